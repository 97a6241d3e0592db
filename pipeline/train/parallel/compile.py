"""Compiled layers: torch.compile of one layer at a time, whose code all equal layers share.

Only training passes run it. Validation has batches of many lengths, each of which would be compiled, and is as right
without. Parameter names stay as they are, since no module is wrapped.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import cast

import torch

from pipeline.config.parallel import ZERO_BUBBLE, ParallelConfig
from pipeline.config.train import RecomputeConfig, TrainConfig
from pipeline.errors import UserError
from pipeline.train.model.block import Block
from pipeline.train.model.decoder import Decoder
from pipeline.train.parallel.compat import prepare_compiler

BACKEND = "inductor"
"""Of torch.compile."""


def compiles(train: TrainConfig, parallel: ParallelConfig, device: torch.device) -> bool:
    """Whether layers are compiled: as the run file says, else on a GPU where nothing that is asked for rules it out."""
    if train.compile is not None:
        return train.compile
    fp8 = train.precision.fp8
    ruled_out = train.recompute.offload or (fp8 is not None and fp8.backend == "te")
    ruled_out = ruled_out or (parallel.pp > 1 and parallel.pipeline.schedule in ZERO_BUBBLE)
    return device.type == "cuda" and not ruled_out


def check_compiler(device: torch.device) -> None:
    """Look for what torch.compile needs besides torch, before anything is built.

    Raises:
        UserError: It is not there.
    """
    if device.type == "cpu":
        missing = _missing_program("CXX", ("g++",), "C++")
    elif importlib.util.find_spec("triton") is None:
        missing = "the Python package triton, which is not installed"
    else:
        missing = _missing_program("CC", ("gcc", "clang"), "C")  # for the code that launches a kernel
    if missing:
        raise UserError(
            f"train.compile needs {missing}: install it, or set train.compile=false, which computes the same, slower"
        )


def _missing_program(variable: str, usual: tuple[str, ...], language: str) -> str | None:
    names = (os.environ[variable],) if os.environ.get(variable) else usual
    if any(shutil.which(name.split()[0]) for name in names):
        return None
    return f"a {language} compiler, but there is no {' or '.join(names)} in PATH (${variable} names another one)"


def compile_layers(part: Decoder, recompute: RecomputeConfig) -> None:
    """Let the layers of a part be compiled when a training pass first comes to them, in place.

    Equal layers share what is compiled. It is made anew for each shape of a micro-batch, and for observed steps.
    """
    prepare_compiler(recompute.budget if recompute.mode == "budget" else 1.0)
    for block in part.layers.values():
        layer = cast(Block, block)
        layer.compiled = torch.compile(layer.compute, fullgraph=True, dynamic=False, backend=BACKEND)
