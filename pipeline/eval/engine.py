"""A model that is evaluated, laid out over one process or several.

Rank 0 alone prints and writes. Mistakes that all ranks would find are looked for by rank 0, and told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from rich.console import Console

from pipeline.common.console import progress
from pipeline.config import Config
from pipeline.data.loading.batch import Batch
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.exported import Evaluated, WeightsOf
from pipeline.train.distributed.process_group import Processes
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.loop.out_of_memory import out_of_memory_means
from pipeline.train.loop.validation import HeldOutLoss, HeldOutRows, heldout_loss
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import Runner
from pipeline.train.parallel.setup import Setup
from pipeline.train.rules.layout import check_evaluation_layout, evaluation_parallel
from pipeline.train.start.setup import load_for_inference


@dataclass(frozen=True)
class GenerationEngine:
    """A model that is evaluated, on this process's place in its layout.

    All ranks of the layout hold one and make the same calls in the same order. Tokens go through `runner.evaluate`.
    """

    config: Config
    setup: Setup
    model: ParallelModel
    """This process's parts of it."""
    runner: Runner
    tokenizer: Tokenizer
    source: Evaluated | None
    """Source of the weights; None for those that are in training."""

    @property
    def max_length(self) -> int:
        """Tokens of input at once: `eval.max_length`, or what was trained; never more than there are positions."""
        length = self.config.eval.max_length or self.config.train.sequence_length
        return min(length, self.setup.spec.learned_positions or length)

    @property
    def is_first(self) -> bool:
        """True on rank 0 of all processes: the one that prints and writes."""
        return not dist.is_initialized() or dist.get_rank() == 0


def open_engine(config: Config, which: WeightsOf, ranks: Processes) -> GenerationEngine:
    """The model of verified weights under the layout of the evaluation; every rank calls this.

    Args:
        config: resolved config.
        which: checkpoint or folder.
        ranks: the place of this process among those of the evaluation.

    Raises:
        UserError: the layout does not fit the model or the number of processes, or as `load_for_inference`.
        MachineError: the model does not fit into memory.
    """
    check_evaluation_layout(config, ranks.world_size)
    parallel = evaluation_parallel(config, ranks.world_size)
    advice = "the model does not fit; evaluate on more processes (eval.processes, eval.parallel)"
    with out_of_memory_means(lambda: advice):
        found = load_for_inference(config, which, ranks, parallel)
    return GenerationEngine(config, found.setup, found.model, found.runner, found.tokenizer, found.source)


@contextmanager
def measuring(
    engine: GenerationEngine, console: Console, title: str, total: int, beat: Callable[[], None]
) -> Iterator[Callable[[int], None]]:
    """A progress bar over batches of `eval.batch_size`, which a message names where memory is too small for them.

    Args:
        engine: the model.
        console: for the bar.
        title: what is measured.
        total: of the bar.
        beat: called after each batch.

    Yields:
        A function that is to be called after each batch, with what was done in it.
    """
    advice = f"lower eval.batch_size ({engine.config.eval.batch_size} now)"
    with progress(console, f"eval {title}", total) as advance, out_of_memory_means(lambda: advice):

        def done(count: int) -> None:
            advance(count)
            beat()

        yield done


def engine_loss(
    engine: GenerationEngine,
    rows: HeldOutRows,
    windows: Sequence[int],
    batch_size: int,
    advance: Callable[[int], None],
    before: Callable[[Batch], None] = lambda batch: None,
) -> HeldOutLoss:
    """`heldout_loss` of an engine's model; every rank calls this, and the arguments are those of `heldout_loss`."""
    return heldout_loss(
        *(engine.config, engine.setup, engine.model, engine.runner, rows, windows),
        batch_size=batch_size,
        advance=advance,
        before=before,
    )


@contextmanager
def watched(config: Config, ranks: Processes) -> Iterator[Callable[[], None]]:
    """Inside, one of several processes that does not get on ends, as in training, and the others with it.

    Loading has the limit `launch.time_limits.save_seconds`. What is yielded is to be called after it and after each
    batch, which have `step_seconds`.
    """
    if ranks.world_size == 1:  # it waits for nobody
        yield lambda: None
        return
    with Watchdog(config.launch.time_limits) as watchdog:
        watchdog.phase("save")
        yield lambda: watchdog.phase("step")
