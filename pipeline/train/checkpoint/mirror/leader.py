"""The thread of rank 0 that mirrors checkpoints: which one, until when, and when it counts."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.objects.listing import list_objects
from pipeline.common.objects.retries import Abandoned
from pipeline.common.objects.writing import FileChanged
from pipeline.common.run_files import RunFiles
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.train.checkpoint.committed import Files
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror.board import Board, Task
from pipeline.train.checkpoint.mirror.bucket import Mirror, OwnerLost, sizes_of
from pipeline.train.checkpoint.mirror.commits import MirrorCommit, upload_name
from pipeline.train.checkpoint.mirror.owner import RENEW_S, MirrorLease, OwnedByOther
from pipeline.train.checkpoint.mirror.uploads import Notes, Uploads, failure_text, files_to_mirror
from pipeline.train.checkpoint.policy import mirror_rules
from pipeline.train.checkpoint.resume_point import files_by_rank
from pipeline.train.run.mirror_state import MirrorRecord

RUN_FILES = (RunFiles.config, RunFiles.metrics, RunFiles.ledger)
"""Files of the run folder that go along, so that a report can be made of a mirror."""
_FIRST_S, _LONGEST_S = 0.5, 30.0
"""Bounds of the pause before a try that failed is repeated."""
_POLL_S = 0.1
"""Seconds between two looks for the notes of the other ranks."""
_IDLE_S = RENEW_S / 2


@dataclass(frozen=True)
class MirrorReport:
    """Something that has happened to the mirror."""

    step: int
    seconds: float = 0.0
    """From the begin of the upload to its commit."""
    warning: str = ""
    """What went wrong; empty where the checkpoint is in the mirror."""


class MirrorLeader:
    """The mirror in a start of the run, or after a rewind.

    Args:
        rules: of the checkpoints.
        run: the run folder.
        began: step at which the start or rewind began.
        ranks: number of all.
        mirror: where to.
        lease: of this start.
        board: where the other ranks look.
        uploads: of this rank.
        record: what `pipeline status` knows.
    """

    def __init__(
        self,
        rules: CheckpointConfig,
        run: Path,
        began: int,
        ranks: int,
        mirror: Mirror,
        lease: MirrorLease,
        board: Board,
        uploads: Uploads,
        record: MirrorRecord,
    ) -> None:
        assert rules.mirror is not None
        self._rules, self._patience_s = rules, rules.mirror.patience_seconds
        self._run, self._began, self._ranks = run, began, ranks
        self._checkpoints = Checkpoints.of_run(run)
        self._mirror, self._lease, self._board, self._uploads, self._record = mirror, lease, board, uploads, record
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        """Steps of checkpoints that are to be uploaded; of several the newest one is."""
        self._current: int | None = None
        """Step of the one that is being uploaded."""
        self._written: dict[int, list[str]] = {}
        """Names of the files that this rank has written, by step."""
        self._number = 0
        self._over = 0
        self._is_lost = False
        self.reports: deque[MirrorReport] = deque()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        """Begin."""
        if not self._waiting:
            self._board.post(Task(0, self._began, "", is_dealt=False, over=self._began))
        self._thread.start()
        threading.Thread(target=self._keep_lease, name="mirror-lease", daemon=True).start()

    def add(self, step: int, names: list[str] | None) -> None:
        """A checkpoint is to be uploaded, of which this rank has written these files; by default they are dealt."""
        with self._changed:
            if names is not None:
                self._written[step] = names
            self._record.committed(step)
            if not self._is_lost:
                self._waiting.append(step)
            self._changed.notify()

    @property
    def held(self) -> list[int]:
        """Step of the checkpoint that must stay, since it is being uploaded."""
        with self._changed:
            return [] if self._current is None else [self._current]

    @property
    def is_idle(self) -> bool:
        """True if nothing is left to upload."""
        with self._changed:
            return self._is_lost or (self._current is None and not self._waiting) or not self._thread.is_alive()

    def close(self, seconds: float) -> None:
        """Give up what is being uploaded, and wait for the end of the thread, within limits."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        """Body of the thread."""
        try:
            while not self._stop.is_set():
                self._own()
                step = self._next()
                if step is not None:
                    self._upload_until_done(step)
        except Abandoned:
            pass
        except (OwnerLost, OwnedByOther) as error:
            self._lose(str(error))
        except Exception as error:  # training must not suffer from whatever it is
            self._lose(f"{type(error).__name__}: {error}")
        if not self._is_lost:
            with suppress(Exception):  # another start waits until it is stale
                self._lease.renew(released=True)

    def _keep_lease(self) -> None:
        """Body of a thread: give signs of life, also while a large file is uploaded."""
        while not self._stop.wait(RENEW_S) and self._thread.is_alive():
            with suppress(UserError):  # the other thread finds out, too
                self._lease.renew()

    def _own(self) -> None:
        """Take the mirror, or give a sign of life; what fails is tried again."""
        try:
            if self._lease.is_taken:
                self._lease.renew()
            else:
                self._lease.take()
            self._record.reached()
        except (OwnerLost, OwnedByOther):
            raise
        except UserError as error:
            self._fail(0, error)

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._is_lost = True
            self._current = None
            self._waiting.clear()
        if self._record.failed(reason, is_lost=True):
            self.reports.append(MirrorReport(0, warning=f"{reason}; nothing more is uploaded"))

    def _next(self) -> int | None:
        """The newest checkpoint that is to be uploaded; None if none came for a while."""
        with self._changed:
            if not self._waiting and not self._stop.is_set():
                self._changed.wait(_IDLE_S)
            if not self._waiting or self._stop.is_set():
                return None
            self._current = max(self._waiting)
            self._waiting.clear()
            return self._current

    def _upload_until_done(self, step: int) -> None:
        """Upload a checkpoint, again where it fails, until a newer one is there or patience is at its end."""
        begin, pause = time.monotonic(), _FIRST_S
        try:
            while True:
                try:
                    if not self._lease.is_taken:
                        self._lease.take()
                    self._upload(step, begin)
                    return
                except (OwnerLost, OwnedByOther):
                    raise
                except (UserError, OSError) as error:
                    self._fail(step, error)
                    if isinstance(error, FileNotFoundError | FileChanged):
                        return
                if time.monotonic() - begin >= self._patience_s or self._is_newer_there():
                    return
                # Jitter: runs that failed together do not come back together.
                if self._stop.wait(pause * random.uniform(0.5, 1)):
                    raise Abandoned
                pause = min(2 * pause, _LONGEST_S)
        finally:
            with self._changed:
                self._current = None
                self._over = max(step, self._over, self._began)
                self._written = {each: names for each, names in self._written.items() if each > step}
            self._board.post(Task(self._number, step, "", is_dealt=False, over=self._over))

    def _is_newer_there(self) -> bool:
        with self._changed:
            return bool(self._waiting)

    def _fail(self, step: int, error: UserError | OSError) -> None:
        reason = failure_text(error)
        if self._record.failed(reason):
            self.reports.append(MirrorReport(step, warning=f"{reason}; training continues, and it is tried again"))

    def _upload(self, step: int, begin: float) -> None:
        """Upload a checkpoint, and let it count.

        Raises:
            OwnerLost: the mirror is another start's by now.
            UserError: a rank could not upload, or the objects are not what was uploaded.
        """
        folder = self._checkpoints.step_folder(step)
        files = files_to_mirror(folder)
        before = self._mirror.commit(step)
        if before is None or before.files != files:
            upload = upload_name(self._lease.generation, self._lease.token)
            self._put_all(folder, step, upload, files)
            run_files = self._uploads.put_run_files(self._run, step, upload, RUN_FILES, self._stop)
            self._lease.check()
            now = MirrorCommit(
                step,
                self._lease.run,
                self._lease.generation,
                self._began,
                upload,
                time.time(),
                files,
                run_files,
            )
            self._mirror.put_commit(now)
            try:
                self._lease.check()
            except OwnerLost:  # since the check before: the new owner may have removed these files
                self._mirror.take_back(now)
                raise
        else:
            now = before
        self._record.mirrored(step, now.time)
        self.reports.append(MirrorReport(step, time.monotonic() - begin))
        try:
            self._mirror.prune(mirror_rules(self._rules), self._lease.generation, self._lease.check)
        except OwnerLost:
            raise
        except UserError as error:
            self.reports.append(MirrorReport(step, warning=f"old checkpoints stay there: {error}"))

    def _put_all(self, folder: Path, step: int, upload: str, files: Files) -> None:
        """Let all ranks upload their files, and compare what is there with what they sent."""
        self._number += 1
        own = self._written.get(step)
        self._board.post(Task(self._number, step, upload, is_dealt=own is None, over=self._over))
        names = files_by_rank(files, self._ranks)[0] if own is None else own
        notes: Notes = dict(self._uploads.put(folder, step, upload, files, names, self._stop))
        for rank in range(1, self._ranks):
            notes |= self._note_of(rank)
        left = [name for name in files if name not in notes]
        notes |= self._uploads.put(folder, step, upload, files, left, self._stop)
        where = self._mirror.files_url(step, upload)
        there = sizes_of(list_objects(where, self._mirror.access), where)
        for name, record in files.items():
            size, digest, version = notes[name]
            if (size, digest) != record or there.get(name) != (size, version):
                raise UserError(f"{where.below(name)} is not the file that was uploaded")

    def _note_of(self, rank: int) -> Notes:
        """The files that a rank has uploaded, as soon as it has."""
        while (found := self._board.note(self._number, rank)) is None:
            if self._stop.wait(_POLL_S):
                raise Abandoned
        if "error" in found:
            raise UserError(str(found["error"]))
        return {
            name: (int(size), str(digest), str(version)) for name, (size, digest, version) in found["files"].items()
        }
