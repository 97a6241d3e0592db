"""Mirrors as what commands read: a run folder in the user's cache folder, with what a command needs of a mirror."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import byte_progress, say, warn
from pipeline.common.errors import UserError
from pipeline.common.format import counted, size
from pipeline.common.hashing import value_hash
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.paths import cache_folder
from pipeline.common.run_files import CHECKPOINT_STATE, RunFiles
from pipeline.config.load import dump, dump_values, load_written
from pipeline.config.parsing.code_keys import code_values
from pipeline.config.parsing.schema import dotted
from pipeline.train.checkpoint.committed import COMMIT, Checkpoint, damage_named
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror.bucket import Mirror
from pipeline.train.checkpoint.mirror.commits import MirrorCommit
from pipeline.train.checkpoint.mirror.fetch import check_files, fetch_files, fetch_run_file

_OF_REPORTS = (RunFiles.metrics, RunFiles.ledger)
"""Files of a run folder that reports are made of."""
_TENSORS = ".distcp"
"""End of the names of the large files."""


def open_mirror(url: str) -> Mirror:
    """The mirror at a URL, with the credentials of the environment."""
    return Mirror.of(url, RemoteAccess(patience_s=60.0))


def chosen(mirror: Mirror, step: int | None) -> MirrorCommit:
    """The checkpoint of a step in a mirror, or the newest one.

    Raises:
        UserError: there is none.
    """
    commits = mirror.commits()
    found = [each for each in commits if step in (None, each.step)]
    if not found:
        there = ", ".join(str(each.step) for each in commits) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise UserError(f"{mirror.url} does not have {wanted} (steps there: {there})")
    return found[-1]


def fetch_run(url: str, step: int | None, console: Console) -> Path:
    """Fetch a checkpoint, with its hashes; returns the run folder in the cache that it is in.

    Args:
        url: of the mirror.
        step: of the checkpoint; by default the newest.
        console: where it is said what is fetched.

    Raises:
        UserError: there is none, or it is damaged.
    """
    mirror = open_mirror(url)
    commit = chosen(mirror, step)
    run = _made(mirror)
    with storage.writing(str(run)):
        checkpoints = Checkpoints.of_run(run)
        _fetch_checkpoint(mirror, commit, checkpoints, console)
        for other in checkpoints.all():  # one of a mirror is kept: a disk has room for few
            if other.step != commit.step:
                shutil.rmtree(other.path)
        _write_config(run, commit.step, console)
        for name in _OF_REPORTS:
            _fetch_run_file(mirror, commit, name, run, console)
    return run


def fetch_report(url: str, console: Console) -> Path:
    """Fetch what a report is made of; returns the run folder in the cache that it is in.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    mirror = open_mirror(url)
    commit = chosen(mirror, None)
    run = _made(mirror)
    with storage.writing(str(run)):
        with _small_files(mirror, commit) as checkpoint, damage_named(checkpoint):
            _write_config_of(run, checkpoint.state(), console)
        for name in _OF_REPORTS:
            _fetch_run_file(mirror, commit, name, run, console)
    say(console, f"{url}: metrics as they were when step {commit.step} was uploaded")
    return run


@contextmanager
def small_files(url: str, step: int | None) -> Iterator[Checkpoint]:
    """A checkpoint in a mirror, without the files of its tensors; it is gone afterwards.

    Raises:
        UserError: there is none, or it is damaged.
    """
    mirror = open_mirror(url)
    with _small_files(mirror, chosen(mirror, step)) as checkpoint:
        yield checkpoint


def verify(url: str, step: int | None, console: Console) -> Iterator[tuple[MirrorCommit, list[str]]]:
    """Read checkpoints of a mirror and compare all hashes; nothing is kept.

    Args:
        url: of the mirror.
        step: of one of them; by default all are read.
        console: for the progress bar.

    Returns:
        Each of them with what is wrong with it.
    """
    mirror = open_mirror(url)
    commits = [chosen(mirror, step)] if step is not None else mirror.commits()
    if not commits:
        chosen(mirror, None)  # which says so
    for commit in commits:
        with byte_progress(console, f"step {commit.step}", commit.size) as advance:
            yield commit, check_files(mirror, commit, advance)


def states(url: str) -> Iterator[tuple[MirrorCommit, dict[str, Any], list[str]]]:
    """The checkpoints of a mirror with their states, and what is wrong with them by the sizes of their objects."""
    mirror = open_mirror(url)
    for commit, missing in mirror.looked_at():
        problems = missing
        state: dict[str, Any] = {}
        try:
            with _small_files(mirror, commit, names=(CHECKPOINT_STATE, COMMIT)) as checkpoint, damage_named(checkpoint):
                state = checkpoint.state()
        except UserError as error:
            problems = problems or [str(error)]
        yield commit, state, problems


def _made(mirror: Mirror) -> Path:
    """The run folder of a mirror in the cache, which is made."""
    run = cache_folder() / "mirrors" / value_hash(str(mirror.url))[:16] / mirror.url.key.rpartition("/")[2]
    with storage.writing(str(run)):
        RunFiles(run).checkpoints.mkdir(parents=True, exist_ok=True)
    return run


def _fetch_checkpoint(mirror: Mirror, commit: MirrorCommit, checkpoints: Checkpoints, console: Console) -> None:
    final = checkpoints.step_folder(commit.step)
    if final.exists():
        there = Checkpoint(final, commit.step)
        if not there.problems(full=False) and f"{there.fingerprint}" == commit.files[COMMIT][1]:
            say(console, f"{mirror.url}: step {commit.step} was fetched before ({final})")
            return
        shutil.rmtree(final)
    files = counted(len(commit.files), "file")
    say(console, f"{mirror.url}: fetching step {commit.step} ({files}, {size(commit.size)}) to {final}")
    tmp = storage.temporary(final)
    tmp.mkdir()
    try:
        with byte_progress(console, "checkpoint", commit.size) as advance:
            problems = fetch_files(mirror, commit, commit.files, tmp, advance)
        if problems:
            raise UserError(f"the checkpoint of step {commit.step} in {mirror.url} is damaged: {'; '.join(problems)}")
        storage.commit(tmp, final)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


@contextmanager
def _small_files(mirror: Mirror, commit: MirrorCommit, names: tuple[str, ...] = ()) -> Iterator[Checkpoint]:
    wanted = names or [name for name in commit.files if not name.endswith(_TENSORS)]
    with tempfile.TemporaryDirectory(prefix="mirror-") as folder:
        path = Path(folder, f"step-{commit.step:08d}")
        path.mkdir()
        if problems := fetch_files(mirror, commit, wanted, path):
            raise UserError(f"the checkpoint of step {commit.step} in {mirror.url} is damaged: {'; '.join(problems)}")
        yield Checkpoint(path, commit.step)


def _fetch_run_file(mirror: Mirror, commit: MirrorCommit, name: str, run: Path, console: Console) -> None:
    if name not in commit.run_files:
        return
    tmp = storage.temporary(run / name)
    try:
        if problem := fetch_run_file(mirror, commit, name, tmp):
            warn(console, problem)
        else:
            storage.commit(tmp, run / name)
    finally:
        tmp.unlink(missing_ok=True)


def _write_config(run: Path, step: int, console: Console) -> None:
    checkpoint = Checkpoint(Checkpoints.of_run(run).step_folder(step), step)
    with damage_named(checkpoint):
        state = checkpoint.state()
    _write_config_of(run, state, console)


def _write_config_of(run: Path, state: dict[str, Any], console: Console) -> None:
    """Write the run file of a checkpoint, without what would be executed: whoever writes to the bucket has named it."""
    file = RunFiles(run).config
    storage.put(file, dump_values(state["config"]).encode())
    try:
        config = load_written(file)
        left_out = [found for found in code_values(config) if found.mark.kind == "code"]
        if left_out:
            keys = ", ".join(dotted(found.path) for found in left_out)
            if not all(found.without for found in left_out):
                raise UserError(f"its run file names code that would be executed ({keys})")
            config = load_written(file, [found.without for found in left_out])
            say(console, f"left out of its run file, since it is executed: {keys}")
        storage.put(file, dump(config).encode())
    except BaseException:
        file.unlink(missing_ok=True)
        raise
