"""Ranges of the files of a dataset in a bucket: asked for steps ahead, and checked block by block."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.content import REWRITE, read_content
from pipeline.common.objects.failures import ObjectChanged
from pipeline.common.objects.stream import reading_pool
from pipeline.common.objects.urls import ObjectUrl
from pipeline.data.datasets.remote.sums import BLOCK_BYTES, SUFFIX, BlockSums

REQUESTS = 16
"""Requests of a training process that are in flight at a time, at least."""
_GAP = 2
"""Blocks between two that are wanted which are fetched along: a request takes longer than they do."""
_ON = 16
"""Blocks of a request that continues where nobody asked ahead, as held-out texts are read."""
_KEPT_BYTES = 2**26
"""Bytes that are kept of what nobody asked for ahead, for the next look at them."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a dataset in a bucket, and the file on this node that has the hashes of its blocks.

    Attributes:
        url: of the object.
        size: of the file, in bytes.
        sums: with the hashes.
    """

    url: ObjectUrl
    size: int
    sums: Path

    @classmethod
    def of(cls, url: ObjectUrl, size: int, copy: Path) -> RemoteFile:
        """A file, by the path that its copy on this node has."""
        return cls(url, size, copy.with_name(copy.name + SUFFIX))

    def block_sums(self) -> BlockSums:
        """The hashes of its blocks.

        Raises:
            UserError: the file with them is missing or damaged.
        """
        try:
            return BlockSums(storage.read_bytes(self.sums), self.size)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(f"{self.sums} is damaged ({error}); remove it, and it is fetched again") from None


def read_blocks(
    file: RemoteFile,
    sums: BlockSums,
    access: RemoteAccess,
    first: int,
    end: int,
    abandoned: threading.Event | None = None,
) -> bytes:
    """Blocks [first, end) of a file, right ones. Wrong bytes are asked for once more.

    Raises:
        ObjectChanged: the object has other bytes than were written.
        UserError: it cannot be read.
    """
    start, stop = first * BLOCK_BYTES, min(end * BLOCK_BYTES, file.size)
    wrong: int | None = None
    for _ in range(2):
        data = read_content(file.url, access, start, stop, abandoned)
        wrong = sums.first_wrong(first, data)
        if wrong is None:
            return data
    raise ObjectChanged(
        f"{file.url}: the bytes from {(wrong or 0) * BLOCK_BYTES:,} on are not those that were written, in two "
        f"answers: the object was replaced, or is damaged; {REWRITE}"
    )


@dataclass(eq=False)
class _Run:
    """Neighbouring blocks of a file that were asked for together."""

    part: int
    first: int
    end: int
    data: Future[bytes] = field(default_factory=Future)
    last_step: int = -1
    """Last step that asked for it."""

    @property
    def keys(self) -> list[tuple[int, int]]:
        return [(self.part, block) for block in range(self.first, self.end)]


class RangeReader:
    """Reads parts of a dataset by ranges. Safe to use from several threads, not after a fork.

    Args:
        files: the `.bin` of each part.
        access: settings.
    """

    def __init__(self, files: list[RemoteFile], access: RemoteAccess) -> None:
        self._files, self._access = files, access
        self._sums: dict[int, BlockSums] = {}
        self._lock = threading.Lock()
        self._blocks: dict[tuple[int, int], _Run] = {}
        self._kept: OrderedDict[_Run, int] = OrderedDict()
        """Runs that nobody asked for ahead, least recently used first, with their bytes."""
        self._abandoned = threading.Event()
        self._most = max(1, access.request_bytes // BLOCK_BYTES)

    def want(self, ranges: Iterable[tuple[int, int, int]], step: int) -> None:
        """Ask for bytes that a step will read.

        Args:
            ranges: number of the part, first byte and the one behind the last, of each.
            step: that reads them.
        """
        blocks = sorted(
            {
                (part, block)
                for part, start, end in ranges
                for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
            }
        )
        with self._lock:
            missing = []
            for key in blocks:
                if (run := self._blocks.get(key)) is None:
                    missing.append(key)
                else:
                    run.last_step = max(run.last_step, step)
            runs = self._runs(missing)
            for run in runs:
                run.last_step = step
                self._blocks |= dict.fromkeys(run.keys, run)
        self._fetch(runs)

    def _runs(self, blocks: list[tuple[int, int]]) -> list[_Run]:
        """The requests for blocks, which are in order."""
        runs: list[_Run] = []
        for part, block in blocks:
            last = runs[-1] if runs else None
            if last and last.part == part and block - last.end <= _GAP and block - last.first < self._most:
                last.end = block + 1
            else:
                runs.append(_Run(part, block, block + 1))
        return runs

    def _fetch(self, runs: list[_Run]) -> None:
        pool = reading_pool(max(REQUESTS, self._access.concurrency))
        abandoned = self._abandoned
        for run in runs:

            def fetch(run: _Run = run) -> None:
                try:
                    file, sums = self._files[run.part], self._sums_of(run.part)
                    run.data.set_result(read_blocks(file, sums, self._access, run.first, run.end, abandoned))
                except BaseException as error:
                    run.data.set_exception(error)

            pool.submit(fetch)

    def _sums_of(self, part: int) -> BlockSums:
        if part not in self._sums:
            self._sums[part] = self._files[part].block_sums()
        return self._sums[part]

    def forget_before(self, step: int) -> None:
        """Forget what only earlier steps asked for."""
        with self._lock:
            self._remove({run for run in self._blocks.values() if run.last_step < step and run not in self._kept})

    def give_up(self) -> None:
        """Forget everything, and what is on its way."""
        with self._lock:
            self._abandoned.set()
            self._abandoned = threading.Event()
            self._remove(set(self._blocks.values()))

    def _remove(self, runs: set[_Run]) -> None:
        for run in runs:
            self._kept.pop(run, None)
            for key in run.keys:
                if self._blocks.get(key) is run:
                    del self._blocks[key]

    def read(self, part: int, start: int, end: int) -> memoryview:
        """Bytes [start, end) of a part, which lie in it.

        Raises:
            ObjectChanged: the object has other bytes than were written.
            UserError: it cannot be read.
        """
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        keys = [(part, block) for block in range(first, last)]
        with self._lock:
            new = self._runs([key for key in keys if key not in self._blocks])
            if new and (part, new[-1].first - 1) in self._blocks:
                blocks = -(-self._files[part].size // BLOCK_BYTES)
                new[-1].end = max(new[-1].end, min(new[-1].first + min(_ON, self._most), blocks))
            for run in new:
                self._blocks |= dict.fromkeys(run.keys, run)
                self._kept[run] = (run.end - run.first) * BLOCK_BYTES
            runs = list(dict.fromkeys(self._blocks[key] for key in keys))
            for run in runs:
                if run in self._kept:
                    self._kept.move_to_end(run)
            self._shrink()
        self._fetch(new)
        found = []
        for run in runs:
            try:
                data = run.data.result()
            except BaseException:
                with self._lock:
                    self._remove({run})  # the next look asks anew
                raise
            base = run.first * BLOCK_BYTES
            low, high = max(start, base), min(end, run.end * BLOCK_BYTES)
            if low < high:
                found.append(memoryview(data)[low - base : high - base])
                start = high
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def _shrink(self) -> None:
        while len(self._kept) > 1 and sum(self._kept.values()) > _KEPT_BYTES:
            self._remove({next(iter(self._kept))})
