"""Tensors to files and back, through torch's distributed checkpoint (DCP). Names do not depend on the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
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

from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import UserError
from pipeline.train.checkpoint.manager import Files, record_of
from pipeline.train.parallel.compat import HashingWriter

# One key a parameter and state ("state.layers.0.mixer.wq.weight.exp_avg"), whatever groups and ranks there are.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer) -> Files:
    """Write model, optimizer and tokenizer into `folder`; every file is flushed to disk.

    Returns:
        Size and hash of each file, of the bytes as they were written.
    """
    writer = HashingWriter(folder)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT),
    }
    try:
        save(state, storage_writer=writer)
    except CheckpointException as failure:  # a BaseException that no `except Exception` sees
        raise _cause(failure) from failure
    files: Files = dict(writer.files)
    tokenizer.save(folder)
    for path in folder.iterdir():
        if path.name not in files:
            files[path.name] = record_of(path)
    return files


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what `write` wrote into a model, and its optimizer if given, of any layout."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    try:
        load(state, storage_reader=FileSystemReader(folder))
    except CheckpointException as failure:
        raise UserError(f"checkpoint {folder} cannot be loaded into this model: {_cause(failure)}") from failure
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        # The checkpoint knows the moments; the hyper-parameters are the config's.
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_FLAT)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def _cause(failure: CheckpointException) -> BaseException:
    """The first error of the lowest rank."""
    rank = min(failure.failures)
    return failure.failures[rank][0]
