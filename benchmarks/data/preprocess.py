"""`pipeline preprocess` as a whole command: against other tools and a bare script, its engine, scaling and memory.

    python benchmarks/data/preprocess.py bare|engine|scaling|parent|memory --tokenizer tokenizer.json --work /tmp/bench
    python benchmarks/data/preprocess.py peers --tokenizer tokenizer.json --work /tmp/bench
        --megatron Megatron-LM --megatron-python PYTHON --datatrove-python PYTHON

One JSON line a run, then one with medians and ratios. A MB is 10^6 bytes of JSONL. The text is what the machine has:
the standard library, site-packages and /usr/share/doc. Runs of different kinds alternate; each waits for a quiet
machine, and the share of the machine that others used meanwhile is in its line: above 15 % it is not `quiet`, and
medians are over quiet runs where there are any. The folder of a checkout of Megatron-LM holds its
tools/preprocess_data.py; datatrove and Megatron-LM run in Python environments of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import QUIET, adopt_orphans, machine, measure, wait_until_quiet

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("auto", "tokenizers", "gigatoken", "fastokens")
PEERS = ("megatron", "datatrove")
LONG_MB = 21

DATATROVE = """\
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    folder, out, tokenizer, end, tasks, batch = sys.argv[1:]
    steps = [
        JsonlReader(folder),
        DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token=end, batch_size=int(batch), seed=1),
    ]
    LocalPipelineExecutor(steps, tasks=int(tasks), workers=int(tasks), logging_dir=out + "/logs").run()
"""

PARENT = """\
import atexit
import resource
import runpy
import sys
from pathlib import Path


def note(path):
    used = resource.getrusage(resource.RUSAGE_SELF)
    Path(path).write_text(str(used.ru_utime + used.ru_stime))


atexit.register(note, sys.argv.pop(1))
runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
"""
"""The `pipeline` command, which notes at its end what CPU time its first process used."""

BARE = """\
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import orjson
from gigatoken.gigatoken_rs import load_hf_json


def run(path, start, end, out, tokenizer, token):
    # Lines that begin in [start, end) to ids, each document with its end, and an array of lengths.
    definition = Path(tokenizer).read_text()
    added = {entry["content"]: entry["id"] for entry in orjson.loads(definition)["added_tokens"]}
    end_of_document = np.array([added[token]], "<u2").tobytes()
    encode = load_hf_json(definition).encode
    lengths = []
    with open(path, "rb") as file, open(out + ".bin", "wb") as tokens:
        file.seek(max(start - 1, 0))
        if start:
            file.readline()
        while file.tell() < end and (line := file.readline()):
            ids = encode(orjson.loads(line)["text"])
            tokens.write(ids.astype("<u2").tobytes() + end_of_document)
            lengths.append(len(ids) + 1)
    np.save(out + ".npy", np.array(lengths, "<i4"))


if __name__ == "__main__":
    path, out, tokenizer, token, workers = sys.argv[1:]
    size, count = Path(path).stat().st_size, int(workers)
    bounds = [size * i // count for i in range(count + 1)]
    jobs = [(path, *bounds[i : i + 2], f"{out}/{i}", tokenizer, token) for i in range(count)]
    with multiprocessing.get_context("fork").Pool(count) as pool:
        pool.starmap(run, jobs, chunksize=1)
"""
"""The least that gives a vocabulary below 65,536 its ids with gigatoken: nothing is flushed, hashed, checked or kept
of where a document came from, and a bad record ends it."""


def texts(longest: int = 2 * 10**6) -> Iterator[str]:
    """Different text files of this machine in an order that is always the same."""
    packages = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    suffixes = {".py", ".pyi", ".txt", ".md", ".rst", ".html", ".h", ".c", ".js", ".css", ".xml", ".json"}
    paths = {path for folder in packages for path in folder.rglob("*") if path.suffix in suffixes}
    paths |= {path for path in Path("/usr/share/doc").rglob("*") if path.suffix not in (".gz", ".png")}
    files = sorted(path for path in paths if path.is_file() and not path.is_symlink())
    random.Random(0).shuffle(files)
    seen: set[bytes] = set()
    for path in files:
        content = path.read_bytes() if 200 <= path.stat().st_size <= longest else b""
        digest = hashlib.sha256(content).digest()
        if not content or digest in seen or b"\0" in content:
            continue
        seen.add(digest)
        try:
            yield content.decode()
        except UnicodeDecodeError:
            continue


@dataclass(frozen=True)
class Corpus:
    """A JSONL file, and the same lines in one file a task for tools that share out files."""

    path: Path
    parts: Path
    documents: int

    @property
    def mb(self) -> float:
        return self.path.stat().st_size / 1e6


def make_corpus(work: Path, size_mb: float, tasks: int, longer: bool = False) -> Corpus:
    """The first `size_mb` MB of the machine's text; a smaller corpus is the beginning of a larger one.

    Args:
        longer: One document of that size instead.
    """
    folder = work / f"corpus-{size_mb:g}{'-one' if longer else ''}-{tasks}"
    path, parts, count = folder / "corpus.jsonl", folder / "parts", folder / "documents"
    if not count.exists():
        shutil.rmtree(folder, ignore_errors=True)
        parts.mkdir(parents=True)
        lines, written = [], 0
        for text in texts():
            line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
            lines.append(text if longer else line)
            written += len(line.encode())
            if written >= size_mb * 1e6:
                break
        else:
            sys.exit(f"error: this machine has only {written / 1e6:.0f} MB of text; lower the size")
        lines = [json.dumps({"text": "\n".join(lines)}, ensure_ascii=False) + "\n"] if longer else lines
        path.write_text("".join(lines), encoding="utf-8")
        for task in range(tasks):
            (parts / f"{task}.jsonl").write_text("".join(lines[task::tasks]), encoding="utf-8")
        count.write_text(str(len(lines)))
    return Corpus(path, parts, int(count.read_text()))


@dataclass(frozen=True)
class Bench:
    """The commands, each in a fresh folder."""

    arguments: argparse.Namespace
    work: Path

    def run(self, side: str, corpus: Corpus, workers: int, unit_mb: float = 1024) -> dict[str, Any]:
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        given, cwd = self.arguments, self.work
        tokenizer, end = str(given.tokenizer), given.end_of_document
        if side == "megatron":
            # A folder as `transformers` wants it, beside the tokenizer's file.
            home = self.work / "hf-tokenizer"
            home.mkdir(exist_ok=True)
            shutil.copyfile(tokenizer, home / "tokenizer.json")
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
            (home / "tokenizer_config.json").write_text(json.dumps(about))
            command = [given.megatron_python, str(given.megatron / "tools/preprocess_data.py")]
            command += ["--input", str(corpus.path), "--output-prefix", str(out / "tokens")]
            command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(home)]
            command += ["--append-eod", "--workers", str(workers)]
        elif side == "datatrove":
            script = self.work / "datatrove_run.py"
            script.write_text(DATATROVE)
            command = [given.datatrove_python, str(script), str(corpus.parts), str(out), tokenizer, end, str(workers)]
            command += [str(given.datatrove_batch)]
        elif side == "bare":
            script = self.work / "bare_run.py"
            script.write_text(BARE)
            command = [sys.executable, str(script), str(corpus.path), str(out), tokenizer, end, str(workers)]
        else:
            run = {
                "run": {"dir": str(out / "run")},
                "data": {
                    "dir": str(out / "data"),
                    "sources": [{"name": "corpus", "type": "jsonl", "paths": [str(corpus.path)]}],
                    "preprocess": {"workers": workers, "engine": side, "unit_bytes": int(unit_mb * 2**20)},
                },
                "tokenizer": {"path": tokenizer, "end_of_document": end},
                "model": {"layers": 1, "dim": 8, "heads": 1},
                "train": {"duration": "1 steps", "sequence_length": 8},
            }
            (out / "run.yaml").write_text(json.dumps(run))
            command = [sys.executable, "-c", PARENT, str(out / "parent"), "preprocess", str(out / "run.yaml")]
            cwd = given.pipeline
        # Some versions of Megatron-LM's tool end with an error after all is written: the output decides.
        found = measure(command, cwd, self.work / f"{side}.log", given.patience, may_fail=side == "megatron")
        if side in ENGINES:
            found["parent_cpu_s"] = round(float((out / "parent").read_text()), 3)
            found["units"] = sum(1 for _ in (out / "data/corpus/receipts").rglob("*.json"))
        documents, tokens = self.written(side, out)
        if documents != corpus.documents:
            log = (self.work / f"{side}.log").read_text(errors="replace")
            sys.exit(f"error: {side} wrote {documents} documents of {corpus.documents}\n{log[-3000:]}")
        shutil.rmtree(out)
        rate = {"mb_per_s": round(corpus.mb / found["wall_s"], 2), "mb_per_cpu_s": round(corpus.mb / found["cpu_s"], 2)}
        about = {"side": side, "mb": round(corpus.mb, 1), "workers": workers, "documents": documents, "tokens": tokens}
        return {**about, **found, **rate}

    @staticmethod
    def written(side: str, out: Path) -> tuple[int, int]:
        """Documents and tokens on disk."""
        if side == "megatron":
            path = out / "tokens_text_document.idx"
            if not path.exists():
                return 0, 0
            count = int.from_bytes(path.read_bytes()[18:26], "little")
            return count, int(np.fromfile(path, "<i4", count, offset=34).sum(dtype=np.int64))
        if side == "bare":
            lengths = [np.load(path) for path in out.glob("*.npy")]
            return sum(map(len, lengths)), sum(int(each.sum(dtype=np.int64)) for each in lengths)
        if side == "datatrove":
            ends = [np.fromfile(path, "<u8") for path in out.glob("*.ds.index")]
            return sum(map(len, ends)), sum(int(end[-1]) for end in ends if len(end))
        manifests = [json.loads(path.read_text()) for path in (out / "data/corpus").glob("*/manifest.json")]
        return sum(m["documents"] for m in manifests), sum(m["tokens"] for m in manifests)


def show(mode: str, row: dict[str, Any]) -> None:
    print(json.dumps({"mode": mode, **row}), flush=True)


def median(rows: list[dict[str, Any]], key: str) -> float:
    """Over the quiet runs, or over all when none was."""
    return float(statistics.median([row[key] for row in rows if row["quiet"]] or [row[key] for row in rows]))


def quiet(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['quiet'] for row in rows)} of {len(rows)}"


def peers(bench: Bench, given: argparse.Namespace) -> None:
    """The tools in turn on the whole corpus, and on a small one, which gives the cost of a MB without the start."""
    whole, small = (make_corpus(bench.work, mb, given.workers) for mb in (given.corpus_mb, 2))
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(-1, given.rounds):
        order = given.sides[number % len(given.sides) :] + given.sides[: number % len(given.sides)]
        for side in order:
            for name, corpus in (("small", small), ("whole", whole)):
                if name == "whole" and number < 0:
                    continue
                row = bench.run(side, corpus, given.workers)
                if number >= 0:  # the first small runs only bring imports into the page cache
                    found.setdefault((side, name), []).append(row)
                    show("peers", {"round": number, **row})
    result: dict[str, Any] = {"mb": round(whole.mb, 1), "workers": given.workers}
    per_mb = {}
    for side in given.sides:
        rows, few = found[side, "whole"], found[side, "small"]
        per_mb[side] = (median(rows, "wall_s") - median(few, "wall_s")) / (whole.mb - small.mb)
        result[side] = {
            **{key: median(rows, key) for key in ("wall_s", "cpu_s", "mb_per_s", "worker_rss_mb", "worker_pss_mb")},
            **{"small_wall_s": median(few, "wall_s"), "ms_per_mb": round(1000 * per_mb[side], 2), "quiet": quiet(rows)},
        }
    for ours, peer in itertools.product([s for s in given.sides if s in ENGINES], PEERS):
        if peer in given.sides:
            ratios = {key: round(result[peer][key] / result[ours][key], 2) for key in ("wall_s", "cpu_s", "ms_per_mb")}
            result[f"{peer} / {ours}"] = ratios
    show("peers medians", result)


def bare(bench: Bench, given: argparse.Namespace) -> None:
    """The whole command against a bare script around gigatoken, for several sizes of input, the first a small one."""
    corpora = [make_corpus(bench.work, mb, given.workers) for mb in (given.small_mb, *given.sizes_mb)]
    sides = ("bare", "gigatoken")
    found: dict[tuple[str, Corpus], list[dict[str, Any]]] = {}
    for number in range(-1, given.rounds):
        for side, corpus in itertools.product(
            sides[:: 1 if number % 2 else -1], corpora if number >= 0 else corpora[:1]
        ):
            row = bench.run(side, corpus, given.workers)
            if number >= 0:  # the first small runs only bring imports into the page cache
                found.setdefault((side, corpus), []).append(row)
                show("bare", {"round": number, **row})
    for corpus in corpora:
        rows = {side: found[side, corpus] for side in sides}
        result: dict[str, Any] = {"mb": round(corpus.mb, 2), "workers": given.workers}
        for key in ("wall_s", "cpu_s"):
            medians = {side: median(rows[side], key) for side in sides}
            result |= {key: medians, f"{key} ratio": round(medians["gigatoken"] / medians["bare"], 2)}
        show("bare medians", {**result, "quiet": {side: quiet(rows[side]) for side in sides}})


def _encode(tokenizer: str, part: Path, start: Barrier, used: SimpleQueue[float]) -> None:
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(tokenizer)
    engine.encode_special_tokens = True
    found = [json.loads(line)["text"] for line in part.read_text(encoding="utf-8").split("\n")[:-1]]
    start.wait()
    before = time.process_time()
    for first in range(0, len(found), 100):
        engine.encode_batch_fast(found[first : first + 100], add_special_tokens=False)
    used.put(time.process_time() - before)


def engine_alone(tokenizer: str, corpus: Corpus, workers: int, patience: float) -> dict[str, Any]:
    """`encode_batch_fast` on texts in memory, one thread in each of `workers` processes; ids are dropped."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("fork")
    start: Barrier = context.Barrier(workers + 1)
    used: SimpleQueue[float] = context.SimpleQueue()
    parts = sorted(corpus.parts.iterdir())
    processes = [context.Process(target=_encode, args=(tokenizer, part, start, used)) for part in parts]
    for process in processes:
        process.start()
    wait_until_quiet(patience)
    start.wait()
    (busy, every), begin = machine(), time.perf_counter()
    for process in processes:
        process.join()
    wall, (busy_after, every_after) = time.perf_counter() - begin, machine()
    os.environ.pop("RAYON_NUM_THREADS")
    if any(process.exitcode for process in processes):
        sys.exit("error: encode_batch_fast failed, see above")
    cpu = sum(used.get() for _ in processes)
    others = max(0.0, (busy_after - busy - cpu) / (every_after - every))
    rates = {"mb_per_s": round(corpus.mb / wall, 2), "mb_per_cpu_s": round(corpus.mb / cpu, 2)}
    about = {"side": "encode_batch_fast", "wall_s": round(wall, 3), "cpu_s": round(cpu, 2)}
    return {**about, "others": round(others, 3), "quiet": others <= QUIET, **rates}


def engine(bench: Bench, given: argparse.Namespace) -> None:
    """The whole command with `engine: tokenizers` against `encode_batch_fast` alone with as many processes."""
    corpus = make_corpus(bench.work, given.corpus_mb, given.workers)
    rows: dict[str, list[dict[str, Any]]] = {"alone": [], "command": []}
    for number in range(given.rounds):
        rows["alone"].append(engine_alone(str(given.tokenizer), corpus, given.workers, given.patience))
        rows["command"].append(bench.run("tokenizers", corpus, given.workers))
        for found in rows.values():
            show("engine", {"round": number, **found[-1]})
    result: dict[str, Any] = {"mb": round(corpus.mb, 1), "workers": given.workers}
    for key, name in (("mb_per_s", "share"), ("mb_per_cpu_s", "share_of_cpu_rate")):
        rates = {kind: median(found, key) for kind, found in rows.items()}
        result |= {key: rates, name: round(rates["command"] / rates["alone"], 3)}
    show("engine medians", {**result, "quiet": {kind: quiet(found) for kind, found in rows.items()}})


def scaling(bench: Bench, given: argparse.Namespace) -> None:
    """One worker against several: the time of a MB, from the difference of two sizes, so without the start."""
    corpora = [make_corpus(bench.work, mb, given.workers) for mb in given.sizes_mb]
    sides = [side for side in given.sides if side in ENGINES]
    cases = list(itertools.product(sides, corpora, (1, given.workers)))
    found: dict[tuple[str, Corpus, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(given.rounds):
        for case in cases:
            row = bench.run(*case)
            found[case].append(row)
            show("scaling", {"round": number, **row})
    small, large = corpora
    for side in sides:
        times = {case: median(rows, "wall_s") for case, rows in found.items() if case[0] == side}
        slopes = [(times[side, large, n] - times[side, small, n]) / (large.mb - small.mb) for n in (1, given.workers)]
        result = {
            "side": side,
            "ms_per_mb": {str(n): round(1000 * slope, 3) for n, slope in zip((1, given.workers), slopes, strict=True)},
            "speedup_of_slope": round(slopes[0] / slopes[1], 2),
            "speedup_of_command": round(times[side, large, 1] / times[side, large, given.workers], 2),
            "quiet": quiet([row for case in times for row in found[case]]),
        }
        show("scaling medians", result)


def parent(bench: Bench, given: argparse.Namespace) -> None:
    """CPU time of the one process that cannot be divided, by the number of workers and of units."""
    corpora = [make_corpus(bench.work, mb, given.workers) for mb in (given.small_mb, given.sizes_mb[0])]
    cases = [(corpora[0], 1, 1024.0), *itertools.product(corpora[1:], (2, 4, 8, 16), (1.0, 0.125))]
    rows = []
    for number in range(given.rounds):
        for case in cases if number % 2 else cases[::-1]:
            rows.append(bench.run("gigatoken", *case))
            show("parent", {"round": number, **rows[-1]})
    # Least squares: what every command takes, and what a worker, a unit and a MB add.
    facts = np.array([[1, row["workers"], row["units"], row["mb"]] for row in rows])
    found = np.linalg.lstsq(facts, np.array([row["parent_cpu_s"] for row in rows]), rcond=None)[0]
    names = ("command_s", "worker_ms", "unit_ms", "mb_ms")
    result = {
        name: round(value * (1000 if name.endswith("_ms") else 1), 3) for name, value in zip(names, found, strict=True)
    }
    show("parent fit", result)


def memory(bench: Bench, given: argparse.Namespace) -> None:
    """The largest worker for two sizes of input, and for one document of 21 MB."""
    corpora = {f"{mb:g} MB": make_corpus(bench.work, mb, given.workers) for mb in given.sizes_mb}
    corpora[f"one document of {LONG_MB} MB"] = make_corpus(bench.work, LONG_MB, given.workers, longer=True)
    for side, (name, corpus) in itertools.product([s for s in given.sides if s in ENGINES], corpora.items()):
        rows = [bench.run(side, corpus, given.workers) for _ in range(given.rounds)]
        keys = ("worker_rss_mb", "worker_pss_mb", "main_rss_mb")
        show("memory", {"side": side, "input": name, **{key: max(row[key] for row in rows) for key in keys}})


def main() -> None:
    modes = {"peers": peers, "bare": bare, "engine": engine, "scaling": scaling, "parent": parent, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=modes, help="; ".join(f"{k}: {f.__doc__}" for k, f in modes.items()))
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--end-of-document", default="<|endoftext|>", help="its token")
    parser.add_argument("--work", type=Path, required=True, help="folder for corpora (kept) and outputs (removed)")
    parser.add_argument("--workers", type=int, default=2, help="processes of every tool")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--corpus-mb", type=float, default=190, help="size of the corpus (peers, engine)")
    parser.add_argument("--sizes-mb", type=float, nargs=2, default=[50, 190], help="two sizes (bare, scaling, memory)")
    parser.add_argument("--small-mb", type=float, default=0.02, help="size of an input that is all start-up (bare)")
    parser.add_argument("--sides", nargs="+", choices=[*ENGINES, *PEERS], help="engines of ours and other tools")
    parser.add_argument("--pipeline", type=Path, default=ROOT, help="checkout of this project to run")
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, help="Python that has what it needs")
    parser.add_argument("--datatrove-python", help="Python that has datatrove")
    parser.add_argument("--datatrove-batch", type=int, default=1000, help="its batch_size; its own default is 10000")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for a quiet machine before a run")
    given = parser.parse_args()
    given.tokenizer, given.work = given.tokenizer.resolve(), given.work.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.megatron:
        given.megatron = given.megatron.resolve()
    if given.sides is None:
        given.sides = ["auto", "tokenizers"] if given.mode == "peers" else ["tokenizers", "gigatoken"]
        given.sides += [peer for peer in PEERS if given.mode == "peers" and _given(given, peer)]
    for peer in PEERS:
        if peer in given.sides and not _given(given, peer):
            parser.error(f"--sides {peer} needs {'--megatron' if peer == 'megatron' else '--datatrove-python'}")
    # As an installed package has it: what is imported is compiled once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(given.work / "pycache")
    adopt_orphans()
    modes[given.mode](Bench(given, given.work), given)


def _given(given: argparse.Namespace, peer: str) -> bool:
    return (given.megatron if peer == "megatron" else given.datatrove_python) is not None


if __name__ == "__main__":
    main()
