"""The tensors of a checkpoint, whole and by name, in one process and without a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
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
from pipeline.train.parallel.torch_compat.checkpoint_files import CheckpointReader, first_cause

_AT_ONCE_BYTES = 2**28
"""Tensors are read in groups of about this size; one that is larger is read alone."""


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


def read(checkpoint: Checkpoint, section: str, tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Some tensors of a section, on the CPU."""
    wanted: dict[str, Any] = {
        f"{section}.{name}": torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(wanted, storage_reader=CheckpointReader(checkpoint.path, _metadata(checkpoint)), no_dist=True)
    except CheckpointException as failure:  # a BaseException that no `except Exception` sees
        raise UserError(f"{checkpoint.path} cannot be read: {first_cause(failure)}") from failure
    return {name: wanted[f"{section}.{name}"] for name in tensors}


def _metadata(checkpoint: Checkpoint) -> Metadata:
    file = (checkpoint.path / METADATA).lstat()
    return _read_once(checkpoint, checkpoint.fingerprint, (file.st_ino, file.st_size, file.st_mtime_ns))


@lru_cache(maxsize=4)
def _read_once(checkpoint: Checkpoint, fingerprint: str, file: tuple[int, ...]) -> Metadata:
    """Tensors are read in groups; the list of a large checkpoint takes a while."""
    return read_metadata(checkpoint)


def groups(tensors: Mapping[str, Stored], max_bytes: float = _AT_ONCE_BYTES) -> Iterator[dict[str, Stored]]:
    """Tensors in groups, in order; by default of a size that is held in memory.

    Args:
        tensors: by name.
        max_bytes: of a group; a tensor that is larger is alone in its own.
    """
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
    """Sorts `layers.10` behind `layers.9`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"[._]", key)]
