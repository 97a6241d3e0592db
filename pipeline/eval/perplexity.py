"""Held-out loss of a checkpoint: every token of every held-out split once, by source and together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.config import Config
from pipeline.console import progress, say
from pipeline.data import store
from pipeline.data.heldout import HeldOut
from pipeline.errors import UserError
from pipeline.eval.reports import report_path
from pipeline.eval.table import write_table
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.setup import check_tokenizer, load_for_inference, out_of_memory_means
from pipeline.train.start import open_heldout
from pipeline.train.validation import HeldOutLoss, heldout_loss


@dataclass(frozen=True)
class Score:
    """Loss on some held-out text, in its usual dresses."""

    documents: int
    targets: int
    """Tokens scored; the end-of-document token that closes each document is one of them."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    loss: float
    """Nats a token."""
    perplexity: float
    """exp(loss), a token."""
    bits_per_byte: float
    """All bits spent, those for the ends of documents included, over the bytes of the text."""


@dataclass(frozen=True)
class EvalReport:
    """Held-out loss of one checkpoint."""

    step: int
    made_with: dict[str, Any]
    """What the figures depend on: checkpoint, which of its weights, held-out data, windows, precision."""
    sources: dict[str, Score]
    blended: Score
    """All sources together, weighted by their tokens."""


def score(loss: HeldOutLoss, documents: int, text_bytes: int) -> Score:
    """From a summed loss to what people compare."""
    return Score(
        documents=documents,
        targets=loss.targets,
        text_bytes=text_bytes,
        loss=loss.mean,
        # Beyond exp(700) a float has no more to say.
        perplexity=math.exp(min(loss.mean, 700.0)),
        bits_per_byte=loss.nats / math.log(2) / text_bytes if text_bytes else math.nan,
    )


def evaluate(
    config: Config, checkpoint: int | None = None, console: Console | None = None, *, keep: bool = True
) -> EvalReport:
    """Score a checkpoint on the whole held-out split; the result is also written to `eval/` in the run folder.

    Args:
        config: resolved config.
        checkpoint: step of the checkpoint, by default the latest one.
        console: where to print.
        keep: whether the result is written down.

    Raises:
        UserError: no such checkpoint, a damaged one, or nothing held out.
    """
    console = console or Console()
    splits = heldout_splits(config)
    setup, model, runner, found = load_for_inference(config, checkpoint)
    check_tokenizer({name: split.dataset for name, split in splits.items()}, setup.tokenizer)
    losses: dict[str, HeldOutLoss] = {}
    for name, split in splits.items():
        with (
            progress(console, f"eval {name}", len(split)) as advance,
            out_of_memory_means(lambda: f"lower eval.batch_size ({config.eval.batch_size} now)"),
        ):
            losses[name] = heldout_loss(
                model,
                runner,
                setup.mesh,
                split,
                range(len(split)),
                batch_size=config.eval.batch_size,
                document_attention=config.model.document_attention,
                device=setup.device,
                advance=advance,
            )
    report = EvalReport(
        step=found.step,
        made_with=_made_with(config, found),
        sources={name: _score_of(losses[name], [splits[name]]) for name in splits},
        blended=_score_of(sum(losses.values(), HeldOutLoss(0.0, 0)), list(splits.values())),
    )
    console.print(_table(report))
    if not keep:
        say(console, f"warning: {config.run.dir} cannot be written to; the result is not kept")
        return report
    path = report_path(config, found.step)
    path.parent.mkdir(exist_ok=True)
    store.put_json(path, asdict(report))
    write_table(config.run.dir)
    say(console, f"written to {path}")
    return report


def heldout_splits(config: Config) -> dict[str, HeldOut]:
    """The held-out splits that have documents, by source.

    Raises:
        UserError: none has.
    """
    splits = {name: split for name, split in open_heldout(config, config.eval.split).items() if len(split)}
    if not splits:
        raise UserError(
            f"nothing is held out (data.splits.{config.eval.split} is {config.data.splits.get(config.eval.split)}), so "
            "there is nothing to evaluate on; raise it, or add sources with more documents, and preprocess into a new "
            "data.dir"
        )
    return splits


def read_report(config: Config, step: int) -> EvalReport | None:
    """The evaluation of a step, if it was made of this checkpoint on this data in this way; None means: evaluate."""
    try:
        value: dict[str, Any] = store.get_json(report_path(config, step))
        if value["made_with"] != _made_with(config, Checkpoints.of_run(config.run.dir).at(step)):
            return None
        return EvalReport(
            value["step"],
            value["made_with"],
            {name: Score(**row) for name, row in value["sources"].items()},
            Score(**value["blended"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _made_with(config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint.fingerprint,
        "data": {name: split.dataset.fingerprint for name, split in heldout_splits(config).items()},
        "split": config.eval.split,
        "weights": config.eval.weights,
        "sequence_length": config.train.sequence_length,
        "compute": config.train.precision.compute,
    }


def _score_of(loss: HeldOutLoss, splits: list[HeldOut]) -> Score:
    documents = sum(split.dataset.documents for split in splits)
    return score(loss, documents, sum(split.dataset.text_bytes for split in splits))


def _table(report: EvalReport) -> Table:
    of = " of the moving average" if report.made_with["weights"] == "ema" else ""
    table = Table("source", title=f"held-out loss{of} at step {report.step}", title_justify="left")
    for column in ("documents", "tokens", "loss", "perplexity", "bits per byte"):
        table.add_column(column, justify="right")
    rows = dict(report.sources)
    if len(rows) > 1:
        rows["all"] = report.blended
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.documents:,}",
            f"{row.targets:,}",
            f"{row.loss:.4f}",
            f"{row.perplexity:,.2f}",
            f"{row.bits_per_byte:.4f}",
        )
    return table
