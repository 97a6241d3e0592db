"""The opening of a run on every rank: the run folder, the checkpoint, the plan and what is validated on."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipeline import __version__
from pipeline.common import links, storage
from pipeline.common.console import say, warn
from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import value_hash
from pipeline.common.versions import code_hash, versions
from pipeline.config import Config
from pipeline.data.datasets.open import open_datasets, open_set
from pipeline.data.datasets.validate import check_datasets
from pipeline.data.loading.heldout import HeldOut, HeldOutTexts
from pipeline.data.loading.masked_sources import refuse_arranged, refuse_mixed_pairs
from pipeline.data.loading.objectives.choice import heldout_objectives, set_objectives
from pipeline.data.preprocess.source_settings import check_heldout_settings
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.committed import wait_until_visible
from pipeline.train.checkpoint.fingerprint import differences
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.resume_point import resume_point
from pipeline.train.checkpoint.rollback import rollback_lines
from pipeline.train.distributed.layout import resolve
from pipeline.train.distributed.process_group import Processes, broadcast_from_rank0, gather
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.run.attempts import refuse_crash_loop, steps_lost
from pipeline.train.run.folder import RunFolder, open_run, refuse_lost_checkpoints
from pipeline.train.start.from_mirror import fetch_from_mirror
from pipeline.train.start.run_plan import RunPlan, plan_run
from pipeline.train.start.schedule_seam import find_seam
from pipeline.train.start.setup import check_tokenizer
from pipeline.train.start.teacher import open_teacher


def open_run_everywhere(
    config: Config, ranks: Processes, stack: ExitStack, watchdog: Watchdog, console: Console
) -> tuple[RunFolder, Checkpoint | None, RunPlan]:
    """Lock the run folder, find the checkpoint to resume from, and plan: rank 0 alone, then the others as it says."""
    checkpoints = Checkpoints.of_run(config.run.dir)
    mine: list[RunFolder] = []

    def lock() -> tuple[dict[str, Any], int]:
        mine.append(stack.enter_context(open_run(config.run.dir)))
        checkpoints.clean(lambda line: say(console, line))
        return _what_all_have(config), mine[0].attempt

    everywhere, attempt = broadcast_from_rank0(lock)
    if not mine:
        _same_as_rank_0(everywhere, _what_all_have(config), ranks)
    folder = mine[0] if mine else RunFolder(config.run.dir, attempt)
    stack.enter_context(watchdog.heartbeats(folder, ranks, config.launch.heartbeat_seconds))

    refuse_separate_folders(config.run.dir, ranks)
    fetch_from_mirror(config, folder, ranks, watchdog, console)
    report = partial(warn, console)
    damage: list[str] = []
    checkpoint = resume_point(checkpoints, config.resume, damage.append)
    teacher = open_teacher(config)
    plans: list[RunPlan] = []

    def plan_on_rank_0() -> None:
        if checkpoint is None:
            refuse_lost_checkpoints(config.run.dir)
        else:
            for line in rollback_lines(checkpoints, checkpoint, config, damage):
                report(line)
        plans.append(plan_run(config, checkpoint, teacher=teacher))
        if checkpoint is not None:
            seam = find_seam(config, checkpoint, plans[0].journal, plans[0].length.steps)
            if seam is not None:
                (warn if seam.rises else say)(console, str(seam))
        # Only now: a run that is refused has gone back nowhere.
        if checkpoint is not None:
            checkpoints.resume_from(checkpoint, config.resume.step, report)
        first_step = checkpoint.step if checkpoint else 0
        lost = steps_lost(config.run.dir, first_step, plans[0].length.steps)
        _begin(mine[0], config, ranks, plans[0], first_step)
        if lost:
            say(console, f"train: {lost}")

    broadcast_from_rank0(plan_on_rank_0)  # rank 0 alone looks at the files of the datasets, and says what is wrong
    folder.step = checkpoint.step if checkpoint else 0
    return folder, checkpoint, plans[0] if plans else plan_run(config, checkpoint, check=False, teacher=teacher)


def refuse_separate_folders(run: Path, ranks: Processes) -> None:
    """Refuse a run folder that is not the same one on all nodes; every rank calls this.

    Raises:
        UserError: a node does not see what rank 0 writes there; on the other ranks a `RankFailed`.
    """
    if ranks.world_size == 1:
        return
    probe = Path(broadcast_from_rank0(lambda: str(_probe(run))))
    host = socket.gethostname()
    try:
        wait_until_visible(run / probe.name)
        blind = None
    except (MachineError, OSError):
        blind = host
    found = gather(blind)

    def decide() -> None:
        links.remove(probe, missing_ok=True)
        hosts = sorted({each for each in found or () if each is not None})
        if hosts:
            raise UserError(
                f"run.dir {run} is not one folder on all nodes: {host} has written a file there that is not seen on "
                f"{', '.join(hosts[:8])}. Set run.dir to a folder on a file system that all nodes share. Without one, "
                "train on one node; documents, and mirrors of checkpoints (train.checkpoint.mirror), may be in object "
                "storage"
            )

    broadcast_from_rank0(decide)


def _probe(run: Path) -> Path:
    """A new file in the run folder, with a name that no folder has a copy of."""
    path = storage.temporary(run / f"ranks-{secrets.token_hex(8)}")
    storage.write_new(path, b"")
    return path


def _begin(folder: RunFolder, config: Config, ranks: Processes, plan: RunPlan, first_step: int) -> None:
    """Note that the attempt begins, unless there is nothing to do or those before it show that it would only die."""
    if first_step >= plan.length.steps:
        return
    tried = _what_is_tried(config)
    refuse_crash_loop(folder.path, config.launch.crash_loop, first_step, tried, plan.journal.is_skipped)
    folder.begin(first_step, layout=resolve(config.parallel, ranks.world_size).to_json(), config=tried)


def _what_is_tried(config: Config) -> str:
    """Hash of all that may decide how an attempt ends, but for the machine: keys and code."""
    no_matter = {"crash_loop", "max_minutes", "heartbeat_seconds", "stop_before_end_seconds"}
    keys = config.model_dump(mode="json", exclude={"launch": no_matter, "notify": True})
    # Not what git says: of a checkout with changes it knows no more than that there are some.
    found = {name: version for name, version in versions().items() if name != "git"}
    return value_hash({**keys, "versions": found, "code": code_hash()})


def _what_all_have(config: Config) -> dict[str, Any]:
    """Keys and versions that must be the same on every rank. Launch and staging may differ by node."""
    keys = config.model_dump(mode="json", exclude={"launch", "stage"})
    return {**keys, "versions": {"pipeline": __version__, "torch": torch.__version__}}


def _same_as_rank_0(theirs: dict[str, Any], mine: dict[str, Any], ranks: Processes) -> None:
    """A `UserError` where this rank was started with other keys than rank 0: it would hang, or train another model."""
    lines = [f"{name}: {old!r} on rank 0, {new!r} here" for name, old, new in differences("", theirs, mine)]
    if lines:
        raise UserError(
            f"rank {ranks.rank} on {socket.gethostname()} has another run file or installation than rank 0:\n  "
            + "\n  ".join(line.removeprefix(".") for line in lines)
            + "\nstart all ranks with the same file and overrides"
        )


def open_validation(config: Config, tokenizer: Tokenizer, *, check: bool) -> HeldOutTexts:
    """Validation data, checked like training data, since it is read only after many steps."""
    found = HeldOutTexts({}, {})
    if config.train.validation.samples:
        found.split.update(open_heldout(config, config.train.validation.split))
    for name, each in config.heldout_sets.items():
        if each.samples:
            found.sets[name] = open_set_windows(config, name)
    for splits in filter(None, (found.split, *found.sets.values())):
        datasets = {name: split.dataset for name, split in splits.items()}
        if check:
            check_datasets(datasets)
        check_tokenizer(datasets, tokenizer)
    if check:
        check_heldout_settings(config)
    rules, split = config.train.checkpoint, config.train.validation.split
    if rules.keep_best is not None and rules.best_of is None and not any(map(len, found.split.values())):
        raise UserError(
            f"train.checkpoint.keep_best: the split {split!r} of train.validation has no documents, so no loss says "
            "which checkpoints are the best; hold documents out (data.splits), or name one of heldout_sets in "
            "train.checkpoint.best_of"
        )
    return found


def open_heldout(
    config: Config, split: str, *, stride: int | None = None, documents: bool = False
) -> dict[str, HeldOut]:
    """A held-out split of each source, in windows of `train.sequence_length` whatever the phases have."""
    length = config.train.sequence_length
    datasets = open_datasets(config, split)
    objectives = heldout_objectives(config, datasets)
    refuse_arranged("train.objective", datasets, objectives)
    refuse_mixed_pairs(config, datasets)
    return {
        name: HeldOut(each, length, stride=stride, documents=documents, objective=objectives[name])
        for name, each in datasets.items()
    }


def open_set_windows(
    config: Config, name: str, *, stride: int | None = None, documents: bool = False
) -> dict[str, HeldOut]:
    """The windows of a set of `heldout_sets`, by source.

    Raises:
        UserError: a dataset is not there, the set has no token, or the objective does not fit.
    """
    datasets, length = open_set(config, name), config.set_length(name)
    objectives = set_objectives(config, name, datasets)
    key = "train.objective" if config.heldout_sets[name].objective is None else f"heldout_sets.{name}.objective"
    refuse_arranged(key, datasets, objectives)
    refuse_mixed_pairs(config, datasets)
    return {
        source: HeldOut(each, length, stride=stride, documents=documents, objective=objectives[source])
        for source, each in datasets.items()
    }
