"""Real training steps of any layout, and the memory that torch's own accounting says they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.config import Config
from pipeline.config.run import TimeLimitsConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.distributed.layout import Layout, resolve
from pipeline.train.distributed.process_group import init_process_group
from pipeline.train.loop.step import Stepper
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.parallel.setup import Setup, set_up
from pipeline.train.parallel.step_shapes import StepShape, step_shapes
from pipeline.train.start.setup import ALONE
from tests.train.parallel.layouts import ENCODER_FAMILIES

BASE: dict[str, Any] = {
    "model": {"layers": 6, "dim": 256, "heads": 8, "kv_heads": 4, "ffn_dim": 704},
    "train": {"sequence_length": 256, "batch_size": 2, "precision": {"compute": "fp32"}},
}
"""A model whose layers, head and optimizer states all count."""
VOCABULARY = 4096
_STEPS = 4
_STEP = "plan_memory.step"
"""What a step is called in the profile."""

KINDS: dict[str, Any] = {
    "model.pattern": ["wide", "near", "near"],
    "model.kinds": {
        "wide": {"ffn_dim": 1024, "qk_norm": "full", "output_gate": True, "norm_place": "both", "mlp": "geglu"},
        "near": {"sliding_window": 32, "rope_share": 0.5, "qk_norm": True, "norm_place": "output", "mlp": "gelu"},
    },
}
"""Six layers, of which the first and the fourth have more of everything."""

EXPERTS: dict[str, Any] = {
    "model.mlp": "experts",
    "model.experts": {"count": 8, "top_k": 2, "ffn_dim": 256, "shared_ffn_dim": 128},
    # Otherwise some ranks get more than others.
    "train.balance": {"force": True},
    "train.precision": {"compute": "bf16"},
}
_EP2 = {**EXPERTS, "parallel.dp_shard": 2, "parallel.ep": 2, "train.batch_size": 4}

MAMBA: dict[str, Any] = {
    "model.pattern": ["state", "state", "attention"],
    "model.kinds": {
        "state": {
            "mixer": "mamba2",
            "mamba2": {"heads": 8, "head_dim": 64, "state_dim": 32, "groups": 2},
            "mlp": "none",
        },
        "attention": {},
    },
}
DELTA: dict[str, Any] = {
    "model.pattern": ["gated", "kimi", "attention"],
    "model.kinds": {
        "gated": {
            "mixer": "gated_delta",
            "delta": {"key_heads": 4, "value_heads": 8, "key_dim": 32, "value_dim": 64},
        },
        "kimi": {"mixer": "kda", "delta": {"key_heads": 4, "key_dim": 32, "value_dim": 64}},
        "attention": {},
    },
}
"""Two layers with a recurrence to one with attention."""

ENCODER: dict[str, Any] = {
    **ENCODER_FAMILIES["bert"],
    "train.objective": {"type": "masked", "rate": 0.25},
    "model.dropout": 0.0,
}
"""BERT, whose head scores a quarter of the positions."""

SIDES: dict[str, Any] = {
    "model.encoder": {"layers": 4},
    "model.layers": 3,
    "model.document_attention": True,
    "train.objective": {"type": "spans", "rate": 0.15},
    "train.batch_size": 4,
}
"""Of 256 tokens 232 positions of an encoder and 52 of a decoder."""
CASES: dict[str, dict[str, Any]] = {
    "sides": SIDES,
    "sides, relative positions": {**SIDES, "model.positions": "relative", "model.tie_embeddings": True},
    "sides, full recomputation": {**SIDES, "train.recompute": {"mode": "full"}},
    "sides, tp2": {**SIDES, "parallel.tp": 2},
    "sides, pp2": {**SIDES, "parallel.pp": 2, "train.micro_batch_size": 1},
    "one process": {},
    "one process, bf16": {"train.precision": {"compute": "bf16"}},
    "chunked loss": {"train.loss.chunk_tokens": 64, "train.precision": {"compute": "bf16"}},
    "tied embeddings": {"model.tie_embeddings": True},
    "average of the weights": {"train.ema": {"decay": 0.99}},
    "accumulation": {"train.micro_batch_size": 1},
    "documents": {"model.document_attention": True},
    "learned positions, layernorm, gelu": {
        "model.positions": "learned",
        "model.norm": "layernorm",
        "model.mlp": "gelu",
        "model.bias": "all",
    },
    "layers of two kinds": KINDS,
    "layers of two kinds, pp2": {**KINDS, "parallel.pp": 2, "train.batch_size": 8, "train.micro_batch_size": 1},
    "experts": EXPERTS,
    "experts, biases, the first layers dense": {
        **EXPERTS,
        "model.experts": {"count": 16, "top_k": 2, "ffn_dim": 128, "bias": True, "activation": "clamped_swiglu"},
        "model.pattern": ["dense", "dense", *["sparse"] * 4],
        "model.kinds": {"dense": {"mlp": "swiglu"}, "sparse": {}},
    },
    "experts, full recomputation": {**EXPERTS, "train.recompute": {"mode": "full"}},
    "experts, selective recomputation": {**EXPERTS, "train.recompute": {"mode": "selective"}},
    "experts, fsdp2": {**_EP2, "parallel.ep": 1},
    "experts, ep2": _EP2,
    "experts, ep2, kept": {**_EP2, "parallel.reshard_after_forward": False},
    "experts, fsdp4 ep2": {**_EP2, "parallel.dp_shard": 4, "train.batch_size": 8},
    "experts, tp2": {**EXPERTS, "parallel.tp": 2},
    "experts, tp2 ep2": {**EXPERTS, "parallel.tp": 2, "parallel.ep": 2},
    "experts, tp2 ep2, no sequence parallelism": {
        **EXPERTS,
        "parallel.tp": 2,
        "parallel.ep": 2,
        "parallel.sequence_parallel": False,
    },
    "experts, pp2 x fsdp2 ep2": {
        **_EP2,
        "parallel.pp": 2,
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
    },
    "encoder": ENCODER,
    "encoder, tp2": {**ENCODER, "parallel.tp": 2},
    "encoder, cp2": {**ENCODER, "parallel.cp": 2},
    "multi-token prediction": {"model.mtp": {"depth": 2}},
    "multi-token prediction, chunked loss, bf16": {
        "model.mtp": {"depth": 1},
        "train.loss.chunk_tokens": 64,
        "train.precision": {"compute": "bf16"},
    },
    "multi-token prediction, pp2": {
        "model.mtp": {"depth": 1},
        "parallel.pp": 2,
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
    },
    "multi-token prediction, fsdp2 x tp2": {
        "model.mtp": {"depth": 2},
        "parallel.dp_shard": 2,
        "parallel.tp": 2,
        "train.batch_size": 4,
    },
    "mamba": MAMBA,
    "mamba, bf16, documents": {**MAMBA, "train.precision": {"compute": "bf16"}, "model.document_attention": True},
    "mamba, full recomputation": {**MAMBA, "train.recompute": {"mode": "full"}},
    "mamba, selective recomputation": {**MAMBA, "train.recompute": {"mode": "selective"}},
    "mamba, muon": {**MAMBA, "train.optimizer": {"type": "muon"}},
    "mamba, tp2": {**MAMBA, "parallel.tp": 2},
    "mamba, cp2": {**MAMBA, "parallel.cp": 2},
    "mamba, fsdp2, bf16": {
        **MAMBA,
        "parallel.dp_shard": 2,
        "train.batch_size": 4,
        "train.precision": {"compute": "bf16"},
    },
    "delta": DELTA,
    "delta, bf16": {**DELTA, "train.precision": {"compute": "bf16"}},
    "delta, full recomputation": {**DELTA, "train.recompute": {"mode": "full"}},
    "delta, selective recomputation": {**DELTA, "train.recompute": {"mode": "selective"}},
    "delta, tp2": {**DELTA, "parallel.tp": 2},
    "delta, cp2": {**DELTA, "parallel.cp": 2},
    "full recomputation": {"train.recompute": {"mode": "full"}},
    "full recomputation, every second layer": {"train.recompute": {"mode": "full", "every": 2}},
    "selective recomputation": {"train.recompute": {"mode": "selective"}},
    "selective recomputation of all but attention": {"train.recompute": {"mode": "selective", "keep": ["attention"]}},
    "fsdp2": {"parallel.dp_shard": 2, "train.batch_size": 4},
    "fsdp2, kept": {"parallel.dp_shard": 2, "parallel.reshard_after_forward": False, "train.batch_size": 4},
    "fsdp2, bf16, accumulation": {
        "parallel.dp_shard": 2,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.precision": {"compute": "bf16"},
    },
    "fsdp2, bf16, one reduction": {
        "parallel.dp_shard": 2,
        "parallel.overlap.reduce": "last",
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.precision": {"compute": "bf16"},
    },
    "fsdp2, far ahead": {
        "parallel.dp_shard": 2,
        "parallel.overlap": {"forward_prefetch": 2, "backward_prefetch": 3},
        "train.batch_size": 4,
    },
    "ddp2, accumulation": {"parallel.dp_replicate": 2, "train.batch_size": 4, "train.micro_batch_size": 1},
    "moments in bf16": {"train.optimizer": {"states": "bf16"}},
    "muon": {"train.optimizer": {"type": "muon"}},
    "fsdp2, muon": {"parallel.dp_shard": 2, "train.batch_size": 4, "train.optimizer": {"type": "muon"}},
    "tp2": {"parallel.tp": 2},
    "tp2, no sequence parallelism": {"parallel.tp": 2, "parallel.sequence_parallel": False},
    "fsdp2 x tp2": {"parallel.dp_shard": 2, "parallel.tp": 2, "train.batch_size": 4},
    "cp2": {"parallel.cp": 2},
    "cp2, heads exchanged, selective recomputation": {
        "parallel.cp": 2,
        "parallel.cp_method": "ulysses",
        "train.recompute": {"mode": "selective"},
    },
    "cp2 x tp2, documents, full recomputation": {
        "parallel.cp": 2,
        "parallel.tp": 2,
        "model.document_attention": True,
        "train.recompute": {"mode": "full"},
    },
    "tp2, selective recomputation": {"parallel.tp": 2, "train.recompute": {"mode": "selective"}},
    "pp2": {"parallel.pp": 2, "train.batch_size": 8, "train.micro_batch_size": 1},
    "pp2, gpipe, tied embeddings": {
        "parallel.pp": 2,
        "parallel.pipeline": {"schedule": "gpipe"},
        "train.batch_size": 4,
        "train.micro_batch_size": 1,
        "model.tie_embeddings": True,
    },
    "pp2, interleaved": {
        "parallel.pp": 2,
        "parallel.pipeline": {"schedule": "interleaved_1f1b"},
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
    },
    "pp2, zbv": {
        "parallel.pp": 2,
        "parallel.pipeline": {"schedule": "zbv"},
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
    },
    "pp2 x fsdp2, bf16": {
        "parallel.pp": 2,
        "parallel.dp_shard": 2,
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
        "train.precision": {"compute": "bf16"},
    },
    "pp2 x fsdp2, interleaved, four stages a rank": {
        "model.layers": 8,
        "parallel.pp": 2,
        "parallel.dp_shard": 2,
        "parallel.pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 4},
        "train.batch_size": 16,
        "train.micro_batch_size": 1,
        "train.precision": {"compute": "bf16"},
    },
    "pp2 x fsdp2 x tp2, full recomputation": {
        "parallel.pp": 2,
        "parallel.dp_shard": 2,
        "parallel.tp": 2,
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
        "train.recompute": {"mode": "full"},
    },
}
"""By name, what a run file has besides `BASE`."""


def case_config(name: str, **more: Any) -> Config:
    """The run file of a case; more keys with two underscores for a dot."""
    values: dict[str, Any] = {
        "run": {"dir": "/nowhere"},
        "data": {"dir": "/nowhere", "sources": [{"name": "s", "paths": ["/nowhere"]}]},
        "tokenizer": {"train": {"vocab_size": VOCABULARY}},
        **{name: dict(section) for name, section in BASE.items()},
    }
    values["train"]["duration"] = "2 steps"
    for key, value in {**CASES[name], **{key.replace("__", "."): value for key, value in more.items()}}.items():
        section = values
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return Config.model_validate(values)


def of_case(config: Config) -> tuple[Layout, DecoderSpec, StepShape]:
    """The layout of a case over as many processes as it names, the model, the steps."""
    degrees = config.parallel
    world = degrees.pp * degrees.dp_replicate * max(1, degrees.dp_shard) * degrees.cp * degrees.tp
    layout = resolve(degrees, world)
    (shape,) = step_shapes(config, layout.dp)
    return layout, decoder_spec(config.model, VOCABULARY, config.max_positions), shape


def measured_peak(config: Config, device_type: str = "cpu") -> tuple[int, int]:
    """Train on this rank of a process group that may exist; its pp coordinate, the most bytes allocated."""
    _, _, shape = of_case(config)
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    init_process_group(ALONE, device, TimeLimitsConfig())
    setup = set_up(config, VOCABULARY, device)
    if device.type == "cuda":
        _steps(config, setup, shape)
        return setup.mesh.rank("pp"), torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _steps(config, setup, shape)
    if dist.get_world_size() > 1:
        dist.barrier()
    return setup.mesh.rank("pp"), _least_peak(profiler.profiler.kineto_results.events())


def _least_peak(events: Sequence[Any]) -> int:
    """The peak of the step after the first one that has the least.

    gloo copies what it sends in threads of its own, which are not looked at, and may let go of what it has sent late.
    """
    begins = sorted((event.start_ns(), event.start_thread_id()) for event in events if event.name() == _STEP)
    own = [event for event in events if event.name() == "[memory]" and event.start_thread_id() == begins[0][1]]
    peaks = [0] * (len(begins) + 1)
    now = 0
    for event in sorted(own, key=lambda event: event.start_ns()):
        now += event.nbytes()
        step = sum(event.start_ns() >= time for time, _ in begins)
        peaks[step] = max(peaks[step], now)
    return min(peaks[2:])


def resident_peak(config: Config) -> tuple[int, int]:
    """Train in this process alone; 0, and by how much they raised the kernel's high-water mark of it."""
    _, _, shape = of_case(config)
    device = torch.device("cpu")
    init_process_group(ALONE, device, TimeLimitsConfig())
    before = _high_water()
    _steps(config, set_up(config, VOCABULARY, device), shape)
    return 0, _high_water() - before


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _steps(config: Config, setup: Setup, shape: StepShape) -> None:
    model = build_model(config, setup)
    stepper = Stepper(config, setup, model, Optimizers(config, model), sources=["data"])
    for _ in range(_STEPS):
        with record_function(_STEP):
            depth = len(setup.spec.mtp)
            batches = [_batch(shape, depth) for _ in range(shape.micro_batches)]
            stepper.step(StepData(0, batches, 1000, valid_ahead=(1000,) * depth), 1e-3)


def _batch(shape: StepShape, depth: int) -> Batch:
    size = (shape.micro_batch_size, shape.stream.length)
    tokens = torch.randint(VOCABULARY, size)
    # A document in each half of a sample, or of each side of it.
    begins = torch.arange(0, tokens.numel(), shape.stream.length)[:, None]
    encoder, decoder = shape.stream.encoder, shape.stream.decoder
    halves = [0, encoder // 2, encoder, encoder + decoder // 2]
    starts = (begins + torch.tensor(sorted(set(halves)))).flatten().to(torch.int32)
    sources = torch.zeros(len(tokens), dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.ones(size), starts, sources, {}, encoder=encoder)
    if not encoder and shape.stream.predicted < decoder:
        places = torch.randperm(decoder)[: shape.stream.predicted].sort().values
        batch = replace(batch, predicted=places.expand(len(tokens), -1).clone())
    if not depth:
        return batch
    ahead = torch.stack([tokens] * depth, dim=1)
    return replace(batch, ahead_targets=ahead, ahead_weight=torch.ones(ahead.shape))
