"""Answers that come piece by piece: the next request begins behind the byte that came last."""

from __future__ import annotations

from typing import Any

from pipeline.common.objects.failures import Truncated
from pipeline.common.objects.retries import COUNTS

_STREAM_BYTES = 2**20
"""Bytes of a response that are kept at a time: after a failure the next request begins behind them."""


class PartialResponse:
    """The bytes of a range that have come so far, in one or several answers.

    Args:
        start: first byte.
    """

    def __init__(self, start: int) -> None:
        self._parts: list[bytes] = []
        self.at = start

    def take(self, found: Any, end: int) -> bytes:
        """Take what an answer of the library has; returns the bytes of all answers up to `end`.

        Raises:
            Truncated: some are still missing.
        """
        if found.range[0] != self.at:
            raise Truncated(f"bytes from {found.range[0]} on came in place of those from {self.at} on")
        for part in found.stream(min_chunk_size=_STREAM_BYTES):
            data = bytes(part)[: end - self.at]
            self._parts.append(data)
            self.at += len(data)
            COUNTS.count(bytes=len(data))
        if self.at < end:
            raise Truncated(f"{end - self.at} bytes are missing")
        return b"".join(self._parts)
