"""Pass `join`: components of all edges, cut into files of whole components. One job."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import MachineError
from pipeline.common.hashing import value_hash
from pipeline.data.curate.duplicates.compared import read_compared
from pipeline.data.curate.duplicates.components.vectorized import make_components
from pipeline.data.curate.duplicates.files import CANDIDATE, EDGE, MEMBER, NO_SHINGLES, ResultFile, write_blocks
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import write_sections
from pipeline.data.work.worker_pool import Progress

JOIN_VERSION = 2
CANDIDATES = "candidates"
"""File of the documents whose shingles are compared, in sections, one per chunk."""
_BLOCK = 2**22
_WRITE = 2**16
_MAX_VERTICES = 2**32 - 1
Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class JoinJob(ReceiptJob):
    """The components of a scope.

    Memory for each document that has an edge: `vertex_bytes`, and twice 8 bytes while their numbers are gathered.

    Attributes:
        chunks: of `write_compared`.
        edges: files of edges by kind, `exact` first.
        members: documents of a file, unless one component has more.
        engine: of the components.
    """

    chunks: Path
    edges: tuple[tuple[str, ResultFile], ...]
    members: int
    engine: Literal["numba", "python"]

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Write the members of all components.

        Raises:
            DamagedResult: a file of edges is not as it was written.
            MachineError: there are more than 2^32 documents with edges.
        """
        vertices = self._vertices(progress)
        if len(vertices) > _MAX_VERTICES:
            raise MachineError(
                f"{len(vertices):,} documents of {self.folder.name} have duplicates; at most {_MAX_VERTICES:,} can be "
                "joined: compare fewer sources with each other (data.curate.scopes)"
            )
        components = make_components(self.engine, len(vertices))
        equal: dict[str, npt.NDArray[np.uint32]] = {}
        is_candidate = np.zeros(len(vertices), np.bool_)
        for kind, file in self.edges:
            edges = file.read(EDGE)
            for start in range(0, len(edges), _BLOCK):
                block = edges[start : start + _BLOCK]
                ones = _places(vertices, block["document"])
                firsts = _places(vertices, block["first"])
                components.add(ones, firsts)
                if kind != "bands":
                    if kind not in equal:
                        equal[kind] = np.arange(len(vertices), dtype=np.uint32)
                    equal[kind][ones] = firsts
                else:
                    _mark_candidates(is_candidate, ones, firsts, equal.get("exact"))
                progress(0)  # a sign of life
            progress(file.size // 2)
        keys = components.roots().astype(np.uint64)
        del components
        progress(0)
        return self._write(vertices, keys, equal, is_candidate, progress)

    def _vertices(self, progress: Progress) -> Numbers:
        """Documents that have an edge, sorted. Pairs of lists of about one length are merged, so each is few times."""
        stack: list[Numbers] = []
        for _, file in self.edges:
            edges = file.read(EDGE)
            if len(edges):
                stack.append(_distinct([edges["document"], edges["first"]]))
            while len(stack) > 1 and len(stack[-1]) * 2 > len(stack[-2]):
                stack.append(_distinct([stack.pop(), stack.pop()]))
            progress(file.size - file.size // 2)
        while len(stack) > 1:
            stack.append(_distinct([stack.pop(), stack.pop()]))
        return stack[0] if stack else np.zeros(0, np.uint64)

    def _write(
        self,
        vertices: Numbers,
        keys: Numbers,
        equal: dict[str, npt.NDArray[np.uint32]],
        is_candidate: npt.NDArray[np.bool_],
        progress: Progress,
    ) -> dict[str, Any]:
        """Sort by (root, document), in place, and write; `keys` are the roots."""
        keys <<= np.uint64(32)
        for start in range(0, len(keys), _BLOCK):
            end = min(start + _BLOCK, len(keys))
            keys[start:end] |= np.arange(start, end, dtype=np.uint64)
        keys.sort()
        sizes = _sizes(keys)
        files: dict[str, HashedFile] = {}
        try:
            sections = np.zeros(0, np.uint32)
            if any(kind == "bands" for kind, _ in self.edges):
                files[CANDIDATES], sections = self._candidates(vertices, is_candidate)
            for number, (low, high) in enumerate(_cuts(sizes, self.members)):
                name = f"members/{number:05d}"
                blocks = _members(vertices, keys[low:high], equal, sections, progress)
                files[name] = write_blocks(self.folder, name, blocks)
            counts = {
                "documents": len(vertices),
                "candidates": int(is_candidate.sum()),
                "clusters": len(sizes),
                "sizes": _size_histogram(sizes),
                "largest": int(sizes.max(initial=0)),
            }
            return self.commit(files, counts)
        finally:
            for file in files.values():
                file.__exit__(None, None, None)

    def _candidates(
        self, vertices: Numbers, is_candidate: npt.NDArray[np.bool_]
    ) -> tuple[HashedFile, npt.NDArray[np.uint32]]:
        """The file of candidates, and of each vertex the section of its shingles in the file of its chunk."""
        compared = read_compared(self.chunks)
        places = np.flatnonzero(is_candidate)
        candidates = np.zeros(len(places), CANDIDATE)
        candidates["document"] = vertices[places]
        chunks = compared.places(vertices[places])
        bounds = np.searchsorted(chunks, np.arange(len(compared.chunks) + 1))
        sections = np.full(len(vertices), NO_SHINGLES, np.uint32)
        sections[places] = np.arange(len(places)) - bounds[chunks]
        return write_sections(self.folder / CANDIDATES, candidates, bounds), sections


def _mark_candidates(
    is_candidate: npt.NDArray[np.bool_],
    ones: npt.NDArray[np.uint32],
    firsts: npt.NDArray[np.uint32],
    exact: npt.NDArray[np.uint32] | None,
) -> None:
    """Mark documents that share a band with one that is not equal; of equal ones the first."""
    if exact is not None:
        ones, firsts = exact[ones], exact[firsts]
    differ = ones != firsts
    is_candidate[ones[differ]] = True
    is_candidate[firsts[differ]] = True


def _members(
    vertices: Numbers,
    keys: Numbers,
    equal: dict[str, npt.NDArray[np.uint32]],
    sections: npt.NDArray[np.uint32],
    progress: Progress,
) -> Iterator[npt.NDArray[Any]]:
    """Records of sorted keys, in blocks: one component may have most of the documents."""
    for start in range(0, len(keys), _WRITE):
        block = keys[start : start + _WRITE]
        places = (block & np.uint64(2**32 - 1)).astype(np.int64)
        members = np.zeros(len(block), MEMBER)
        members["root"] = vertices[(block >> np.uint64(32)).astype(np.int64)]
        members["document"] = vertices[places]
        for kind in ("exact", "url"):
            members[kind] = vertices[equal[kind][places]] if kind in equal else members["document"]
        firsts = equal["exact"][places] if "exact" in equal else places
        members["shingles"] = sections[firsts] if len(sections) else NO_SHINGLES
        progress(0)  # a sign of life
        yield members


def _distinct(lists: list[Numbers]) -> Numbers:
    """All numbers, sorted, each once; `numpy.unique` hashes them, which is ten times slower for millions."""
    numbers = np.concatenate(lists)
    lists.clear()
    numbers.sort()
    kept = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=kept[1:])
    return numbers[kept]


def _sizes(keys: Numbers) -> npt.NDArray[np.int64]:
    """Sizes of components, of sorted keys with the root in their upper half."""
    starts = [np.zeros(min(len(keys), 1), np.int64)]
    for start in range(1, len(keys), _BLOCK):
        end = min(start + _BLOCK, len(keys))
        starts.append(np.flatnonzero(keys[start:end] ^ keys[start - 1 : end - 1] >= np.uint64(2**32)) + start)
    places = np.append(np.concatenate(starts), len(keys))
    sizes: npt.NDArray[np.int64] = places[1:] - places[:-1]
    return sizes


def _places(vertices: Numbers, numbers: Numbers) -> npt.NDArray[np.uint32]:
    return np.searchsorted(vertices, numbers).astype(np.uint32)


def _cuts(sizes: npt.NDArray[np.int64], members: int) -> list[tuple[int, int]]:
    """Ranges of whole components, of at most `members` unless one has more."""
    ends = np.cumsum(sizes)
    cuts, low, begin = [], 0, 0
    while begin < len(ends):
        end = max(int(np.searchsorted(ends, low + members, "right")), begin + 1)
        cuts.append((low, int(ends[end - 1])))
        low, begin = int(ends[end - 1]), end
    return cuts


def _size_histogram(sizes: npt.NDArray[np.int64]) -> list[int]:
    """Number of clusters of 2, 3-4, 5-8, 9-16 ... documents."""
    if not len(sizes):
        return []
    most = int(sizes.max() - 1).bit_length()
    up_to = [int((sizes <= 2**power).sum()) for power in range(most + 1)]
    return [after - before for before, after in itertools.pairwise(up_to)]


def vertex_bytes(kinds: Iterable[str]) -> int:
    """Memory of the job for each document with an edge: number, key in the order of components, groups, section."""
    return 16 + 4 * len({"exact", "url"} & set(kinds)) + 5 * ("bands" in kinds)


def join_job(
    folder: Path,
    chunks: Path,
    edges: list[tuple[str, ResultFile]],
    members: int,
    engine: Literal["numba", "python"],
) -> JoinJob:
    """The job of the pass.

    Args:
        folder: of the scope.
        chunks: of `write_compared`.
        edges: files of `match` by kind, `exact` first.
        members: documents of a file.
        engine: of the components.
    """
    of_edges = [[kind, file.path.name, file.xxh3] for kind, file in edges]
    inputs = value_hash([JOIN_VERSION, members, of_edges, read_compared(chunks).hashes()])
    return JoinJob(folder, "join", inputs, sum(file.size for _, file in edges), chunks, tuple(edges), members, engine)
