"""The stages of a run on this machine, in this process, each recorded in the run's ledger."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from pipeline.config import Config
from pipeline.errors import Stopped
from slurm.ledger import Ledger

if TYPE_CHECKING:
    from pipeline.eval.perplexity import EvalReport

# Each stage imports what it needs when its turn comes: preprocessing does not wait for torch.


def preprocess(config: Config, *, dry_run: bool = False) -> None:
    """Documents to tokens; see `pipeline.data.preprocess`. A dry run leaves no trace."""
    from pipeline.data.preprocess import preprocess as stage

    if dry_run:
        stage(config, dry_run=True)
        return
    with _ledger(config).stage("preprocess"), _terminate_stops():
        stage(config)


@contextmanager
def _terminate_stops() -> Iterator[None]:
    """SIGTERM, which schedulers send at the end of the time, ends the stage as Ctrl-C does, and says so."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough; another would only interrupt the leaving
        raise Stopped("SIGTERM came; what was committed is kept, the same command goes on from there")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def train(config: Config, console: Console | None = None) -> int:
    """Tokens to a model, up to the step that is returned; see `pipeline.train.trainer`."""
    from pipeline.train.trainer import train as stage

    with _ledger(config).stage("train"):
        return stage(config, console)


def evaluate(config: Config, step: int | None = None, console: Console | None = None) -> EvalReport:
    """A model to numbers; see `pipeline.eval.perplexity`."""
    from pipeline.eval.perplexity import evaluate as stage

    with _ledger(config).stage("eval"):
        return stage(config, step, console)


def run(config: Config, console: Console | None = None) -> None:
    """Preprocess, train, evaluate, summarize. What is done already is passed over, so this is also how to go on."""
    console = console or Console()
    preprocess(config)

    from pipeline.eval.perplexity import heldout_splits, read_report
    from pipeline.eval.summary import show, summarize

    heldout_splits(config)  # refuses a run that could not be evaluated before it is trained
    step = train(config, console)
    report = read_report(config, step) or evaluate(config, step, console)
    show(config, summarize(config, report, _ledger(config).seconds(), console), console)


def _ledger(config: Config) -> Ledger:
    from pipeline.train.run_folder import make_writable

    make_writable(config.run.dir)
    return Ledger(config.run.dir)
