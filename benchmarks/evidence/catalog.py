"""`ITEMS`: all that is to be shown, the most worth first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.item import Item
from evidence.recurrence_items import RECURRENCES

_TESTS = Item(
    "tests",
    "Do the tests that need a GPU pass?",
    "suite:measure",
    full={"paths": None, "marker": "gpu", "workers": 6},
    rehearsal={"paths": ["tests/train/model/kernels/test_choice.py"], "marker": "not gpu", "workers": 1},
    least_s=90,
    limit_s=330,
)

_RATES = Item(
    "rates",
    "Which shares of its stated peaks does the device reach, in products, attention and memory bandwidth?",
    "rates:measure",
    full={
        "tokens": 16384,
        "layers": 32,
        "layer": {
            "q, o": [4096, 4096, 2],
            "k, v": [1024, 4096, 2],
            "gate, up": [14336, 4096, 2],
            "down": [4096, 14336, 1],
        },
        "head": [128256, 4096],
        "square": 8192,
        "attention": {"lengths": [8192, 4096], "heads": 32, "kv_heads": 8, "head_dim": 128},
        "elements": 2**28,
        "update_layers": 4,
        "launches": 1000,
        "copy_bytes": 2**30,
        "seconds": 1.0,
    },
    rehearsal={
        "tokens": 256,
        "layers": 2,
        "layer": {"q, o": [128, 128, 2], "k, v": [64, 128, 2], "gate, up": [384, 128, 2], "down": [128, 384, 1]},
        "head": [512, 128],
        "square": 256,
        "attention": {"lengths": [256, 128], "heads": 4, "kv_heads": 2, "head_dim": 32},
        "elements": 2**16,
        "update_layers": 1,
        "launches": 100,
        "copy_bytes": 2**20,
        "seconds": 0.01,
    },
    least_s=60,
    limit_s=150,
)

_CLOSE = {
    "duration": "50 steps",
    "optimizer": {"lr": 1e-3},
    "schedule": {"warmup": "10 steps"},
    "validation": {"every_steps": 25, "samples": 8},
    "metrics": {"tensorboard": False},
}
"""Training of runs that are compared step by step."""
_TINY: dict[str, Any] = {
    "launch": {"threads": 1},
    "model": {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 192},
}
"""Sections of run files for a CPU; more threads would wait for one another."""
_PEER = {"layers": 8, "dim": 1024, "heads": 16, "kv_heads": 4, "ffn_dim": 2816, "vocab_size": 32_000}


def _transformers(precision: str, question: str) -> Item:
    """One precision of the same comparison."""

    def shapes(model: Mapping[str, Any], lr: float, **train: int) -> dict[str, Any]:
        given = {**train, "optimizer": {"lr": lr}, "compile": False}
        return {"precision": precision, "steps": 50, "sections": {**model, "train": given}}

    tiny = {**_TINY, "model": {**_TINY["model"], "vocab_size": 512}}
    return Item(
        f"exact/transformers-{precision}",
        question,
        "exact:transformers",
        full=shapes({"model": _PEER}, 3e-4, sequence_length=512, batch_size=2, micro_batch_size=1),
        rehearsal=shapes(tiny, 1e-3, sequence_length=64, batch_size=8, micro_batch_size=4),
        least_s=40,
        limit_s=120,
    )


_FP32, _BITS = {"precision": {"compute": "fp32"}}, {"deterministic": True}
_EXACT = (
    Item(
        "exact/cpu",
        "Does a run on the GPU in fp32 have the data and the losses of the same run on the CPU?",
        "exact:cpu",
        full={
            "sections": {
                "model": {"layers": 6, "dim": 320, "heads": 5, "vocab_multiple": 64},
                "train": {**_CLOSE, **_FP32, "sequence_length": 256, "batch_size": 8},
            },
            "text_bytes": 4_000_000,
            "vocab_size": 8192,
        },
        rehearsal={
            "sections": {**_TINY, "train": {**_CLOSE, **_FP32, "sequence_length": 64, "batch_size": 4}},
            "text_bytes": 500_000,
            "vocab_size": 512,
        },
        least_s=70,
        limit_s=180,
    ),
    Item(
        "exact/resume",
        "Does a run that is stopped and resumed have the same bits as one that is not, in bf16?",
        "exact:resume",
        full={
            "sections": {
                "model": {"layers": 8, "dim": 1024, "heads": 16, "kv_heads": 4},
                "train": {**_CLOSE, **_BITS, "sequence_length": 1024, "batch_size": 8},
            },
            "stop_after": 25,
            "text_bytes": 4_000_000,
            "vocab_size": 16_384,
        },
        rehearsal={
            "sections": {**_TINY, "train": {**_CLOSE, **_BITS, "sequence_length": 64, "batch_size": 4}},
            "stop_after": 25,
            "text_bytes": 500_000,
            "vocab_size": 512,
        },
        least_s=90,
        limit_s=240,
    ),
    _transformers("fp32", "Does our model train like transformers' Llama, step by step in fp32?"),
    _transformers("bf16", "Is our model in bf16 as close to fp32 as transformers' Llama in bf16 is?"),
    Item(
        "exact/documents",
        "Do all backends of attention keep to documents and windows, output and gradients?",
        "documents:measure",
        full={
            "samples": 2,
            "length": 4096,
            "kind": "mean 800",
            "window": 512,
            "heads": 8,
            "kv_heads": 2,
            "head_sizes": {"bf16": [64, 128], "fp32": [64]},
        },
        rehearsal={
            "samples": 2,
            "length": 384,
            "kind": "fifties",
            "window": 30,
            "heads": 4,
            "kv_heads": 2,
            "head_sizes": {"bf16": [64], "fp32": [64, 128]},
        },
        least_s=90,
        limit_s=300,
    ),
)

_RUNS = (
    Item(
        "saves",
        "How long do saves hold up training, and how soon does a run continue after kill -9?",
        "saves:measure",
        full={
            "threads": None,
            "model": {"layers": 15, "dim": 2048, "heads": 16, "ffn_dim": 8192},
            "text_bytes": 8_000_000,
            "vocab_size": 8192,
            "sequence_length": 2048,
            "batch_size": 8,
            "every": 24,
            "kill_at": 73,
            "steps": 76,
        },
        rehearsal={
            "threads": 1,
            "model": {"layers": 2, "dim": 64, "heads": 4},
            "text_bytes": 300_000,
            "vocab_size": 512,
            "sequence_length": 128,
            "batch_size": 8,
            "every": 20,
            "kill_at": 44,
            "steps": 60,
        },
        least_s=150,
        limit_s=300,
    ),
    Item(
        "generation",
        "How many tokens per second are generated, beside transformers, and are greedy texts equal?",
        "generation:measure",
        full={
            "model": {"vocabulary": 32768, "layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "ffn_dim": 8192},
            "rows": [1, 8, 32],
            "new": 128,
            "rounds": 3,
            "exact_model": {"vocabulary": 8192, "layers": 6, "dim": 256, "heads": 4, "kv_heads": 2, "ffn_dim": 704},
            "exact_rows": 8,
            "exact_new": 64,
        },
        rehearsal={
            "model": {"vocabulary": 512, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 192},
            "rows": [1, 3],
            "new": 8,
            "rounds": 1,
            "exact_model": {"vocabulary": 512, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 192},
            "exact_rows": 4,
            "exact_new": 16,
        },
        least_s=80,
        limit_s=180,
    ),
    Item(
        "gpt2",
        "Does GPT-2 learn in bf16, how fast, and are its first steps those of a CPU in fp32?",
        "gpt2:measure",
        full={
            "model": {},
            "text_bytes": 20_000_000,
            "vocab_size": 16_384,
            "sequence_length": 1024,
            "batch_size": 128,
            "micro_batch_size": 32,
            "first_steps": 4,
            "first_batch_size": 4,
            "warmup": 100,
            "validate_every": 50,
            "validation_samples": 64,
            "duration": "600_000 steps",
            "minutes": 2,
            "threads": None,
        },
        rehearsal={
            "model": {"layers": 2, "dim": 64, "heads": 4, "ffn_dim": 256, "max_positions": 64, "vocab_size": 600},
            "text_bytes": 3_000_000,
            "vocab_size": 512,
            "sequence_length": 64,
            "batch_size": 8,
            "micro_batch_size": 4,
            "first_steps": 4,
            "first_batch_size": 2,
            "warmup": 10,
            "validate_every": 20,
            "validation_samples": 8,
            "duration": "80 steps",
            "minutes": None,
            "threads": 1,
        },
        least_s=190,
        limit_s=300,
    ),
)

_BASE = {
    "sequence": 8192,
    "precision": "bf16",
    "compiled": True,
    "backend": "auto",
    "documents": "one",
    "recompute": "none",
}
_TINY_BASE = {**_BASE, "sequence": 128, "precision": "fp32", "compiled": False}
_LLAMA = "configs/models/llama3-8b.yaml"


def _speed(
    name: str,
    question: str,
    change: Mapping[str, Any],
    *,
    tiny: Mapping[str, Any] | None = None,
    own: Sequence[str] = (),
    tiny_own: Sequence[str] | None = None,
    own_layers: bool = False,
    side: str = "ours",
    goals: Mapping[str, float] | None = None,
    least_s: float = 45,
) -> Item:
    """A row of the table of speed; `tiny` and `tiny_own` are what is changed on a CPU instead."""
    both = {"run_file": _LLAMA, "own_layers": own_layers, "side": side, "goals": goals or {}}
    full = {
        "tiny": False,
        "base": _BASE,
        "change": change,
        "tokens": 16384,
        "micro_batches": 2,
        "memory_bytes": None,
        "planned_for": None,
    }
    small = {
        "tiny": True,
        "base": _TINY_BASE,
        "tokens": 256,
        "micro_batches": 2,
        "memory_bytes": 1 << 30,
        "planned_for": "NVIDIA H200",
    }
    return Item(
        f"speed/{name}",
        question,
        "speed:measure",
        full={**both, **full, "own": list(own), "steps": 10, "warmup": 3},
        rehearsal={
            **both,
            **small,
            "own": list(own if tiny_own is None else tiny_own),
            "change": change if tiny is None else tiny,
            "steps": 2,
            "warmup": 1,
        },
        least_s=least_s,
        limit_s=180,
    )


_AGAIN = {"recompute": "selective"}
_SPEED = (
    _speed(
        "compiled",
        "Llama 3 8B's layers, 8,192 tokens, compiled",
        {},
        tiny={"precision": "bf16", "compiled": True},
        goals={"product_share": 0.75},
    ),
    _speed("loop", "transformers' model in a bare loop, compiled", {}, tiny={}, side="loop"),
    _speed("eager", "not compiled", {"compiled": False}),
    _speed(
        "4096-full-bf16-states",
        "4,096 tokens, full recomputation, moments in bf16, as many layers as fit",
        {"sequence": 4096, "recompute": "full"},
        tiny={"sequence": 64, "recompute": "full"},
        own=["train.optimizer.states=bf16"],
        own_layers=True,
        goals={"mfu": 0.57},
        least_s=60,
    ),
    _speed("trainer", "transformers' Trainer, as it is started by default", {"compiled": False}, side="trainer"),
    _speed("selective-sdpa", "selective recomputation, attention by torch", {**_AGAIN, "backend": "sdpa"}),
    _speed(
        "selective-varlen",
        "selective recomputation, attention by torch's variable-length kernel",
        {**_AGAIN, "backend": "varlen"},
        tiny=_AGAIN,
    ),
    _speed(
        "selective-flash",
        "selective recomputation, attention by flash-attn",
        {**_AGAIN, "backend": "flash"},
        tiny=_AGAIN,
        least_s=10,
    ),
    _speed("selective-flex", "selective recomputation, flex attention", {**_AGAIN, "backend": "flex"}, tiny=_AGAIN),
    _speed("documents", "attention within documents of 1,000 tokens on average", {"documents": "many"}),
)
_FP8 = (
    _speed(
        "fp8-tensorwise",
        "products in fp8, one scale per tensor",
        {"precision": "fp8"},
        tiny={"precision": "fp8-emulated"},
    ),
    _speed(
        "fp8-rowwise",
        "products in fp8, one scale per row",
        {"precision": "fp8-rowwise"},
        tiny={"precision": "fp8-emulated"},
    ),
)

_QWEN3 = {"count": 128, "top_k": 8, "ffn_dim": 768}
_MIXTRAL = {"count": 8, "top_k": 2, "ffn_dim": 14336}
_GPT_OSS = {
    **{"count": 32, "top_k": 4, "ffn_dim": 2880, "bias": True, "router_bias": True},
    "activation": "clamped_swiglu",
}


def _keys(model: Mapping[str, Any], experts: Mapping[str, Any], forced: bool) -> list[str]:
    """Overrides of the shape of a model with experts."""
    given = [f"model.{name}={value}" for name, value in {**model, "mlp": "experts"}.items()]
    words = ", ".join(f"{name}: {str(value).lower()}" for name, value in experts.items())
    return [*given, f"model.experts={{{words}}}", f"train.balance.force={str(forced).lower()}"]


def _mixture(
    name: str, title: str, model: Mapping[str, Any], experts: Mapping[str, Any], goals: Mapping[str, float]
) -> tuple[Item, Item]:
    """Steps of a slice of a model, with real routing and with balance that is forced."""
    tiny = {**experts, "count": 8, "top_k": 2, "ffn_dim": 32}
    return tuple(  # type: ignore[return-value]
        _speed(
            f"experts-{name}{'-forced' if forced else ''}",
            f"layers of {title}, as many as fit, 4,096 tokens; {'balance is forced' if forced else 'real routing'}",
            {"sequence": 4096},
            tiny={"sequence": 64},
            own=_keys(model, experts, forced),
            tiny_own=_keys({}, tiny, forced),
            own_layers=True,
            goals={} if forced else goals,
            least_s=60,
        )
        for forced in (False, True)
    )


_EXPERTS = (
    Item(
        "experts",
        "How fast are grouped products beside a dense one, and what does a layer with experts take besides them?",
        "experts:measure",
        full={
            "tokens": 32768,
            "mixtures": {
                "Qwen3 30B": {"dim": 2048, "experts": _QWEN3},
                "Mixtral 8x7B": {"dim": 4096, "experts": _MIXTRAL},
            },
            "goals": {"Qwen3 30B": 0.3, "Mixtral 8x7B": 0.7},
            "square": 8192,
            "seconds": 2.0,
        },
        rehearsal={
            "tokens": 256,
            "mixtures": {
                "Qwen3 30B": {"dim": 64, "experts": {"count": 16, "top_k": 4, "ffn_dim": 32}},
                "Mixtral 8x7B": {"dim": 64, "experts": {"count": 8, "top_k": 2, "ffn_dim": 96}},
            },
            "goals": {"Qwen3 30B": 0.3, "Mixtral 8x7B": 0.7},
            "square": 256,
            "seconds": 0.01,
        },
        least_s=40,
        limit_s=120,
    ),
    *_mixture(
        "mixtral",
        "Mixtral 8x7B",
        {"dim": 4096, "heads": 32, "kv_heads": 8, "vocab_size": 32000},
        _MIXTRAL,
        {"mfu": 0.45},
    ),
    *_mixture(
        "qwen3",
        "Qwen3 30B",
        {"dim": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "qk_norm": "true", "vocab_size": 151936},
        _QWEN3,
        {"mfu": 0.3},
    ),
    *_mixture(
        "gpt-oss",
        "GPT-OSS 20B",
        {
            **{"dim": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "bias": "attention", "vocab_size": 201088},
            **{"sinks": "true", "pattern": "[near, far]", "kinds": "{near: {sliding_window: 128}, far: {}}"},
        },
        _GPT_OSS,
        {"mfu": 0.28},
    ),
)

_PROFILE = tuple(
    Item(
        f"profile/{name}",
        f"Where the time of a step is spent, what waits for the device, and when it idles: {name}",
        "profiled:measure",
        full={"run_file": _LLAMA, "tiny": False, "variant": {**_BASE, **change}, "layers": 8, "tokens": 16384, **steps},
        rehearsal={
            "run_file": _LLAMA,
            "tiny": True,
            "variant": _TINY_BASE,
            "layers": 2,
            "tokens": 256,
            **steps,
        },
        least_s=40,
    )
    for name, change in (("compiled", {}), ("eager", {"compiled": False}))
    for steps in ({"micro_batches": 2, "warmup": 3, "steps": 3, "rows": 25},)
)

ITEMS: tuple[Item, ...] = (_TESTS, *_EXACT, _RATES, *_SPEED, *_FP8, *_EXPERTS, RECURRENCES, *_PROFILE, *_RUNS)
