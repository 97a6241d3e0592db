"""The evaluations of all steps of a run in one table: on the screen, as JSON, and as `eval/table.csv`.

It is always made from the reports, whoever wrote them: evaluations that end at the same time lose nothing.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import alarm, echo, say, verbatim, warn
from pipeline.common.format import aligned
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.eval.reports import (
    Evaluation,
    Scores,
    WeightsEvaluation,
    best,
    read_evaluations,
    read_weights_evaluations,
    report_files,
)

TABLE_FILE = "table.csv"
_SCORES = {"loss": ",.4f", "perplexity": ",.2f", "bits_per_byte": ",.4f"}


def show_table(config: Config, console: Console, *, as_json: bool = False) -> None:
    """Print the evaluations of a run by step, the best of them marked.

    Args:
        config: the run.
        console: where the table goes.
        as_json: print one JSON object instead.
    """
    run = config.run.dir
    found, damaged = read_evaluations(run)
    of_weights, damaged_too = read_weights_evaluations(run)
    if as_json:
        value: dict[str, Any] = {"run": str(run), "evaluations": _rows(found)}
        if of_weights:
            value["exports"] = [_row(each) for each in of_weights]
        echo(json.dumps(value, indent=2, ensure_ascii=False))
        return
    if found:
        for line in _lines(run, found):
            verbatim(console, line)
    else:
        say(console, f"no checkpoint of {run} was evaluated; `pipeline eval RUN.yaml --step N` evaluates one")
    if any(each.replaced for each in found):
        say(console, "(replaced): the run went back and has written another checkpoint of this step")
    for path in damaged:
        warn(console, f"{path} is damaged; remove it, and evaluate that step again")
    for line in _lines_of_weights(of_weights):
        verbatim(console, line)
    for path in damaged_too:
        warn(console, f"{path} is damaged; remove it, and evaluate those weights again")


def write_table(run: Path) -> None:
    """Write the evaluations of a run folder as `eval/table.csv`.

    Another process may have added a report, and written the table, between the look at the reports and the end of this
    one's writing: so it looks again until what it wrote is what there is. Where it cannot be written it says so, and no
    report is the worse for it.
    """
    file = RunFiles(run).evaluations / TABLE_FILE
    seen: list[tuple[str, int, int]] | None = None
    try:
        while seen != (there := _fingerprints(run)):
            seen = there
            storage.put(file, _csv(read_evaluations(run)[0]).encode())
    except OSError as error:
        alarm("warning:", f"{file} was not written: {error.strerror}; `pipeline eval RUN.yaml --table` needs no file")


def _fingerprints(run: Path) -> list[tuple[str, int, int]]:
    """The reports, each with what changes when it is written anew."""
    found = []
    for path in report_files(run):
        state = path.stat()
        found.append((path.name, state.st_ino, state.st_mtime_ns))
    return found


def _row(each: WeightsEvaluation) -> dict[str, Any]:
    """For other programs."""
    values = asdict(each)
    values.update(values.pop("scores"))
    return values


def _lines_of_weights(found: list[WeightsEvaluation]) -> Iterator[str]:
    """For the screen, below the steps of the run."""
    if not found:
        return
    yield "evaluations of weights in folders (--weights)"
    cells = [[*(score.replace("_", " ") for score in _SCORES), "weights", "split", "when", "folder"]]
    for each in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time))
        scores = [_text(each.scores, score) for score in _SCORES]
        cells.append([*scores, each.weights, each.split, when, f"{each.path} ({each.export})"])
    yield from aligned(cells, [True] * len(_SCORES))


def _rows(found: list[Evaluation]) -> list[dict[str, Any]]:
    """For other programs."""
    marked = best(found)
    rows = []
    for each in found:
        values = asdict(each)
        scores = values.pop("scores")
        if not each.sets:
            del values["sets"], values["set_measures"]
        rows.append(values | scores | {"best": each in marked})
    return rows


def _csv(found: list[Evaluation]) -> str:
    """A line an evaluation; figures of several sources follow as `loss of NAME`, of sets as `loss of set NAME`."""
    marked, sources, sets = best(found), _sources(found), _sets(found)
    head = ["step", "tokens", "weights", "split", *_SCORES, "best", "replaced", "time"]
    head += [f"{score} of {name}" for name in sources for score in _SCORES]
    head += [f"{score} of set {name}" for name in sets for score in _SCORES]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for each in found:
        row = [each.step, each.tokens, each.weights, each.split, *(each.scores[score] for score in _SCORES)]
        row += [int(each in marked), int(each.replaced), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each.time))]
        row += [each.sources.get(name, {}).get(score) for name in sources for score in _SCORES]
        row += [each.sets.get(name, {}).get(score) for name in sets for score in _SCORES]
        writer.writerow(row)
    return text.getvalue()


def _lines(run: Path, found: list[Evaluation]) -> Iterator[str]:
    """For the screen, in lines as long as they need to be; what is the same in all rows is above them."""
    marked, sources, sets = best(found), _sources(found), _sets(found)
    weights, splits = {each.weights for each in found}, {each.split for each in found}
    of = " of the moving average" if weights == {"ema"} else ""
    yield f"evaluations{of} of {run}"
    numbers = [
        "step",
        "tokens",
        *(score.replace("_", " ") for score in _SCORES),
        *(f"loss of {name}" for name in sources),
        *(f"loss of set {name}" for name in sets),
    ]
    words = [*(["weights"] if len(weights) > 1 else []), *(["split"] if len(splits) > 1 else []), "when", ""]
    cells = [numbers + words]
    for each in found:
        row = [f"{each.step:,}", "-" if each.tokens is None else f"{each.tokens:,}"]
        row += [_text(each.scores, score) for score in _SCORES]
        row += [_text(each.sources.get(name, {}), "loss") for name in sources]
        row += [_text(each.sets.get(name, {}), "loss") for name in sets]
        row += [each.weights] if len(weights) > 1 else []
        row += [each.split] if len(splits) > 1 else []
        row.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time)))
        row.append("best" if each in marked else "(replaced)" if each.replaced else "")
        cells.append(row)
    yield from aligned(cells, [True] * len(numbers))


def _sources(found: list[Evaluation]) -> list[str]:
    """Names of the sources if there are several; the figures of one are those of all."""
    names = list(dict.fromkeys(name for each in found for name in each.sources))
    return names if len(names) > 1 else []


def _sets(found: list[Evaluation]) -> list[str]:
    """Names of the sets."""
    return list(dict.fromkeys(name for each in found for name in each.sets))


def _text(scores: Scores, score: str) -> str:
    value = scores.get(score)
    return "-" if value is None else format(value, _SCORES[score])
