"""Notifications about a run: its events, and how commands and webhooks are told of them."""
