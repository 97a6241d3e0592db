"""Text that every machine has without a network: the Python files of the standard library, as documents."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evidence.child import pipeline

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders: tests are missing from many installations, packages are not part of the library."""


@dataclass(frozen=True)
class Corpus:
    """A run file whose data is preprocessed."""

    file: Path
    """The run file; run, data and tokenizer are in its folder."""
    about: dict[str, Any]
    """`text_hash` of ids and texts, `text_bytes`, `documents`, and `python`, since the text is that of its version."""


def make(work: Path, sections: Mapping[str, Any], *, text_bytes: int, vocab_size: int) -> Corpus:
    """Write text and run file, train the tokenizer and tokenize the text, by the command line.

    Args:
        work: Folder for all of it; empty.
        sections: Sections of the run file, at least `model` and `train`; `run`, `data` and `tokenizer` are added.
        text_bytes: Limit of the text in bytes.
        vocab_size: Entries of the tokenizer.

    Raises:
        RuntimeError: There is no text, or the command failed.
    """
    text = work / "library.jsonl"
    about = _write_text(text, text_bytes)
    values = {
        "run": {"dir": str(work / "run")},
        "data": {
            "dir": str(work / "data"),
            "sources": [{"name": "library", "type": "jsonl", "paths": [str(text)]}],
            "splits": {"heldout": 0.02},
        },
        "tokenizer": {"train": {"vocab_size": vocab_size}},
        **sections,
    }
    file = work / "run.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    pipeline("preprocess", file)
    return Corpus(file, about)


def _write_text(file: Path, limit: int) -> dict[str, Any]:
    """One JSON line for each file of the library, in the order of their names, up to `limit` bytes of text."""
    digest, size, documents = hashlib.blake2b(digest_size=16), 0, 0
    with file.open("wb") as output:
        for name, text in _library():
            length = len(text.encode())
            if size + length > limit:
                break
            size += length
            line = json.dumps({"id": name, "text": text}).encode() + b"\n"
            output.write(line)
            digest.update(line)
            documents += 1
    if not documents:
        raise RuntimeError(f"{sysconfig.get_path('stdlib')} has no Python files that fit into {limit} bytes")
    return {
        "text_hash": digest.hexdigest(),
        "text_bytes": size,
        "documents": documents,
        "python": sysconfig.get_python_version(),
    }


def _library() -> Iterator[tuple[str, str]]:
    """Names and texts; files in other encodings than UTF-8 are left out."""
    root, names = Path(sysconfig.get_path("stdlib")), []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    for name in sorted(names):
        try:
            yield name, (root / name).read_bytes().decode()
        except UnicodeDecodeError:
            continue
