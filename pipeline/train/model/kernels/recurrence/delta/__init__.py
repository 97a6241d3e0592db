"""Results and gradients of `delta_rule.py` within chunks."""
