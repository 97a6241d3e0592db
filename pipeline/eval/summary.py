"""The summary at the end of `pipeline run`: figures, and commands to try next. Also as `summary.json`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline.common import storage
from pipeline.common.console import Console, print_table, say, verbatim, warn
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place, open_datasets
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.eval.perplexity import EvalReport
from pipeline.eval.reference import unigram_bits_per_byte, zstd_bits_per_byte
from pipeline.eval.text import continue_prompt
from pipeline.train.run.folder import read_metrics


def summarize(config: Config, report: EvalReport, seconds: dict[str, float], console: Console) -> dict[str, Any]:
    """Collect the figures of a finished run and write `summary.json`; a summary of the same figures is reused.

    Args:
        config: resolved config.
        report: evaluation of the last checkpoint.
        seconds: wall time by stage, over all attempts.
        console: where the generated continuation is printed.
    """
    path = RunFiles(config.run.dir).summary
    train = list(open_datasets(config, TRAIN).values())
    heldout = list(open_datasets(config, config.eval.split).values()) if report.sources else []
    rows = [row for row in read_metrics(config.run.dir) if "loss" in row and row["step"] <= report.step]
    if not rows:
        raise UserError(f"{RunFiles(config.run.dir).metrics} has no step up to {report.step}; was it moved or emptied?")
    everything = train + heldout
    figures: dict[str, Any] = {
        "documents": sum(dataset.documents for dataset in everything),
        "tokens": sum(dataset.tokens for dataset in everything),
        "bytes": sum(dataset.text_bytes for dataset in everything),
        "steps": report.step,
        "trained_tokens": rows[-1]["tokens"],
        "loss_first": rows[0]["loss"],
        "loss_last": rows[-1]["loss"],
        "weights": config.eval.weights,
        "heldout_loss": report.blended.loss if report.sources else None,
        "perplexity": report.blended.perplexity if report.sources else None,
        "bits_per_byte": report.blended.bits_per_byte,
        "generate": config.generate.model_dump(mode="json"),
    }
    if report.sets:
        keys = ("loss", "perplexity", "bits_per_byte")
        figures["sets"] = {
            name: {key: getattr(each.blended, key) for key in keys} for name, each in report.sets.items()
        }
    with suppress(FileNotFoundError, ValueError):
        before = storage.get_json(path)
        if isinstance(before, dict) and all(before.get(key) == value for key, value in figures.items()):
            return before
    tokenizer = run_tokenizer(config)
    figures["unigram_bits_per_byte"] = figures["zstd_bits_per_byte"] = None
    if heldout:
        figures["unigram_bits_per_byte"] = unigram_bits_per_byte(train, heldout, tokenizer.vocab_size)
        figures["zstd_bits_per_byte"] = zstd_bits_per_byte(heldout, tokenizer)
    figures["seconds"] = seconds
    try:
        encoder = config.model.direction == "both"  # which writes no text
        figures["continuation"] = None if encoder else continue_prompt(config, report.step, console)
    except UserError as error:  # a model that diverged has figures, if bad ones, but no text
        warn(console, error)
        figures["continuation"] = None
    storage.put_json(path, figures)
    return figures


def show(config: Config, summary: dict[str, Any], console: Console) -> None:
    """Print the summary and commands to try next."""

    def form(value: Any, how: str) -> str:
        return "-" if value is None else format(value, how)

    def number(key: str, how: str) -> str:
        """A figure; a dash where there is none (not computed, or not finite)."""
        return form(summary[key], how)

    table = Table(title=f"summary of {config.run.dir}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    of = ", moving average of the weights" if summary["weights"] == "ema" else ""
    seconds = summary["seconds"]
    for row in (
        ("documents", number("documents", ",")),
        (
            "tokens",
            number("tokens", ","),
            f"{number('trained_tokens', ',')} trained on in {number('steps', ',')} steps",
        ),
        ("bytes per token", f"{summary['bytes'] / summary['tokens']:.2f}", f"{summary['bytes']:,} bytes of text"),
        ("training loss", f"{number('loss_first', '.3f')} → {number('loss_last', '.3f')}", "first and last step"),
        ("held-out loss", number("heldout_loss", ".4f"), f"nats per token{of}"),
        ("perplexity", number("perplexity", ",.2f"), "per token"),
        ("bits per byte", number("bits_per_byte", ".3f"), "this model"),
        ("", number("unigram_bits_per_byte", ".3f"), "unigram model of the tokens"),
        ("", number("zstd_bits_per_byte", ".3f"), "zstd -19, a compressor: all documents as one file"),
        *(
            (f"loss of {name}", form(scores["loss"], ".4f"), f"{form(scores['bits_per_byte'], '.3f')} bits per byte")
            for name, scores in summary.get("sets", {}).items()
        ),
        *(
            (f"{stage} time", f"{seconds[stage]:.1f} s")
            for stage in ("curate", "preprocess", "train", "eval")
            if stage in seconds
        ),
    ):
        table.add_row(*row)
    print_table(console, table)
    model, zstd = summary["bits_per_byte"], summary["zstd_bits_per_byte"]
    if model is not None and zstd is not None and model > zstd:
        say(
            console,
            "zstd -19 needs fewer bits than this model: it uses long repetitions, and a small or briefly trained model "
            "often loses to it",
        )
    say(console, f"run folder: {config.run.dir} (these figures: {RunFiles.summary})")
    program = _program()
    file = shlex.quote(str(RunFiles(config.run.dir).config))
    data = dataset_place(config, config.data.sources[0], "train")
    say(console, "try next:")
    writes = config.model.direction == "causal"
    for command in (
        *([f"{program} generate {file} --temperature 0.5 --seed 1"] if writes else []),
        *([f"{program} data inspect {shlex.quote(str(data))}"] if isinstance(data, Path) else []),
        f"{program} run {file} train.duration='{2 * summary['steps']} steps'",
    ):
        verbatim(console, f"  {command}")  # to be copied


def _program() -> str:
    """The command that started this program: its name, or a path if its folder is not on the search path."""
    started = Path(sys.argv[0])
    found = shutil.which(started.name)
    if started.name != "pipeline" or (found is not None and Path(found).resolve() == started.resolve()):
        return "pipeline"
    return shlex.quote(os.path.relpath(started))
