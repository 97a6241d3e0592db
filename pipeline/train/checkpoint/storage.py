"""Tensors to files and back, through torch's distributed checkpoint (DCP). Names do not depend on the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline.errors import UserError
from pipeline.train.checkpoint.manager import Files
from pipeline.train.optim import Optimizers
from pipeline.train.parallel.compat import HashingWriter
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.processes import cpu_group

# One key a parameter and state ("state.layers.0.mixer.wq.weight.exp_avg"), whatever groups and ranks there are.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def write(folder: Path, model: ParallelModel, optimizers: Optimizers) -> Files:
    """Write what this rank has of model and optimizer into `folder`; every rank calls this.

    Returns:
        Size and hash of each file that this rank wrote, of the bytes as they were written and flushed to disk.
    """
    writer = HashingWriter(folder)
    try:
        save(_state(model, optimizers), storage_writer=writer, process_group=cpu_group())
    except CheckpointException as failure:  # a BaseException that no `except Exception` sees
        raise _cause(failure) from failure
    return dict(writer.files)


def read(folder: Path, model: ParallelModel, optimizers: Optimizers | None = None) -> None:
    """Load what `write` wrote into a model, and its optimizers if given, of any layout; every rank calls this."""
    state = _state(model, optimizers)
    try:
        load(state, storage_reader=FileSystemReader(folder), process_group=cpu_group())
    except CheckpointException as failure:
        raise UserError(f"checkpoint {folder} cannot be loaded into this model: {_cause(failure)}") from failure
    given: set[str] = set()
    for index, part in model.parts.items():
        names = get_model_state_dict(part)
        set_model_state_dict(part, {name: state["model"][name] for name in names})
        if optimizers is not None:
            optimizer = optimizers.by_stage[index]
            # The checkpoint knows the moments; the hyper-parameters are the config's.
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            keys = get_optimizer_state_dict(part, optimizer, options=_FLAT)
            moments = {key: state["optimizer"][key] for key in keys}
            # The optimizer keeps these very tensors: the copies of a tied embedding must not update the same ones.
            moments |= {key: moments[key].clone() for key in given & keys.keys() if key.startswith("state.")}
            given |= keys.keys()
            set_optimizer_state_dict(part, optimizer, moments, options=_FLAT)
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)


def _state(model: ParallelModel, optimizers: Optimizers | None) -> dict[str, dict[str, Any]]:
    """What this rank has, by name. A tied embedding that two stages have copies of is one entry."""
    state: dict[str, dict[str, Any]] = {"model": {}}
    if optimizers is not None:
        state["optimizer"] = {}
    for index, part in model.parts.items():
        state["model"].update(get_model_state_dict(part))
        if optimizers is not None:
            optimizer = optimizers.by_stage[index]
            is_new = not optimizer.state
            state["optimizer"].update(get_optimizer_state_dict(part, optimizer, options=_FLAT))
            if is_new:
                # torch has made the states in a step of its own, which must not count as one of the run's: the first
                # steps may have been passed over.
                for values in optimizer.state.values():
                    values["step"].zero_()
    return state


def _cause(failure: CheckpointException) -> BaseException:
    """The first error of the lowest rank."""
    rank = min(failure.failures)
    return failure.failures[rank][0]
