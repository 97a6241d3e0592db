"""Beginning from a mirror: its newest checkpoint is fetched into a run folder that has none."""

from __future__ import annotations

import socket
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from pipeline.common import links, storage
from pipeline.common.console import byte_progress, say, warn
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import counted, size
from pipeline.common.objects.failures import ObjectMissing, StoreError
from pipeline.common.objects.stored import StoredObject
from pipeline.common.objects.writing import check_writing, delete_objects
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.parsing.code_keys import refuse_mirrors_of_others
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror.bucket import Mirror, remote_access
from pipeline.train.checkpoint.mirror.commits import MirrorCommit
from pipeline.train.checkpoint.mirror.fetch import fetch_files, fetch_run_file
from pipeline.train.checkpoint.mirror.identity import adopt, folder_id, mirror_run
from pipeline.train.checkpoint.mirror.owner import Owner, read_owner, refuse_other
from pipeline.train.checkpoint.resume_point import files_by_rank
from pipeline.train.distributed.process_group import Processes, broadcast_from_rank0, gather
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.run.folder import RunFolder

_LOOK_S = 10.0
"""Seconds for which a look at a mirror is tried, where training can begin without it."""


def check_mirror(config: Config) -> list[str]:
    """Look whether the mirrors that a run names can be used, with the credentials that there are here.

    A small object is written and removed.

    Returns:
        Warnings.

    Raises:
        UserError: a mirror cannot be written or read, or belongs to another run.
    """
    refuse_mirrors_of_others(config)
    run, own, asked = config.run.dir, config.train.checkpoint.mirror, config.resume.from_mirror
    access, warnings = remote_access(config, _LOOK_S), list[str]()
    needs = Checkpoints.of_run(run).latest() is None
    if own is not None:
        mirror = Mirror.of(own.to, access)
        try:
            check_writing(mirror.url, access)
            owner = read_owner(mirror)
        except UserError as error:
            raise type(error)(f"train.checkpoint.mirror.to: {error}") from None
        _refuse_other(mirror, owner, run, is_taken_up=needs and asked == own.to)
        try:
            delete_objects([mirror.url.below(".probe")], access)
        except UserError as error:
            warnings.append(
                f"train.checkpoint.mirror: old checkpoints stay there, since they cannot be removed: {error}"
            )
    if asked is not None and needs and not Mirror.of(asked, access).commits():
        raise UserError(f"resume.from_mirror: {asked} has no checkpoint")
    return warnings


def fetch_from_mirror(
    config: Config, folder: RunFolder, ranks: Processes, watchdog: Watchdog, console: Console
) -> None:
    """Fetch the checkpoint to begin from, if the run folder has none and a mirror has; every rank calls this.

    It is the one of `resume.from_mirror`, or of the run's own mirror, if that is of this run.

    Raises:
        UserError: the mirror is another run's, has no checkpoint though one is asked for, or has damaged ones alone.
    """
    if config.train.checkpoint.mirror is None and config.resume.from_mirror is None:
        return
    found: dict[str, Any] = broadcast_from_rank0(lambda: _choose(config, console))
    commits = [MirrorCommit(**values) for values in found["commits"]]
    if not commits:
        return
    checkpoints = Checkpoints.of_run(config.run.dir)
    mirror = Mirror.of(found["url"], remote_access(config, config.data.remote.patience_seconds))
    watchdog.pause()  # it takes as long as it takes
    problems: list[str] = []
    for commit in commits:
        if ranks.rank == 0:
            files = counted(len(commit.files), "file")
            say(console, f"train: fetching step {commit.step} from {mirror.url} ({files}, {size(commit.size)})")
        tmp = Path(broadcast_from_rank0(partial(_begin, checkpoints, commit, folder.attempt)))
        answers = gather(_fetch_own(mirror, commit, tmp, ranks, console))
        fetched: list[str] = broadcast_from_rank0(partial(_end, answers, commit, tmp, checkpoints))
        if not fetched:
            broadcast_from_rank0(partial(_follow, config, mirror, commit, console))
            watchdog.phase("save")
            return
        problems += fetched
        if ranks.rank == 0:
            warn(console, f"the checkpoint of step {commit.step} in {mirror.url} is damaged: {'; '.join(fetched)}")

    def give_up() -> None:
        raise UserError(
            f"no checkpoint in {mirror.url} is valid; refusing to restart from random weights:\n  "
            + "\n  ".join(problems)
            + "\nrestore the objects, or train from scratch with another run.dir and another train.checkpoint.mirror.to"
        )

    broadcast_from_rank0(give_up)


def _choose(config: Config, console: Console) -> dict[str, Any]:
    """On rank 0: URL of the mirror, and its checkpoints to try, newest first; none if the run needs none."""
    refuse_mirrors_of_others(config)
    run, own, asked = config.run.dir, config.train.checkpoint.mirror, config.resume.from_mirror
    needs = Checkpoints.of_run(run).latest() is None
    nothing = {"url": "", "commits": []}
    if own is not None:
        mirror = Mirror.of(own.to, remote_access(config, _LOOK_S))
        try:
            _refuse_other(mirror, read_owner(mirror), run, is_taken_up=needs and asked == own.to)
        except (StoreError, ObjectMissing) as error:
            warn(console, f"mirror {own.to}: {error}; training continues, and it is tried again")
            if asked is None:
                return nothing
    if not needs:
        if asked is not None:
            say(console, f"train: {run} has checkpoints; resume.from_mirror is not used")
        return nothing
    url = asked or (own.to if own is not None else "")
    mirror = Mirror.of(url, remote_access(config, config.data.remote.patience_seconds))
    commits = mirror.commits()[::-1]
    if config.resume.step is not None:
        commits = [each for each in commits if each.step == config.resume.step]
    if asked is None:
        mine = mirror_run(run) or ""
        commits = [each for each in commits if each.run == mine]
    elif not commits:
        of_step = "" if config.resume.step is None else f" of step {config.resume.step}"
        raise UserError(f"{url} has no checkpoint{of_step}; name a mirror that has one, or leave out --from-mirror")
    return {"url": url, "commits": [asdict(each) for each in commits]}


def _refuse_other(mirror: Mirror, owner: tuple[Owner, StoredObject] | None, run: Path, *, is_taken_up: bool) -> None:
    """Refuse the mirror of another run. One that this run begins from and goes on with is its own from then on."""
    if owner is not None:
        refuse_other(mirror, owner[0], owner[0].run if is_taken_up else mirror_run(run) or "", folder_id(run))


def _begin(checkpoints: Checkpoints, commit: MirrorCommit, attempt: int) -> str:
    return str(checkpoints.begin(commit.step, attempt))


def _fetch_own(mirror: Mirror, commit: MirrorCommit, tmp: Path, ranks: Processes, console: Console) -> dict[str, Any]:
    """Fetch this rank's share of a checkpoint: problems of its files, and the error if there is one."""
    names = files_by_rank(commit.files, ranks.world_size)[ranks.rank]
    try:
        with byte_progress(console, "checkpoint", sum(commit.files[name][0] for name in names)) as advance:
            return {"problems": fetch_files(mirror, commit, names, tmp, advance), "error": None}
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        return {"problems": [], "error": f"rank {ranks.rank} on {socket.gethostname()} cannot write {why}"}
    except UserError as error:
        return {"problems": [], "error": f"rank {ranks.rank} on {socket.gethostname()}: {error}"}


def _end(answers: list[dict[str, Any]] | None, commit: MirrorCommit, tmp: Path, checkpoints: Checkpoints) -> list[str]:
    """On rank 0: commit what was fetched, or remove it; returns what is wrong with it."""
    assert answers is not None
    if error := next((each["error"] for each in answers if each["error"]), None):
        links.remove_tree(tmp, ignore_errors=True)
        raise MachineError(f"{error}; run the same command again")
    if problems := [problem for each in answers for problem in each["problems"]]:
        links.remove_tree(tmp, ignore_errors=True)
        return problems
    storage.commit(tmp, checkpoints.step_folder(commit.step))
    return []


def _follow(config: Config, mirror: Mirror, commit: MirrorCommit, console: Console) -> None:
    """On rank 0: let the run folder continue the run: its id in the mirror, and its metrics up to the checkpoint."""
    run, own = config.run.dir, config.train.checkpoint.mirror
    if own is not None and own.to == str(mirror.url):
        adopt(run, commit.run)
    metrics = RunFiles(run).metrics
    if metrics.exists() or RunFiles.metrics not in commit.run_files:
        return
    tmp = storage.temporary(metrics)
    try:
        if problem := fetch_run_file(mirror, commit, RunFiles.metrics, tmp):
            warn(console, f"the metrics before step {commit.step} are missing: {problem}")
            return
        rows = [
            row for row in storage.json_lines(tmp) if isinstance(row.get("step"), int) and row["step"] <= commit.step
        ]
        storage.put(metrics, b"".join(orjson.dumps(row) + b"\n" for row in rows))
    finally:
        links.remove(tmp, missing_ok=True)
