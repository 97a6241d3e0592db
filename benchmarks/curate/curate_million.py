"""`pipeline curate` on a million documents: time by pass, memory of all processes, files; then another bound.

    python benchmarks/curate/curate_million.py --work /tmp/million [--documents N] [--texts FOLDER] [--tokenizer FILE]

Documents are pieces of 300 to 1,500 characters of the text that the machine has (or of the files in FOLDER); once that
is used up, lines of it in another order. An eighth are copies of an earlier one, exact or with some words changed. They
are in compressed JSON Lines. All rules, exact and near duplicates, lines, and contamination by a file of items are
asked for, with two workers. With a tokenizer, `pipeline preprocess` then applies the verdicts. The folder is removed at
the end, unless `--keep` is given.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
import zstandard

from benchmarks.data.preprocess import texts as machine_texts
from benchmarks.measure import adopt_orphans, measure

FILES = 8
ITEM_EVERY = 500
RULES = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
"""It has the parts of a run file that curation does not read."""
OTHER = "data.curate.rules.gopher_quality.min_words=60"
COMMAND = Path(__file__).with_name("curate_command.py")


def sources(folder: Path | None) -> Iterator[str]:
    """Long texts."""
    if folder is None:
        yield from machine_texts()
        return
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text = path.read_text(errors="replace")
            is_json = path.suffix == ".jsonl"
            yield "\n".join(json.loads(line)["text"] for line in text.splitlines()) if is_json else text


def pieces(folder: Path | None, rng: random.Random) -> Iterator[str]:
    """Pieces of text, without end."""
    lines: list[str] = []
    for text in sources(folder):
        start = 0
        while start < len(text):
            end = start + int(300 * 5 ** rng.random())
            yield text[start:end]
            start = end
        if len(lines) < 10**6:
            lines += text[: 2**20].splitlines()
    while True:
        yield "\n".join(rng.choice(lines) for _ in range(rng.randint(8, 30)))


def changed(text: str, rng: random.Random) -> str:
    """A copy, of which up to 5 words are changed."""
    words = text.split(" ")
    for _ in range(rng.choice((0, 0, 1, 2, 3, 5))):
        words[rng.randrange(len(words))] = f"changed{rng.randrange(10**9)}"
    return " ".join(words)


def write_corpus(work: Path, documents: int, folder: Path | None) -> dict[str, Any]:
    """Write the documents and the items to look for; counts."""
    rng = random.Random(0)
    recent: list[str] = []
    items: list[str] = []
    size = 0
    (work / "texts").mkdir(parents=True)
    found = pieces(folder, rng)
    for number in range(FILES):
        path = work / "texts" / f"{number}.jsonl.zst"
        with path.open("wb") as raw, zstandard.ZstdCompressor(3).stream_writer(raw) as file:
            for place in range(documents * number // FILES, documents * (number + 1) // FILES):
                text = changed(rng.choice(recent), rng) if recent and rng.random() < 1 / 8 else next(found)
                if len(recent) < 50_000:
                    recent.append(text)
                else:
                    recent[rng.randrange(len(recent))] = text
                if place % ITEM_EVERY == 0:
                    items.append(" ".join(text.split()[:60]))
                size += len(text.encode())
                url = f"https://site{int(10 ** (rng.random() * 5))}.example/{place}"
                file.write(json.dumps({"text": text, "url": url}).encode() + b"\n")
    (work / "items.txt").write_text("".join(f"{item}\n" for item in items if item))
    return {"documents": documents, "text_mb": round(size / 1e6, 1), "items": len(items)}


def write_run(work: Path, workers: int, tokenizer: Path | None) -> Path:
    """The run file."""
    paths = [str(work / "texts" / "*.jsonl.zst")]
    curate = {
        "mode": "apply",
        "rules": {name: {} for name in RULES},
        "duplicates": {"exact": "text", "near": {}, "lines": {}},
        "decontaminate": {"files": [str(work / "items.txt")]},
    }
    data: dict[str, Any] = {
        "dir": str(work / "data"),
        "sources": [{"name": "web", "type": "jsonl", "paths": paths, "metadata": ["url"]}],
        "preprocess": {"workers": workers},
        "curate": curate,
    }
    run: dict[str, Any] = {"include": str(QUICKSTART), "run": {"dir": str(work / "run")}, "data": data}
    if tokenizer is not None:
        run["tokenizer"] = {"path": str(tokenizer), "train": None}
    path = work / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def timed(work: Path, run: Path, *more: str) -> dict[str, Any]:
    """Run `pipeline curate`: time and memory of all processes, and time by pass."""
    notes, log = work / "notes.jsonl", work / "log.txt"
    result = measure([sys.executable, str(COMMAND), str(notes), "curate", str(run), *more], work, log, patience=0)
    passes: dict[str, list[float]] = {}
    opened: Counter[str] = Counter()
    for line in map(json.loads, notes.read_text().splitlines()):
        if "opened" in line:
            opened[Path(line["opened"]).name] += 1
            continue
        before = passes.setdefault(line["pass"], [0.0, 0.0])
        passes[line["pass"]] = [round(before[0] + line["wall_s"], 2), round(before[1] + line["cpu_s"], 2)]
    return result | {"texts_opened": sum(opened.values()), "passes [wall, cpu]": passes}


def disk(work: Path) -> dict[str, float]:
    """MB of files by kind."""
    found: Counter[str] = Counter()
    data = work / "data"
    for path in data.rglob("*"):
        if path.is_file():
            parts = path.relative_to(data).parts
            kind = path.suffix if "measures" in parts or "decisions" in parts else ""
            found["/".join((*(part for part in parts[:-1] if not part.isalnum() or part.isalpha()), kind))] += (
                path.stat().st_size
            )
    return {name: round(size / 1e6, 1) for name, size in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10**6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--texts", type=Path, help="a folder of texts, or of JSON Lines with `text`")
    parser.add_argument("--tokenizer", type=Path, help="then `pipeline preprocess` runs, too")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    adopt_orphans()
    shutil.rmtree(options.work, ignore_errors=True)
    start = time.process_time()
    about = write_corpus(options.work, options.documents, options.texts)
    print(json.dumps(about | {"making_s": round(time.process_time() - start)}), flush=True)
    run = write_run(options.work, options.workers, options.tokenizer)
    print(json.dumps({"what": "first run"} | timed(options.work, run)), flush=True)
    print(json.dumps({"what": "MB on disk"} | disk(options.work)), flush=True)
    other = timed(options.work, run, OTHER)
    print(json.dumps({"what": "another bound"} | other), flush=True)
    if options.tokenizer is not None:
        command = [sys.executable, "-m", "pipeline", "preprocess", str(run), OTHER]
        found = measure(command, options.work, options.work / "log.txt", patience=0)
        print(json.dumps({"what": "preprocess"} | found))
    if not options.keep:
        shutil.rmtree(options.work)


if __name__ == "__main__":
    main()
