"""Passes that find duplicates, in their order: the jobs of each, once the pass before is done.

    passes = DuplicatePasses(scope, settings, choices, ...)
    for name in passes.names:
        run(passes.jobs(name))        # any order, any workers; skip those with `job.find()`
    passes.chosen(chunk)              # what goes of a chunk as a duplicate
    passes.removed_lines(chunk)       # which lines of its kept documents go

`match` compares hashes: a job for each kind and range of hashes. `join` brings documents together that may be compared:
one job. `rank` orders documents by what `keep` reads and whether a rule removes them: a job per chunk. `choose` finds
which document goes for which kept one: a job per range of what `join` wrote. With `lines`, `kept` and `lines` follow.

Files of `match` and `join` lie in `scope.folder` and depend on measures alone; those of the other passes lie in
`choices`, whose name is the hash of the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.config.curate import DuplicatesConfig
from pipeline.data.curate.jobs import Job
from pipeline.data.curate.rules.base import Rule
from pipeline.data.curate.scope import Chunk, Scope

PassName = Literal["match", "join", "rank", "choose", "kept", "lines"]
OpenTable = Callable[[Chunk], npt.NDArray[Any]]
"""Opens the table of measures of a chunk, checked: structured, of shape (records,). It is pickled with the jobs."""
CHOSEN = np.dtype([("row", "<u4"), ("rule", "<u2"), ("kept", "<u8"), ("value", "<f4")])
"""A document that goes: its row in the chunk, `EXACT`, `URL` or `NEAR`, the kept document, and the similarity to it."""
LINE = np.dtype([("row", "<u4"), ("line", "<u4")])
"""A line that goes: the row of its document in the chunk, and its number in the cleaned text, from 0."""
EXACT, URL, NEAR = 1, 2, 3
RULE_NAMES = {EXACT: "duplicates.exact", URL: "duplicates.url", NEAR: "duplicates.near"}


@dataclass(frozen=True)
class DuplicatePasses:
    """Passes over a scope.

    Attributes:
        scope: with its measured chunks.
        settings: `data.curate.duplicates`.
        rules: of each source of the scope by its number: documents that one of them removes never win.
        open_table: opens a table of measures.
        choices: folder of what depends on bounds: `DATA_DIR/curate/SCOPE/choices/HASH`.
        seed: `data.curate.seed`.
        bucket_bytes: `data.curate.bucket_bytes`.
        engine: `numba` or `python`; results are the same.
        against: finished curations, of `against.read_curations`.
    """

    scope: Scope
    settings: DuplicatesConfig
    rules: tuple[tuple[Rule, ...], ...]
    open_table: OpenTable
    choices: Path
    seed: int
    bucket_bytes: int
    engine: Literal["numba", "python"] = "numba"

    @property
    def names(self) -> tuple[PassName, ...]:
        """Passes that these settings need, in order."""
        raise NotImplementedError

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names by the number that documents have in `kept`: sources of the scope, then folders of `against`."""
        raise NotImplementedError

    def jobs(self, name: PassName) -> list[Job]:
        """Jobs of a pass. Those of the passes before it must be done.

        Raises:
            UserError: a job before it has no receipt.
        """
        raise NotImplementedError

    def chosen(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Duplicates among the documents of a chunk that go, of type `CHOSEN`, ascending by row; after `choose`.

        A document that a rule removes may be among them: then both are reasons.
        """
        raise NotImplementedError

    def removed_lines(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Lines of kept documents of a chunk that go, of type `LINE`, ascending; after `lines`."""
        raise NotImplementedError

    def counts(self, name: PassName) -> dict[str, Any]:
        """Counts of a pass that is done, added up: rows, groups and edges by kind, giant groups, clusters, removed."""
        raise NotImplementedError
