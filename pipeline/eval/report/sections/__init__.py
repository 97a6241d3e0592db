"""Parts of a report that are tables and texts, each with how it is read."""
