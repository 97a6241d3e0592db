"""Copies of datasets on a node's own disk: made once, checked while they are made, kept for the next start.

Below `stage.dir`, `pipeline-data-UID/FINGERPRINT` has those parts of a dataset that this user's runs on this node have
needed, and their packs. A file has its final name only if its bytes were those that `parts.bin`, or the index of the
packs, has the hash of. `checked.jsonl` has the size and time that each file had then; a file that has others now, or is
not listed, is read again, and copied again if it is wrong. All of that is good for nothing where others may write, so
the folder belongs to the user alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pipeline.common import process_identity, storage
from pipeline.common.console import Console, say
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import counted, size
from pipeline.common.hashing import CHUNK_BYTES, file_hash
from pipeline.common.retry import retried
from pipeline.config.root import Config
from pipeline.data.datasets.dataset import Dataset, ReadBy
from pipeline.data.datasets.in_threads import in_threads
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.datasets.manifest import read_parts
from pipeline.data.datasets.node_folder import CHECKED_FILE, alone, checked_row
from pipeline.data.datasets.open import stage_folder
from pipeline.data.datasets.packing.files import PACKS, file_hashes, pack_command, packs_folder
from pipeline.data.datasets.validate import file_sizes, part_prefixes, repair
from pipeline.data.loading.node_copier import keep_copies, parts_with
from pipeline.data.order.journal import Journal

_THREADS = 4
_LINE_EVERY_S = 10.0
_ROOM = 2**24
"""Bytes that are left free: for what is written beside the parts, and for blocks that are not full."""


def copy_locally(
    config: Config, datasets: Mapping[str, Dataset], journal: Journal, *, first_step: int = 0
) -> dict[str, Dataset]:
    """The datasets to train on: as they are, or with `stage.data: local` copies on this node.

    Those in a bucket are copied while they are read, by `node_copier`.

    Of the processes of a node that call this at the same time one copies, and the others wait for it.

    Args:
        config: the run.
        datasets: the training split of each source.
        journal: of the run.
        first_step: of this start. Only parts with documents that later steps may draw are copied.

    Raises:
        UserError: a file of a dataset is missing or damaged.
        MachineError: there is too little space, or the folder cannot be used, or others may write there.
        OSError: a disk failed. Nothing half-copied stays.
    """
    if config.stage.data == "shared":
        return dict(datasets)
    base = stage_folder(config)
    segments = journal.segments[journal.segment_number(first_step) :]
    copies: dict[str, _Copy] = {}
    used = set()
    for name, dataset in datasets.items():
        if not dataset.has_files:
            continue
        for segment in segments:
            if name in segment.sources:
                if dataset.fingerprint not in copies:
                    copies[dataset.fingerprint] = _Copy(base, dataset, config.pack_lengths)
                copies[dataset.fingerprint].need(segment.sources[name].documents)
                used.add(name)
    if not all(copy.is_complete() for copy in copies.values()):
        with alone(base, Console()):
            _make(base, list(copies.values()))
    return {
        name: copies[dataset.fingerprint].opened(dataset, config.data.loader.read) if name in used else dataset
        for name, dataset in datasets.items()
    }


class _File(NamedTuple):
    """A file of a part, or of packs."""

    source: str
    target: str
    hash: int
    repair: str
    """Advice for a source that is not as it should be."""


class _Copy:
    """A dataset and its copy.

    Args:
        base: folder of the copies.
        dataset: to copy.
        pack_lengths: sequence lengths whose packs are copied as well.
    """

    def __init__(self, base: Path, dataset: Dataset, pack_lengths: Sequence[int]) -> None:
        self.folder = base / dataset.fingerprint
        self._dataset = dataset
        self._pack_lengths = pack_lengths
        self._parts = read_parts(dataset.folder, dataset.whole)
        self._needed = np.zeros(len(self._parts), bool)

    def need(self, documents: tuple[int, int] | None) -> None:
        """The parts with documents [first, end) are needed; None for all."""
        counts = self._parts["documents"].astype(np.int64)
        self._needed |= parts_with(counts, documents, self._dataset.manifest.parts)

    def missing(self) -> list[_File]:
        """The files that are needed, and not known to be there and right."""
        parts = self._parts[self._needed]
        sources, targets = (part_prefixes(folder, parts) for folder in (self._dataset.folder, self.folder))
        checked = {row.get("file"): row for row in storage.read_json_lines(self.folder / CHECKED_FILE)}
        advice = repair(self._dataset)
        files = [
            _File(f"{source}.{name}", f"{target}.{name}", digest, advice)
            for name in ("bin", "idx", "weight", "mask")
            if name in (parts.dtype.names or ())
            for source, target, digest in zip(sources, targets, parts[name].tolist(), strict=True)
        ]
        return [file for file in files + self._of_packs() if self.row(file) != checked.get(self._name(file))]

    def _of_packs(self) -> list[_File]:
        """The files of packs."""
        found = []
        for length in self._pack_lengths:
            source, target = (packs_folder(folder, length) for folder in (self._dataset.folder, self.folder))
            advice = f"run {pack_command(self._dataset.folder, length)}"
            hashes = file_hashes(self._dataset.folder, self._dataset.newer, length)
            found += [_File(f"{source}/{name}", f"{target}/{name}", hashes[name], advice) for name in hashes]
        return found

    def row(self, file: _File) -> dict[str, Any]:
        """The row of `checked.jsonl` for a file as it is now."""
        return checked_row(self.folder, self._name(file), file.hash)

    def _name(self, file: _File) -> str:
        return file.target[len(str(self.folder)) + 1 :]

    def sweep(self) -> None:
        """Remove what processes that were killed left behind."""
        for pattern in ("", "parts/*/", f"{PACKS}/*/", f"{PACKS}/*/*/*/"):
            for path in self.folder.glob(f"{pattern}.*{storage.TEMPORARY_SUFFIX}"):
                # This process has the lock, which others of this machine have lost if they had it: they are dead, or
                # about to be. Others may see the folder through a file system on which locks mean nothing.
                if f".{process_identity.pid_space()}." in path.name or storage.is_stale(path):
                    path.unlink(missing_ok=True)

    def is_complete(self) -> bool:
        """True if there is nothing to do."""
        return not self.missing()

    def opened(self, dataset: Dataset, read: ReadBy) -> Dataset:
        """The copy of a dataset of this fingerprint. Its manifest and the counts of its parts are in memory already."""
        # What a run brought that reads the same dataset from a bucket is of this one, too.
        keep_copies(self.folder, [f"{prefix}.bin" for prefix in part_prefixes(Path(), self._parts[self._needed])])
        return _LocalCopy(self.folder, dataset, self._parts, self._needed, read)


class _LocalCopy(Dataset):
    """A copy of some parts of a dataset. The others are read where they came from, for the little that is asked there.

    That is where the slice of a phase that is over begins, say; or the steps of it that a run goes back to.
    """

    def __init__(
        self, folder: Path, origin: Dataset, parts: npt.NDArray[Any], copied: npt.NDArray[np.bool_], read: ReadBy
    ) -> None:
        super().__init__(folder, origin.whole, parts, read, len(origin.manifest.generations))
        self._origin = origin
        self._copied = copied

    def prefix(self, index: int) -> Path:
        """Prefix of the files of a part."""
        return super().prefix(index) if self._copied[index] else self._origin.prefix(index)


def _make(base: Path, copies: list[_Copy]) -> None:
    """Bring what is missing. One process at a time is here."""
    for copy in copies:
        copy.sweep()
    if missing := [(copy, file) for copy in copies for file in copy.missing()]:
        _Transfer(base, missing).run()


class _Transfer:
    """Files that are brought, several at a time.

    Raises:
        UserError: the source of one is missing.
    """

    def __init__(self, base: Path, missing: list[tuple[_Copy, _File]]) -> None:
        self._base = base
        self._missing = missing
        self._sizes: list[int] = file_sizes([file.source for _, file in missing]).tolist()
        self._stop = threading.Event()
        for (_, file), length in zip(missing, self._sizes, strict=True):
            if length < 0:
                raise UserError(f"{file.source} is missing; {file.repair}")

    def run(self) -> None:
        """Bring them, and note that they are right."""
        if self._lacking() + _ROOM > shutil.disk_usage(self._base).free:
            raise self._no_room()
        total, console = sum(self._sizes), Console()
        say(console, f"copying {counted(len(self._missing), 'file')} of datasets, {size(total)}, to {self._base}")
        with ExitStack() as stack:
            self._advance = stack.enter_context(_shown(console, total))
            try:
                for folder in {os.path.dirname(file.target) for _, file in self._missing}:
                    storage.make_below(self._base, Path(folder))
                notes = {
                    copy: stack.enter_context(closing(storage.JsonLines(copy.folder / CHECKED_FILE)))
                    for copy in dict(self._missing)
                }
                for copy, file in in_threads(self._bring, self._missing, _THREADS, "local-copy", self._stop.set):
                    notes[copy].write(copy.row(file))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._no_room() from None
                raise

    def _bring(self, one: tuple[_Copy, _File]) -> None:
        """Make a file right; it is kept if it is."""
        file = one[1]
        target = Path(file.target)
        if target.exists() and file_hash(target) == file.hash:
            self._advance(target.stat().st_size)
        else:
            retried(lambda: self._copy(file), Path(file.source), f"copying it to {target}")

    def _copy(self, file: _File) -> None:
        """Copy a file and check its hash on the way."""
        with storage.open_regular(Path(file.source)) as source, HashedFile(Path(file.target)) as copy:
            while chunk := source.read(CHUNK_BYTES):
                if self._stop.is_set():
                    return
                copy.write(chunk)
                self._advance(len(chunk))
            if copy.hash != file.hash:
                raise UserError(
                    f"{file.source}: its bytes differ from those that were written (other xxh3), so it was not copied; "
                    f"`pipeline data verify` shows what else is damaged; {file.repair}"
                )
            copy.commit()

    def _lacking(self) -> int:
        """Bytes of the files that are not there yet."""
        pairs = zip(self._missing, self._sizes, strict=True)
        return sum(length for (_, file), length in pairs if not os.path.exists(file.target))

    def _no_room(self) -> MachineError:
        """The disk cannot take them."""
        own = {copy.folder for copy, _ in self._missing}
        others = [path for path in sorted(self._base.iterdir()) if path.is_dir() and path not in own]
        remove = ""
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            remove = f"remove copies of other datasets that no run needs ({others[0]}{more}), "
        return MachineError(
            f"stage.dir: {self._base} has {size(shutil.disk_usage(self._base).free)} free, and the parts that the run "
            f"reads need {size(self._lacking())} more; {remove}free some space, set stage.dir to a folder on a larger "
            "disk of the node, or read the datasets where they are with stage.data: shared"
        )


@contextmanager
def _shown(console: Console, total: int) -> Iterator[Callable[[int], object]]:
    """Progress: a bar on a terminal, some lines elsewhere. Yields a function that advances it by bytes."""
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("copying"), *columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, began = 0, time.monotonic()
    printed, lock = began, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done, printed
        with lock:
            done += count
            now = time.monotonic()
            if now - printed > _LINE_EVERY_S:
                printed = now
                say(console, f"copied {size(done)} of {size(total)}, {size(done / (now - began))}/s")

    yield advance
