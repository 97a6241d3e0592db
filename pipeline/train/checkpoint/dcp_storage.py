"""Tensors to files and back, through torch's distributed checkpoint (DCP). Names do not depend on the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from pipeline.common.errors import UserError
from pipeline.common.format import shape_text
from pipeline.train.checkpoint.dcp_metadata import read_metadata
from pipeline.train.checkpoint.manager import Checkpoint, Files
from pipeline.train.checkpoint.state_shapes import is_buffer, state_shapes
from pipeline.train.distributed.process_group import cpu_group
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.optim.ema import Ema
from pipeline.train.optim.optimizers import Optimizers, make_states
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.torch_compat.checkpoint_files import CheckpointReader, HashingWriter, first_cause
from pipeline.train.torch_compat.core import plain

Section = Literal["model", "ema"]
"""Section of the weights: those that were trained, or their moving average."""
State = dict[str, dict[str, Any]]
"""Section ("model", "optimizer", "ema") -> name -> tensor or number."""

# One key a parameter and state ("state.layers.0.mixer.wq.weight.exp_avg"), whatever groups and ranks there are.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."
"""Prefix of the keys of moments; those of hyper-parameters begin with something else."""


def tensors(model: ParallelModel, optimizers: Optimizers | None, ema: Ema | None = None) -> State:
    """The state that this rank has to save, by name: the very tensors that training changes. Every rank calls this."""
    state = _state(model, optimizers)
    if ema is not None:
        state["ema"] = dict(ema.averages)
    return state


def write(folder: Path, state: State, group: dist.ProcessGroup | None = None) -> Files:
    """Write what this rank has into `folder`; every rank calls this.

    Args:
        folder: that all ranks write to.
        state: from `tensors`, or a copy of it.
        group: of all ranks, connected by gloo; no other thread may use it meanwhile.

    Returns:
        Size and hash of each file that this rank wrote, of the bytes as they were written and flushed to disk.

    Raises:
        OSError: on all ranks, where a file of one could not be written. Nobody writes any more then.
    """
    values = [value for section in state.values() for value in section.values()]
    writer = HashingWriter(folder, on_host=all(value.is_cpu for value in values if isinstance(value, Tensor)))
    try:
        with _without_crc32():
            # DCP sends plans between ranks as Python objects, which over NCCL would go through the memory of GPUs.
            save(state, storage_writer=writer, process_group=group or cpu_group())
    except CheckpointException as failure:  # a BaseException that no `except Exception` sees
        raise first_cause(failure) from failure
    return dict(writer.files)


def read(
    checkpoint: Checkpoint,
    model: ParallelModel,
    optimizers: Optimizers | None = None,
    ema: Ema | None = None,
    *,
    weights: Section = "model",
) -> set[str]:
    """Load what `write` wrote into a model of any layout, and its optimizers and average if given.

    Every rank calls this.

    Args:
        checkpoint: that was verified.
        model: gets the weights.
        optimizers: get the moments.
        ema: gets the average; if the checkpoint has none, it starts from the weights.
        weights: which ones the model gets, those that were trained or their average.

    Returns:
        Parameters of this rank whose moments begin at zero: the checkpoint has those of another type of optimizer.

    Raises:
        UserError: the checkpoint is not of this model, or has no average though that is asked for, or is forged.
    """
    folder, metadata = checkpoint.path, read_metadata(checkpoint)
    entries = metadata.state_dict_metadata
    has_average = any(name.startswith("ema.") for name in entries)
    # On every rank for the whole model: all come to the same end. torch says less, each rank of its own part.
    refuse_misfit(
        {
            name.removeprefix("model."): tuple(entry.size)
            for name, entry in entries.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        },
        model.spec,
        folder,
    )
    state = _state(model, optimizers)
    if weights == "ema":
        assert ema is None, "training resumes from the weights"
        if not has_average:
            raise UserError(
                f"checkpoint {folder} has no moving average of the weights (its run had no train.ema then); "
                "use the weights themselves, or another checkpoint"
            )
        trained = state.pop("model")
        state["ema"] = {name: weight for name, weight in trained.items() if not is_buffer(name)}
        if buffers := {name: value for name, value in trained.items() if is_buffer(name)}:  # which have no average
            state["model"] = buffers
    elif ema is not None and has_average:
        state["ema"] = dict(ema.averages)
    anew: set[str] = set()
    if optimizers is not None:
        anew = _begin_anew(state["optimizer"], entries)
    try:
        load(state, storage_reader=CheckpointReader(folder, metadata), process_group=cpu_group())
    except CheckpointException as failure:
        raise UserError(f"checkpoint {folder} cannot be loaded into this model: {first_cause(failure)}") from failure
    given: set[str] = set()
    loaded = state.get("model", {}) | state[weights]
    for index, part in model.parts.items():
        set_model_state_dict(part, {name: loaded[name] for name in get_model_state_dict(part)})
        if optimizers is not None:
            stage = optimizers.by_stage[index]
            keys = get_optimizer_state_dict(part, stage, options=_FLAT)
            # The checkpoint knows the moments; the hyper-parameters are the config's.
            moments = keys | {key: value for key, value in state["optimizer"].items() if key in keys}
            # The optimizer keeps these very tensors: the copies of a tied embedding must not update the same ones.
            moments |= {key: moments[key].clone() for key in given & keys.keys() if key.startswith(_STATE)}
            given |= keys.keys()
            set_optimizer_state_dict(part, stage, moments, options=_FLAT)
    if ema is not None and not has_average:
        ema.reset()
    return anew


def _begin_anew(moments: dict[str, Any], entries: Mapping[str, Any]) -> set[str]:
    """Zero the moments that a checkpoint does not have because its optimizer was of another type.

    Args:
        moments: What `_state` has of optimizers; what is not to be loaded is taken out of it.
        entries: What is in the checkpoint.

    Returns:
        Parameters that they belong to. One of which there is nothing at all is none of them: that is an error.
    """
    saved = {key.removeprefix("optimizer.") for key in entries if key.startswith(f"optimizer.{_STATE}")}
    missing = {key.rpartition(".")[0] for key in moments if key.startswith(_STATE) and key not in saved}
    anew = missing & {key.rpartition(".")[0] for key in saved}
    for key in list(moments):
        if not key.startswith(_STATE):
            del moments[key]
        elif key.rpartition(".")[0] in anew:
            moments.pop(key).zero_()
    return {parameter.removeprefix(_STATE) for parameter in anew}


def refuse_misfit(found: Mapping[str, Sequence[int]], spec: DecoderSpec, source: Path) -> None:
    """A `UserError` if the weights in a checkpoint, by their shapes, are not those of a model."""
    if problem := first_misfit(found, spec, source):
        raise UserError(
            f"{problem}; set `model` back to that of the checkpoint (resume.allow=[model] is for changes that leave "
            "all shapes as they are), or start a new run with another run.dir"
        )


def first_misfit(found: Mapping[str, Sequence[int]], spec: DecoderSpec, source: Path) -> str | None:
    """The first tensor that a model does not have as it is stored, in words; None if all fit.

    Args:
        found: shapes of the stored weights by parameter name.
        spec: of the model.
        source: the folder of the weights, for messages.
    """
    shapes = state_shapes(spec)
    wanted = shapes.parameters | shapes.weight_buffers
    for name, shape in wanted.items():
        if name not in found:
            return f"{source} has no {name}, which this model has"
        if tuple(found[name]) != shape:
            return f"{name} is {shape_text(found[name])} in {source} and {shape_text(shape)} in this model"
    more = next((name for name in found if name not in wanted and name not in shapes.buffers), None)
    return None if more is None else f"{source} has {more}, which this model does not have"


def _state(model: ParallelModel, optimizers: Optimizers | None) -> State:
    """The state of this rank, by name. A tied embedding that two stages have copies of is one entry."""
    state: State = {"model": {}}
    if optimizers is not None:
        state["optimizer"] = {}
    for index, part in model.parts.items():
        state["model"].update(
            {name: plain(cast(Tensor, weight)) for name, weight in get_model_state_dict(part).items()}
        )
        if optimizers is not None:
            stage = optimizers.by_stage[index]
            for optimizer in stage:
                make_states(optimizer)
            state["optimizer"].update(get_optimizer_state_dict(part, stage, options=_FLAT))
    return state


@contextmanager
def _without_crc32() -> Iterator[None]:
    """A context without torch's checksum of each tensor, which takes as long as the disk; the file has a better one."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
