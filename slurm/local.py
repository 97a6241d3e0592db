"""All stages of a run in order, on this machine and in this process."""

from __future__ import annotations

from rich.console import Console

from pipeline.config import Config
from slurm.ledger import Ledger


def run(config: Config, console: Console | None = None) -> None:
    """Preprocess, train, evaluate, summarize. What is done already is passed over, so this is also how to go on."""
    # Each stage imports what it needs when its turn comes: preprocessing does not wait for torch.
    from pipeline.data.preprocess import preprocess
    from pipeline.train.run_folder import make_writable

    console = console or Console()
    make_writable(config.run.dir)
    ledger = Ledger(config.run.dir)
    with ledger.stage("preprocess"):
        preprocess(config)

    from pipeline.eval.perplexity import evaluate, heldout_splits, read_report
    from pipeline.train.trainer import train

    heldout_splits(config)  # refuses a run that could not be evaluated before it is trained
    with ledger.stage("train"):
        trained = train(config, console)
    report = read_report(config, trained.step)
    if report is None:
        with ledger.stage("eval"):
            report = evaluate(config, trained.step, console)

    from pipeline.eval.summary import show, summarize

    summary = summarize(config, report, ledger.seconds(), console)
    show(config, summary, console)
