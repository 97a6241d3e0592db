"""Runs of every kind of batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from tests import tiny
from tests.train.runs import train

SPECIAL = ["[MASK]", *(f"<extra_id_{number}>" for number in range(12))]
BASE = {
    "train.precision": {"compute": "fp32"},
    "train.metrics.windows": True,
    "train.checkpoint": {"every_steps": 4, "keep": 9},
    "train.schedule": {"type": "constant", "warmup": "2 steps"},
}
KINDS: dict[str, dict[str, Any]] = {
    "windows": {},
    "packed": {"data.loader.packing": "best_fit", "model.document_attention": True},
    "masked": {
        "model.direction": "both",
        "model.document_attention": True,
        "train.objective": {"type": "masked", "rate": 0.3},
        "tokenizer.special_tokens": SPECIAL,
    },
    "spans": {
        "model.encoder": {"layers": 1},
        "train.objective": {"type": "spans", "rate": 0.3},
        "tokenizer.special_tokens": SPECIAL,
    },
    "phases": {
        "blend.phases": [
            {"until": "4 steps"},
            {"name": "long", "weights": {"sea": 1, "land": 1}, "sequence_length": 48, "batch_size": 3},
        ]
    },
    "ramp": {"train.batch_ramp": {"start": 1, "increment": 1, "tokens": 256}, "train.micro_batch_size": 1},
    "skips": {
        "blend.skip": [{"steps": 3}, {"samples": "17-18"}, {"source": "sea", "documents": ["5-30"]}],
        "train.loss.mask_document_start": True,
    },
    "experts": {
        "model.mlp": "experts",
        "model.experts": {"count": 4, "top_k": 2, "ffn_dim": 16},
        "model.kinds": {
            "state": {"mixer": "gated_delta", "delta": {"key_heads": 1, "key_dim": 16, "value_dim": 32}},
            "full": {"sliding_window": 20},
        },
        "model.pattern": ["state", "full"],
        "model.document_attention": True,
    },
    "weights": {"model.mtp": {"depth": 2}, "model.document_attention": True},
}


def trained(root: Path, kind: str, **changes: Any) -> Path:
    """The run folder of a run of a kind; beside it lie its run file and its data."""
    preprocess(load(tiny.write_run(root, {**BASE, **KINDS[kind], **changes})))
    return train(root, "run")
