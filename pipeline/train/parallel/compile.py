"""Compiled layers: torch.compile of one layer at a time, whose code all equal layers share.

Only training passes run it. Validation has batches of many lengths, each of which would be compiled, and is as right
without. Parameter names stay as they are, since no module is wrapped.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from pipeline.common.errors import UserError
from pipeline.common.format import duration
from pipeline.config import Config
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.decoder import Decoder
from pipeline.train.torch_compat.compiler import prepare_compiler

BACKEND = "inductor"
"""Backend of torch.compile."""
_FLOPS_OF_A_THREAD = 1e11
"""A round number for how much a CPU's thread computes in a second; only the order of magnitude matters."""
_LONG_SECONDS = 1800.0


def compiles(config: Config, device: torch.device) -> bool:
    """True if layers are compiled: by the run file, else on a GPU where nothing that is asked for rules it out."""
    if config.train.compile is not None:
        return config.train.compile
    return device.type == "cuda" and not _ruled_out(config)


def _ruled_out(config: Config) -> bool:
    fp8 = config.train.precision.fp8
    # A backward pass of two halves goes through a layer's graph twice, and compiled code reuses the memory of saved
    # activations the first time (`donated_buffer` of torch._functorch).
    return (
        config.train.recompute.offload or config.parallel.splits_backward or (fp8 is not None and fp8.backend == "te")
    )


def choose_compiling(
    config: Config, device: torch.device, flops: float, threads: int, before: bool | None = None
) -> tuple[bool, str]:
    """True if layers are compiled, and a line for the log. One rank decides for all.

    On a CPU compiling takes half a minute at each start and saves about a tenth of every step: that is for long runs.

    Args:
        config: The run file.
        device: Where the run is.
        flops: Of a process in the whole run.
        threads: Of a process.
        before: What was decided on a CPU when the run was there last, which stays, as compiled layers round otherwise.
    """
    train, compiled = config.train, compiles(config, device)
    why = "as train.compile says" if train.compile is not None else ""
    if train.compile is None and device.type == "cpu" and before is not None:
        compiled, why = before, "as before"
    elif train.compile is None and device.type == "cpu":
        seconds = flops / (_FLOPS_OF_A_THREAD * threads)
        missing = _missing_program("CXX", ("g++",), "C++")
        long = seconds >= _LONG_SECONDS
        many_shapes = train.batch_ramp is not None and train.micro_batch_size is None
        ruled_out = _ruled_out(config) or many_shapes
        compiled = long and not missing and not ruled_out
        why = f"the run is {'long' if long else 'short'}, {duration(seconds)} of arithmetic"
        if long and not compiled:
            why += f", but {'there is no C++ compiler' if missing else 'other settings do not go with compiled layers'}"
    return compiled, f"layers are {'' if compiled else 'not '}compiled" + (f": {why}" if why else "")


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
            f"train.compile needs {missing}: install it, or set train.compile=false, which gives the same result more "
            "slowly"
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
    from pipeline.train.parallel.experts import mixtures  # and that DTensor, which the launcher does without

    prepare_compiler(recompute.budget if recompute.mode == "budget" else 1.0)
    for block in part.blocks:
        # A method and not the module: FSDP's hooks run around the module's call, outside of what is compiled. With
        # `fullgraph` a break in the graph is an error, not slower code; with `dynamic=False` a second shape gets code
        # of its own, where torch would otherwise make its sizes symbolic.
        block.compiled = torch.compile(block.compute, fullgraph=True, dynamic=False, backend=BACKEND)
        for mixture in mixtures(block):
            # Of a layer with experts that is the piece before them; this is theirs, for any number of rows.
            experts = mixture.experts
            experts.compiled = torch.compile(experts.compute, fullgraph=True, backend=BACKEND)
