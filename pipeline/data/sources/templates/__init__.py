"""Texts of documents that are put together from the values of a record."""
