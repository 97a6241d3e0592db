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
)
