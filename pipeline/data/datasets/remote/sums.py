"""Hashes of the blocks of a file, in an object beside it: so any range of the object can be checked.

`NAME.sum` has the xxh3-64 of each block of 64 KiB of NAME, in order, as little-endian u64, and at the end that of all
of them: 0.012 % of the file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

SUFFIX = ".sum"
BLOCK_BYTES = 2**16


class SumWriter:
    """Hashes of the blocks of a file, and of the whole file, whose bytes come piece by piece."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_64()
        self._block = xxhash.xxh3_64()
        self._filled = 0
        self._sums: list[int] = []

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._whole.update(data)
        view = memoryview(data)
        while view:
            some = view[: BLOCK_BYTES - self._filled]
            self._block.update(some)
            self._filled += len(some)
            view = view[len(some) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._sums.append(self._block.intdigest())
        self._block.reset()
        self._filled = 0

    def hexdigest(self) -> str:
        """xxh3-64 of all bytes so far."""
        return self._whole.hexdigest()

    def sums(self) -> bytes:
        """Content of the object with the hashes, when all bytes have come."""
        if self._filled:
            self._end_block()
        data = np.array(self._sums, "<u8").tobytes()
        return data + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def sums_size(size: int) -> int:
    """Bytes of the object with the hashes of a file of `size` bytes."""
    return 8 * (-(-size // BLOCK_BYTES) + 1)


class BlockSums:
    """The hashes of the blocks of a file.

    Args:
        data: content of the object with the hashes.
        size: bytes of the file.

    Raises:
        ValueError: they are damaged, or of a file of another size.
    """

    def __init__(self, data: bytes, size: int) -> None:
        if len(data) != sums_size(size):
            raise ValueError(f"it has {len(data):,} bytes, and should have {sums_size(size):,}")
        if xxhash.xxh3_64_intdigest(data[:-8]) != int.from_bytes(data[-8:], "little"):
            raise ValueError("its bytes are not those that were written")
        self._sums: npt.NDArray[np.uint64] = np.frombuffer(data[:-8], "<u8")

    def first_wrong(self, block: int, data: bytes | memoryview) -> int | None:
        """The first of some blocks that has other bytes than were written; None if all are right.

        Args:
            block: number of the first block.
            data: bytes of the file from there on; all but the last block of the file are whole.
        """
        view = memoryview(data)
        for number, at in enumerate(range(0, len(view), BLOCK_BYTES), block):
            if xxhash.xxh3_64_intdigest(view[at : at + BLOCK_BYTES]) != int(self._sums[number]):
                return number
        return None
