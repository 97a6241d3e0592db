"""Everything that may end an evaluation at its start and that can be told before: for previews and for its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.common.problems import Problems, StartCheck
from pipeline.config import Config
from pipeline.eval.continuations import refuse_continuations
from pipeline.eval.encoders import refuse_tasks
from pipeline.eval.engine import GenerationEngine, watched
from pipeline.eval.heldout_data import check_heldout
from pipeline.eval.tasks.builtin import check_files
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.process_group import Processes, broadcast_from_rank0
from pipeline.train.rules.layout import check_evaluation_layout, evaluation_parallel
from pipeline.train.start.setup import init_rank


@dataclass(frozen=True)
class EvalScope:
    """An evaluation that is about to start.

    Attributes:
        config: the run.
        processes: that evaluate.
        step: of the checkpoint; None for the latest one.
        data_comes: preprocessing runs before it, so datasets need not be there yet.
        finds_checkpoint: False if training runs before it, or the weights are opened by other means.
    """

    config: Config
    processes: int
    step: int | None = None
    data_comes: bool = False
    finds_checkpoint: bool = True


def _layout(scope: EvalScope, found: Problems) -> None:
    check_evaluation_layout(scope.config, scope.processes)


def _kinds(scope: EvalScope, found: Problems) -> None:
    """Benchmarks that the model or the number of processes does not allow."""
    with found.collecting():
        refuse_tasks(scope.config)
    refuse_continuations(scope.config, scope.processes)


def _files(scope: EvalScope, found: Problems) -> None:
    check_files(scope.config, found)


def _harness(scope: EvalScope, found: Problems) -> None:
    harness = scope.config.eval.harness
    if harness is not None and scope.config.model.direction != "both":  # of which that was said
        from pipeline.eval.tasks.harness import check_harness_tasks

        check_harness_tasks(scope.config, harness)


def _splits(scope: EvalScope, found: Problems) -> None:
    """Splits that hold nothing out, which can be told before there are datasets."""
    config = scope.config
    holds = config.heldout_sets or any(split.share or split.documents for split in config.data.splits.values())
    if scope.data_comes and not holds:
        raise UserError(
            f"nothing is held out (data.splits.{config.eval.split} is {config.data.splits.get(config.eval.split)}), so "
            f"there is nothing to evaluate on; set data.splits.{config.eval.split} to a share or a number of documents"
        )


def _heldout(scope: EvalScope, found: Problems) -> None:
    check_heldout(scope.config)


def _data_comes(scope: EvalScope) -> str:
    return "preprocessing comes first and makes them" if scope.data_comes else ""


def _checkpoint(scope: EvalScope, found: Problems) -> None:
    Checkpoints.of_run(scope.config.run.dir).find(scope.step)


def _no_checkpoint_yet(scope: EvalScope) -> str:
    return "" if scope.finds_checkpoint else "training comes first and makes it"


EVAL_CHECKS: tuple[StartCheck[EvalScope], ...] = (
    StartCheck("layout of the evaluation", _layout),
    StartCheck("kinds of benchmarks", _kinds),
    StartCheck("files of eval.tasks", _files),
    StartCheck("names of eval.harness.tasks", _harness),
    StartCheck("held-out splits", _splits),
    StartCheck("held-out datasets", _heldout, _data_comes),
    StartCheck("checkpoint to evaluate", _checkpoint, _no_checkpoint_yet),
)


def refuse_importance(config: Config, processes: int) -> None:
    """Refuse an evaluation in which importance cannot be measured.

    Args:
        config: of the run.
        processes: that evaluate.

    Raises:
        UserError: the layout has a pipeline, or the model an encoder beside its decoder.
    """
    if config.model.encoder is not None:
        raise UserError("--importance does not work with model.encoder: pruning is for decoders, and encoders alone")
    if (stages := evaluation_parallel(config, processes).pp) > 1:
        raise UserError(
            f"--importance does not work with {stages} stages of a pipeline; lay them out otherwise, "
            "like eval.processes=2 eval.parallel={dp_shard: 2}"
        )


def _importance(scope: EvalScope, found: Problems) -> None:
    refuse_importance(scope.config, scope.processes)


IMPORTANCE_CHECKS = (
    StartCheck("measure of importance", _importance),
    *(check for check in EVAL_CHECKS if check.look in (_layout, _splits, _heldout, _checkpoint)),
)
"""The checks of `pipeline eval --importance`."""


@contextmanager
def checked_engine(
    config: Config,
    ranks: Processes,
    checks: Sequence[StartCheck[EvalScope]],
    load: Callable[[], GenerationEngine],
) -> Iterator[tuple[GenerationEngine, Callable[[], None]]]:
    """The engine of an evaluation; every rank enters this.

    Args:
        config: resolved config.
        ranks: the place of this process.
        checks: of what may be wrong, before anything is loaded; rank 0 alone looks, and says what is.
        load: opens the engine.

    Yields:
        The engine, and what is to be called after each batch, see `watched`.
    """

    def check() -> None:
        found = Problems()
        found.look(checks, EvalScope(config, ranks.world_size, finds_checkpoint=False))
        found.raise_problems()

    with watched(config, ranks) as beat:
        init_rank(config, ranks)
        broadcast_from_rank0(check)
        engine = load()
        beat()
        yield engine, beat
