"""Near duplicates of families of templated pages, beside planted pairs and datatrove's MinHash.

    python benchmarks/curate/curate_families.py --work /tmp/bench [--documents 10000,30000] [--own 48,40,31,27]
        [--peer PYTHON] [--pairs 2000] [--sets]

A family is pages of 120 shared words and some of their own: every pair has one Jaccard similarity J of word 5-grams,
116 / (116 + 2 * own). With `min_similarity` .7 none is to be removed but the planted copies: in each family every
hundredth page has a copy with other last words. `--pairs` is a corpus of pairs of random texts with J from .6 to 1.
Each line has CPU seconds from texts to removed documents, precision (removed ones whose counted J to the kept document,
or for datatrove to any kept document of the family or pair, is at least .7) and recall of planted pairs with J of at
least .7. `--peer` is a Python that has datatrove; it reads the same texts with the same bands.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.curate.curate_duplicates import PEER, SETTINGS, batches_of, measured_passes
from pipeline.data.curate.duplicates.choose import make_leaders
from pipeline.data.curate.duplicates.leaders.leader_choice import Frequencies, Members

BOUND = 0.7
PEER_FILES = """
removed_documents = []
for path in sorted(Path(f"{work}/removed").rglob("*.remove")):
    data = path.read_bytes()
    removed_documents += [int.from_bytes(data[place : place + 4], "little") for place in range(0, len(data), 4)]
print("REMOVED", json.dumps(removed_documents))
"""


def letters(number: int) -> str:
    """A word: digits would all be the same to the words that are compared."""
    return "".join(chr(ord("a") + (number >> shift & 15)) for shift in range(0, 40, 4))


def words(rng: np.random.Generator, count: int) -> list[str]:
    """Random words."""
    return [letters(number) for number in rng.integers(0, 2**40, count).tolist()]


def family(count: int, own: int) -> tuple[list[list[str]], list[tuple[int, int]]]:
    """Pages, and (page, its copy) of those that were planted."""
    rng = np.random.default_rng(own)
    template = words(rng, 120)
    pages = [template + words(rng, own) for _ in range(count - count // 100)]
    planted = []
    for number in range(count // 100):
        planted.append((number, len(pages)))
        pages.append([*pages[number][:-2], *words(rng, 2)])
    return pages, planted


def pairs(count: int) -> tuple[list[list[str]], list[tuple[int, int]]]:
    """Texts of which two each have a similarity from .6 to 1, and (one, other)."""
    rng = np.random.default_rng(1)
    texts: list[list[str]] = []
    for number in range(count):
        one = words(rng, int(rng.integers(120, 400)))
        wanted = 0.6 + 0.4 * (number + 0.5) / count
        other = list(one)
        changes = max(1, round((1 - wanted) / (1 + wanted) * len(one) / 5))
        for place in rng.choice(len(one), changes, replace=False).tolist():
            other[place] = words(rng, 1)[0]
        texts += [one, other]
    return texts, [(2 * number, 2 * number + 1) for number in range(count)]


def jaccard(one: list[str], other: list[str]) -> float:
    """Similarity of two texts by plain sets of word 5-grams."""
    a, b = ({tuple(text[start : start + 5]) for start in range(len(text) - 4)} for text in (one, other))
    return len(a & b) / len(a | b)


def ours(texts: list[str], work: Path) -> tuple[dict[int, int], float]:
    """(kept document by removed one, CPU seconds) by numba."""
    batches = batches_of(texts)
    start = time.process_time()
    passes, chunk = measured_passes(batches, work, "numba")
    for name in passes.names:
        for job in passes.jobs(name):
            job.run(None, lambda amount: None)
    chosen = passes.chosen(chunk)
    seconds = time.process_time() - start
    return dict(zip(chosen["row"].tolist(), (chosen["kept"] & np.uint64(2**32 - 1)).tolist(), strict=True)), seconds


def peer(python: str, texts: list[str], work: Path) -> tuple[set[int], float]:
    """(removed documents, CPU seconds) of datatrove."""
    work.mkdir(parents=True, exist_ok=True)
    file, script = work / "texts.json", work / "peer.py"
    file.write_text(json.dumps(texts))
    script.write_text(PEER + PEER_FILES)
    command = [python, str(script), str(file), str(work / "peer")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if "REMOVED" not in run.stdout:
        raise SystemExit(run.stderr[-3000:])
    lines = {line.split(" ", 1)[0]: json.loads(line.split(" ", 1)[1]) for line in run.stdout.splitlines() if " " in line
             and line.split(" ", 1)[0] in ("RESULT", "REMOVED")}  # fmt: skip
    return set(lines["REMOVED"]), lines["RESULT"]["signatures_s"] + lines["RESULT"]["clusters_s"]


def similar(texts: list[list[str]], planted: list[tuple[int, int]]) -> dict[int, set[int]]:
    """The other document of each planted pair with similarity from the bound on."""
    found: dict[int, set[int]] = {}
    for one, other in planted:
        if jaccard(texts[one], texts[other]) >= BOUND:
            found.setdefault(one, set()).add(other)
            found.setdefault(other, set()).add(one)
    return found


def figures(
    texts: list[list[str]], planted: list[tuple[int, int]], removed: set[int], seconds: float
) -> dict[str, Any]:
    """Precision and recall; in a family no other pair than a planted one reaches the bound."""
    partners = similar(texts, planted)
    right = sum(any(other not in removed for other in partners.get(one, ())) for one in removed)
    wanted = [pair for pair in planted if pair[1] in partners.get(pair[0], ())]
    found = sum(bool({one, other} & removed) for one, other in wanted)
    return {
        "removed": len(removed),
        "precision": round(right / max(len(removed), 1), 4),
        "planted": len(wanted),
        "recall": round(found / max(len(wanted), 1), 4),
        "cpu_s": round(seconds, 2),
    }


def own_words(rng: np.random.Generator, count: int, own: int) -> npt.NDArray[np.uint32]:
    """Sets of 116 shared shingles and some of their own."""
    return rng.integers(0, 2**32, (count, own), np.uint32)


def slots(rng: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    """Sets of 116 shared shingles and 8 slots of 5 shingles, each filled with one of 50 values."""
    values = rng.integers(0, 2**32, (8, 50, 5), np.uint32)
    return values[np.arange(8), rng.integers(0, 50, (count, 8))].reshape(count, -1)


def choose(name: str, differing: npt.NDArray[np.uint32]) -> None:
    """CPU seconds to choose among sets of made shingles, which all share a band: without texts and files."""
    count = len(differing)
    shared = np.broadcast_to((np.arange(116) * 37_000_000).astype(np.uint32), (count, 116))
    sets = np.sort(np.concatenate([shared, differing], axis=1), axis=1)
    shingles, starts = sets.reshape(-1), np.arange(count + 1) * sets.shape[1]
    start = time.process_time()
    frequencies = Frequencies(len(shingles))
    frequencies.add(shingles, starts)
    leaders = make_leaders("numba", BOUND, frequencies, 1, count)
    ids = np.arange(count)
    members = Members(shingles, starts, np.zeros((count, 1), np.uint64), ids, ids, np.zeros(count, np.uint8))
    removed = 0
    for low in range(0, count, 512):
        removed += int((leaders.add(members.part(low, min(low + 512, count))).rule > 0).sum())
    seconds = round(time.process_time() - start, 2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        json.dumps({"what": name, "documents": count, "removed": removed, "cpu_s": seconds, "peak_mib": peak}),
        flush=True,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--documents", default="10000,30000")
    parser.add_argument("--own", default="48,40,31,27")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--sets", action="store_true", help="choose among made sets alone, without texts")
    parser.add_argument("--peer", help="Python with datatrove")
    options = parser.parse_args()
    counts, owns = (list(map(int, text.split(","))) for text in (options.documents, options.own))
    if options.sets:
        rng = np.random.default_rng(1)
        choose("compiles", slots(rng, 64))
        for count in counts:
            for own in owns:
                choose(f"sets, J {116 / (116 + 2 * own):.3f}", own_words(rng, count, own))
            choose("slots", slots(rng, count))
        return
    near = SETTINGS.near
    assert near is not None and near.min_similarity == BOUND
    ours([" ".join(text) for text in family(200, 40)[0]], options.work / "warm")  # compiles
    corpora = [
        (f"family J {116 / (116 + 2 * own):.3f}", *family(count, own))
        for count in counts
        for own in owns
    ]  # fmt: skip
    corpora += [("pairs", *pairs(options.pairs))] if options.pairs else []
    for name, texts, planted in corpora:
        joined = [" ".join(text) for text in texts]
        kept, seconds = ours(joined, options.work / "ours")
        for one, other in kept.items():
            assert jaccard(texts[one], texts[other]) >= BOUND, (one, other)
        row = {"what": name, "documents": len(texts), "tool": "ours"}
        row |= figures(texts, planted, set(kept), seconds)
        row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps(row), flush=True)
        if options.peer:
            removed, seconds = peer(options.peer, joined, options.work / "peer")
            row = {"what": name, "documents": len(texts), "tool": "datatrove"}
            print(json.dumps(row | figures(texts, planted, removed, seconds)), flush=True)
        shutil.rmtree(options.work / "ours")


if __name__ == "__main__":
    sys.exit(main())
