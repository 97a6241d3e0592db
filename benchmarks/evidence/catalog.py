"""`ITEMS`: all that is to be shown, the most worth first."""

from __future__ import annotations

from evidence.item import Item

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
        "saves",
        "How long do saves hold up training, and how soon does a run continue after kill -9?",
        "saves:measure",
        full={
            "threads": None,
            "model": {"layers": 15, "dim": 2048, "heads": 16, "ffn_dim": 8192},
            "text_bytes": 8_000_000,
            "vocabulary": 8192,
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
            "vocabulary": 512,
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
)
