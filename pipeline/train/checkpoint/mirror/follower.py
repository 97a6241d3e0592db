"""The thread of a rank other than 0 that uploads its files of checkpoints, when rank 0 has posted that."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.objects.retries import Abandoned
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror.board import Board, Task
from pipeline.train.checkpoint.mirror.uploads import Notes, Uploads, failure_text, files_to_mirror
from pipeline.train.checkpoint.resume_point import files_by_rank

_FIRST_S, _LONGEST_S = 0.05, 2.0
"""Bounds of the pause between two looks at what rank 0 has posted."""


class MirrorFollower:
    """The uploads of this rank in a start, or after a rewind.

    Args:
        rank: this one.
        ranks: number of all.
        checkpoints: of the run.
        board: where rank 0 posts.
        uploads: of this rank.
    """

    def __init__(self, rank: int, ranks: int, checkpoints: Checkpoints, board: Board, uploads: Uploads) -> None:
        self._rank, self._ranks = rank, ranks
        self._checkpoints, self._board, self._uploads = checkpoints, board, uploads
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._newest = 0
        """Step of the newest checkpoint that may be posted."""
        self._written: dict[int, list[str]] = {}
        """Names of this rank's files by step."""
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, step: int, names: list[str] | None) -> None:
        """A checkpoint may be posted: this rank has written these files of it, or they will be dealt."""
        with self._changed:
            self._newest = max(self._newest, step)
            if names is not None:
                self._written[step] = names
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Give up what is being uploaded, and wait for the end of the thread, within limits."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        """Body of the thread."""
        last, pause = 0, _FIRST_S
        try:
            while not self._stop.is_set():
                task = self._board.task() if self._waits() else None
                if task is not None and self._is_over(task):
                    continue
                if task is not None and task.number > last and (task.is_dealt or task.step in self._written):
                    last, pause = task.number, _FIRST_S
                    self._board.answer(task.number, self._rank, self._put(task))
                    continue
                self._stop.wait(pause)
                pause = min(2 * pause, _LONGEST_S)
        except (Abandoned, RuntimeError):  # torch's store is gone: the other ranks are, too
            return

    def _waits(self) -> bool:
        """Wait until something may be posted; False at the end."""
        with self._changed:
            while not self._newest and not self._stop.is_set():
                self._changed.wait()
            return not self._stop.is_set()

    def _is_over(self, task: Task) -> bool:
        with self._changed:
            if task.over < self._newest:
                return False
            self._newest = 0
            self._written.clear()
            return True

    def _put(self, task: Task) -> dict[str, object]:
        """Upload the files of a task; what rank 0 is to know."""
        folder: Path = self._checkpoints.step_folder(task.step)
        try:
            files = files_to_mirror(folder)
            names = files_by_rank(files, self._ranks)[self._rank] if task.is_dealt else self._written[task.step]
            notes: Notes = self._uploads.put(folder, task.step, task.upload, files, names, self._stop)
        except Abandoned:
            raise
        except Exception as error:  # rank 0 waits for this
            known = isinstance(error, UserError | OSError)
            why = failure_text(error) if known else f"{type(error).__name__}: {error}"
            return {"error": f"rank {self._rank} on {socket.gethostname()}: {why}"}
        return {"files": notes}
