"""Exported weights into a model of any layout: each rank verifies some of the files, and reads what it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from pipeline.common.errors import UserError
from pipeline.train.checkpoint.committed import Files, changed
from pipeline.train.checkpoint.exported import ExportedWeights, Weights
from pipeline.train.checkpoint.resume_point import files_by_rank
from pipeline.train.checkpoint.state_shapes import is_count
from pipeline.train.checkpoint.weight_source import exported_tensors
from pipeline.train.distributed.process_group import broadcast_from_rank0, gather
from pipeline.train.model.init import local_range
from pipeline.train.parallel.parallelize import ParallelModel

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by parameter name."""


@dataclass(frozen=True)
class VerifiedWeights:
    """Exported weights whose files are as they were written."""

    source: ExportedWeights
    files: dict[str, str]
    """The file of each tensor."""
    shapes: Shapes

    def load(self, model: ParallelModel) -> None:
        """Fill a model that has these weights, in its own types; each rank reads the rows and columns it has."""
        load_shards(self.source.path, self.files, named_weights(model))


def verified_export(folder: Path, weights: Weights, option: str, weights_key: str) -> VerifiedWeights:
    """The weights in a folder, every file of them read and hashed; every rank calls this.

    Args:
        folder: that was named.
        weights: `ema` if they have to be the moving average.
        option: that named the folder, for messages.
        weights_key: key that `weights` is from, for messages.

    Raises:
        UserError: they are not there, not what was asked for, or damaged.
    """

    def read_record() -> dict[str, Any]:
        found = ExportedWeights.open(folder, option)
        found.check_section(weights, weights_key)
        return {"about": found.about, "fingerprint": found.fingerprint, "files": found.files}

    record = broadcast_from_rank0(read_record)
    verify_files(folder, record["files"], option)
    files, tensors = exported_tensors(folder, record["files"])
    shapes = {name: each.shape for name, each in tensors.items()}
    return VerifiedWeights(ExportedWeights(folder, record["about"], record["fingerprint"]), files, shapes)


def verify_files(folder: Path, files: Files, option: str) -> None:
    """Compare the hashes of files, each of which one rank reads; every rank calls this.

    Args:
        folder: of the files.
        files: by their paths in it.
        option: that named the folder, for messages.

    Raises:
        UserError: some are not as they were written.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    problems: list[str] = []
    for name in files_by_rank(files, ranks)[rank]:
        try:
            size, digest = files[name]
            problem = changed(folder / name, digest, size=size, symlinks=True)
        except OSError as error:
            problem = f"{folder / name} cannot be read: {error.strerror}"
        problems += [problem] if problem else []
    found = gather(problems)

    def verdict() -> None:
        assert found is not None, "this is rank 0"
        if everything := [problem for those in found for problem in those]:
            raise UserError(f"{option}: " + "; ".join(everything) + "; export them again")

    broadcast_from_rank0(verdict)


@torch.no_grad()
def load_shards(folder: Path, files: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill what this rank has of some tensors from safetensors files, in their own types.

    Args:
        folder: of the files.
        files: the file of each tensor.
        tensors: with their names.
    """
    for name, rows, others, local in local_shards(tensors):
        with safe_open(folder / files[name], framework="pt") as opened:
            local.copy_(opened.get_slice(name)[(rows, *others)])


def local_shards(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, slice, list[slice], torch.Tensor]]:
    """Shards of this rank: name, rows and columns of each tensor, and the memory that holds them."""
    for name, tensor in tensors:
        ranges = (local_range(tensor, dim) for dim in range(tensor.ndim))
        rows, *others = (slice(each.start, each.stop) for each in ranges)
        # No copy: what is written to it is in the tensor.
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            yield name, rows, others, local


def named_weights(model: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of this rank by name: parameters, and buffers that belong to them."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        yield name, parameter
    for part in model.parts.values():
        for name, buffer in part.named_buffers():
            if not is_count(name):  # choices of a run that this one knows nothing of
                yield name, buffer
