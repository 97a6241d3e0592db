"""Tiny datasets of pairs of conversations, made of JSON lines by a chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config.load import load
from pipeline.data.packing.command import pack
from pipeline.data.preprocess.stage import preprocess
from tests import tiny
from tests.data.chat.templates import SPECIAL, TEMPLATES, write_tokenizer
from tests.train import runs

_WORDS = "far mile harbour boat wind sails the a sea night".split()
KEYS: dict[str, Any] = {
    "data.loader": {"packing": "best_fit"},
    "model.document_attention": True,
    "train.precision": {"compute": "fp32"},
    "train.sequence_length": 256,
    "train.schedule": {"type": "constant", "warmup": "0 steps"},
    "train.validation": {"samples": 0},
}


def records(count: int = 90, seed: int = 0) -> list[dict[str, Any]]:
    """Records of `chosen` and `rejected`, which have the same turns up to their last answers."""
    chance = random.Random(seed)

    def words() -> str:
        return " ".join(chance.choices(_WORDS, k=chance.randint(1, 4)))

    found = []
    for number in range(count):
        turns = [{"role": "user", "content": words()}]
        if chance.random() < 0.3:
            turns += [{"role": "assistant", "content": words()}, {"role": "user", "content": words()}]
        answers = [[*turns, {"role": "assistant", "content": f"{words()} {side}"}] for side in "01"]
        found.append({"id": f"p{number}", "chosen": answers[0], "rejected": answers[1]})
    return found


def write(root: Path, changes: dict[str, Any] | None = None, name: str = "pairs.yaml") -> Path:
    """A run file of one source of pairs, with its records and tokenizer."""
    path, template = root / "pairs.jsonl", root / "chat.jinja"
    if not path.exists():
        path.write_text("".join(json.dumps(each) + "\n" for each in records()))
        template.write_text(TEMPLATES["plain"])
    chat = {"format": "preference", "template": str(template), "train_on": "last", "max_tokens": 256}
    source = {"name": "pairs", "type": "jsonl", "paths": [str(path)], "chat": chat}
    keys = {"data.sources": [source], "tokenizer": _tokenizer(root), "train.preference": {"beta": 0.3}}
    keys["train.init_from"] = {"path": str(root / "base")}
    return tiny.write_run(root, {**KEYS, **keys, **(changes or {})}, name)


def _tokenizer(root: Path) -> dict[str, Any]:
    """Section of the tokenizer that all run files have, which is made."""
    if not (root / "tokenizer").exists():
        write_tokenizer(root / "tokenizer")
    return {"path": str(root / "tokenizer"), "end_of_document": SPECIAL[0], "special_tokens": SPECIAL[1:]}


def base(root: Path, changes: dict[str, Any] | None = None) -> Path:
    """A run on text, whose weights those on pairs start from."""
    keys = {"data.dir": str(root / "text"), "tokenizer": _tokenizer(root), "train.precision": {"compute": "fp32"}}
    file = tiny.write_run(root, {**keys, "train.duration": "3 steps", **(changes or {})}, "base.yaml")
    preprocess(load(file))
    return runs.train(root, "base", file=file.name)


def make(file: Path) -> None:
    """The datasets of a run file, and their packs."""
    config = load(file)
    preprocess(config)
    pack(config.data_dir / "pairs", config.pack_lengths, workers=1, console=Console(quiet=True))
