"""The losses of a run's samples on disk: two bytes per sample, at the place of its global number.

A file has a head of 32 bytes and then a little-endian fp16 number per sample, the mean cross entropy in nats of its
targets that count, rounded to the nearest. The head says which sample is the first one: 0, or the first one after the
step at which the run was forked or began to record. Values that stand for no loss:

- +0 (no bits): nothing is recorded. A loss that rounds to 0 is -0.
- NaN: no target counted, since the sample was masked or its step skipped.
- +inf: the loss was not finite.

A larger finite loss than fp16 has is its largest number, 65,504.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import links, storage
from pipeline.common.errors import UserError

Codes = npt.NDArray[np.uint16]
"""The numbers of a file as they are written."""

SAMPLE_BYTES = 2
_MAGIC = b"LOSSES\x00\x01"
_HEAD = struct.Struct("<8sQQQ")  # magic with version, first sample, first step, attempt that writes
HEAD_BYTES = _HEAD.size
_LARGEST = 65504.0
_ZERO = 0x8000
_MASKED = 0x7E00
_NOT_FINITE = 0x7C00


@dataclass(frozen=True)
class LossHead:
    """Head of a file of losses."""

    first_sample: int
    """Global number of the first sample that has a place."""
    first_step: int
    """Steps before it."""
    attempt: int
    """The attempt that wrote last."""

    def packed(self) -> bytes:
        """As it is on disk."""
        return _HEAD.pack(_MAGIC, self.first_sample, self.first_step, self.attempt)

    @classmethod
    def read(cls, descriptor: int, path: Path) -> LossHead | None:
        """The head of an open file; None if a kill has cut it short.

        Raises:
            UserError: it is another file, or one of another version.
        """
        data = os.pread(descriptor, HEAD_BYTES, 0)
        if len(data) < HEAD_BYTES:
            return None
        magic, *numbers = _HEAD.unpack(data)
        if magic != _MAGIC:
            raise UserError(
                f"{path} is not a file of losses that this version of the program understands; move it away, and the "
                "run records the losses of the steps to come in a new one"
            )
        return cls(*numbers)

    def place(self, sample: int) -> int:
        """Offset in the file of a sample's loss."""
        return HEAD_BYTES + SAMPLE_BYTES * (sample - self.first_sample)


def losses_bytes(samples: int) -> int:
    """Bytes of a file of losses."""
    return HEAD_BYTES + SAMPLE_BYTES * samples


def encode(nats: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]) -> Codes:
    """Losses of samples as they are written.

    Args:
        nats: summed cross entropy of each sample.
        targets: how many of its targets count.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        means = nats / targets
        codes = np.minimum(means, _LARGEST).astype("<f2").view("<u2")
    codes = np.where(codes == 0, _ZERO, codes)
    codes = np.where(np.isfinite(means), codes, _NOT_FINITE)
    return np.where(targets > 0, codes, _MASKED).astype("<u2")


def masked(samples: int) -> Codes:
    """Codes of samples of a step that is skipped."""
    return np.full(samples, _MASKED, "<u2")


def read_head(path: Path) -> LossHead | None:
    """The head of a file of losses; None without one, or where a kill has cut it short."""
    try:
        file = storage.open_regular(path)
    except FileNotFoundError:
        return None
    with file:
        return LossHead.read(file.fileno(), path)


def cut_losses(path: Path, sample: int) -> None:
    """Forget the losses of a sample and all after it; a file that has no others is removed."""
    head = read_head(path)
    if head is None or sample <= head.first_sample:
        links.remove(path, missing_ok=True)
    else:
        storage.cut(path, head.place(sample))


class LossFile:
    """The losses of a run, open for reading; it may be written meanwhile. Use as a context manager.

    Args:
        path: of the file.

    Raises:
        UserError: there is none, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = storage.open_regular(path)
        except FileNotFoundError:
            raise UserError(
                f"{path} does not exist: the run does not record the losses of its samples; set "
                "train.metrics.windows=true, and the steps to come are recorded"
            ) from None
        try:
            head = LossHead.read(self._file.fileno(), path)
            if head is None:
                raise UserError(f"{path} has no losses yet")
            self.head = head
        except BaseException:
            self._file.close()
            raise
        self.path = path

    @property
    def end(self) -> int:
        """The sample behind the last one that has a place."""
        size = os.fstat(self._file.fileno()).st_size
        return self.head.first_sample + max(0, size - HEAD_BYTES) // SAMPLE_BYTES

    def read(self, first: int, end: int) -> Codes:
        """Codes of samples [first, end); 0 for those that have no place."""
        result = np.zeros(end - first, "<u2")
        low, high = max(first, self.head.first_sample), min(end, self.end)
        if low < high:
            with storage.naming(self.path):
                data = os.pread(self._file.fileno(), SAMPLE_BYTES * (high - low), self.head.place(low))
            codes = np.frombuffer(data[: len(data) // SAMPLE_BYTES * SAMPLE_BYTES], "<u2")
            result[low - first : low - first + len(codes)] = codes
        return result

    def __enter__(self) -> LossFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def recorded(codes: Codes) -> npt.NDArray[np.bool_]:
    """True where something is recorded, if only that no target counted."""
    result: npt.NDArray[np.bool_] = codes != 0
    return result


def losses(codes: Codes) -> npt.NDArray[np.float32]:
    """Losses as fp32, where `recorded`; NaN where no target counted, inf where the loss was not finite."""
    return np.abs(codes.view("<f2").astype(np.float32))
