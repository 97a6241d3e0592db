"""Computation of the log-probabilities that the reference of a training by preference gives to its pairs.

It runs before the first step, on the processes and in the layout of the training, which have the weights of
`train.init_from`. Blocks that are there already are left alone, so a start that was stopped is resumed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np
import torch
import torch.distributed as dist

from pipeline.common.console import Console, progress, say
from pipeline.common.errors import Stopped, UserError
from pipeline.common.format import counted
from pipeline.config import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.heldout import PairTexts
from pipeline.data.loading.masked_sources import check_masked_datasets
from pipeline.data.loading.pair_rows import Scores
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.loop.out_of_memory import out_of_memory_means, weights_advice
from pipeline.train.loop.validation import measure_rows
from pipeline.train.model.loss import TokenLosses
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import Runner, build_runner
from pipeline.train.parallel.setup import Setup, set_up
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.run.stop_requests import RESUME_ADVICE, Requests
from pipeline.train.start.reference import (
    KEY,
    ReferenceFolder,
    ReferenceScores,
    open_reference,
    pinned_start,
    reference_folders,
    saved_folders,
    with_init_step,
)
from pipeline.train.start.run_plan import RunPlan
from pipeline.train.start.setup import build_for_inference, check_tokenizer, for_inference
from pipeline.train.start.warm_start import warm_start
from pipeline.train.start.weights_place import weights_identity

_LONGEST_WAIT = 7 * 24 * 3600.0
"""Seconds to wait for another start that computes the same."""


def begin_with_references(
    config: Config, plan: RunPlan, setup: Setup, watchdog: Watchdog, requests: Requests, console: Console
) -> tuple[Config, RunPlan]:
    """Config and plan of a run that starts on pairs, whose reference is complete; every rank calls this.

    Raises:
        UserError, MachineError, Stopped: as `complete_references`.
    """
    config = pinned_start(config)
    found = complete_references(config, plan.datasets, plan.tokenizer, setup, watchdog, requests, console)
    return config, plan.with_references(config, found)


def complete_references(
    config: Config,
    datasets: Mapping[str, Dataset],
    tokenizer: Tokenizer,
    setup: Setup,
    watchdog: Watchdog,
    requests: Requests,
    console: Console,
) -> dict[str, ReferenceScores]:
    """The log-probabilities of each source, after those that are missing are computed; every rank calls this.

    Args:
        config: of the run, see `pinned_start`.
        datasets: the training split of each source.
        tokenizer: of the run.
        setup: of the training.
        watchdog: of this process.
        requests: to stop.
        console: for lines and a progress bar.

    Raises:
        UserError: the weights of `train.init_from` are not there, do not fit, or give no finite number.
        MachineError: the folder cannot be written.
        Stopped: a stop was asked for; blocks that are done are kept.
    """
    watchdog.phase("save")
    folders = reference_folders(config, datasets)
    if not broadcast_from_rank0(lambda: all(folder.is_complete() for folder in folders.values())):
        with ExitStack() as locks:
            watchdog.pause()  # another start may compute for hours
            broadcast_from_rank0(lambda: _lock(folders, locks, console))
            _compute(config, datasets, tokenizer, setup, folders, watchdog, requests, console)
    watchdog.phase("save")
    found = {name: open_reference(folder.folder, datasets[name]) for name, folder in folders.items()}
    hashes = broadcast_from_rank0(lambda: {name: each.hash for name, each in found.items()})
    for name, each in found.items():
        if each.hash != hashes[name]:
            raise UserError(f"{each.folder} has other files here than on rank 0: name a folder that all nodes share")
        say(console, f"train: reference of {name}: {each.folder}")
    return found


def _lock(folders: Mapping[str, ReferenceFolder], locks: ExitStack, console: Console) -> None:
    say(console, "train: the reference's log-probabilities are not complete; they are computed first")
    # In one order, so that two starts do not wait for each other.
    for folder in sorted(folders.values(), key=lambda each: each.folder):
        locks.enter_context(folder.locked(_LONGEST_WAIT))


def _compute(
    config: Config,
    datasets: Mapping[str, Dataset],
    tokenizer: Tokenizer,
    setup: Setup,
    folders: Mapping[str, ReferenceFolder],
    watchdog: Watchdog,
    requests: Requests,
    console: Console,
) -> None:
    """Compute the blocks that are missing, while the folders are locked."""
    assert config.train.init_from is not None
    missing = broadcast_from_rank0(lambda: {name: folder.missing() for name, folder in folders.items()})
    pairs = sum(len(folders[name].blocks[number]) for name, numbers in missing.items() for number in numbers)
    if pairs:
        say(console, f"train: {counted(pairs, 'pair')} to compute")
        watchdog.phase("save")
        scorer = _Scorer(config, tokenizer, setup)
        watchdog.phase("first_step")
        with progress(console, "reference (pairs)", pairs) as advance:

            def done(documents: int) -> None:
                watchdog.beat()
                advance(documents)
                if (reason := broadcast_from_rank0(requests.reason)) is not None:
                    requests.remove_stop_file()
                    watchdog.pause()
                    kept = "the blocks of the reference that are computed are kept"
                    raise Stopped(f"{reason}; {kept}.{RESUME_ADVICE}", agreed=True)

            for name, numbers in missing.items():
                texts = PairTexts(datasets[name], config.max_sequence_length) if numbers else None
                for number in numbers:
                    assert texts is not None
                    block = folders[name].blocks[number]
                    scores = scorer.scores(texts, block, done)
                    _refuse_infinite(name, block, scores, config.train.precision.compute)
                    _commit(folders[name], number, scores)
        # What it has refers to itself, and the training needs the room.
        del scorer
        gc.collect()
        identity = weights_identity(config.train.init_from, KEY, config.model.vocab_multiple)
        if any(folder.key["weights"] != identity for folder in folders.values()):
            raise UserError(
                f"{KEY}: the weights were changed while the reference was computed; remove "
                f"{', '.join(str(folder.folder) for folder in folders.values())}, and run the command again"
            )

    def finish() -> None:
        for folder in folders.values():
            folder.finish()

    broadcast_from_rank0(finish)


def _commit(folder: ReferenceFolder, number: int, scores: Scores) -> None:
    broadcast_from_rank0(lambda: folder.commit(number, scores))


def _refuse_infinite(source: str, block: range, scores: Scores, compute: str) -> None:
    """Refuse log-probabilities that are not finite; all ranks have the same."""
    wrong = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    if len(wrong):
        raise UserError(
            f"train.preference: the reference gives document {block.start + int(wrong[0]):,} of source {source!r} a "
            f"log-probability that is not finite (train.precision.compute: {compute}): look at it with `pipeline data "
            f"inspect`, and at the weights of {KEY}"
        )


def make_references(config: Config, device: torch.device, watchdog: Watchdog, console: Console) -> None:
    """Compute the log-probabilities of a run without training; every rank calls this.

    Raises:
        UserError: as `complete_references`; or the run has no pairs to train on, or what its checkpoint was trained
            with cannot be computed any more.
    """
    if config.train.preference is None:
        raise UserError("--reference is for training on pairs: set train.preference, like {beta: 0.1}")
    checkpoint = Checkpoints.of_run(config.run.dir).preferred(config.resume.step)
    state = {} if checkpoint is None else checkpoint.state()
    datasets = open_datasets(config, "train", state["fingerprints"]["data"] if state else {})
    tokenizer = run_tokenizer(config)

    def check() -> None:
        check_tokenizer(datasets, tokenizer)
        check_masked_datasets(config, datasets)

    broadcast_from_rank0(check)
    origin = state.get("origin") or {}
    began = origin.get("step") if origin.get("kind") == "init_from" else None
    config = with_init_step(config, began) if isinstance(began, int) else pinned_start(config)
    if checkpoint is not None:
        _refuse_others(checkpoint, reference_folders(config, datasets))
    setup = set_up(config, tokenizer.vocab_size, device)
    minutes, before_end = config.launch.max_minutes, config.launch.stop_before_end_seconds
    folder = config.run.dir if dist.get_rank() == 0 else None
    with (
        Requests(folder, max_minutes=minutes, before_end=before_end) as requests,
        out_of_memory_means(weights_advice),
    ):
        complete_references(config, datasets, tokenizer, setup, watchdog, requests, console)
    watchdog.pause()


def _refuse_others(checkpoint: Checkpoint, folders: Mapping[str, ReferenceFolder]) -> None:
    """Refuse to compute what the checkpoint was not trained with."""
    known = saved_folders(checkpoint.state()["fingerprints"])
    for name, folder in folders.items():
        if name in known and known[name] != folder.folder.name:
            raise UserError(
                f"--reference: {checkpoint.path.name} was trained with the reference {known[name]} of source {name!r}, "
                f"and today's would be {folder.folder.name}: the weights of {KEY}, keys of model, the precision or the "
                "release differ from when the run began; set them back"
            )


class _Scorer:
    """The model at the start of the run, as it scores pairs."""

    def __init__(self, config: Config, tokenizer: Tokenizer, setup: Setup) -> None:
        assert config.train.init_from is not None
        alone = config.train.init_from.model_copy(update={"optimizer": False})
        config = config.model_copy(update={"train": config.train.model_copy(update={"init_from": alone})})
        self._config, self._setup = for_inference(config, config.parallel), setup
        self._model: ParallelModel = build_for_inference(
            self._config, setup, lambda model: warm_start(config, tokenizer, model, None)
        )
        self._runner: Runner = build_runner(self._config, setup, self._model)
        shapes = step_shapes(config, setup.mesh.size("batch"))
        tokens = min(shape.micro_batch_size * shape.sequence_length for shape in shapes)
        self._rows = max(1, tokens // config.max_sequence_length)

    def scores(self, texts: PairTexts, documents: range, advance: Callable[[int], None]) -> Scores:
        """Log-probabilities [n, 2] of the trained targets of both conversations of documents; every rank calls this.

        Args:
            texts: a dataset of pairs.
            documents: some of it.
            advance: told how many are done after each pass.
        """
        sums = torch.zeros(2 * len(documents), dtype=torch.float64, device=self._setup.device)

        def measure(losses: TokenLosses, batch: Batch) -> None:
            assert batch.conversation is not None and batch.samples is not None
            place = 2 * (batch.samples - documents.start)[:, None] + batch.conversation % 2
            nats = torch.where(batch.weight != 0, losses.loss_BS, 0).double()
            sums.index_add_(0, place.flatten(), nats.flatten())

        measure_rows(
            *(self._config, self._setup, self._model, self._runner, texts, documents, measure),
            batch_size=self._rows,
            advance=advance,
        )
        dist.all_reduce(sums)
        found: Scores = -sums.view(-1, 2).cpu().numpy()
        return found
