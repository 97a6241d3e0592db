"""Training steps of the Llama 3 8B shape: one variant per item, beside a plain matrix product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from train_gpu_peer import peer
from train_gpu_steps import measure as measure_steps
from train_gpu_steps import ours
from train_gpu_variants import SHARED, TINY, Sizes, Variant, most_layers, planned

from evidence.imported import ROOT
from evidence.item import Result, goal
from evidence.trainer import trainer_steps

_ROOM = 0.95
"""Of the memory, for layers that the loop shares: what it needs is estimated from its tensors alone."""


def measure(
    device: str,
    work: Path,
    *,
    run_file: str,
    tiny: bool,
    base: Mapping[str, Any],
    change: Mapping[str, Any],
    own: Sequence[str],
    own_layers: bool,
    memory_bytes: int | None,
    planned_for: str | None,
    side: str,
    tokens: int,
    micro_batches: int,
    steps: int,
    warmup: int,
    goals: Mapping[str, float],
) -> Result:
    """Time steps.

    Args:
        device: cuda or cpu.
        work: An empty folder.
        run_file: Relative to the repository.
        tiny: A model for a CPU instead of that of the run file.
        base: The fields of `Variant` that all rows are compared with.
        change: Those in which this row differs.
        own: Overrides of this row alone.
        own_layers: As many layers as this row fits; otherwise as many as fit with the base and the bare loop.
        memory_bytes: That layers have to fit in; None: those of the GPU.
        planned_for: Name of the device by its driver that steps are planned for; None: that of the GPU.
        side: `ours`, `loop` (transformers' model in a bare loop) or `trainer` (transformers' `Trainer`).
        tokens: Of a micro-batch.
        micro_batches: Of a step.
        steps: That are timed.
        warmup: Steps before them.
        goals: Values of the line, by name, to reach.
    """
    rival = {} if side == "ours" else {"peer": "sdpa" if side == "loop" else "Trainer"}
    variant, first = Variant(**{**base, **change, **rival}), Variant(**base)
    sizes = sizes_of(run_file, tiny, device, tokens, micro_batches)
    alone = Sizes(sizes.run_file, (*sizes.common, *own), tokens, micro_batches, 1)
    memory = torch.cuda.get_device_properties(0).total_memory if memory_bytes is None else memory_bytes
    fitting = [variant] if own_layers else [first, Variant(**{**base, "peer": "sdpa"})]
    layers = most_layers(alone if own_layers else sizes, fitting, int(memory * (1.0 if own_layers else _ROOM)))
    config = alone.config(variant, layers)
    line: Result = {}
    if side == "ours":
        # Before the steps: a plan has a process group of its own.
        line |= planned(config, 1, planned_for or torch.cuda.get_device_name())
    if side == "trainer":
        line |= trainer_steps(config, work, steps, warmup)
    else:
        line |= measure_steps(config, ours if side == "ours" else peer("sdpa"), steps, warmup) or {}
    reached = {name: goal(line[name], wanted) for name, wanted in goals.items() if line[name] is not None}
    about = variant.about(line["layers"]) | {"variant": " ".join([variant.name, *own])}
    return {**about, **line, "goals": reached, "reads": [run_file]}


def sizes_of(run_file: str, tiny: bool, device: str, tokens: int, micro_batches: int) -> Sizes:
    """Of the variants of a run file on one process; arguments as in `measure`."""
    common = (*SHARED, *(TINY if tiny else ()), f"launch.device={device}")
    return Sizes(ROOT / run_file, common, tokens, micro_batches, 1)
