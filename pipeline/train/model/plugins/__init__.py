"""Mixers and mlps of other packages."""
