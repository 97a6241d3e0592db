"""One committed checkpoint: what it consists of, what is wrong with it, and what it descends from."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common import storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import file_hash
from pipeline.common.run_files import CHECKPOINT_STATE
from pipeline.config.checkpoint import CheckpointConfig

ABANDONED = "abandoned"
"""Folder beside checkpoints and exports, for those that a run has gone back from."""
COMMIT = "COMMIT"
VALIDATION_LOSSES = "validation_losses"
"""In state.json of runs that keep the best: the losses of the sets that were scored at this step, by name; "" is the
split of `train.validation`."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors that reading the state or the list of files of a damaged checkpoint may raise."""


@contextmanager
def damage_named(checkpoint: Checkpoint) -> Iterator[None]:
    """A context in which errors of a damaged or forged state become a message that names the checkpoint.

    Raises:
        UserError: it is damaged.
    """
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        problems = checkpoint.problems(full=False)
        reason = "; ".join(problems) if problems else f"{type(error).__name__}: {storage.shown(str(error))}"
        raise UserError(f"checkpoint {checkpoint.path} is damaged or forged: {reason}") from error


_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}

PATIENCE_S = 60.0
"""Seconds that a rank waits for files of another machine: network file systems cache which names there are."""

Files = dict[str, tuple[int, str]]
"""File name -> (bytes, xxh3 in hexadecimal)."""


def place_in_abandoned(path: Path) -> Path:
    """A free path in `abandoned/`, which is made beside a folder that a run goes back from, to move it to."""
    folder, number = path.with_name(ABANDONED), 1
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    while target.exists():
        number += 1
        target = folder / f"{path.name}.{number}"
    return target


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder, `step-00001000`; None for any other name."""
    number = name.removeprefix("step-")
    return int(number) if name.startswith("step-") and number.isdecimal() else None


@dataclass(frozen=True)
class Parent:
    """The checkpoint that another one descends from, as it was known when that was committed."""

    name: str
    step: int | None = None
    fingerprint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields of state.json."""
        return {"step": self.step, "name": self.name, "fingerprint": self.fingerprint}


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Step, journal, fingerprints, config, versions, layout, parent and attempt."""
        return dict(storage.get_json(self.path / CHECKPOINT_STATE))

    @property
    def fingerprint(self) -> str:
        """Hash of `COMMIT`, and so of everything in the checkpoint."""
        return xxhash.xxh3_64_hexdigest(storage.read_bytes(self.path / COMMIT, storage.MAX_JSON_BYTES))

    def parent(self) -> Parent | None:
        """The checkpoint that it descends from; None for the first one of a run.

        Raises:
            UNREADABLE: its state is damaged, or that of another step.
        """
        if self._commit()["step"] != self.step:
            raise ValueError(f"{self.path / COMMIT} is of another step")
        if record_of(self.path / CHECKPOINT_STATE) != self.files()[CHECKPOINT_STATE]:
            raise ValueError(f"{self.path / CHECKPOINT_STATE} has changed since it was written")
        value = self.state()["parent"]
        if value is None:
            return None
        if isinstance(value, str):  # as it was written before steps and fingerprints came with it
            return Parent(value, step_of(value))
        return Parent(str(value["name"]), value["step"], value["fingerprint"])

    def files(self) -> Files:
        """The files of the checkpoint, besides `COMMIT` itself.

        Raises:
            UNREADABLE: `COMMIT` is damaged.
        """
        listed, file = self._commit()["files"].items(), self.path / COMMIT
        files = {storage.plain_name(name, file): (int(size), str(digest)) for name, (size, digest) in listed}
        if CHECKPOINT_STATE not in files:
            raise ValueError(f"it does not list {CHECKPOINT_STATE}")
        return files

    @property
    def size(self) -> int:
        """Bytes of all files but `COMMIT`.

        Raises:
            UNREADABLE: `COMMIT` is damaged.
        """
        return sum(size for size, _ in self.files().values())

    @property
    def time(self) -> float:
        """The time of the commit, in seconds since 1970."""
        try:
            return float(self._commit()["time"])
        except UNREADABLE:
            return self.path.stat().st_mtime

    def _commit(self) -> Any:
        return storage.get_json(self.path / COMMIT)

    def problems(self, *, full: bool = True, advance: Callable[[int], None] = lambda size: None) -> list[str]:
        """Problems of the checkpoint, each with the file's name; empty if it can be trusted.

        Args:
            full: read every file and compare its hash; otherwise only existence and size.
            advance: gets the bytes that have been read, piece by piece.
        """
        try:
            step, files = self._commit()["step"], self.files()
        except FileNotFoundError:
            return [f"{self.path / COMMIT} is missing"]
        except UNREADABLE as error:
            return [f"{self.path / COMMIT} is damaged: {error}"]
        if step != self.step:
            return [f"{self.path / COMMIT} is of step {step}: the folder is a copy of another one, or was renamed"]
        found = []
        for name, (size, digest) in files.items():
            path = self.path / name
            try:
                status = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                found.append(f"{path} is missing")
                continue
            if not stat.S_ISREG(status.st_mode):
                found.append(
                    f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'a special file')}, not a regular file"
                )
            elif status.st_size != size:
                found.append(f"{path} has {status.st_size:,} bytes instead of {size:,}")
            elif full and (problem := changed(path, digest, advance)):
                found.append(problem)
        return found


def changed(
    path: Path,
    digest: str,
    advance: Callable[[int], None] = lambda size: None,
    *,
    size: int | None = None,
    symlinks: bool = False,
) -> str | None:
    """The problem of the content of a file, in words; None if its hash is `digest`.

    Args:
        path: of the file.
        digest: that it should have.
        size: bytes that it should have: of a file with others, which may be terabytes of a sparse one, none is read.
        advance: as for `file_hash`.
        symlinks: whether it may be a symbolic link. In a checkpoint none is expected.

    Raises:
        OSError: it cannot be read, and that need not be the disk's fault.
    """
    try:
        if size is not None and (found_size := path.stat().st_size) != size:
            return f"{path} has {found_size:,} bytes instead of {size:,}"
        now = f"{file_hash(path, advance, symlinks=symlinks):016x}"
    except UserError as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{path} cannot be read: {error.strerror}"
    return None if now == digest else f"{path} has changed since it was written (xxh3 differs)"


def validation_losses(checkpoints: Iterable[Checkpoint], config: CheckpointConfig) -> dict[int, float | None]:
    """Loss by step of the set that decides which checkpoints are the best, as far as it was measured at their steps."""
    found = dict[int, float | None]()
    for checkpoint in checkpoints if config.keep_best is not None else ():
        with suppress(*UNREADABLE):
            found[checkpoint.step] = checkpoint.state().get(VALIDATION_LOSSES, {}).get(config.best_of or "")
    return found


def record_of(path: Path) -> tuple[int, str]:
    """Size and hash of a file as it is on disk, for `Files`."""
    return path.lstat().st_size, f"{file_hash(path, symlinks=False):016x}"


def wait_until_visible(path: Path) -> None:
    """Return as soon as a file or folder that another machine has made is seen from here.

    Raises:
        MachineError: it is not within `PATIENCE_S`.
    """
    until, pause = time.monotonic() + PATIENCE_S, 0.01
    while True:
        try:
            os.listdir(path.parent)  # which makes NFS ask its server again
            os.stat(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            if time.monotonic() > until:
                raise MachineError(
                    f"rank 0 sees {path}, but {socket.gethostname()} does not see it after {PATIENCE_S:.0f} s; run.dir "
                    "must be the same folder on all machines, on a file system that they share"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
