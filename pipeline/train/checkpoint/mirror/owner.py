"""The owner of a mirror: the one start of the one run that writes to it.

An object names it. A start takes it over from an earlier start in the same run folder, which has the lock of that; from
one in another folder only when that has released it, or has not renewed it for a while. Who has lost it finds out
before the next commit.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from pipeline.common import process_identity, storage
from pipeline.common.errors import UserError
from pipeline.common.format import duration
from pipeline.common.objects.stored import StoredObject
from pipeline.common.objects.writing import create_object, read_small, replace_object
from pipeline.train.checkpoint.mirror.bucket import Mirror, OwnerLost
from pipeline.train.checkpoint.mirror.commits import FORMAT

RENEW_S = 60.0
"""Seconds between two signs of life of an owner."""
STALE_S = 600.0
"""Age of the last sign of life from which a start in another run folder may take a mirror over."""


class OwnedByOther(UserError):
    """A mirror that another run, or another run folder, writes to."""


@dataclass(frozen=True)
class Owner:
    """The content of the object."""

    run: str
    """Id of the run."""
    folder: str
    """Id of the run folder."""
    host: str
    generation: int
    token: str
    """Random number of this start."""
    time: float
    """Time of the last sign of life, in seconds since 1970."""
    released: bool = False
    """The run has ended, or was stopped."""

    def to_bytes(self) -> bytes:
        """The content of the object."""
        return orjson.dumps({"format": FORMAT, **asdict(self)})


def _parse(data: bytes, name: str) -> Owner:
    try:
        values: dict[str, Any] = orjson.loads(data)
        if values["format"] != FORMAT:
            raise ValueError("it has another format")
        found = Owner(**{key: values[key] for key in Owner.__dataclass_fields__})
        float(found.time)
        if type(found.generation) is not int or not all(
            isinstance(text, str) for text in (found.run, found.folder, found.host, found.token)
        ):
            raise ValueError("a value in it is none")
    except (ValueError, LookupError, TypeError) as error:
        raise OwnedByOther(
            f"{name} is not of a mirror of checkpoints ({storage.shown(str(error))}); name another folder in "
            "train.checkpoint.mirror.to"
        ) from None
    return found


def read_owner(mirror: Mirror) -> tuple[Owner, StoredObject] | None:
    """The owner of a mirror, and the version of the object; None if it has none.

    Raises:
        UserError: it cannot be read.
    """
    found = read_small(mirror.owner, mirror.access)
    return None if found is None else (_parse(found[0], str(mirror.owner)), found[1])


def refuse_other(mirror: Mirror, found: Owner | None, run: str, folder: str) -> None:
    """Refuse a mirror that another run, or another run folder, writes to.

    Args:
        mirror: it.
        found: its owner.
        run: id of this run.
        folder: id of this run folder.

    Raises:
        OwnedByOther: it is another's.
    """
    if found is None or (found.run == run and (found.folder == folder or found.released)):
        return
    shown, age = storage.shown(ascii(found.host)), max(0.0, time.time() - found.time)
    if found.run != run and mirror.commits():
        raise OwnedByOther(
            f"train.checkpoint.mirror.to: {mirror.url} has the checkpoints of another run (of host {shown}); name "
            f"another folder. To continue that run in a new run folder: `pipeline train RUN.yaml --from-mirror "
            f"{mirror.url}`"
        )
    if not found.released and age < STALE_S:
        who = "the same run writes" if found.run == run else "another run writes"
        raise OwnedByOther(
            f"train.checkpoint.mirror.to: {who} to {mirror.url} from another run folder, on host {shown} "
            f"({duration(age)} ago); stop it. If it is gone, remove {mirror.owner}, or start again in "
            f"{duration(STALE_S - age)}"
        )


class MirrorLease:
    """The ownership of a mirror by this start.

    Args:
        mirror: it.
        run: id of the run.
        folder: id of the run folder.
    """

    def __init__(self, mirror: Mirror, run: str, folder: str) -> None:
        self._mirror = mirror
        self._mine = Owner(run, folder, process_identity.node_name(), 0, secrets.token_hex(4), 0.0)
        self._version: str | None = None
        self._renewed = 0.0
        self._lock = threading.Lock()

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._mine.run

    @property
    def generation(self) -> int:
        """Number of this start, once it is taken."""
        return self._mine.generation

    @property
    def token(self) -> str:
        """Random number of this start."""
        return self._mine.token

    @property
    def is_taken(self) -> bool:
        """True if it was taken."""
        return self._version is not None

    def take(self) -> None:
        """Take the mirror, or over from an earlier start.

        Raises:
            OwnedByOther: it is another's.
            UserError: it cannot be written.
        """
        with self._lock:
            self._take()

    def _take(self) -> None:
        while True:
            before = read_owner(self._mirror)
            owner = before[0] if before is not None else None
            refuse_other(self._mirror, owner, self._mine.run, self._mine.folder)
            if before is None:
                self._refuse_commits_of_others()
            newest = owner.generation if owner is not None else self._mine.generation
            self._mine = replace(self._mine, generation=newest + 1, time=time.time(), released=False)
            data = self._mine.to_bytes()
            if before is not None:
                done = replace_object(self._mirror.owner, data, self._mirror.access, before[1].version)
            elif create_object(self._mirror.owner, data, self._mirror.access) == data:
                found = read_owner(self._mirror)
                done = found[1] if found is not None and found[0] == self._mine else None
            else:
                done = None
            if done is not None:
                self._version, self._renewed = done.version, time.monotonic()
                return

    def _refuse_commits_of_others(self) -> None:
        for commit in self._mirror.commits():
            if commit.run != self._mine.run:
                other = replace(self._mine, run=commit.run, host="unknown")
                refuse_other(self._mirror, other, self._mine.run, self._mine.folder)
            self._mine = replace(self._mine, generation=max(self._mine.generation, commit.generation))

    def check(self) -> None:
        """Look whether it is still this start's.

        Raises:
            OwnerLost: it is not.
            UserError: it cannot be read.
        """
        found = read_owner(self._mirror)
        if found is None or found[0].token != self._mine.token or found[0].generation != self._mine.generation:
            raise OwnerLost(f"{self._mirror.url} has another owner by now: another start of the run writes to it")

    def renew(self, *, released: bool = False) -> None:
        """Give a sign of life, if the last one is a while ago; or let go of it.

        Raises:
            OwnerLost: it is another's by now.
            UserError: it cannot be written.
        """
        with self._lock:
            self._renew(released)

    def _renew(self, released: bool) -> None:
        if (
            self._version is None
            or self._mine.released
            or (not released and time.monotonic() - self._renewed < RENEW_S)
        ):
            return
        self._mine = replace(self._mine, time=time.time(), released=released)
        done = replace_object(self._mirror.owner, self._mine.to_bytes(), self._mirror.access, self._version)
        if done is None:
            raise OwnerLost(f"{self._mirror.url} has another owner by now: another start of the run writes to it")
        self._version, self._renewed = done.version, time.monotonic()
