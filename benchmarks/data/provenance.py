"""Ask where the data of a step came from, and when a document is trained on, on a blend of any size.

    python benchmarks/data/provenance.py --work /tmp/blend --documents 100000000

Times whole commands, imports included, in seconds: the median over `--rounds`, each of another step or document. The
blend is that of `synthetic.py`, with a plan, receipts and ids as `pipeline preprocess` writes them. The first round is
not counted: it brings the files into the page cache. One JSON line a question.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import xxhash
import yaml

from benchmarks.synthetic import make_blend
from pipeline.common import storage
from pipeline.common.hashing import key, keyed_order, mix
from pipeline.data.datasets.files import receipt_path
from pipeline.data.datasets.indexed import PROVENANCE, part_files, part_prefix
from pipeline.data.datasets.manifest import read_manifest, read_parts, write_dataset
from pipeline.data.tokenization.tokenizer import Tokenizer

PIECES = 2
"""Units that a file is cut into."""
PIECE_BYTES = 2**26
CONFIG_HASH = "provenance"


def add_provenance(folder: Path, source: str) -> None:
    """Make a synthetic dataset one that has a plan, receipts, and ids in its `.prov` files.

    Args:
        folder: of the source.
        source: its name.
    """
    dataset = folder / "train"
    manifest = read_manifest(dataset)
    if manifest.config_hash == CONFIG_HASH:
        return
    parts = read_parts(dataset, manifest).copy()
    files = -(-len(parts) // PIECES)
    settings = {"name": source, "type": "jsonl", "id_key": "id", "text_key": "text", "metadata": []}
    places = [divmod(unit, PIECES) for unit in range(len(parts))]
    plan = {
        "config_hash": CONFIG_HASH,
        "settings": settings,
        "splits": ["train"],
        "files": [[name, f"/corpus/{source}/{name}", PIECES * PIECE_BYTES] for name in map(file_name, range(files))],
        "units": [[[file, piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES]] for file, piece in places],
    }
    storage.put_json(folder / "plan.json", plan)
    for unit, part in enumerate(parts):
        documents = int(part["documents"])
        records = np.zeros(documents, PROVENANCE)
        rows = keyed_order(documents, unit)
        records["unit"], records["row"] = unit, rows
        # Ids are hashes of nothing, but for those of the first rows.
        records["id_hash"] = mix(rows.astype(np.uint64), key(source, unit))
        records["id_hash"][rows == 0] = xxhash.xxh3_64_intdigest(document_id(source, unit).encode())
        data = records.tobytes()
        part_files(part_prefix(dataset, unit))[2].write_bytes(data)
        parts[unit]["prov"] = xxhash.xxh3_64_intdigest(data)
        receipt = {
            "unit": unit,
            "link": 0,
            "last": True,
            "start": [0, -1, 0, 0],
            "next": None,
            "input": {"hash": "", "stat": "", "read": PIECE_BYTES},
            "config_hash": CONFIG_HASH,
            "engine": "tokenizers",
            "pieces": {"0": [documents, documents]},
            "records": documents,
            "rejected": {},
            "checked": 0,
            "splits": {"train": {"documents": documents, "tokens": int(part["tokens"])}},
        }
        path = receipt_path(folder, unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.json_bytes(receipt))  # ten thousand flushes to disk would take minutes
    about = manifest.model_dump(include={"source", "split", "text_bytes", "code_version"})
    write_dataset(dataset, parts, Tokenizer.open(dataset), about | {"settings": settings, "config_hash": CONFIG_HASH})


def file_name(file: int) -> str:
    """Name of a file of a source."""
    return f"{file:05d}.jsonl"


def document_id(source: str, unit: int) -> str:
    """Id of the document of row 0 of a unit."""
    return f"{source}-{unit}"


def seconds(*arguments: object) -> float:
    """Time of a command."""
    words = [sys.executable, "-m", "pipeline", "data", *map(str, arguments)]
    start = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder to write to")
    parser.add_argument("--sources", type=int, default=50)
    parser.add_argument("--parts", type=int, default=10_000)
    parser.add_argument("--documents", type=int, default=10**8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    run = make_blend(arguments.work, arguments.sources, arguments.parts, arguments.documents)
    sources = {entry["name"]: Path(entry["dataset"]) for entry in yaml.safe_load(run.read_text())["data"]["sources"]}
    for name, folder in sources.items():
        add_provenance(folder, name)
    names, units = list(sources), arguments.parts // arguments.sources
    lines = arguments.documents // arguments.parts
    questions = {
        "where --step": lambda n: ("where", run, "--step", 1 + 1009 * n),
        "when --document": lambda n: ("when", run, "--source", names[-1 - n % len(names)], "--document", 5 + 11 * n),
        "when --doc": lambda n: (
            *("when", run, "--source", names[-1 - n % len(names)]),
            *("--doc", document_id(names[-1 - n % len(names)], (7 * n + units - 1) % units)),
        ),
        "when --row": lambda n: (
            *("when", run, "--source", names[-1 - n % len(names)]),
            *("--row", f"{file_name(units // PIECES - 1)}:{1 + (lines + 13 * n) % lines}"),
        ),
    }
    for name, question in questions.items():
        times = [seconds(*question(number)) for number in range(arguments.rounds + 1)][1:]
        result = {
            "question": name,
            "sources": arguments.sources,
            "parts": arguments.parts,
            "documents": arguments.documents,
            "rounds": arguments.rounds,
            "median_s": round(statistics.median(times), 3),
            "max_s": round(max(times), 3),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
