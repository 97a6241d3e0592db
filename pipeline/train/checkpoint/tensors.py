"""The tensors of a checkpoint, whole and by name, in one process and without a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from pipeline.common.errors import UserError
from pipeline.train.checkpoint.committed import Checkpoint
from pipeline.train.checkpoint.dcp_metadata import METADATA, read_metadata
from pipeline.train.checkpoint.state_shapes import is_buffer, is_count
from pipeline.train.torch_compat.checkpoint_files import CheckpointReader, PartPlanner, first_cause

_AT_ONCE_BYTES = 2**27
"""Tensors are read in groups of about this size; one that is larger is read alone, some rows at a time."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


def stored(checkpoint: Checkpoint) -> dict[str, dict[str, Stored]]:
    """Section ("model", "optimizer", "ema") -> name -> what is stored; layers in the order of their numbers.

    Raises:
        UserError: the list of tensors is damaged or forged.
    """
    sections: dict[str, dict[str, Stored]] = {}
    entries = _metadata(checkpoint).state_dict_metadata
    for key in sorted(entries, key=_natural):
        entry, (section, _, name) = entries[key], key.partition(".")
        if isinstance(entry, TensorStorageMetadata):
            sections.setdefault(section, {})[name] = Stored(tuple(entry.size), entry.properties.dtype)
    return sections


def stored_weights(checkpoint: Checkpoint, weights: str) -> dict[str, Stored]:
    """The weights of a section, without the choices of the last step; empty if there is no such section.

    Buffers have no average: those of the weights that were trained stand for it.
    """
    sections = stored(checkpoint)
    found = sections.get(weights, {})
    if found:
        found = {name: each for name, each in sections.get("model", {}).items() if is_buffer(name)} | found
    names = sorted((name for name in found if not is_count(name)), key=_natural)
    return {name: found[name] for name in names}


def read(
    checkpoint: Checkpoint, section: str, tensors: Mapping[str, Stored], rows: slice | None = None
) -> dict[str, Tensor]:
    """Some tensors of a section, on the CPU; buffers are those of the weights that were trained.

    Args:
        checkpoint: that was verified.
        section: one of `stored`.
        tensors: by name.
        rows: of each of them; by default all.
    """
    keys = {name: _key(section, name) for name in tensors}
    wanted: dict[str, Any] = {}
    for name, each in tensors.items():
        count = each.shape[:1] if rows is None else (rows.stop - rows.start,)
        wanted[keys[name]] = torch.empty((*count, *each.shape[1:]), dtype=each.dtype)
    planner = None if rows is None else PartPlanner((rows.start,))
    load_parts(wanted, _reader(checkpoint), planner, f"{checkpoint.path}")
    return {name: wanted[key] for name, key in keys.items()}


def read_box(checkpoint: Checkpoint, section: str, name: str, dtype: torch.dtype, box: Sequence[slice]) -> Tensor:
    """A range of each dimension of a tensor of a section, on the CPU.

    Args:
        checkpoint: that was verified.
        section: one of `stored`.
        name: of the tensor.
        dtype: of its elements.
        box: the ranges.

    Raises:
        UserError: it cannot be read.
    """
    key = _key(section, name)
    wanted: dict[str, Any] = {key: torch.empty([each.stop - each.start for each in box], dtype=dtype)}
    load_parts(wanted, _reader(checkpoint), PartPlanner([each.start for each in box]), f"{checkpoint.path}")
    value: Tensor = wanted[key]
    return value


def _key(section: str, name: str) -> str:
    return f"{'model' if is_buffer(name) else section}.{name}"


def load_parts(state: dict[str, Any], reader: CheckpointReader, planner: PartPlanner | None, where: str) -> None:
    """Fill tensors from files of DCP in this process alone.

    Args:
        state: tensors by name, of the whole ones or of parts of them.
        reader: of the files.
        planner: knows which parts; None: whole ones.
        where: they are, for messages.

    Raises:
        UserError: they cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failure:  # a BaseException that no `except Exception` sees
        cause = first_cause(failure)
        if not isinstance(cause, Exception):  # such as Ctrl-C
            raise cause from None
        raise UserError(f"{where} cannot be read: {cause}") from failure


def _metadata(checkpoint: Checkpoint) -> Metadata:
    return _reader(checkpoint).read_metadata()


def _reader(checkpoint: Checkpoint) -> CheckpointReader:
    file = (checkpoint.path / METADATA).lstat()
    return _made_once(checkpoint, checkpoint.fingerprint, (file.st_ino, file.st_size, file.st_mtime_ns))


@lru_cache(maxsize=4)
def _made_once(checkpoint: Checkpoint, fingerprint: str, file: tuple[int, ...]) -> CheckpointReader:
    """Tensors are read in groups; the list of a large checkpoint takes a while, and so does what they look like."""
    return CheckpointReader(checkpoint.path, read_metadata(checkpoint))


def row_ranges(group: Mapping[str, Stored]) -> Iterator[slice | None]:
    """Rows to read at a time of a group of `groups`: all, but of a tensor that is too large."""
    large = [each for each in group.values() if each.bytes > _AT_ONCE_BYTES]
    if not large:
        yield None
        return
    (tensor,) = group.values()
    count = tensor.shape[0]
    step = max(1, _AT_ONCE_BYTES * count // tensor.bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def groups(tensors: Mapping[str, Stored], max_bytes: float | None = None) -> Iterator[dict[str, Stored]]:
    """Tensors in groups, in order; by default of a size that is held in memory.

    Args:
        tensors: by name.
        max_bytes: of a group; a tensor that is larger is alone in its own.
    """
    max_bytes = _AT_ONCE_BYTES if max_bytes is None else max_bytes
    group: dict[str, Stored] = {}
    size = 0
    for name, each in tensors.items():
        if group and size + each.bytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = each
        size += each.bytes
    if group:
        yield group


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """Sorts `layers.10` after `layers.9`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"[._]", key)]
