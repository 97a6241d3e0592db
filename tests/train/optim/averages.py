"""Moving averages in checkpoints, made again from the weights in those checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def tensors(run: Path, step: int, section: str) -> dict[str, Tensor]:
    """Whole tensors of a section of a checkpoint by name; none if it has no such section."""
    reader = FileSystemReader(run / "checkpoints" / f"step-{step:08d}")
    state: dict[str, Tensor] = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in reader.read_metadata().state_dict_metadata.items()
        if isinstance(kind, TensorStorageMetadata) and name.startswith(f"{section}.")
    }
    if state:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            load(dict(state), storage_reader=reader, no_dist=True)
    return {name.removeprefix(f"{section}."): tensor for name, tensor in state.items()}


def averages_differ(run: Path, decay: float, *, first: int, last: int, given: bool = True) -> list[str]:
    """What differs, in words, between the averages of a run and those made here, in fp64.

    Args:
        run: Its folder, with the checkpoints of all steps from `first`.
        decay: Of the average.
        first: Where to begin: with the average that is there, or with the weights.
        last: The last step that is compared.
        given: The checkpoint of `first` has an average.
    """
    averages = {name: value.double() for name, value in tensors(run, first, "ema" if given else "model").items()}
    found = [] if averages else [f"step {first} has no average"]
    for step in range(first + 1, last + 1):
        theirs, weights = tensors(run, step, "ema"), tensors(run, step, "model")
        if theirs.keys() != weights.keys():
            found.append(f"step {step}: {sorted(theirs.keys() ^ weights.keys())}")
            continue
        for name, weight in weights.items():
            averages[name] = decay * averages[name] + (1 - decay) * weight.double()
            error = (theirs[name] - averages[name]).abs().max() / averages[name].abs().max()
            if not error <= 1e-6:
                found.append(f"step {step}: {name} differs by {error:.2g}")
            if torch.equal(theirs[name], weight):
                found.append(f"step {step}: {name} is the weight itself")
    return found
