"""Benchmarks that are built in, on files of this machine; the results are kept beside those of the held-out loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.common import storage
from pipeline.common.console import print_table, say
from pipeline.common.hashing import file_hash
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.config.eval import TaskConfig
from pipeline.eval.engine import GenerationEngine, measuring
from pipeline.eval.reports import benchmark_path, evaluated_by, identity, kept_results
from pipeline.eval.scoring import score
from pipeline.eval.tasks.lambada import lambada_figures, last_word, read_passages
from pipeline.eval.tasks.wikitext import read_pages, wikitext_figures, wikitext_requests
from pipeline.train.checkpoint.exported import Evaluated, ExportedWeights, described
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.process_group import broadcast_from_rank0

Row = tuple[str, str, float | None, float | None, str]
"""Row of a table: task, figure, value, its standard error, and what else there is to say."""
_SHOWN = {
    "wikitext": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "lambada": ("accuracy", "perplexity"),
}


def run_tasks(
    engine: GenerationEngine, console: Console, *, keep: bool = True, beat: Callable[[], None] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Make the tasks of `eval.tasks` that are not made of these weights in this way yet. Every rank calls this.

    Rank 0 alone reads the files, speaks and writes.

    Args:
        engine: with weights that are kept.
        console: where the table goes.
        keep: whether results are written down, each task when it is done.
        beat: called after each batch.

    Returns:
        The figures of each task, by its name.

    Raises:
        UserError: a file is not there, or not what the task reads.
    """
    config, source = engine.config, engine.source
    assert source is not None, "results are of weights that are kept"
    path = benchmark_path(config, evaluated_by(source), "tasks")
    made: dict[str, Any] = broadcast_from_rank0(lambda: _made(config, source))
    for task in config.eval.tasks:
        if task.title in made:
            continue
        made_with, texts = broadcast_from_rank0(lambda task=task: (_made_with(config, task, source), _read(task)))  # type: ignore[misc]
        figures = _evaluate(engine, task, texts, console, beat)
        made[task.title] = {"made_with": made_with, "results": figures}
        if keep and engine.is_first:
            path.parent.mkdir(exist_ok=True)
            # Those of the same weights that this run file does not name stay.
            tasks = kept_results(config, source, "tasks") | made
            storage.put_json(path, {**results_of(source), "tasks": tasks})
    results = {task.title: made[task.title]["results"] for task in config.eval.tasks}
    if engine.is_first:
        print_results(config, source, console, "tasks", _rows(config, results), path if keep else None)
    return results


def check_files(config: Config, found: Problems) -> None:
    """Check that the files of `eval.tasks` are there and hold what their tasks read."""
    for task in config.eval.tasks:
        with found.collecting():
            _read(task)


def tasks_are_made(config: Config, step: int) -> bool:
    """True if each task of `eval.tasks` is made of this checkpoint already."""
    made = _made(config, Checkpoints.of_run(config.run.dir).at(step)) if config.eval.tasks else {}
    return all(task.title in made for task in config.eval.tasks)


def results_of(source: Evaluated) -> dict[str, Any]:
    """First keys of a file of results: the step of the run, or where other weights come from."""
    origin = {"export": source.origin()} if isinstance(source, ExportedWeights) else {}
    return {"step": source.step, **origin}


def made_with_weights(config: Config, source: Evaluated) -> dict[str, Any]:
    """Settings that all results of some weights depend on."""
    return {
        **identity(config, source),
        "compute": config.train.precision.compute,
        "max_length": config.eval.max_length or config.train.sequence_length,
    }


def print_results(
    config: Config, source: Evaluated, console: Console, title: str, rows: Iterable[Row], file: Path | None
) -> None:
    """Print the results of some weights, a line for each figure, and the file that they are kept in, if any."""
    title += described(source, config.eval.weights)
    table = Table("task", "figure", title=title, title_justify="left")
    table.add_column("value", justify="right")
    table.add_column("stderr", justify="right")
    table.add_column()
    before = None
    for task, figure, value, stderr, words in rows:
        table.add_row("" if task == before else task, figure, _text(value), _text(stderr), words)
        before = task
    print_table(console, table)
    if file is not None:
        say(console, f"kept in {file}")


def _text(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.2f}"


def _made(config: Config, source: Evaluated) -> dict[str, Any]:
    """Results of those tasks of a run file that are there, made of the same things; a damaged file has none."""
    found = {}
    kept = kept_results(config, source, "tasks") if config.eval.tasks else {}
    for task in config.eval.tasks:
        each = kept.get(task.title)
        if each is not None and "results" in each and each["made_with"] == _made_with(config, task, source):
            found[task.title] = each
    return found


def _made_with(config: Config, task: TaskConfig, source: Evaluated) -> dict[str, Any]:
    own = {"stride": task.stride, "detokenize": task.detokenize, "documents": task.documents}
    return {
        **made_with_weights(config, source),
        "type": task.type,
        "file": f"{file_hash(task.path):016x}" if task.path.is_file() else None,
        **(own if task.type == "wikitext" else {}),
    }


def _read(task: TaskConfig) -> list[str]:
    if task.type == "lambada":
        return read_passages(task.path)
    return read_pages(task.path, documents=task.documents)


def _evaluate(
    engine: GenerationEngine, task: TaskConfig, texts: list[str], console: Console, beat: Callable[[], None]
) -> dict[str, float]:
    """The figures of a task on the texts of its file. Every rank calls this."""
    if task.type == "lambada":
        requests = [last_word(engine.tokenizer, text, engine.max_length) for text in texts]
    else:
        requests = wikitext_requests(engine.tokenizer, task, texts, engine.max_length)
    with measuring(engine, console, task.title, len(requests), beat) as done:
        scored = score(engine, requests, batch_size=engine.config.eval.batch_size, advance=done)
    return (
        lambada_figures(requests, scored) if task.type == "lambada" else wikitext_figures(task, texts, requests, scored)
    )


def truncated_words(count: int) -> str:
    """A note on contexts that were longer than the model takes at once; empty without any."""
    return f", {count:,} truncated {'context' if count == 1 else 'contexts'}" if count else ""


def _rows(config: Config, results: dict[str, Any]) -> Iterable[Row]:
    for task in config.eval.tasks:
        figures = results[task.title]
        if task.type == "lambada":
            words = f"{figures['passages']:,} passages" + truncated_words(figures.get("truncated", 0))
        else:
            words = f"{figures['documents']:,} documents" if task.documents else "one text"
            words += f", {figures['words']:,} words" + (f", stride {task.stride:,}" if task.stride else "")
        for name in _SHOWN[task.type]:
            yield task.title, name.replace("_", " "), figures[name], figures.get(f"{name}_stderr"), words
