"""`ITEMS`: all that is to be shown, the most worth first."""

from __future__ import annotations

from typing import Any

from evidence.item import Item

_CLOSE = {
    "duration": "50 steps",
    "optimizer": {"lr": 1e-3},
    "schedule": {"warmup": "10 steps"},
    "validation": {"every_steps": 25, "samples": 8},
    "metrics": {"tensorboard": False},
}
"""Training of runs that are compared step by step."""
_SMALL: dict[str, Any] = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 192}
_LLAMA = {"layers": 8, "dim": 1024, "heads": 16, "kv_heads": 4, "ffn_dim": 2816, "vocab_size": 32_000}


def _transformers(precision: str, question: str) -> Item:
    """One precision of the same comparison."""
    return Item(
        f"exact/transformers-{precision}",
        question,
        "exact:transformers",
        full={
            "precision": precision,
            "steps": 50,
            "model": _LLAMA,
            "train": {
                "sequence_length": 512,
                "batch_size": 2,
                "micro_batch_size": 1,
                "optimizer": {"lr": 3e-4},
                "compile": False,
            },
        },
        rehearsal={
            "precision": precision,
            "steps": 30,
            "model": _SMALL | {"vocab_size": 512},
            "train": {
                "sequence_length": 64,
                "batch_size": 4,
                "micro_batch_size": 2,
                "optimizer": {"lr": 2e-3},
                "compile": False,
            },
        },
        least_s=40,
        limit_s=120,
    )


ITEMS: tuple[Item, ...] = (
    Item(
        "tests",
        "Do the tests that need a GPU pass?",
        "tests:measure",
        full={"paths": ["tests"], "marker": "gpu", "workers": 6},
        rehearsal={"paths": ["tests/train/kernels/test_choice.py"], "marker": "not gpu", "workers": 0},
        least_s=90,
        limit_s=330,
    ),
    Item(
        "exact/cpu",
        "Does a run on the GPU in fp32 have the data and the losses of the same run on the CPU?",
        "exact:cpu",
        full={
            "model": {"layers": 6, "dim": 320, "heads": 5, "vocab_multiple": 64},
            "train": _CLOSE | {"sequence_length": 256, "batch_size": 8, "precision": {"compute": "fp32"}},
            "text_bytes": 12_000_000,
            "vocab_size": 8192,
        },
        rehearsal={
            "model": _SMALL,
            "train": _CLOSE | {"sequence_length": 64, "batch_size": 4, "precision": {"compute": "fp32"}},
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
            "model": {"layers": 8, "dim": 1024, "heads": 16, "kv_heads": 4},
            "train": _CLOSE | {"sequence_length": 1024, "batch_size": 8, "deterministic": True},
            "stop_after": 25,
            "text_bytes": 12_000_000,
            "vocab_size": 16_384,
        },
        rehearsal={
            "model": _SMALL,
            "train": _CLOSE | {"sequence_length": 64, "batch_size": 4, "deterministic": True},
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
        limit_s=240,
    ),
)
