"""What `delta_rule.py` computes within chunks."""
