"""A corpus and a run file so small that a whole run takes a second or two; real code all the way."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

_WORDS = "the a sea boat wind sails north harbour of under and light old night before storm keeper tower rope".split()


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    """Text files of made-up sentences, different for each seed."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    for number in range(documents):
        sentences = (" ".join(chance.choices(_WORDS, k=chance.randint(4, 12))) for _ in range(chance.randint(3, 20)))
        (folder / f"{number:03d}.txt").write_text(". ".join(sentences) + ".\n")
    return folder


def values(root: Path) -> dict[str, Any]:
    """The run file as a dictionary: two sources under `root`, a model of some thousand parameters, 8 steps."""
    return {
        "run": {"dir": str(root / "run")},
        "launch": {"threads": 1},
        "data": {
            "dir": str(root / "data"),
            "sources": [
                {"name": "sea", "paths": [str(root / "sea" / "*.txt")], "weight": 3},
                {"name": "land", "paths": [str(root / "land" / "*.txt")], "weight": 1},
            ],
            "splits": {"heldout": 0.2},
            "preprocess": {"workers": 1, "engine": "tokenizers"},
        },
        "tokenizer": {"train": {"vocab_size": 300}},
        "model": {"layers": 2, "dim": 32, "heads": 2, "vocab_multiple": 16},
        "train": {
            "duration": "8 steps",
            "sequence_length": 32,
            "batch_size": 4,
            "micro_batch_size": 2,
            "optimizer": {"lr": 1e-2},
            "schedule": {"warmup": "2 steps"},
            "validation": {"every_steps": 4, "samples": 4},
            "checkpoint": {"every_steps": 3},
            "metrics": {"log_every_steps": 1, "tensorboard": False},
        },
        "generate": {"prompt": "the ", "max_tokens": 8},
        "resume": {"allow": ["schedule"]},  # many tests train on
    }


def write_run(root: Path, changes: dict[str, Any] | None = None, name: str = "run.yaml") -> Path:
    """Write the corpus, if it is not there, and the run file with changes by dotted key."""
    if not (root / "sea").exists():
        write_corpus(root / "sea", seed=1)
        write_corpus(root / "land", seed=2)
    everything = values(root)
    for key, value in (changes or {}).items():
        section = everything
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = deepcopy(value)  # of which later changes are of this file alone
    file = root / name
    file.write_text(yaml.safe_dump(everything))
    return file


def pipeline(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would, in a process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, check=False)


def resumed_from(out: str) -> int | None:
    """The step of the checkpoint that a training resumed from, by what it printed; None if it began anew."""
    found = re.search(r"train: resuming from step-(\d+)", out)
    return int(found[1]) if found else None


def warnings_of(out: str) -> list[str]:
    """The lines of warnings, but for that of a processor which has no fast products in bf16."""
    return [line for line in out.splitlines() if "warning" in line and "no fast products" not in line]


def failed_saves(out: str) -> list[int]:
    """The steps whose saves a training gave up, by what it printed."""
    return [int(step) for step in re.findall(r"step (\d+) could not be saved", out)]


def command(*arguments: object) -> list[str]:
    """The words of a command line."""
    return [sys.executable, "-m", "pipeline", *(os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments)]
