"""Passes that find duplicates, in their order: the jobs of each, once the pass before is done.

    passes = DuplicatePasses(scope, settings, choices, ...)
    for name in passes.names:
        run(passes.jobs(name))        # any order, any workers; skip those with `job.find()`
    passes.chosen(chunk)              # what goes of a chunk as a duplicate
    passes.removed_lines(chunk)       # which lines of its kept documents go
    passes.removed_paragraphs(chunk)  # which paragraphs of these do

`match` compares hashes: a job for each kind and range of hashes. `join` brings documents together that may be compared:
one job. With `near`, `shingles` reads the texts of those that share a band: a job per chunk. `rank` orders documents by
what `keep` reads and whether a rule removes them: a job per chunk. `choose` finds which document is removed for which
kept one: a job per range of what `join` wrote. With `lines` or `paragraphs`, `kept` and
these follow.

Files of `match`, `join` and `shingles` lie in `scope.folder` and depend on measures alone; those of the other passes
lie in `choices`, whose name is the hash of the bounds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.config.curation.curate import DuplicatesConfig
from pipeline.data.curate.chunk_texts import ChunkTexts, read_chunk_texts
from pipeline.data.curate.duplicates.against import FinishedCuration
from pipeline.data.curate.duplicates.choose import ChooseSettings, choose_jobs
from pipeline.data.curate.duplicates.compared import ComparedChunk, read_compared, write_compared
from pipeline.data.curate.duplicates.files import DECISION, MEMBER, ResultFile, finished, result_files
from pipeline.data.curate.duplicates.join import CANDIDATES, join_job
from pipeline.data.curate.duplicates.kept import kept_jobs, read_section
from pipeline.data.curate.duplicates.kinds import PassName, RepeatedKind, kinds_of, pass_names
from pipeline.data.curate.duplicates.leaders.leader_choice import EXACT, NEAR, URL
from pipeline.data.curate.duplicates.lines import PIECES, repeated_jobs, sorted_lines
from pipeline.data.curate.duplicates.match import MatchJob, match_bucket_jobs
from pipeline.data.curate.duplicates.measure import duplicate_settings
from pipeline.data.curate.duplicates.rank import OpenTable, rank_jobs
from pipeline.data.curate.duplicates.shingles import shingle_jobs
from pipeline.data.curate.files import portable
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.scope import Chunk, Scope
from pipeline.data.work.job import ReceiptJob

CHOSEN = np.dtype([("row", "<u4"), ("rule", "<u2"), ("kept", "<u8"), ("value", "<f4")])
"""A document that goes: its row in the chunk, `EXACT`, `URL` or `NEAR`, the kept document, and the similarity to it."""
RULE_NAMES = {EXACT: "duplicates.exact", URL: "duplicates.url", NEAR: "duplicates.near"}


@dataclass(frozen=True)
class DuplicatePasses:
    """Passes over a scope.

    Attributes:
        scope: with its measured chunks.
        settings: `data.curate.duplicates`.
        rules: of each source of the scope by its number: documents that one of them removes never win.
        open_table: opens the table of measures of a chunk, checked; it is pickled with the jobs.
        choices: folder of what depends on bounds: `DATA_DIR/curate/SCOPE/choices/HASH`.
        seed: `data.curate.seed`.
        bucket_bytes: `data.curate.bucket_bytes`.
        engine: `numba` or `python`; results are the same.
        against: finished curations, of `against.read_curation`.
        read_texts: reads texts of chunks again.
    """

    scope: Scope
    settings: DuplicatesConfig
    rules: tuple[tuple[DocumentRule, ...], ...]
    open_table: OpenTable
    choices: Path
    seed: int
    bucket_bytes: int
    engine: Literal["numba", "python"] = "numba"
    against: tuple[FinishedCuration, ...] = ()
    read_texts: ChunkTexts = read_chunk_texts

    @property
    def names(self) -> tuple[PassName, ...]:
        """Passes that these settings need, in order."""
        return pass_names(self.settings)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names by the number that documents have in `kept`: sources of the scope, then folders of `against`."""
        return (*self.scope.sources, *(portable(each.folder, self.scope.data_dir) for each in self.against))

    def jobs(self, name: PassName) -> list[ReceiptJob]:
        """Jobs of a pass. Those of the passes before it must be done, but for `match` and `rank`.

        Raises:
            UserError: a job before it has no receipt.
        """
        keep = tuple(self.settings.keep)
        if name == "match":
            measured = duplicate_settings(self.settings)
            folder, kinds = self.scope.folder, kinds_of(self.settings)
            return match_bucket_jobs(folder, self._chunks, kinds, measured, self.bucket_bytes)
        if name == "join":
            members = members_of_a_job(self.settings, self.bucket_bytes)
            return [join_job(self.scope.folder, self._chunks, self._edges(), members, self.engine)]
        if name == "shingles":
            return self._shingle_jobs()
        if name == "rank":
            return rank_jobs(self.choices, self._chunks, self.rules, self.open_table, keep)
        if name == "choose":
            return self._choose_jobs()
        chosen = self._receipts("choose") if "choose" in self.names else []
        kept = kept_jobs(self.choices, self._chunks, keep, self._receipts("rank"), chosen)
        pieces = {"lines": self.settings.lines, "paragraphs": self.settings.paragraphs}.get(name)
        if name == "kept" or pieces is None:
            return kept
        kind: RepeatedKind = "lines" if name == "lines" else "paragraphs"
        done = finished(kept, "kept")
        return repeated_jobs(kind, self.choices, self._chunks, pieces, done, self.bucket_bytes)

    def chosen(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Duplicates among the documents of a chunk that go, of type `CHOSEN`, ascending by row; after `choose`.

        A document that a rule removes may be among them: then both are reasons.

        Raises:
            DamagedResult: a file of `choose` is not as it was written.
        """
        if "choose" not in self.names or not chunk.records:
            return np.zeros(0, CHOSEN)
        compared = read_compared(self._chunks)
        place = compared.place(chunk)
        decisions = read_section(self.choices, self._names("choose"), DECISION, "choose", place)
        decisions = decisions[np.argsort(decisions["document"], kind="stable")]
        found = np.zeros(len(decisions), CHOSEN)
        found["row"] = decisions["document"] - np.uint64(compared.chunks[place].base)
        for name in ("rule", "kept", "value"):
            found[name] = decisions[name]
        return found

    def removed_lines(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Lines of kept documents of a chunk that go, of type `LINE`, ascending; after `lines`.

        Raises:
            DamagedResult: a file of `lines` is not as it was written.
        """
        return self._removed("lines", chunk)

    def removed_paragraphs(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Paragraphs of kept documents of a chunk that go, of type `PARAGRAPH`, ascending; after `paragraphs`.

        Raises:
            DamagedResult: a file of `paragraphs` is not as it was written.
        """
        return self._removed("paragraphs", chunk)

    def _removed(self, kind: RepeatedKind, chunk: Chunk) -> npt.NDArray[Any]:
        if kind not in self.names or not chunk.records:
            return np.zeros(0, PIECES[kind])
        place = read_compared(self._chunks).place(chunk)
        return sorted_lines(read_section(self.choices, self._names(kind), PIECES[kind], kind, place))

    def counts(self, name: PassName) -> list[dict[str, Any]]:
        """Counts of each job of a pass that is done."""
        return [receipt["counts"] for receipt in self._receipts(name)]

    @functools.cached_property
    def _chunks(self) -> Path:
        """The list of all chunks, for the jobs."""
        chunks = [ComparedChunk(chunk) for chunk in self.scope.chunks]
        own = len(self.scope.sources)
        for number, each in enumerate(self.against):
            chunks += each.numbered(own + number)
        return write_compared(self.scope.folder / "chunks", self.source_names, own, chunks)

    def _shingle_jobs(self) -> list[ReceiptJob]:
        near, scope = self.settings.near, self.scope.folder
        assert near is not None, "the pass is one of near duplicates"
        (candidates,) = (file for file in self._files("join") if file.path.name == CANDIDATES)
        return shingle_jobs(scope, self._chunks, candidates, near.words, self.engine, self.read_texts)

    def _choose_jobs(self) -> list[ReceiptJob]:
        members = [file for file in self._files("join") if file.path.name != CANDIDATES]
        shingles = self._receipts("shingles") if "shingles" in self.names else []
        return choose_jobs(
            self.choices,
            self.scope.folder,
            self._chunks,
            members,
            shingles,
            self._receipts("rank"),
            self._choose_settings,
            self.engine,
        )

    @property
    def _choose_settings(self) -> ChooseSettings:
        near = self.settings.near
        return ChooseSettings(
            bands=near.bands if near else 0,
            values=near.bands * near.rows if near else 0,
            min_similarity=near.min_similarity if near else 1,
            keep=tuple(self.settings.keep),
            preference=self.scope.preference,
            seed=self.seed,
        )

    def _receipts(self, name: PassName) -> list[dict[str, Any]]:
        # A chunk is asked for after the other; the jobs that are done do not change.
        cache: dict[PassName, list[dict[str, Any]]] = self.__dict__.setdefault("_found", {})
        if name not in cache:
            cache[name] = finished(self.jobs(name), name)
        return cache[name]

    def _names(self, name: PassName) -> list[str]:
        return [file for receipt in self._receipts(name) for file in receipt["files"]]

    def _files(self, name: PassName) -> list[ResultFile]:
        jobs = self.jobs(name)
        receipts = finished(jobs, name)
        return [file for job, receipt in zip(jobs, receipts, strict=True) for file in result_files(job, receipt, name)]

    def _edges(self) -> list[tuple[str, ResultFile]]:
        jobs = self.jobs("match")
        receipts = finished(jobs, "match")
        return [
            (job.kind, file)
            for job, receipt in zip(jobs, receipts, strict=True)
            if isinstance(job, MatchJob)
            for file in result_files(job, receipt, "match")
        ]


def members_of_a_job(settings: DuplicatesConfig, bucket_bytes: int) -> int:
    """Documents of a job of `choose`, by their memory: a signature, the record of `join`, and keys to order them."""
    values = settings.near.bands * settings.near.rows if settings.near else 0
    return max(1, bucket_bytes // (values * 4 + 2 * MEMBER.itemsize + 128))
