"""Computation of the log-probabilities that the reference of a training by preference gives to its pairs.

It runs before the first step, on the processes and in the layout of the training, which have the weights of
`train.init_from`. Blocks that are there already are left alone, so it goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist

from pipeline.common.console import Console, progress, say
from pipeline.common.errors import Stopped, UserError
from pipeline.common.format import counted
from pipeline.config import Config
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.heldout import PairTexts
from pipeline.data.loading.pair_rows import Scores
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.loop.validation import measure_rows
from pipeline.train.model.loss import TokenLosses
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import Runner, build_runner
from pipeline.train.parallel.setup import Setup, set_up
from pipeline.train.start.reference import ReferenceFolder, ReferenceScores, open_reference, reference_folders
from pipeline.train.start.run_plan import RunPlan, plan_run
from pipeline.train.start.setup import build_for_inference, for_inference
from pipeline.train.start.warm_start import warm_start


def complete_references(
    config: Config,
    plan: RunPlan,
    setup: Setup,
    watchdog: Watchdog,
    stop_reason: Callable[[], str | None],
    console: Console,
) -> dict[str, ReferenceScores]:
    """The log-probabilities of each source, after those that are missing are computed; every rank calls this.

    Args:
        config: of a run that starts.
        plan: of it.
        setup: of the training.
        watchdog: of this process.
        stop_reason: says on rank 0 why to stop, or None.
        console: for lines and a progress bar.

    Raises:
        UserError: the weights of `train.init_from` are not there, or do not fit.
        Stopped: a stop was asked for; blocks that are done are kept.
    """
    watchdog.phase("save")
    folders = reference_folders(config, plan.datasets)
    missing = broadcast_from_rank0(lambda: {name: folder.missing() for name, folder in folders.items()})
    if any(missing.values()):
        pairs = sum(len(folders[name].blocks[number]) for name, numbers in missing.items() for number in numbers)
        say(console, f"train: the reference's log-probabilities of {counted(pairs, 'pair')} are computed first")
        scorer = _Scorer(config, plan, setup)
        watchdog.phase("first_step")
        with ExitStack() as stack:
            advance = stack.enter_context(progress(console, "reference (pairs)", pairs))

            def done(documents: int) -> None:
                watchdog.beat()
                advance(documents)

            for name, numbers in missing.items():
                texts = PairTexts(plan.datasets[name], config.max_sequence_length)
                for number in numbers:
                    scores = scorer.scores(texts, folders[name].blocks[number], done)
                    commit = partial(_commit, folders[name], number, scores, stop_reason)
                    if (reason := broadcast_from_rank0(commit)) is not None:
                        raise Stopped(f"{reason}; the reference is kept as far as it is computed", agreed=True)
        del scorer
    watchdog.phase("save")

    def finish() -> None:
        for folder in folders.values():
            folder.finish()

    broadcast_from_rank0(finish)
    found = {name: open_reference(folder.folder, plan.datasets[name]) for name, folder in folders.items()}
    for name, each in found.items():
        say(console, f"train: reference of {name}: {each.folder}")
    return found


def _commit(folder: ReferenceFolder, number: int, scores: Scores, stop_reason: Callable[[], str | None]) -> str | None:
    folder.commit(number, scores)
    return stop_reason()


def make_references(config: Config, device: torch.device, watchdog: Watchdog, console: Console) -> None:
    """Compute the log-probabilities of a run without training; every rank calls this.

    Raises:
        UserError: as `complete_references`; or the run has no pairs to train on.
    """
    if config.train.preference is None:
        raise UserError("--reference is for training on pairs: set train.preference, like {beta: 0.1}")

    def check() -> None:
        plan_run(config, None)

    broadcast_from_rank0(check)  # rank 0 alone looks at the files of the datasets
    plan = plan_run(config, None, check=False)
    setup = set_up(config, plan.tokenizer.vocab_size, device)
    complete_references(config, plan, setup, watchdog, lambda: None, console)
    watchdog.pause()


class _Scorer:
    """The model at the start of the run, as it scores pairs."""

    def __init__(self, config: Config, plan: RunPlan, setup: Setup) -> None:
        assert config.train.init_from is not None
        alone = config.train.init_from.model_copy(update={"optimizer": False})
        config = config.model_copy(update={"train": config.train.model_copy(update={"init_from": alone})})
        self._config, self._setup = for_inference(config, config.parallel), setup
        self._model: ParallelModel = build_for_inference(
            self._config, setup, lambda model: warm_start(config, plan.tokenizer, model, None)
        )
        self._runner: Runner = build_runner(self._config, setup, self._model)

    def scores(self, texts: PairTexts, documents: range, advance: Callable[[int], None]) -> Scores:
        """Log-probabilities [n, 2] of the trained targets of both conversations of documents; every rank calls this.

        Args:
            texts: a dataset of pairs.
            documents: some of it.
            advance: told how many are done after each pass.
        """
        config, device = self._config, self._setup.device
        sums = torch.zeros(2 * len(documents), dtype=torch.float64, device=device)

        def measure(losses: TokenLosses, batch: Batch) -> None:
            assert batch.conversation is not None and batch.samples is not None
            place = 2 * (batch.samples - documents.start)[:, None] + batch.conversation % 2
            nats = torch.where(batch.weight != 0, losses.loss_BS, 0).double()
            sums.index_add_(0, place.flatten(), nats.flatten())

        measure_rows(
            config,
            self._setup,
            self._model,
            self._runner,
            texts,
            documents,
            measure,
            batch_size=config.train.micro_batch_size or config.train.batch_size,
            advance=advance,
        )
        dist.all_reduce(sums)
        found: Scores = -sums.view(-1, 2).cpu().numpy()
        return found
