"""Sources of all kinds with what makes them hard, and the same documents read by other means."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipeline.config import Config
from tests.data.runs import make_config, text

KEPT = ["url", "n"]


class Expected(NamedTuple):
    """A document."""

    id: str
    text: str
    metadata: dict[str, Any]


def records(count: int, seed: int, words: int = 60) -> list[dict[str, Any]]:
    """Records of JSON lines: with ids and without, some long, some equal, some with special tokens or nothing."""
    chance = random.Random(seed)
    result = []
    for number in range(count):
        record: dict[str, Any] = {"text": f"{text(chance, chance.randint(1, words))} {seed} {number}"}
        if number % 3:
            record["id"] = f"s{seed}-{number}" if number % 2 else seed * 10_000 + number
        if number % 4:
            record |= {"url": f"https://example.org/{number}", "n": number, "unkept": "x"}
        if number % 40 == 7:
            record["text"] = "\n".join(text(chance, 60) for _ in range(20))
        if number % 40 == 8:
            record["text"] = f"<|endoftext|>{number}<|endoftext|> <|endoftext|>"
        if number % 50 == 9:
            record["text"] = "the same text again"
        if number % 40 == 11:
            record["text"] = ""
        result.append(record)
    return result


def lines_of(made: list[dict[str, Any]]) -> list[bytes]:
    """Lines, two of which are bad and one blank."""
    lines = [json.dumps(record, ensure_ascii=number % 2 == 0).encode() + b"\n" for number, record in enumerate(made)]
    return [*lines[:5], b"\n", *lines[5:9], b'{"text": 3}\n', *lines[9:12], b"{bad\r\n", *lines[12:]]


def write(root: Path, scale: int = 1) -> Path:
    """Write the files of five sources.

    Args:
        root: folder.
        scale: how many times the smallest number of documents.
    """
    root.mkdir(exist_ok=True)
    for name, seed in (("a", 1), ("b", 2)):
        (root / f"{name}.jsonl").write_bytes(b"".join(lines_of(records(60 * scale, seed))))
    (root / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(lines_of(records(80 * scale, 3))), mtime=0))
    lines = lines_of(records(200 * scale, 4))
    whole = b"".join(lines)  # frames end inside of lines, too
    cut = [0, *sorted(random.Random(0).sample(range(len(whole)), 6)), len(whole)]
    (root / "d.jsonl.zst").write_bytes(b"".join(zstandard.compress(whole[a:b]) for a, b in itertools.pairwise(cut)))
    made = records(120 * scale, 5)
    table = pa.table(
        {
            "id": pa.array([str(r["id"]) if "id" in r else None for r in made], pa.string()),
            "body": pa.array([None if i == 20 else r["text"] for i, r in enumerate(made)], pa.large_string()),
            "url": pa.array([r.get("url") for r in made], pa.string()),
            "n": pa.array([r.get("n") for r in made], pa.int64()),
        }
    )
    pq.write_table(table, root / "e.parquet", row_group_size=25)
    chance = random.Random(6)
    for number in range(40 * scale):
        path = root / "text" / f"{number % 3}" / f"{number:04}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(chance, chance.randint(1, 300)) + f" {number}", newline="")
    (root / "text" / "empty.txt").touch()
    (root / "text" / "latin.txt").write_bytes(b"caf\xe9")
    return root


def sources(root: Path) -> list[dict[str, Any]]:
    """The five sources, as in a run file."""
    jsonl = {"type": "jsonl", "metadata": KEPT}
    return [
        jsonl | {"name": "plain", "paths": [f"{root}/*.jsonl"]},
        jsonl | {"name": "gz", "paths": [f"{root}/c.jsonl.gz"]},
        jsonl | {"name": "zst", "paths": [f"{root}/d.jsonl.zst"]},
        {"name": "pq", "type": "parquet", "text_key": "body", "metadata": KEPT, "paths": [f"{root}/e.parquet"]},
        {"name": "text", "paths": [f"{root}/text/**/*.txt"]},
    ]


def read(root: Path) -> dict[str, list[Expected]]:
    """The good documents of every source, read with the standard library and pyarrow."""
    text_files = sorted((root / "text").rglob("*.txt"))
    texts = [(str(p.relative_to(root / "text")), p.read_bytes()) for p in text_files]
    return {
        "plain": [d for name in ("a", "b") for d in _json(f"{name}.jsonl", (root / f"{name}.jsonl").read_bytes())],
        "gz": _json("c.jsonl.gz", gzip.decompress((root / "c.jsonl.gz").read_bytes())),
        "zst": _json("d.jsonl.zst", _unzstd(root / "d.jsonl.zst")),
        "pq": [
            Expected(row["id"] or f"e.parquet#{number}", row["body"], {key: row[key] for key in KEPT})
            for number, row in enumerate(pq.read_table(root / "e.parquet").to_pylist())
            if row["body"]
        ],
        "text": [Expected(name, raw.decode(), {}) for name, raw in texts if raw and name != "latin.txt"],
    }


def _unzstd(path: Path) -> bytes:
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()


def _json(name: str, data: bytes) -> list[Expected]:
    result = []
    byte = 0
    for line in data.splitlines(keepends=True):
        start, byte = byte, byte + len(line)
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record["text"], str) or not record["text"]:
            continue
        kept = {key: record[key] for key in KEPT if key in record}
        result.append(Expected(str(record.get("id", f"{name}@{start}")), record["text"], kept))
    return result


def config_of(root: Path, corpus: Path, engine: str, **settings: Any) -> Config:
    """A config with units of several links, long documents, metadata and bad records."""
    settings |= {"unit_bytes": 8000, "max_document_bytes": 3000, "max_error_rate": 0.1, "workers": 2, "engine": engine}
    return make_config(root, sources(corpus), preprocess=settings)


def report(config: Config, name: str) -> Any:
    """The `report.json` of a source."""
    return json.loads((config.data_dir / name / "report.json").read_text())


def own(name: str) -> str:
    """Name and version of a library that is installed."""
    return f"{name} {metadata.version(name)}"
