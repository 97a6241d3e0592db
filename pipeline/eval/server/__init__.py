"""A server for looking at a run while it trains."""
