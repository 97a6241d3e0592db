"""One HTML file that shows figures: no script, no request, the same in light and dark."""
