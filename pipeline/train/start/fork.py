"""`pipeline fork`: a new run that begins with the whole state of another one, and has a future of its own.

The new run's first checkpoint is the other one's: the same files, by hard links where that can be, under a state.json
that says where they are from. What the run has seen until then is frozen as the parent had it; what comes after is the
new run file's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import links, storage
from pipeline.common.console import say
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import counted
from pipeline.common.run_files import CHECKPOINT_STATE, RunFiles
from pipeline.config import Config
from pipeline.config.load import dump, load_run, no_run_folder
from pipeline.data.order.journal_file import saved_journal
from pipeline.data.preprocess.run_file_check import check_run_file
from pipeline.train.checkpoint.committed import Checkpoint, Files, damage_named, record_of
from pipeline.train.checkpoint.dcp_storage import refuse_misfit
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.tensors import stored
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.monitor.phase_log import describe_run
from pipeline.train.run.folder import make_writable
from pipeline.train.run.lock import Lock
from pipeline.train.start.open_run import open_validation
from pipeline.train.start.resume import changes
from pipeline.train.start.run_plan import RunPlan, plan_run
from pipeline.train.start.schedule_seam import find_seam


def fork(
    run: Path,
    step: int,
    config: Config,
    console: Console,
    *,
    dry_run: bool = False,
    arguments: Sequence[str] = ("NEW.yaml",),
) -> None:
    """Give a run that has not begun the state of another one.

    Args:
        run: run file or folder of the parent.
        step: of its checkpoint.
        config: of the new run.
        console: where it is said what differs.
        dry_run: write nothing.
        arguments: of the command that trains the new run: its run file and overrides.

    Raises:
        UserError: there is no such checkpoint, or it is damaged; the new run has begun already; or it differs in what
            the checkpoint depends on.
    """
    if run.is_dir() and not RunFiles(run).config.is_file() and not Checkpoints.of_run(run).folder.is_dir():
        raise no_run_folder(run)
    parent = run.absolute() if run.is_dir() else load_run(run).run.dir
    child = config.run.dir
    _check_new(parent, child)
    _check_unused(config)
    checkpoint = Checkpoints.of_run(parent).at(step)
    with damage_named(checkpoint):
        state = checkpoint.state()
        past = saved_journal(parent, state["journal"], step)
        _check_data(config, state)
    plan = plan_run(config, checkpoint, saved=past.forked(step))
    if plan.length.steps <= step:
        raise UserError(
            f"the new run would end at step {plan.length.steps:,} ({plan.length.reason}), but it begins with the "
            f"{step:,} steps of {checkpoint.path}; raise train.duration, which counts from the start of the parent"
        )
    _check_start(config, plan, checkpoint)
    with damage_named(checkpoint):
        lines = list(_lines(checkpoint, config, plan, parent, child))
        seam = find_seam(config, checkpoint, plan.journal, plan.length.steps)
    lines += [] if seam is None else [f"fork: {seam}"]
    for line in lines:
        say(console, line)
    if dry_run:
        say(console, "fork: nothing was written (--dry-run)")
        return
    origin = {
        "kind": "fork",
        "run": str(parent),
        "step": step,
        "fingerprint": checkpoint.fingerprint,
        "journal": past.fingerprint,
        "time": time.time(),
        "origin": state.get("origin") or None,
    }
    make_writable(child)
    files = RunFiles(child)
    with storage.writing(f"run.dir {child} of the new run"):
        lock = Lock.take(child)
        try:
            _check_new(parent, child)  # another one may have come first
            state |= {"journal": past.forked(step).to_json(), "attempt": 0, "origin": origin}
            storage.put_json(files.journal, plan.journal.to_json())
            storage.put(files.config, dump(config).encode())
            linked, copied = _copy(checkpoint, state, Checkpoints.of_run(child), lock)
        finally:
            lock.release()
    how = " and ".join(f"{counted(n, 'file')} {verb}" for n, verb in ((linked, "linked"), (copied, "copied")) if n)
    command = shlex.join(["pipeline", "train", *arguments])
    say(console, f"fork: {child} has the checkpoint ({how}); resume from it: {command}")


_ANOTHER = "set run.dir to a new folder"
_BEFORE_THE_FIRST_STEP = (
    *(RunFiles.checkpoints, RunFiles.data, RunFiles.ledger, RunFiles.lock, RunFiles.lock_guard, RunFiles.config),
    *(RunFiles.journal, RunFiles.attempt, RunFiles.exit, RunFiles.heartbeats, RunFiles.logs, RunFiles.tensorboard),
    *(RunFiles.stop, RunFiles.save, RunFiles.evaluations, RunFiles.folder_id),
)
"""Files that `pipeline preprocess`, a fork that was killed, a start that was refused and an evaluation of weights in
another folder (`--weights`) leave in a run folder."""
_OF_THE_USER = (".yaml", ".yml", ".sh", ".md", ".txt", ".log", ".out", ".err")
"""Run files, and what lies beside them."""


def _check_new(parent: Path, child: Path) -> None:
    if child.resolve() == parent.resolve():
        raise UserError(f"run.dir of the new run is that of its parent, {parent}; set run.dir to another folder")
    if parent.resolve() in child.resolve().parents:
        raise UserError(f"run.dir of the new run, {child}, is inside the run folder of its parent; {_ANOTHER}")
    if child.resolve() in parent.resolve().parents:
        raise UserError(f"run.dir of the new run, {child}, contains the run folder of its parent, {parent}; {_ANOTHER}")
    begun = [path for path in (RunFiles(child).checkpoints, RunFiles(child).metrics) if path.exists()]
    if Checkpoints.of_run(child).all() or RunFiles(child).metrics.exists():
        undo = f"; or, since nothing was trained there after the fork, remove {begun[0]} and fork again"
        raise UserError(
            f"a run has already started in {child} ({begun[0].name} exists); {_ANOTHER}"
            f"{undo if _only_forked(child) else ''}"
        )


def _only_forked(child: Path) -> bool:
    """True if there is nothing but the checkpoint that a fork has put there."""
    if RunFiles(child).metrics.exists():
        return False
    try:
        origins = [checkpoint.state().get("origin") for checkpoint in Checkpoints.of_run(child).all()]
    except UserError:
        return False
    return len(origins) == 1 and (origins[0] or {}).get("kind") == "fork"


def _check_unused(config: Config) -> None:
    """The folder of the new run may have what commands leave there before the first step, and run files."""
    child = config.run.dir
    if not child.is_dir():
        return
    mine = set(_BEFORE_THE_FIRST_STEP)
    if config.data_url is None and config.data_dir.is_relative_to(child):
        inside = config.data_dir.relative_to(child).parts
        # Data right in the run folder: their folders are beside its files.
        mine |= {inside[0]} if inside else {"tokenizer", *(source.name for source in config.data.inputs.values())}
    for path in sorted(child.iterdir()):
        hidden_or_file = path.name.startswith(".") or (path.is_file() and path.suffix in _OF_THE_USER)
        if path.name not in mine and not hidden_or_file:
            raise UserError(
                f"{child} has {path.name}, which no run has before its first step: the folder is used for something "
                f"else; {_ANOTHER}"
            )


def _check_data(config: Config, state: dict[str, Any]) -> None:
    """The data folder is by default in the run folder, and so the new run would have none."""
    theirs = state["config"].get("data", {}).get("dir") or f"{state['config']['run']['dir']}/data"
    if config.run.dir.resolve() == Path(theirs).resolve():
        raise UserError(f"run.dir of the new run, {config.run.dir}, is the data folder of the parent; {_ANOTHER}")
    if config.data_url is not None:
        return
    if not config.data_dir.exists() and str(config.data_dir) != theirs:
        raise UserError(
            f"there is no data in {config.data_dir}; the parent has its data in {theirs}: set data.dir to that, or run "
            "`pipeline preprocess` first if the new run has other data"
        )


def _check_start(config: Config, plan: RunPlan, checkpoint: Checkpoint) -> None:
    """Make the checks of `pipeline train` after its plan, so that no fork is made that it would refuse."""
    wanted = config.resume.step
    if wanted is not None and wanted != checkpoint.step:
        raise UserError(
            f"resume.from: {wanted} will not be in the new run, whose first checkpoint is that of step "
            f"{checkpoint.step}; leave resume.from out"
        )
    check_run_file(config, plan.datasets)
    open_validation(config, plan.tokenizer, check=True)
    spec = decoder_spec(config.model, plan.tokenizer.vocab_size, config.max_positions)
    refuse_misfit({name: each.shape for name, each in stored(checkpoint)["model"].items()}, spec, checkpoint.path)


def _lines(checkpoint: Checkpoint, config: Config, plan: RunPlan, parent: Path, child: Path) -> Iterator[str]:
    step, total = checkpoint.step, plan.length.steps
    yield f"fork: {child} from step {step:,} of {parent}"
    for line in changes(checkpoint.state(), config, plan.fingerprints):
        yield f"  {line}"
    yield f"fork: then {describe_run(config, plan.journal, step, total)} ({plan.length.reason})"
    for line in plan.warnings:
        yield f"warning: {line}"
    for skip in plan.journal.skips:
        if skip.fault and skip.steps is not None and skip.steps[1] > step:
            first, last = max(step, skip.steps[0]) + 1, skip.steps[1]
            yield f"warning: steps {first} to {last} will be skipped, as in the parent (fault at step {last})"
    if config.train.init_from is not None:
        yield "warning: train.init_from is ignored, since the new run begins with the parent's checkpoint"


def _copy(checkpoint: Checkpoint, state: dict[str, Any], to: Checkpoints, lock: Lock) -> tuple[int, int]:
    """Commit the checkpoint's files as the first checkpoint of the new run; how many were linked, and copied."""
    to.clean(lambda line: None)  # of a fork that was killed
    tmp = to.begin(checkpoint.step, 0)
    linked = copied = 0
    try:
        files: Files = {name: record for name, record in checkpoint.files().items() if name != CHECKPOINT_STATE}
        for name, record in files.items():
            if _hard_link(checkpoint.path / name, tmp / name):
                linked += 1
                continue
            shutil.copyfile(checkpoint.path / name, tmp / name, follow_symlinks=False)
            if record_of(tmp / name) != record:
                raise MachineError(
                    f"{tmp / name} differs from the file that was copied; check the disk, then fork again"
                )
            copied += 1
        to.commit(tmp, checkpoint.step, files, state, lock.assert_mine)
    except BaseException:
        links.remove_tree(tmp, ignore_errors=True)
        raise
    return linked, copied


def _hard_link(source: Path, target: Path) -> bool:
    """Hard link a file; False where a copy is needed: on another file system, or one without links."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
