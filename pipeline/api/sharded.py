"""A model over the processes of a torch.distributed group."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeline.api.settings import invalid
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.parallel import ParallelConfig
from pipeline.train.distributed.axes import AXES
from pipeline.train.distributed.process_group import Processes
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.rules.layout import check_evaluation_layout, evaluation_parallel
from pipeline.train.start.setup import InferenceModel, load_for_inference

_CUTS = ("tp", "dp_shard", "dp_replicate")


def load_sharded(config: Config, step: int | None, parallel: Mapping[str, int] | None) -> InferenceModel:
    """The model of a run's checkpoint over all processes; every one of them calls this.

    Raises:
        UserError: As `load_for_inference`; or a layout that a call of the model cannot have.
    """
    ranks = processes()
    wanted = evaluation_parallel(config, ranks.world_size)
    if parallel is not None:
        if unknown := sorted(parallel.keys() - set(_CUTS)):
            raise UserError(f"parallel.{unknown[0]}: a model that is called is cut by {', '.join(_CUTS)} alone")
        try:
            wanted = ParallelConfig.model_validate(dict(parallel))
        except ValidationError as error:
            raise invalid("parallel", error) from None
    others = [axis.name for axis in AXES if axis.name not in _CUTS and getattr(wanted, axis.name) > 1]
    if others:
        raise UserError(
            f"parallel.{others[0]}={getattr(wanted, others[0])}: a model that is called is cut by {', '.join(_CUTS)} "
            'alone; give another layout, such as load_model(path, parallel={"tp": 2}), or use `pipeline eval`'
        )
    # Rows of any length.
    wanted = wanted.model_copy(update={"sequence_parallel": False})
    config = config.model_copy(
        update={
            "eval": config.eval.model_copy(update={"parallel": wanted}),
            # The caller has placed its processes.
            "launch": config.launch.model_copy(update={"bind": "none"}),
        }
    )
    check_evaluation_layout(config, ranks.world_size)
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        return load_for_inference(config, step, ranks, wanted)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)


def processes() -> Processes:
    """The place of this process in the group."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size > 1 and "gloo" not in str(dist.get_backend_config()):
        raise UserError(
            "the process group has no gloo, over which processes agree on files: make it with "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    local_size = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    return Processes(
        rank=rank,
        world_size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank % local_size)),
        local_world_size=local_size,
    )


def gathered_logits(logits: Tensor, mesh: Mesh) -> Tensor:
    """Logits with the columns of all processes of tp; each process has all of them, and their gradient."""
    if mesh.size("tp") == 1:
        return logits
    placed = DTensor.from_local(logits, mesh.role("tp"), [Shard(logits.ndim - 1)], run_check=False)
    whole: Tensor = placed.redistribute(placements=[Replicate()]).to_local()
    return whole
