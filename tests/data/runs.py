"""Run files, corpora and comparisons for the tests of the preprocess stage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson

from pipeline.config import Config
from pipeline.data.preprocess.splits import split_hash

WORDS = ["tokens", "flow", "through", "shards", "while", "workers", "rename", "ünï", "漢字", "🙂", "42", "don't"]


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words)) + "\n" * chance.randint(0, 2)


def write_text(folder: Path, documents: int, seed: int = 0, words: int = 60) -> Path:
    chance = random.Random(seed)
    for number in range(documents):
        path = folder / f"{number % 7}" / f"{number:05d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(chance, chance.randint(1, words)) + str(number))
    return folder


def write_jsonl(path: Path, documents: int, seed: int = 0, words: int = 60) -> Path:
    chance = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for number in range(documents):
            record = {"id": f"r{number}", "text": text(chance, chance.randint(1, words)) + str(number)}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
    return path


def make_config(root: Path, sources: list[dict[str, Any]], **data: Any) -> Config:
    """A config with its run folder under `root`; `data`: keys of `data:`, and `tokenizer`, `run.seed` and `run.dir`."""
    splits = data.pop("splits", {"heldout": data.pop("heldout", 0.2)})
    used = {} if "heldout" in splits else {"split": next(iter(splits))}
    preprocess = {
        "engine": "tokenizers",
        "workers": 1,
        "seed": 7,
        "unit_bytes": 4000,
        "max_error_rate": 0,
        **data.pop("preprocess", {}),
    }
    return Config.model_validate(
        {
            "run": {"dir": str(data.pop("dir", root / "run")), "seed": data.pop("seed", 7)},
            "tokenizer": data.pop("tokenizer", {"train": {"vocab_size": 400}}),
            "data": {"splits": splits, "sources": sources, "preprocess": preprocess, **data},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": "1 steps", "sequence_length": 8, "validation": used},
            "eval": used,
        }
    )


def is_heldout(text: bytes, share: float) -> bool:
    """Whether a share of the documents has this one."""
    return split_hash(text) < int(share * 2**64)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but temporary ones: relative path -> bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".tmp")
    }


def datasets(config: Config) -> dict[str, bytes]:
    """The files of all datasets of a run, without plans, receipts and reports."""
    return {
        f"{source.name}/{split}/{name}": content
        for source in config.data.sources
        for split in ("train", *config.data.splits)
        for name, content in tree(config.data_dir / source.name / split).items()
    }


def write_both(root: Path) -> Path:
    """Text files and JSON lines below `root`."""
    write_text(root / "text", 90)
    write_jsonl(root / "lines.jsonl", 150, seed=1)
    return root


def both(root: Path) -> list[dict[str, Any]]:
    """A source of each of what `write_both` wrote: `t` and `j`."""
    return [
        {"name": "t", "paths": [f"{root}/text/**/*.txt"]},
        {"name": "j", "type": "jsonl", "paths": [f"{root}/lines.jsonl"]},
    ]
