"""Rules of curation beside datatrove's filters: MB of UTF-8 per CPU second, alternated in one run, ratio of medians.

    python benchmarks/curate/curate_rules.py --texts documents.jsonl --peer /path/to/python/with/datatrove

Ours: all counters of all presets, the check of a sample, and the rules of all presets; with numba and without.
datatrove: its filters of Gopher (quality, repetition), FineWeb and C4, on every document (`shipped`); the same without
C4, whose sentences need a tokenizer, with words from `str.split()` (`split`); and that as a chain, each filter on what
the one before keeps (`split_chained`).

With `--compare`, no times but decisions: the share of documents for which both remove or both keep, with words from
`str.split()` in both and without counts of sentences; for the texts as they are, and for texts without blank lines and
without whitespace at the ends of lines.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.curation.rules import RulesConfig
from pipeline.data.curate.batch import BATCH_BYTES, TextBatch
from pipeline.data.curate.cleaning.lines import clean_lines
from pipeline.data.curate.measures.counters import CounterMeasurer
from pipeline.data.curate.measures.engine_choice import CounterEngineName, as_batch
from pipeline.data.curate.rules.evaluate import evaluate
from pipeline.data.curate.rules.presets import MEASURES, preset_rules

PEER = Path(__file__).with_name("curate_rules_peer.py")
ENGINES: tuple[CounterEngineName, ...] = ("numba", "python")
VARIANTS = ("shipped", "split", "split_chained")
RULES = preset_rules(RulesConfig.model_validate({name: {} for name in MEASURES}), "data.curate.rules")


class NoOutput:
    """Output of a chunk that nobody reads."""

    def append(self, name: str, records: Any) -> None: ...

    def add_run(self, name: str, records: Any) -> None: ...

    def count(self, name: str, counts: Any) -> None: ...


def batches(texts: list[str]) -> list[TextBatch]:
    """Texts in batches of the size that curation has."""
    found: list[TextBatch] = []
    begin = size = 0
    for end, text in enumerate(texts, 1):
        size += len(text)
        if size >= BATCH_BYTES or end == len(texts):
            found.append(as_batch(texts[begin:end]))
            begin, size = end, 0
    return found


def ours(measurer: CounterMeasurer, documents: list[TextBatch]) -> float:
    """CPU seconds of counters and rules."""
    start = time.process_time()
    for batch in documents:
        table = np.zeros(len(batch.rows), [("state", "u1"), *measurer.columns])
        measurer.measure(batch, table, NoOutput())
        evaluate(RULES, table)
    return time.process_time() - start


class Peer:
    """datatrove in a process of its own."""

    def __init__(self, python: Path, texts: Path, most: int) -> None:
        self._process = subprocess.Popen(
            [str(python), str(PEER), str(texts), str(most)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("error: the peer has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, variant: str) -> dict[str, Any]:
        """Answer to a variant."""
        assert self._process.stdin is not None
        print(variant, file=self._process.stdin, flush=True)
        return self._answer()

    def run(self, variant: str) -> float:
        """CPU seconds of a variant."""
        return float(self.ask(variant)["seconds"])


def compare(python: Path, texts: list[str]) -> None:
    """Print shares of equal decisions for each preset."""
    line_end = re.compile("[\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029]")
    bare = ["\n".join(line.rstrip() for line in line_end.split(text) if line.strip()) for text in texts]
    for name, each in {"as they are": texts, "without blank lines and whitespace at ends": bare}.items():
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in each)
            file.flush()
            theirs = Peer(python, Path(file.name), len(each)).ask("decide")["removed"]
        for preset in MEASURES:
            removed, other = our_removed(preset, each), np.array(theirs[preset])
            answer = {"texts": name, "preset": preset, "documents": len(each)}
            answer |= {"equal": round(float((removed == other).mean()), 5), "only_ours": int((removed & ~other).sum())}
            print(json.dumps(answer | {"only_theirs": int((other & ~removed).sum())}), flush=True)


def our_removed(preset: str, texts: list[str]) -> Any:
    """Documents that a preset removes: bool of shape (documents,). C4 counts lines that its line rules keep."""
    bounds = {"min_sentences": None} if preset == "c4" else {}
    rules = preset_rules(RulesConfig.model_validate({preset: bounds}), "data.curate.rules")
    measurer = CounterMeasurer()
    table = np.zeros(len(texts), [("state", "u1"), *measurer.columns])
    measurer.measure(
        as_batch([clean_lines(text, ["c4"]) for text in texts] if preset == "c4" else texts), table, NoOutput()
    )
    return evaluate(rules, table).any(axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="JSON Lines with `text`")
    parser.add_argument("--documents", type=int, default=2000, help="documents that are read")
    parser.add_argument("--peer", type=Path, help="a Python with datatrove; without it, ours alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compare", action="store_true", help="compare decisions, measure no times")
    arguments = parser.parse_args()
    with arguments.texts.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(arguments.documents), strict=False)]
    if arguments.compare:
        return compare(arguments.peer, texts)
    documents = batches(texts)
    size = sum(len(batch.data) for batch in documents) / 1e6
    runs: dict[str, Callable[[], float]] = {}
    for engine in ENGINES:
        runs[engine] = functools.partial(ours, CounterMeasurer(engine), documents)
    about: dict[str, Any] = {"documents": len(texts), "mb": round(size, 2), "rounds": arguments.rounds}
    if arguments.peer is not None:
        peer = Peer(arguments.peer, arguments.texts, arguments.documents)
        about["datatrove"] = peer.version
        runs |= {name: functools.partial(peer.run, name) for name in VARIANTS}
    print(json.dumps(about), flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in medians.items():
        ratios = {of: round(medians[of] / median, 1) for of in VARIANTS if of in medians and name not in VARIANTS}
        print(
            json.dumps({"name": name, "mb_per_cpu_s": round(size / median, 2), "times_datatrove": ratios}), flush=True
        )


if __name__ == "__main__":
    main()
