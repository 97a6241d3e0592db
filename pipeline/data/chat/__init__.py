"""Conversations: formats of their messages, and the templates that make text of them."""
