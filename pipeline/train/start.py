"""Before the first step, on every rank: the run folder, the checkpoint, the plan and what is validated on."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console

from pipeline import __version__
from pipeline.config import Config
from pipeline.console import say
from pipeline.data.checks import check_datasets
from pipeline.data.heldout import HeldOut
from pipeline.data.opening import open_datasets
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import UserError
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.fingerprint import differences
from pipeline.train.parallel.processes import Processes, share
from pipeline.train.plan import RunPlan, plan_run
from pipeline.train.run_folder import RunFolder, open_run
from pipeline.train.setup import check_tokenizer


def open_run_everywhere(
    config: Config, ranks: Processes, stack: ExitStack, console: Console
) -> tuple[RunFolder, Checkpoint | None, RunPlan]:
    """Lock the run folder, find the checkpoint to go on from, and plan: rank 0 alone, then the others as it says."""
    checkpoints = Checkpoints.of_run(config.run.dir)
    mine: list[tuple[RunFolder, Checkpoint | None, RunPlan]] = []

    def begin() -> tuple[dict[str, Any], int, int | None]:
        folder = stack.enter_context(open_run(config.run.dir))
        checkpoints.clean(lambda line: say(console, line))
        checkpoint = checkpoints.resumable(lambda line: say(console, f"warning: {line}"))
        mine.append((folder, checkpoint, plan_run(config, checkpoint)))
        return _what_all_have(config), folder.attempt, checkpoint.step if checkpoint else None

    everywhere, attempt, step = share(begin)
    if mine:
        folder, checkpoint, plan = mine[0]
    else:
        _same_as_rank_0(everywhere, _what_all_have(config), ranks)
        folder = RunFolder(config.run.dir, attempt)
        checkpoint = None if step is None else checkpoints.committed(step)
        plan = plan_run(config, checkpoint, check=False)
    folder.step = step or 0
    return folder, checkpoint, plan


def _what_all_have(config: Config) -> dict[str, Any]:
    """What must be the same on every rank. Launch and staging may differ by node."""
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


def open_validation(config: Config, tokenizer: Tokenizer, *, check: bool) -> dict[str, HeldOut]:
    """What is validated on, checked like what is trained on, since it is read only after many steps."""
    if not config.train.validation.samples:
        return {}
    splits = open_heldout(config, config.train.validation.split)
    datasets = {name: split.dataset for name, split in splits.items()}
    if check:
        check_datasets(datasets)
    check_tokenizer(datasets, tokenizer)
    return splits


def open_heldout(config: Config, split: str) -> dict[str, HeldOut]:
    """A held-out split of each source, in windows of `train.sequence_length` whatever the phases have."""
    datasets = open_datasets(config, split)
    return {name: HeldOut(dataset, config.train.sequence_length) for name, dataset in datasets.items()}
