"""`ITEMS`: all that is to be shown, the most worth first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.item import Item

_TESTS = Item(
    "tests",
    "Do the tests that need a GPU pass?",
    "suite:measure",
    full={"paths": None, "marker": "gpu", "workers": 6},
    rehearsal={"paths": ["tests/train/kernels/test_choice.py"], "marker": "not gpu", "workers": 0},
    least_s=90,
    limit_s=330,
)

_RATES = Item(
    "rates",
    "Which shares of its stated peaks does the device reach, in products, attention and passes over memory?",
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
    own_layers: bool = False,
    side: str = "ours",
    goals: Mapping[str, float] | None = None,
    least_s: float = 45,
) -> Item:
    """A row of the table of speed; `tiny` is what is changed on a CPU instead."""
    both = {"run_file": _LLAMA, "own": list(own), "own_layers": own_layers, "side": side}
    full = {
        "tiny": False,
        "base": _BASE,
        "change": change,
        "tokens": 16384,
        "micro_batches": 2,
        "memory_bytes": None,
        "goals": goals or {},
    }
    small = {
        "tiny": True,
        "base": _TINY_BASE,
        "tokens": 256,
        "micro_batches": 2,
        "memory_bytes": 1 << 30,
        "goals": {},
    }
    return Item(
        f"speed/{name}",
        question,
        "speed:measure",
        full={**both, **full, "steps": 10, "warmup": 3},
        rehearsal={**both, **small, "change": change if tiny is None else tiny, "steps": 2, "warmup": 1},
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

ITEMS: tuple[Item, ...] = (_TESTS, _RATES, *_SPEED, *_FP8, *_PROFILE)
