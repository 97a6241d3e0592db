"""Copies of parts of datasets in a bucket, made on this node while a training reads them by ranges.

One process of a node copies at a time. Parts come in the order of what the next steps of the node's ranks read, each
compared block by block and as a whole. A full cache keeps what it has: only what no later step reads gives way, or what
the next steps do not read to a part that they read as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.console import Console, say, warn
from pipeline.common.errors import UserError
from pipeline.common.file_lock import open_lock_file
from pipeline.common.format import counted, size
from pipeline.common.objects.content import REWRITE
from pipeline.common.objects.failures import ObjectChanged, StoreError
from pipeline.common.objects.retries import Abandoned
from pipeline.config.root import Config
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.datasets.manifest import read_parts
from pipeline.data.datasets.node_folder import CHECKED_FILE, checked_row
from pipeline.data.datasets.open import stage_folder
from pipeline.data.datasets.remote.dataset import RemoteDataset
from pipeline.data.datasets.remote.ranges import read_blocks
from pipeline.data.datasets.remote.sums import BLOCK_BYTES
from pipeline.data.loading.fetch_ahead import StepPieces
from pipeline.data.loading.node_readers import EVICTED_FILE, NodeReader, live_readers
from pipeline.data.order.journal import Journal

LOCK_FILE = "copier.lock"
COPIED_FILE = "copied.jsonl"
"""File in the copy of a dataset: parts whose tokens a copier brought and may bring again; `kept` if a run from a disk
reads them, too."""
_POLL_S = 1.0
_HORIZON = 64
"""Least number of steps whose reads decide what is copied first."""
_LEFT_FREE = 20
"""Bytes of the disk for each one that is left free for others."""


@dataclass
class _Cached:
    """A dataset in a bucket, and its copy on this node."""

    dataset: RemoteDataset
    hashes: list[int]
    documents: npt.NDArray[np.int64]
    """Documents of each part."""
    here: set[int] = field(default_factory=set)
    """Parts whose tokens are on this node, as whoever copies knows."""
    may_go: set[int] = field(default_factory=set)
    """Those of them that a copier brought, for runs from a bucket alone."""
    wanted: dict[int, int] = field(default_factory=dict)
    """Bytes that the next steps read of parts."""
    urgency: dict[int, float] = field(default_factory=dict)
    """The same, of which half counts as much for every `ahead` steps until then."""

    @property
    def folder(self) -> Path:
        return self.dataset.folder

    def file(self, part: int) -> str:
        """Name of the tokens of a part in the folder."""
        return str(self.dataset.copy_of(part).relative_to(self.folder))

    def look(self) -> None:
        """Look what is on this node."""
        names = _may_go(self.folder)
        self.here = {part for part in range(len(self.hashes)) if self.dataset.has_copy(part)}
        self.may_go = {part for part in self.here if self.file(part) in names}


def _may_go(folder: Path) -> set[str]:
    """Files of a copy that a copier brought for runs from a bucket alone."""
    rows = storage.read_json_lines(folder / COPIED_FILE)
    return {row.get("file", "") for row in rows} - {row.get("file", "") for row in rows if row.get("kept")}


def keep_copies(folder: Path, names: Iterable[str]) -> None:
    """Let copiers remove none of some files, which a run from a disk reads from now on."""
    for name in sorted(_may_go(folder).intersection(names)):
        storage.add_json_line(folder / COPIED_FILE, {"file": name, "kept": True})


class NodeCopier:
    """Copies parts to this node in a thread, as far as there is room, while steps are read.

    Args:
        base: folder of this user's copies.
        run: folder of the run.
        journal: the run's plan.
        datasets: those that lie in a bucket, by source.
        pieces_of: what a data-parallel rank reads in steps.
        dp_rank: of this process.
        most: bytes of tokens that may be here; None for what fits.
        ahead: steps whose ranges are asked for ahead.
    """

    def __init__(
        self,
        base: Path,
        run: Path,
        journal: Journal,
        datasets: Mapping[str, RemoteDataset],
        pieces_of: Callable[[int], StepPieces],
        *,
        dp_rank: int,
        most: int | None,
        ahead: int,
    ) -> None:
        self._base, self._run, self._journal = base, run, journal
        self._pieces_of, self._dp_rank, self._most = pieces_of, dp_rank, most
        self._ahead, self._horizon = ahead, max(_HORIZON, 4 * ahead)
        self._sources = dict(datasets)
        self._cached: dict[str, _Cached] = {}
        for dataset in datasets.values():
            if dataset.folder.name not in self._cached:
                parts = read_parts(dataset.folder, dataset.whole)
                counts = parts["documents"].astype(np.int64)
                self._cached[dataset.folder.name] = _Cached(dataset, parts["bin"].tolist(), counts)
        self._ranks: dict[int, StepPieces] = {}
        self._planned = -1
        self._readers: list[NodeReader] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: UserError | None = None
        self._last = 0
        self._is_full = False

    def begin(self, first: int, last: int) -> None:
        """Steps [first, last) will be read."""
        self._last, self._planned = last, -1
        self._stop = threading.Event()
        for each in self._cached.values():
            forget = self._forgetting(each)
            self._readers.append(NodeReader(each.folder, self._run, self._dp_rank, first, forget))
        self._thread = threading.Thread(target=self._work, name="node-copier", daemon=True)
        self._thread.start()

    def _forgetting(self, cached: _Cached) -> Callable[[list[str]], None]:
        numbers = {cached.file(part): part for part in range(len(cached.hashes))}
        mine = [each for each in self._sources.values() if each.folder == cached.folder]

        def forget(names: list[str]) -> None:
            for dataset in mine:
                dataset.forget_parts([numbers[name] for name in names if name in numbers])

        return forget

    def at(self, step: int) -> None:
        """A step is read now.

        Raises:
            ObjectChanged: an object that was copied has other bytes than were written.
        """
        if self._failure is not None:
            raise self._failure
        for reader in self._readers:
            reader.at(step)

    def end(self) -> None:
        """No more steps are read."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._readers:
            self._readers.pop().close()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                with self._alone() as alone:
                    for each in self._cached.values() if alone else ():
                        each.look()
                    while alone and not self._stop.is_set() and self._copy_one():
                        pass
            except Abandoned:
                return
            except StoreError as error:
                warn(Console(), f"copying of datasets pauses: {error}")
                self._stop.wait(30 * _POLL_S)
            except UserError as error:
                self._failure = error
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    warn(Console(), f"copying of datasets ends: {error}")
                    return
                self._say_full()
            self._stop.wait(_POLL_S)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """The lock of who copies; yields False if another process of the node has it."""
        file = open_lock_file(self._base / LOCK_FILE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(file)

    def _copy_one(self) -> bool:
        """Copy the part that is wanted most; False if there is nothing to copy, or no room."""
        step = self._plan()
        lasting = {key: self._lasting(each, step) for key, each in self._cached.items()}
        missing = [
            (each.urgency.get(part, 0.0), key, part)
            for key, each in self._cached.items()
            for part in lasting[key]
            if part not in each.here
        ]
        # The most urgent first, and then in the order of the parts.
        for _, key, part in sorted(missing, key=lambda one: (-one[0], one[1], one[2])):
            each = self._cached[key]
            if self._make_room(each.dataset.files[part].size, each.wanted.get(part, 0), lasting):
                self._copy(each, part)
                self._is_full = False
                return True
        if missing:
            self._say_full()
        return False

    def _plan(self) -> int:
        """Count what the next steps read; returns the step of the slowest reader of the run on this node."""
        readers = [
            reader
            for each in self._cached.values()
            for reader in live_readers(each.folder)
            if reader.run == str(self._run)
        ]
        first = min((reader.step for reader in readers), default=0)
        ranks = {reader.dp_rank for reader in readers} | {self._dp_rank}
        if 0 <= self._planned <= first < self._planned + self._horizon // 4 and ranks == self._ranks.keys():
            return first
        self._ranks = {rank: self._ranks.get(rank) or self._pieces_of(rank) for rank in ranks}
        for each in self._cached.values():
            each.wanted.clear()
            each.urgency.clear()
        for step in range(first, min(first + self._horizon, self._last)):
            for pieces in self._ranks.values():
                self._count(pieces, step, 0.5 ** ((step - first) / self._ahead))
        self._planned = first
        return first

    def _count(self, pieces: StepPieces, step: int, weight: float) -> None:
        for name, found in pieces.of_step(step):
            if name not in self._sources:
                continue
            cached = self._cached[self._sources[name].folder.name]
            item = cached.dataset.dtype.itemsize
            low, high = found.start * item // BLOCK_BYTES, -(-(found.start + found.length) * item // BLOCK_BYTES)
            for part, blocks in zip(found.part.tolist(), (high - low).tolist(), strict=True):
                cached.wanted[part] = cached.wanted.get(part, 0) + blocks * BLOCK_BYTES
                cached.urgency[part] = cached.urgency.get(part, 0.0) + blocks * weight

    def _lasting(self, cached: _Cached, step: int) -> list[int]:
        """Parts that a step from this one on may read."""
        needed = np.zeros(len(cached.hashes), bool)
        for segment in self._journal.segments[self._journal.segment_number(step) :]:
            if segment.first_step >= self._last:
                continue
            for name, dataset in self._sources.items():
                if dataset.folder == cached.folder and name in segment.sources:
                    needed |= parts_with(cached.documents, segment.sources[name].documents, dataset.manifest.parts)
        return [part for part in np.flatnonzero(needed).tolist() if cached.dataset.files[part].size]

    def _make_room(self, needed: int, wanted: int, lasting: Mapping[str, Sequence[int]]) -> bool:
        """Make room for a part, of which the next steps read some bytes; False if there is none."""
        there = [(key, part) for key, each in self._cached.items() for part in sorted(each.may_go)]
        sizes = {one: self._cached[one[0]].dataset.files[one[1]].size for one in there}
        disk = shutil.disk_usage(self._base)
        used, free = sum(sizes.values()), disk.free - disk.total // _LEFT_FREE
        most = 2**63 if self._most is None else self._most
        if needed > most:
            return False
        going = []
        for one in self._victims(there, wanted >= needed, lasting):
            if used + needed <= most and needed <= free:
                break
            going.append(one)
            used, free = used - sizes[one], free + sizes[one]
        if used + needed > most or needed > free:
            return False
        for key, part in going:
            self._evict(self._cached[key], part)
        return True

    def _victims(
        self, there: list[tuple[str, int]], is_worth: bool, lasting: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, int]]:
        """Copies that may go, those first that are needed last; none of a dataset that another run reads."""
        others = {
            key
            for key, each in self._cached.items()
            if any(reader.run != str(self._run) for reader in live_readers(each.folder))
        }
        mine = [one for one in there if one[0] not in others]
        keeps = {key: set(parts) for key, parts in lasting.items()}
        yield from (one for one in mine if one[1] not in keeps[one[0]])
        if is_worth:
            yield from (
                one for one in mine if one[1] in keeps[one[0]] and not self._cached[one[0]].wanted.get(one[1], 0)
            )

    def _evict(self, cached: _Cached, part: int) -> None:
        cached.dataset.copy_of(part).unlink(missing_ok=True)
        cached.here.discard(part)
        cached.may_go.discard(part)
        storage.add_json_line(cached.folder / EVICTED_FILE, {"file": cached.file(part)})

    def _copy(self, cached: _Cached, part: int) -> None:
        """Copy the tokens of a part; the file gets its name only if they are right."""
        file, target = cached.dataset.files[part], cached.dataset.copy_of(part)
        sums, access = file.block_sums(), cached.dataset.access
        step = max(1, access.request_bytes // BLOCK_BYTES)
        blocks = deque(range(0, -(-file.size // BLOCK_BYTES), step))
        with (
            ThreadPoolExecutor(access.concurrency, thread_name_prefix="node-copier") as pool,
            HashedFile(target) as copy,
        ):
            running: deque[Future[bytes]] = deque()
            while blocks or running:
                while blocks and len(running) < access.concurrency:
                    first = blocks.popleft()
                    end = min(first + step, -(-file.size // BLOCK_BYTES))
                    running.append(pool.submit(read_blocks, file, sums, access, first, end, self._stop))
                copy.write(running.popleft().result())
            if copy.hash != cached.hashes[part]:
                raise ObjectChanged(
                    f"{file.url}: its bytes are not those that were written (other xxh3), though they fit the hashes "
                    f"beside it: both were replaced; {REWRITE}"
                )
            # Before it has its name: a copy that nobody has noted would never give way.
            storage.add_json_line(cached.folder / COPIED_FILE, {"file": cached.file(part)})
            copy.commit()
        cached.here.add(part)
        cached.may_go.add(part)
        with closing(storage.JsonLines(cached.folder / CHECKED_FILE)) as notes:
            notes.write(checked_row(cached.folder, cached.file(part), cached.hashes[part]))

    def _say_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            copied = [each.dataset.files[part].size for each in self._cached.values() for part in each.may_go]
            say(
                Console(),
                f"no room for more copies of datasets in {self._base}: {counted(len(copied), 'part')} "
                f"({size(sum(copied))}) are here, others are read by ranges",
            )


def open_copier(
    config: Config,
    journal: Journal,
    datasets: Mapping[str, RemoteDataset],
    pieces_of: Callable[[int], StepPieces],
    dp_rank: int,
) -> NodeCopier | None:
    """The copier of a run; None where nothing is copied. For the arguments see `NodeCopier`."""
    if not datasets or config.stage.data == "shared":
        return None
    stage, base = config.stage, stage_folder(config)
    return NodeCopier(
        base, config.run.dir, journal, datasets, pieces_of, dp_rank=dp_rank, most=stage.size, ahead=stage.ahead
    )


def parts_with(counts: npt.NDArray[np.int64], documents: tuple[int, int] | None, parts: int) -> npt.NDArray[np.bool_]:
    """The parts that have some of documents [first, end).

    Args:
        counts: documents of each part.
        documents: which; None for those of the first parts.
        parts: number of the first parts: what was appended to a dataset since the run began is behind them.
    """
    if documents is None:
        return np.arange(len(counts)) < parts
    ends = np.cumsum(counts)
    return (counts > 0) & (ends > documents[0]) & (ends - counts < documents[1])
