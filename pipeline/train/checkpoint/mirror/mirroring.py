"""Uploads beside a training: checkpoints that were committed are copied to object storage by a thread of each rank.

No step waits for them, and whatever becomes of them, the training continues. Each rank uploads the files that it has
written. Rank 0 says which checkpoint it is, waits for the notes of all, looks at the objects, and lets them count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from pipeline.common.console import Console, detail, say, warn
from pipeline.common.format import duration
from pipeline.config import Config
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror.board import Board
from pipeline.train.checkpoint.mirror.bucket import Mirror, remote_access
from pipeline.train.checkpoint.mirror.follower import MirrorFollower
from pipeline.train.checkpoint.mirror.identity import folder_id, mirror_run
from pipeline.train.checkpoint.mirror.leader import MirrorLeader
from pipeline.train.checkpoint.mirror.owner import MirrorLease
from pipeline.train.checkpoint.mirror.uploads import Uploads
from pipeline.train.checkpoint.policy import is_mirrored
from pipeline.train.distributed import process_group
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.mirror_state import MirrorRecord

_REQUEST_S = 30.0
"""Most seconds for which one request is sent again; what fails then is tried again as a whole."""
_CLOSE_S = 10.0
"""Seconds for which the end of a thread is waited for."""
_POLL_S = 0.2

Stopped = Callable[[], str | None]
"""Why the run is to stop now, or None."""


class Mirroring:
    """The mirror of a run; without `train.checkpoint.mirror` it does nothing. Every rank calls the methods.

    Args:
        config: of the run.
        folder: of the run, locked.
        total: steps of the run.
    """

    def __init__(self, config: Config, folder: RunFolder, total: int) -> None:
        self._config, self._rules, self._folder, self._total = config, config.train.checkpoint, folder, total
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._sessions = 0
        self._leader: MirrorLeader | None = None
        self._follower: MirrorFollower | None = None
        self._record: MirrorRecord | None = None

    def begin(self) -> None:
        """Begin at the step of the run folder; of its checkpoints the newest is uploaded if it is not there yet."""
        rules = self._rules.mirror
        if rules is None:
            return
        self.close()
        self._sessions += 1
        access = remote_access(self._config, min(_REQUEST_S, rules.patience_seconds))
        mirror = Mirror.of(rules.to, access)
        store = process_group.shared_store() if self._ranks > 1 else None
        board, uploads = Board(store, self._sessions), Uploads(mirror, rules.max_bytes_per_second)
        run, began, checkpoints = self._folder.path, self._folder.step, Checkpoints.of_run(self._folder.path)
        if self._rank:
            self._follower = MirrorFollower(self._rank, self._ranks, checkpoints, board, uploads)
            self._follower.start()
            self._follower.add(began, None)
            return
        if self._record is None:
            self._record = MirrorRecord(self._folder, rules.to)
        else:
            self._record.rewound()
        lease = MirrorLease(mirror, mirror_run(run) or "", folder_id(run))
        self._leader = MirrorLeader(self._rules, run, began, self._ranks, mirror, lease, board, uploads, self._record)
        for step in [each.step for each in checkpoints.all() if each.step <= began][-1:]:
            if is_mirrored(self._rules, step, self._total):
                self._leader.add(step, None)
        self._leader.start()

    def add(self, step: int, names: Iterable[str]) -> None:
        """Upload the checkpoint of a step, which was committed, if its turn is by the policy.

        Args:
            step: of the checkpoint.
            names: of the files of it that this rank has written.
        """
        if not is_mirrored(self._rules, step, self._total):
            return
        for each in (self._leader, self._follower):
            if each is not None:
                each.add(step, list(names))

    @property
    def held(self) -> list[int]:
        """Steps whose checkpoints must stay, since they are being uploaded."""
        return [] if self._leader is None else self._leader.held

    def report(self, write: Callable[[int, dict[str, Any]], None], console: Console) -> None:
        """Note what has happened to the mirror since this was called last: what went wrong with a warning.

        Args:
            write: gets the step of the run and metrics.
            console: for what the user should know.
        """
        if self._leader is None:
            return
        for report in [self._leader.reports.popleft() for _ in range(len(self._leader.reports))]:
            if report.warning:
                warn(console, f"mirror {self._to}: {report.warning}")
            else:
                detail(console, f"step {report.step} was uploaded to {self._to} in {duration(report.seconds)}")
                write(self._folder.step, {"mirrored_step": report.step, "mirror_seconds": report.seconds})

    @property
    def _to(self) -> str:
        return self._rules.mirror.to if self._rules.mirror is not None else ""

    def finish(self, stopped: Stopped, write: Callable[[int, dict[str, Any]], None], console: Console) -> None:
        """Wait for what is left at the end of the run, for as long as patience lasts, or until it is to stop.

        Args:
            stopped: see `Stopped`.
            write: as for `report`.
            console: as for `report`.
        """
        if self._rules.mirror is None:
            return
        if self._leader is not None:
            until = time.monotonic() + self._rules.mirror.patience_seconds
            if not self._leader.is_idle:
                say(console, f"train: waiting for the upload of the last checkpoint to {self._to}")
            while not self._leader.is_idle and time.monotonic() < until and stopped() is None:
                time.sleep(_POLL_S)
            self.report(write, console)
            state = self._record.state if self._record is not None else None
            if state is not None and state.behind:
                why = f": {state.reason}" if state.reason else ""
                warn(console, f"step {state.waiting} is not in the mirror {self._to}{why}")
        # The others upload until rank 0 has all, or has given up.
        process_group.wait_for_all()
        self.close()

    def close(self) -> None:
        """Give up what is being uploaded; the next start uploads the newest checkpoint."""
        for each in (self._leader, self._follower):
            if each is not None:
                each.close(_CLOSE_S)
        self._leader = self._follower = None
