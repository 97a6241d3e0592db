"""One HTML file that shows figures: no request, no script but its own, the same in light and dark."""
