"""Measured chunks of made texts, and the passes over them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import file_hash
from pipeline.config.curation.curate import DuplicatesConfig, NearConfig
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.duplicates.against import FinishedCuration
from pipeline.data.curate.duplicates.measure import DuplicateMeasurer
from pipeline.data.curate.duplicates.passes import DuplicatePasses
from pipeline.data.curate.duplicates.signatures.signer import text_batch
from pipeline.data.curate.files import MEASURES, measured_file
from pipeline.data.curate.rules.base import DocumentRule, Ratio
from pipeline.data.curate.scope import Chunk, Scope
from pipeline.data.work.sorted_runs import RunWriter
from pipeline.data.work.worker_pool import Progress

FIXED = [("state", "u1"), ("edited", "u1"), ("bytes", "<u4")]
NEAR = DuplicatesConfig(exact="text", near=NearConfig())
TEXTS = "texts"
Engine = Literal["numba", "python"]


class Output:
    """Gathers what measurers write of a chunk."""

    def __init__(self, path: Any) -> None:
        self.arrays: dict[str, list[npt.NDArray[Any]]] = {}
        self.runs: dict[str, RunWriter] = {}
        self._path = path

    def append(self, name: str, records: npt.NDArray[Any]) -> None:
        self.arrays.setdefault(name, []).append(records)

    def add_run(self, name: str, records: npt.NDArray[Any]) -> None:
        if name not in self.runs:
            self.runs[name] = RunWriter(self._path(name), records.dtype)
        self.runs[name].add(records)

    def count(self, name: str, counts: npt.NDArray[np.int64]) -> None:
        raise NotImplementedError


def batches(texts: Sequence[str | None], metadata: Sequence[bytes | None], size: int) -> list[TextBatch]:
    """Batches of documents; a row without a text is a rejected record."""
    rows = [row for row, text in enumerate(texts) if text is not None]
    found = []
    for start in range(0, max(len(rows), 1), size):
        some = rows[start : start + size]
        batch = text_batch([text for row in some if (text := texts[row]) is not None])
        kept = [metadata[row] if metadata else None for row in some]
        numbers = np.array(some, np.uint32)
        found.append(TextBatch(batch.data, batch.starts, batch.texts, numbers, batch.ids, kept))
    return found


def columns(settings: DuplicatesConfig, engine: Engine = "python") -> np.dtype[Any]:
    """Type of the table of measures."""
    return np.dtype([*FIXED, *DuplicateMeasurer(settings, engine).columns, ("bad", "<u4")])


@dataclass(frozen=True)
class Opened:
    """Opens tables of measures."""

    kind: np.dtype[Any]

    def __call__(self, chunk: Chunk) -> npt.NDArray[Any]:
        return np.fromfile(measured_file(chunk.curation, chunk.unit, chunk.chunk, MEASURES), self.kind)


def measure_chunk(
    curation: Path,
    place: tuple[int, int, int, int],
    texts: Sequence[str | None],
    settings: DuplicatesConfig,
    *,
    metadata: Sequence[bytes | None] = (),
    bad: Sequence[int] = (),
    engine: Engine = "python",
) -> Chunk:
    """Write the files of a chunk.

    Args:
        curation: folder of the source.
        place: source, unit, chunk, first row.
        texts: of its rows; None for a rejected record.
        settings: of the duplicates.
        metadata: of the rows.
        bad: rows that the rule `bad` removes.
        engine: of the signatures.
    """
    source, unit, number, first = place
    measured_file(curation, unit, number, "x").parent.mkdir(parents=True, exist_ok=True)
    measurer = DuplicateMeasurer(settings, engine)
    output = Output(lambda name: measured_file(curation, unit, number, name))
    table = np.zeros(len(texts), columns(settings))
    for batch in batches(texts, metadata, 50):
        part = np.zeros(len(batch.rows), table.dtype)
        part["bytes"] = np.diff(batch.starts)
        measurer.measure(batch, part, output)
        table[batch.rows] = part
    table["state"] = [text is None for text in texts]
    table["bad"][list(bad)] = 1
    rows = [row for row, text in enumerate(texts) if text is not None]
    files: dict[str, npt.NDArray[Any]] = {MEASURES: table}
    for name, parts in output.arrays.items():
        of_documents = np.concatenate(parts)
        files[name] = np.full((len(texts), *of_documents.shape[1:]), 2**32 - 1, np.uint32)
        files[name][rows] = of_documents
    for name, array in files.items():
        array.tofile(measured_file(curation, unit, number, name))
    with ExitStack() as stack:
        for run in output.runs.values():
            stack.enter_context(run)
            run.finish().commit()
    measured_file(curation, unit, number, TEXTS).write_text(json.dumps(texts))
    names = [*files, *output.runs]
    paths = {name: measured_file(curation, unit, number, name) for name in names}
    hashes = {name: f"{file_hash(path):016x}" for name, path in paths.items()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    return Chunk(curation, source, unit, number, first, len(texts), hashes, sizes)


def stored_texts(chunk: Chunk, rows: npt.NDArray[np.int64], progress: Progress) -> Iterator[str]:
    """Texts of rows of a made chunk."""
    texts = json.loads(measured_file(chunk.curation, chunk.unit, chunk.chunk, TEXTS).read_text())
    for row in rows.tolist():
        yield texts[row]


def bad_rule() -> DocumentRule:
    """A rule that removes the rows that were said to be bad."""
    return Ratio("bad", "rules.bad", 0, "max", "bad", numerator="bad")


def cut(texts: Sequence[Any], chunks: int) -> list[tuple[int, list[Any]]]:
    """(first row, texts) of nearly equal chunks."""
    bounds = np.linspace(0, len(texts), chunks + 1).astype(int).tolist()
    return [(low, list(texts[low:high])) for low, high in itertools.pairwise(bounds)]


def make_scope(
    folder: Path,
    sources: Mapping[str, Sequence[str | None]],
    settings: DuplicatesConfig = NEAR,
    *,
    chunks: int = 3,
    bad: Mapping[str, Sequence[int]] | None = None,
    metadata: Mapping[str, Sequence[bytes | None]] | None = None,
    engine: Engine = "python",
) -> Scope:
    """Measure sources, all of unit 0, in some chunks each."""
    found = []
    for number, name in enumerate(sorted(sources)):
        of_source = (bad or {}).get(name, ())
        for chunk, (first, texts) in enumerate(cut(sources[name], chunks)):
            rows = [row - first for row in of_source if first <= row < first + len(texts)]
            objects = (metadata or {}).get(name, ())[first : first + len(texts)]
            place = (number, 0, chunk, first)
            found.append(
                measure_chunk(
                    folder / name / "curate", place, texts, settings, metadata=objects, bad=rows, engine=engine
                )
            )
    return Scope("scope", folder / "curate" / "scope", tuple(sorted(sources)), tuple(sources), tuple(found))


def make_passes(
    scope: Scope,
    settings: DuplicatesConfig = NEAR,
    *,
    seed: int = 0,
    bucket_bytes: int = 2**29,
    engine: Engine = "python",
    against: tuple[FinishedCuration, ...] = (),
    name: str = "choices",
) -> DuplicatePasses:
    """Passes with the rule `bad` for all sources."""
    rules = ((bad_rule(),),) * len(scope.sources)
    opened = Opened(columns(settings))
    choices = scope.folder / name
    choices.mkdir(parents=True, exist_ok=True)
    return DuplicatePasses(scope, settings, rules, opened, choices, seed, bucket_bytes, engine, against, stored_texts)


def run_all(passes: DuplicatePasses) -> int:
    """Run the jobs that are not done; returns how many."""
    done = 0
    for name in passes.names:
        for job in passes.jobs(name):
            if job.find() is None:
                job.run(None, lambda amount: None)
                done += 1
    return done


def removed(passes: DuplicatePasses) -> dict[tuple[str, int], tuple[int, tuple[str, int], float]]:
    """By (source, row) of what goes: the rule, (source, row) of the kept one, and the similarity."""
    names = passes.source_names
    found = {}
    for chunk in passes.scope.chunks:
        for row, rule, kept, value in passes.chosen(chunk).tolist():
            other = (names[kept >> 56], kept & 2**32 - 1)
            found[names[chunk.source], row + chunk.first] = (rule, other, value)
    return found


def without_receipts(folder: Path) -> dict[str, bytes]:
    """All files of results below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "receipts" not in path.parts and "chunks" not in path.parts and path.suffix != ".txt"
    }


def words(rng: np.random.Generator, count: int, vocabulary: int = 20_000) -> list[str]:
    """Random words of many lengths."""
    return [f"w{number:x}" for number in rng.integers(0, vocabulary, count).tolist()]


def near_copy(rng: np.random.Generator, text: list[str], changes: int) -> list[str]:
    """Words with some of them replaced, at even distances from a random start."""
    copy = list(text)
    places = rng.choice(len(copy), changes, replace=False)
    for place in places.tolist():
        copy[place] = f"x{rng.integers(0, 2**40):x}"
    return copy


def jaccard(one: list[str], other: list[str], size: int = 5) -> float:
    """True similarity by plain sets of shingles."""
    a, b = ({tuple(text[start : start + size]) for start in range(len(text) - size + 1)} for text in (one, other))
    return len(a & b) / len(a | b)
