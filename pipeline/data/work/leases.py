"""Leases: who works on what, so that processes and machines with one shared folder do not do the same twice.

A lease is a small file, `leases/00000/00000012.json`, that names the process that has the unit. Leases only save work.
Results are right without them, because a result that is committed twice is the same bytes. So where a rare race and a
simple rule meet, the simple rule stays: in the worst case two processes hold one lease until the next beat.

Clocks of machines are never compared. A process of this machine is looked up. A lease of another machine, or of a
process that is stopped (SIGSTOP), is stale when this process has watched it for a while without a change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from pipeline.common import links, process_identity, storage
from pipeline.data.datasets.indexed import numbered

LEASES = "leases"
HEARTBEAT_S = 10.0
"""A lease that is held is written anew this often at most."""
PATIENCE_S = 120.0
"""A lease of another machine, or of a stopped process, that does not change for so long is stale."""
_POLL_S = 0.5
_ATTEMPTS = 20
_MAX_BYTES = 4096
"""A longer file is not a lease."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL)
_BEGAN = {"at": time.time()}
_Whole = Annotated[int, Field(ge=0, lt=2**63)]
_Time = Annotated[float, Field(allow_inf_nan=False)]


os.register_at_fork(after_in_child=lambda: _BEGAN.update(at=time.time()))


@dataclass(frozen=True)
class Holder:
    """The process that has a lease. A damaged lease has no name: `pid` is 0."""

    host: str
    pid: int
    since: float
    """Seconds since 1970, by that machine's clock."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown process (it has not written its name)"


@dataclass(frozen=True)
class LeaseRecord:
    """Content of a lease file.

    Attributes:
        started: start time of the process in clock ticks after boot, since pids are used again; None if not known.
        boot: id of the running kernel, which tells machines apart better than their names; "" if not known.
        namespace: of pids; containers of one machine do not see each other's processes.
        nonce: of this lease; nobody else has the same.
        began: when the process loaded this module, or was forked.
        since: when the lease was taken.
        beat: how often the file was written anew.
        done: bytes of the unit's files that are done.
    """

    host: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: _Whole | None
    boot: str
    namespace: str
    nonce: str
    began: _Time
    since: _Time
    beat: _Whole
    done: _Whole

    @property
    def holder(self) -> Holder:
        """The process."""
        return Holder(self.host, self.pid, self.since)

    def is_running(self) -> bool | None:
        """Tell whether the process is there; None if this cannot be known from here, or if it is stopped."""
        if self.is_stopped():
            return None
        if not self._is_here():
            return None
        found = process_identity.process(self.pid)
        if found is not None and self.started is not None:
            return process_identity.is_alive(found) and found[1] == self.started
        # It may be there and another user's, whose start time may be hidden.
        return None if process_identity.runs(self.pid) else False

    def is_stopped(self) -> bool:
        """Tell whether it is a process of this machine that is stopped: it is there and does nothing until SIGCONT."""
        found = process_identity.process(self.pid) if self._is_here() else None
        return found is not None and found[0] in "Tt" and self.started in (None, found[1])

    def _is_here(self) -> bool:
        here = (process_identity.boot() or socket.gethostname(), process_identity.namespace())
        return (self.boot or self.host, self.namespace) == here


_RECORD = TypeAdapter(LeaseRecord)


class LeaseWatch:
    """Remembers since when leases of other machines, and of stopped processes, have not changed.

    Keep one as long as the process works.

    Args:
        patience: seconds without a change after which such a lease is stale.
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, patience: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._seen: dict[Path, tuple[bytes, float]] = {}

    def is_stale(self, path: Path, data: bytes) -> bool:
        """Tell whether nobody holds the lease with this content any more."""
        record = parse(data)
        running = None if record is None else record.is_running()
        if running is not None:
            self.forget(path)
            return not running
        now = self._clock()
        before = self._seen.get(path)
        if before is None or before[0] != data:
            self._seen[path] = (data, now)
            return False
        return now - before[1] >= self._patience

    def forget(self, path: Path) -> None:
        """The lease is not there any more."""
        self._seen.pop(path, None)


class Lease:
    """A lease that this process has. As a context manager it is released at the end.

    Attributes:
        lost: another process took it over, or somebody removed it. The work may go on; it is done twice at worst.
    """

    def __init__(self, path: Path, record: LeaseRecord) -> None:
        self.path = path
        self.lost = False
        self._record = record
        self._written = time.monotonic()
        self._released = False

    def beat(self, done_bytes: int) -> None:
        """Show that this process is alive and how far it is. Cheap; never raises for what is wrong with the disk."""
        now = time.monotonic()
        if self.lost or self._released or now - self._written < HEARTBEAT_S:
            return
        self._written = now
        with contextlib.suppress(OSError):  # a full disk: others think we are gone, and do our unit too
            if not self._is_ours():
                self.lost = True
                return
            self._record = replace(self._record, beat=self._record.beat + 1, done=done_bytes)
            _write(self.path, self._record)

    def counting(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        """A progress function that also beats with the bytes done so far."""
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            progress(amount)
            self.beat(done)

        return advance

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Beat from a thread, for work that cannot call `beat` itself."""
        end = threading.Event()

        def run() -> None:
            while not end.wait(HEARTBEAT_S):
                self.beat(self._record.done)

        thread = threading.Thread(target=run, daemon=True, name="lease")
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def release(self) -> None:
        """Give it back; somebody else's lease on the same work is left alone."""
        if self._released:
            return
        self._released = True
        with contextlib.suppress(OSError):  # what stays is stale as soon as this process ends
            if self._is_ours():
                links.remove(self.path)

    def _is_ours(self) -> bool:
        record = parse(_read(self.path))
        return record is not None and record.nonce == self._record.nonce

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lease_path(folder: Path, unit: int | str) -> Path:
    """The file of a lease.

    Args:
        folder: of a source, or of the tokenizer.
        unit: number of a unit, or the name of other work that one process at a time should do.
    """
    if isinstance(unit, int):
        return numbered(folder / LEASES, unit).with_suffix(".json")
    assert re.fullmatch(r"[A-Za-z][\w-]*", unit), unit
    return folder / LEASES / f"{unit}.json"


def take(folder: Path, unit: int | str, watch: LeaseWatch) -> Lease | Holder:
    """Take the lease on a unit or on other work, also in place of a stale one.

    Args:
        folder: of the source.
        unit: number or name.
        watch: of this process.

    Returns:
        The lease; or who has it.

    Raises:
        OSError: the folder cannot be written, say.
    """
    path = lease_path(folder, unit)
    holder = Holder("", 0, 0.0)
    for _ in range(_ATTEMPTS):
        data = _read(path)
        if data is None:
            record = _new_record()
            if _create(folder, path, record):
                watch.forget(path)
                return Lease(path, record)
            continue  # somebody was faster
        found = parse(data)
        holder = holder if found is None else found.holder
        if not watch.is_stale(path, data):
            return holder
        _remove(path, data)
        watch.forget(path)
    return holder  # others are always faster


def take_when_free(folder: Path, unit: int | str, watch: LeaseWatch, notify: Callable[[Holder], None]) -> Lease:
    """Wait for a lease.

    Args:
        folder: of the source.
        unit: number or name.
        watch: of this process.
        notify: called once with the one that is waited for, if there is one.
    """
    is_notified = False
    while isinstance(result := take(folder, unit, watch), Holder):
        if not is_notified:
            is_notified = True
            notify(result)
        time.sleep(_POLL_S)
    return result


def sweep(folder: Path) -> None:
    """Remove the leases below a source's folder whose processes are known to be gone."""
    for path in _lease_files(folder):
        with contextlib.suppress(OSError):  # on a disk that cannot be written they stay
            data = _read(path)
            record = parse(data)
            if data is not None and record is not None and record.is_running() is False:
                _remove(path, data)


def read_leases(folder: Path) -> Iterator[tuple[int | str, LeaseRecord, float]]:
    """All leases of a source's folder: number or name, content, time of the last beat by the file system's clock.

    Damaged ones are skipped.
    """
    for path in _lease_files(folder):
        try:
            record, time_s = parse(_read(path)), path.stat().st_mtime
        except OSError:
            continue  # released just now
        if record is not None:
            yield int(path.stem) if path.stem.isdecimal() else path.stem, record, time_s


def parse(data: bytes | None) -> LeaseRecord | None:
    """The content of a lease file; None if it is none, or there is none."""
    try:
        return _RECORD.validate_json(data or b"", strict=True)
    except ValidationError:
        return None


def _lease_files(folder: Path) -> list[Path]:
    found = [*folder.glob(f"{LEASES}/*.json"), *folder.glob(f"{LEASES}/*/*.json")]
    return sorted(path for path in found if not path.name.startswith("."))


def _new_record() -> LeaseRecord:
    return LeaseRecord(
        **process_identity.identity(),
        nonce=secrets.token_hex(8),
        began=_BEGAN["at"],
        since=time.time(),
        beat=0,
        done=0,
    )


def _create(folder: Path, path: Path, record: LeaseRecord) -> bool:
    """Make the file of a lease, by the folder that is leased; False if there is one."""
    data = orjson.dumps(asdict(record))
    # On network file systems a link is what either comes into being as a whole or finds that the name is taken.
    tmp = storage.temporary(path)
    try:
        try:
            storage.write_new(tmp, data)
        except FileNotFoundError:
            storage.make_below(folder, path.parent)
            storage.write_new(tmp, data)
        os.link(tmp, path)
        return True
    except FileExistsError:
        # The answer to a first try may be lost on the way, and the second one then finds the result of the first.
        return _read(path) == data
    except OSError as error:
        if error.errno not in _NO_LINKS:
            error.filename = error.filename or str(path)  # a failed write does not say where
            raise
        return _create_exclusively(path, data)
    finally:
        links.remove(tmp, missing_ok=True)


def _create_exclusively(path: Path, data: bytes) -> bool:
    """For file systems without links: for a moment the file is there and empty."""
    try:
        storage.write_new(path, data)
    except FileExistsError:
        return False
    return True


def _write(path: Path, record: LeaseRecord) -> None:
    """Replace the file of a lease. It is not flushed: after a crash of the machine nobody holds it anyway."""
    tmp = storage.temporary(path)
    try:
        storage.write_new(tmp, orjson.dumps(asdict(record)))
        links.replace(tmp, path)
    finally:
        links.remove(tmp, missing_ok=True)


def _read(path: Path) -> bytes | None:
    """The beginning of a file; None if there is none."""
    try:
        with storage.open_regular(path) as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


def _remove(path: Path, stale: bytes) -> None:
    """Remove a lease file if it still has this content.

    Only one process can rename a file. What it then has in hand may be a lease that another one took in between, and
    that goes back.
    """
    aside = storage.temporary(path)
    try:
        links.replace(path, aside)
    except FileNotFoundError:
        return  # somebody else was faster
    try:
        if _read(aside) != stale:
            with contextlib.suppress(FileExistsError):  # a third one has it by now; the owner sees that when it beats
                _put_back(aside, path)
    finally:
        links.remove(aside, missing_ok=True)


def _put_back(aside: Path, path: Path) -> None:
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        links.replace(aside, path)


@dataclass(frozen=True)
class WorkerProgress:
    """A process that has a lease.

    Attributes:
        host: its machine.
        pid: its number there.
        what: unit, or the name of other work.
        began: when it began with its first unit, by its clock.
        since: when it took this lease, by its clock.
        beat_s: seconds since its last heartbeat.
        done: bytes of the unit's files that it has done.
        state: `works`, `silent` (on another machine, for long), `stopped` (by SIGSTOP) or `gone`.
    """

    host: str
    pid: int
    what: int | str
    began: float
    since: float
    beat_s: float
    done: int
    state: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read_workers(folder: Path, now: float) -> list[WorkerProgress]:
    """Processes that have a lease in the folder of a source or of the tokenizer."""
    workers = []
    for what, record, beat in read_leases(folder):
        running, age = record.is_running(), max(now - beat, 0.0)
        alive = age < PATIENCE_S if running is None else running
        state = "works" if alive else "silent" if running is None else "gone"
        if record.is_stopped():
            state = "stopped"
        workers.append(
            WorkerProgress(record.host, record.pid, what, record.began, record.since, age, record.done, state),
        )
    return workers
