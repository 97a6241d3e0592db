"""Duplicates of `pipeline curate` beside datatrove, and the layout of a very large corpus.

    python benchmarks/curate/curate_duplicates.py compare --peer PYTHON --work /tmp/bench [--mb 8] [--runs 3]
        [--texts JSONL]
    python benchmarks/curate/curate_duplicates.py speed --work /tmp/bench [--mb 100]
    python benchmarks/curate/curate_duplicates.py layout [--documents 1e10] [--chunks 40000]

`compare`: both read the same texts from memory and go from text to the documents that are removed, with 14 bands of 8
values of word 5-grams, in one process each, alternately; datatrove runs in a Python environment of its own. Numbers are
CPU seconds of signatures (up to sorted rows on disk) and of clustering, and ratios of their medians. The text is what
the machine has (the standard library, site-packages, /usr/share/doc), in pieces of 3.2 kB, with planted copies.
`layout` asks the functions by which the passes cut their work; nothing of that size is made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common.format import counted
from pipeline.common.hashing import file_hash
from pipeline.config.curation.curate import CurateConfig, DuplicatesConfig, NearConfig
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.duplicates.files import EDGE, MEMBER
from pipeline.data.curate.duplicates.join import vertex_bytes
from pipeline.data.curate.duplicates.kinds import RUN_TYPES, Kind
from pipeline.data.curate.duplicates.match import ROW_BYTES
from pipeline.data.curate.duplicates.measure import DuplicateMeasurer
from pipeline.data.curate.duplicates.passes import DuplicatePasses, members_of_a_job
from pipeline.data.curate.duplicates.signatures.signer import make_signer, text_batch
from pipeline.data.curate.files import MEASURES, measured_file
from pipeline.data.curate.scope import Chunk, Scope
from pipeline.data.work.sorted_runs import RunWriter, bucket_count, run_ranges

PIECE = 3200
SETTINGS = DuplicatesConfig(near=NearConfig())
FIXED = [("state", "u1"), ("edited", "u1"), ("bytes", "<u4")]

PEER = """\
import json, shutil, sys, time
from pathlib import Path
from datatrove.data import Document
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster
from datatrove.utils.hashing import HashConfig

texts, work = json.load(open(sys.argv[1])), sys.argv[2]
config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(precision=64))
shutil.rmtree(work, ignore_errors=True)
documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
sign = MinhashDedupSignature(output_folder=f"{work}/signatures", config=config)
# What is loaded once is not counted: spaCy, and compiled hashes.
list(sign.run(iter([Document(text="some words of a first text to load all", id="x")]), 0, 1) or [])
shutil.rmtree(work)
sign = MinhashDedupSignature(output_folder=f"{work}/signatures", config=config)
start = time.process_time()
list(sign.run(iter(documents), 0, 1) or [])
signed = time.process_time()
for bucket in range(14):
    step = MinhashDedupBuckets(input_folder=f"{work}/signatures", output_folder=f"{work}/buckets", config=config)
    step.run(None, bucket, 14)
MinhashDedupCluster(input_folder=f"{work}/buckets", output_folder=f"{work}/removed", config=config).run(None, 0, 1)
end = time.process_time()
removed = sum(path.stat().st_size // 4 for path in Path(f"{work}/removed").rglob("*.remove"))
print("RESULT", json.dumps({"signatures_s": signed - start, "clusters_s": end - signed, "removed": removed}))
"""


def pieces() -> Iterator[str]:
    """Text of this machine."""
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc"]
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in (".py", ".md", ".rst", ".txt") and path.is_file() and "test" not in path.parts:
                text = path.read_text(errors="replace")
                for start in range(0, len(text), PIECE):
                    yield text[start : start + PIECE]


def read_texts(path: Path | None) -> Iterator[str]:
    """Texts of JSON Lines, or of this machine."""
    if path is None:
        return pieces()
    return (json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines())


def corpus(size: int, found: Iterator[str]) -> list[str]:
    """Texts of about `size` bytes, of which an eighth are exact or near copies."""
    rng = np.random.default_rng(0)
    texts: list[str] = []
    total = 0
    for text in found:
        texts.append(text)
        total += len(text)
        if rng.random() < 1 / 8:
            words = texts[int(rng.integers(0, len(texts)))].split(" ")
            for place in rng.integers(0, len(words), int(rng.integers(0, 8))).tolist():
                words[place] = f"changed{rng.integers(0, 10**9)}"
            texts.append(" ".join(words))
            total += len(texts[-1])
        if total >= size:
            break
    return [texts[place] for place in rng.permutation(len(texts)).tolist()]


class _Output:
    def __init__(self, curation: Path) -> None:
        self._curation = curation
        self.arrays: dict[str, list[Any]] = {}
        self.runs: dict[str, RunWriter] = {}

    def append(self, name: str, records: Any) -> None:
        self.arrays.setdefault(name, []).append(records)

    def add_run(self, name: str, records: Any) -> None:
        if name not in self.runs:
            self.runs[name] = RunWriter(measured_file(self._curation, 0, 0, name), records.dtype)
        self.runs[name].add(records)

    def count(self, name: str, counts: Any) -> None:
        raise NotImplementedError


class _Opened:
    def __init__(self, table: Any) -> None:
        self._table = table

    def __call__(self, chunk: Chunk) -> Any:
        return self._table


class _Texts:
    """Reads texts again; from memory, as both sides read them."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __call__(self, chunk: Chunk, rows: Any, progress: Any) -> Iterator[str]:
        return (self._texts[row] for row in rows.tolist())


def measured_passes(batches: list[TextBatch], work: Path, engine: Any) -> tuple[DuplicatePasses, Chunk]:
    """Measure texts as one chunk; the passes that compare them."""
    shutil.rmtree(work, ignore_errors=True)
    curation = work / "source" / "curate"
    measured_file(curation, 0, 0, "x").parent.mkdir(parents=True)
    measurer = DuplicateMeasurer(SETTINGS, engine)
    output = _Output(curation)
    kind = np.dtype([*FIXED, *measurer.columns])
    tables = []
    for batch in batches:
        table = np.zeros(len(batch.rows), kind)
        table["bytes"] = np.diff(batch.starts)
        measurer.measure(batch, table, output)
        tables.append(table)
    table = np.concatenate(tables)
    files = {MEASURES: table} | {name: np.concatenate(parts) for name, parts in output.arrays.items()}
    for name, array in files.items():
        array.tofile(measured_file(curation, 0, 0, name))
    for run in output.runs.values():
        with run:
            run.finish().commit()
    names = [*files, *output.runs]
    paths = {name: measured_file(curation, 0, 0, name) for name in names}
    hashes = {name: f"{file_hash(path):016x}" for name, path in paths.items()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    chunk = Chunk(curation, 0, 0, 0, 0, len(table), hashes, sizes)
    scope = Scope("scope", work / "curate" / "scope", ("source",), ("source",), (chunk,))
    texts = _Texts([text for batch in batches for text in batch.texts])
    choices = scope.folder / "choices"
    choices.mkdir(parents=True)
    return DuplicatePasses(scope, SETTINGS, ((),), _Opened(table), choices, 0, 2**29, engine, (), texts), chunk


def ours(batches: list[TextBatch], work: Path, engine: Any) -> dict[str, Any]:
    """Text to removals: CPU seconds of both parts, and removed documents."""
    start = time.process_time()
    passes, chunk = measured_passes(batches, work, engine)
    signed = time.process_time()
    for name in passes.names:
        for job in passes.jobs(name):
            job.run(None, lambda amount: None)
    removed = len(passes.chosen(chunk))
    return {"signatures_s": signed - start, "clusters_s": time.process_time() - signed, "removed": removed}


def batches_of(texts: list[str]) -> list[TextBatch]:
    """Texts in batches of one chunk."""
    found, row = [], 0
    for start in range(0, len(texts), 300):
        batch = text_batch(texts[start : start + 300])
        rows = np.arange(row, row + len(batch.rows), dtype=np.uint32)
        found.append(TextBatch(batch.data, batch.starts, batch.texts, rows, batch.ids, batch.metadata))
        row += len(rows)
    return found


def compare(options: argparse.Namespace) -> None:
    """Run both alternately."""
    options.work.mkdir(parents=True, exist_ok=True)
    texts = corpus(int(options.mb * 1e6), read_texts(options.texts))
    batches = batches_of(texts)
    size = sum(int(batch.starts[-1]) for batch in batches) / 1e6
    file, script = options.work / "texts.json", options.work / "peer.py"
    file.write_text(json.dumps(texts))
    script.write_text(PEER)
    results: dict[str, list[dict[str, Any]]] = {"numba": [], "python": [], "datatrove": []}
    for engine in ("numba", "python"):
        ours(batches, options.work / engine, engine)  # compiles what is not in the cache
    for _ in range(options.runs):
        for engine in ("numba", "python"):
            results[engine].append(ours(batches, options.work / engine, engine))
        command = [options.peer, str(script), str(file), str(options.work / "peer")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if "RESULT" not in run.stdout:
            raise SystemExit(run.stderr[-3000:])
        results["datatrove"].append(json.loads(run.stdout.rsplit("RESULT", 1)[1]))
        for name, found in results.items():
            print(json.dumps({"what": name, "mb": round(size, 2), "documents": len(texts)} | found[-1]))
    medians = {
        name: {part: statistics.median(each[part] for each in found) for part in ("signatures_s", "clusters_s")}
        for name, found in results.items()
    }
    for name in ("numba", "python"):
        mine, theirs = medians[name], medians["datatrove"]
        ratios = {part: round(theirs[part] / mine[part], 1) for part in mine}
        whole = round(sum(theirs.values()) / sum(mine.values()), 1)
        speed = round(size / mine["signatures_s"], 1)
        print(json.dumps({"what": f"{name} beside datatrove", "mb_per_cpu_s": speed} | ratios | {"all": whole}))


def speed(options: argparse.Namespace) -> None:
    """Rates of ours alone."""
    batches = batches_of(corpus(int(options.mb * 1e6), pieces()))
    size = sum(int(batch.starts[-1]) for batch in batches) / 1e6
    documents = sum(len(batch.rows) for batch in batches)
    for engine in ("numba", "python"):
        signer = make_signer(engine, 5, 112)  # type: ignore[arg-type]
        signer.sign(batches[0])
        start = time.process_time()
        for batch in batches:
            signer.sign(batch)
        signing = size / (time.process_time() - start)
        ours(batches[:1], options.work / engine, engine)
        found = ours(batches, options.work / engine, engine)
        row = {"what": engine, "mb": size, "signing_mb_per_cpu_s": signing, **found, "documents": documents}
        row["measure_mb_per_cpu_s"] = size / found["signatures_s"]
        row["band_rows_per_cpu_s_to_removal"] = documents * 14 / found["clusters_s"]
        print(json.dumps({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}))


def layout(options: argparse.Namespace) -> None:
    """How a large corpus is cut."""
    documents, chunks, share = int(options.documents), int(options.chunks), options.share
    bucket_bytes = options.bucket_bytes
    settings = DuplicatesConfig(exact="text", near=NearConfig())
    near = settings.near
    assert near is not None
    rows: dict[Kind, int] = {"exact": documents, "bands": documents * near.bands}
    print(f"{documents:.3g} documents in {counted(chunks, 'chunk')}, bucket_bytes {bucket_bytes:,}")
    form = "{:<8}{:>10}{:>14}{:>16}{:>16}{:>14}{:>12}"
    print(form.format("kind", "jobs", "rows per job", "memory per job", "bytes per read", "sections/run", "in total"))
    for kind, count in rows.items():
        width = RUN_TYPES[kind].itemsize
        buckets = bucket_count(count, ROW_BYTES[kind], bucket_bytes)
        per_job = count // buckets
        read, sections = per_job * width // chunks, run_ranges(count * width // chunks)
        print(
            form.format(
                kind,
                f"{buckets:,}",
                f"{per_job:,}",
                f"{per_job * ROW_BYTES[kind] / 2**20:.0f} MiB",
                f"{read:,}",
                f"{sections:,}",
                f"{count * width / 1e12:.2f} TB",
            )
        )
    vertices = int(documents * share)
    edges = vertices * near.bands // 2 + vertices
    members = members_of_a_job(settings, bucket_bytes)
    print(f"join: {share:.0%} of documents have edges, at most {edges:.3g} ({edges * EDGE.itemsize / 1e12:.2f} TB)")
    print(f"  memory {vertices * vertex_bytes(['exact']) / 2**30:.0f} GiB, one process; at most 2^32 such documents")
    print(f"  members: {vertices * MEMBER.itemsize / 1e12:.2f} TB in {-(-vertices // members):,} files of {members:,}")
    print(f"choose: {-(-vertices // members):,} jobs, each below {bucket_bytes / 2**20:.0f} MiB")
    print(f"rank: {counted(chunks, 'job')}; signatures {documents * near.bands * near.rows * 4 / 1e12:.2f} TB")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compare", "speed"):
        one = commands.add_parser(name)
        one.add_argument("--work", type=Path, required=True)
        one.add_argument("--mb", type=float, default=8 if name == "compare" else 100)
        if name == "compare":
            one.add_argument("--peer", required=True, help="Python with datatrove")
            one.add_argument("--runs", type=int, default=3)
            one.add_argument("--texts", type=Path, help="JSON Lines with `text`, in place of the machine's text")
    large = commands.add_parser("layout")
    large.add_argument("--documents", type=float, default=1e10)
    large.add_argument("--chunks", type=float, default=40_000)
    large.add_argument("--share", type=float, default=0.4, help="of documents that have an edge")
    large.add_argument("--bucket-bytes", type=int, default=CurateConfig().bucket_bytes)
    options = parser.parse_args()
    {"compare": compare, "speed": speed, "layout": layout}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
