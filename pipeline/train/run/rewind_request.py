"""The request to go back to a checkpoint."""

from __future__ import annotations


class Rewind(Exception):
    """Raised to take the run back to a checkpoint, by every rank after the same step.

    Args:
        before: the checkpoint must not be of a later step.
        skip: steps [first, end), counted from 0, that are skipped then.
        reason: in words.
    """

    def __init__(self, before: int, skip: tuple[int, int], reason: str) -> None:
        super().__init__(reason)
        self.before = before
        self.skip = skip
        self.reason = reason
