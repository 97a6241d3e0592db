"""Items about layers with a recurrence, for the catalog."""

from __future__ import annotations

from evidence.item import Item

RECURRENCES = Item(
    "recurrences",
    "How fast are recurrences by fla-core beside PyTorch alone and beside attention, and are they the same?",
    "recurrences:measure",
    full={
        "kinds": ["ssd", "gated_delta", "kda"],
        "lengths": [8192, 32768, 131072],
        "heads": 64,
        "head_dim": 64,
        "state_dim": 128,
        "beside_from": 32768,
        "seconds": 1.5,
    },
    rehearsal={
        "kinds": ["ssd", "gated_delta", "kda"],
        "lengths": [128, 256],
        "heads": 4,
        "head_dim": 16,
        "state_dim": 16,
        "beside_from": 512,
        "seconds": 0.01,
    },
    least_s=100,
    limit_s=240,
)
