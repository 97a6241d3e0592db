"""Exported weights into a model of any layout: each rank verifies some of the files, and reads what it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from pipeline.common.errors import UserError
from pipeline.train.checkpoint.committed import changed
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

    @torch.no_grad()
    def load(self, model: ParallelModel) -> None:
        """Fill a model that has these weights, in its own types; each rank reads the rows and columns it has."""
        for name, rows, others, local in local_shards(model):
            with safe_open(self.source.path / self.files[name], framework="pt") as tensors:
                local.copy_(tensors.get_slice(name)[(rows, *others)])


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
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    problems: list[str] = []
    for name in files_by_rank(record["files"], ranks)[rank]:
        try:
            size, digest = record["files"][name]
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
    files, tensors = exported_tensors(folder, record["files"])
    shapes = {name: each.shape for name, each in tensors.items()}
    return VerifiedWeights(ExportedWeights(folder, record["about"], record["fingerprint"]), files, shapes)


def local_shards(model: ParallelModel) -> Iterator[tuple[str, slice, list[slice], torch.Tensor]]:
    """Shards of this rank: name, rows and columns of each weight, and the tensor that holds them."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        ranges = (local_range(parameter, dim) for dim in range(parameter.ndim))
        rows, *others = (slice(each.start, each.stop) for each in ranges)
        local = parameter.to_local()  # no copy: what is written to it is in the parameter
        if local.numel():
            yield name, rows, others, local
    for part in model.parts.values():
        for name, buffer in part.named_buffers():
            if not is_count(name):  # choices of a run that this one knows nothing of
                yield name, slice(0, len(buffer)), [], buffer
