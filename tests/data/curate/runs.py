"""Corpora and run files for the tests of the curation stage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson

from pipeline.config import Config
from pipeline.data.curate.verdicts import read_curation
from tests.data.runs import make_config, tree

WORDS = "the of and to that with have be river stone window garden music letter winter summer number paper".split()
BOILERPLATE = "All rights are reserved by the owners of this page."
ITEM = "seven brave sailors counted nine golden lanterns while the tired captain slept beside his broken compass"


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words)).capitalize() + "."


def write_documents(path: Path, documents: int, seed: int) -> Path:
    """JSON Lines: fresh documents, exact and near copies, boilerplate, personal data, bad records, empty ones."""
    chance = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    with path.open("wb") as file:
        for number in range(documents):
            if number % 23 == 5:
                file.write(b'{"text": 12}\n' if number % 2 else b"no json\n")
                continue
            if number % 7 == 3 and written:
                body = chance.choice(written)
                body = body if number % 2 else body + " " + text(chance, 2)
            else:
                body = text(chance, chance.randint(1, 90))
            if number % 5 == 0:
                body += f"\n{BOILERPLATE}\n{text(chance, 8)}"
            if number % 11 == 0:
                body += f" Write to someone{number % 3}@example.org"
            if number % 29 == 7:
                body = f"{text(chance, 30)} {ITEM} {text(chance, 30)}"
            if number % 31 == 9:
                body = ""
            written.append(body)
            record = {"id": f"{path.stem}{number}", "text": body, "url": f"http://www.s{number % 9}.org/{number % 150}"}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
    return path


def write_corpus(folder: Path, documents: int = 160) -> Path:
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        write_documents(folder / f"{name}.jsonl", documents, seed)
    (folder / "items.txt").write_text(ITEM + "\n")
    return folder


def everything(corpus: Path) -> dict[str, Any]:
    """`data.curate` with all kinds of rules that need no model."""
    return {
        "mode": "apply",
        "scopes": {"web": ["b", "a"]},
        "rules": {"gopher_quality": {"min_words": 5}, "gopher_repetition": {}},
        "by_source": {"c": {"fineweb": {}}},
        "clean": {"pii": {"email": "mask"}},
        "duplicates": {"exact": "text", "url": "url", "near": {"bands": 8, "rows": 4}, "lines": {"min_count": 3}},
        "decontaminate": {"files": [str(corpus / "items.txt")]},
        "engine": "auto",
        "bucket_bytes": 2**16,
    }


def curate_config(
    root: Path, corpus: Path, curate: dict[str, Any] | None = None, workers: int = 1, **data: Any
) -> Config:
    """A run on the three sources of a corpus."""
    sources = [
        {"name": name, "type": "jsonl", "paths": [str(corpus / f"{name}.jsonl")], "metadata": ["url"]} for name in "abc"
    ]
    settings = {"workers": workers, "unit_bytes": 6000, "max_error_rate": 0.2, **data.pop("preprocess", {})}
    return make_config(root, sources, preprocess=settings, curate=curate or everything(corpus), **data)


def results(config: Config) -> dict[str, bytes]:
    """All files of the active decisions: relative path -> bytes."""
    found: dict[str, bytes] = {}
    for source in config.data.sources:
        curation = read_curation(config.data_dir / source.name / "curate")
        found[f"{source.name}/curation.json"] = (curation.folder / "curation.json").read_bytes()
        for name, content in tree(curation.decisions).items():
            if name.startswith(("verdicts/", "report.")) or name == "curation.json":
                found[f"{source.name}/{curation.decisions.name}/{name}"] = content
    return found
