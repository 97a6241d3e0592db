"""The results of a sweep so far, from the files of its runs: one table, best first."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.common import storage
from pipeline.common.console import alarm, echo, print_table, say
from pipeline.common.errors import EXIT_OK, UserError
from pipeline.common.run_files import RunFiles
from pipeline.eval.reports import report_files
from slurm.record.sweep_folder import SWEEP_FILE, noted
from slurm.status.command import status
from slurm.status.run import RunStatus
from slurm.status.state import State
from slurm.sweep.members import short_names

_MEAN_OF = 10
"""Steps at the end whose losses are averaged."""
_LOOK_BACK = 1_000
"""Rows in which these are looked for: lines of validations, saves and earlier attempts are between them."""

_LIVE: tuple[State, ...] = ("pending", "held", "running", "stalled", "suspended", "requeued", "evaluating")
_FAILED: tuple[State, ...] = ("failed", "refused", "hung", "diverged", "unsaved", "chain exhausted")
_LOSSES = ("eval_loss", "validation_loss", "train_loss")


@dataclass(frozen=True)
class Result:
    """The result of a run of a sweep so far."""

    name: str
    values: dict[str, str]
    """Values that set it apart, by key."""
    state: str
    """As `pipeline status` has it; `done` is one that was evaluated, too, and `trained` one that was not."""
    why: str
    step: int
    steps: int
    """Steps of the whole run."""
    train_loss: float | None
    """Mean of the last steps."""
    validation_loss: float | None
    """The newest."""
    eval_loss: float | None
    """Loss on the held-out documents, at the newest evaluated step."""
    bits_per_byte: float | None
    eval_step: int | None
    tokens_per_second: float | None
    """Median of the last steps."""


def note_members(folder: Path, values: Mapping[str, dict[str, str]], steps: Mapping[str, int]) -> None:
    """Write down the runs of a sweep; those that an earlier command has noted stay."""
    folder.mkdir(parents=True, exist_ok=True)
    now = {name: {"values": values[name], "steps": steps[name]} for name in values}
    storage.put_json(folder / SWEEP_FILE, {"members": noted(folder) | now})


def results(folder: Path) -> list[Result]:
    """All runs of a sweep, best first.

    Raises:
        UserError: nothing of it was started.
    """
    members = noted(folder)
    if not members:
        raise UserError(
            f"nothing of this sweep was started ({folder} has no {SWEEP_FILE}); leave --table out to start it"
        )
    states = {each.run: each for each in status(dict.fromkeys(folder / name for name in members), spent=False)}
    found = [_result(states[folder / name], name, each["values"], int(each["steps"])) for name, each in members.items()]
    by = sorted_by(found)
    return sorted(found, key=lambda each: (_loss(each, by) is None, _loss(each, by) or 0.0))


def sorted_by(found: Sequence[Result]) -> str:
    """The first of evaluation, validation and training loss that any run has."""
    return next((name for name in _LOSSES if any(_loss(each, name) is not None for each in found)), _LOSSES[-1])


def is_done(run: Path, steps: int) -> bool:
    """True if a run is trained to its end and that step is evaluated."""
    end = RunFiles(run).exit_state()
    return end.get("code") == EXIT_OK and (end.get("step") or 0) >= steps <= (_evaluated(run)[0] or -1)


def live(runs: Sequence[Path]) -> dict[Path, str | None]:
    """State of each run if it runs or waits, else None."""
    found = status(dict.fromkeys(runs), spent=False)
    return {each.run: each.state if each.state in _LIVE else None for each in found}


def show_table(folder: Path, console: Console, *, as_json: bool) -> None:
    """Print the results and write them beside the runs as `table.csv`."""
    found = results(folder)
    by = sorted_by(found)
    best = found[0].name if _loss(found[0], by) is not None else None
    keys = list(dict.fromkeys(key for each in found for key in each.values))
    try:
        storage.put(folder / "table.csv", _csv(found, keys, best).encode())
    except OSError as error:
        alarm("warning:", f"{folder / 'table.csv'} is not written: {error.strerror}")
    if as_json:
        value = {"sweep": str(folder), "sorted_by": by, "best": best, "members": [asdict(each) for each in found]}
        echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
        return
    say(console, f"sweep {folder}")
    print_table(console, _table(found, keys, best))
    if best is not None:
        say(console, f"* best by {by.replace('_', ' ')}; also in {folder / 'table.csv'}")
    for each in found:
        if each.state in _FAILED:
            say(console, f"{each.name} {each.state}: {each.why}; `pipeline logs {folder / each.name} --first-error`")


def _result(now: RunStatus, name: str, values: dict[str, str], steps: int) -> Result:
    last: list[dict[str, Any]] = []
    for row in islice(RunFiles(now.run).newest_rows(), _LOOK_BACK):
        # Of a step that was trained twice the last one counts, which comes first here.
        if "tokens" in row and (not last or row["step"] < last[-1]["step"]):
            last.append(row)
            if len(last) == _MEAN_OF:
                break
    losses = [loss for row in last if (loss := _number(row.get("loss"))) is not None]
    rates = [rate for row in last if (rate := _number(row.get("tokens_per_second"))) is not None]
    evaluated, score = _evaluated(now.run)
    return Result(
        name=name,
        values=values,
        state=_state(now, steps),
        why=now.why.partition("\n")[0].partition(". ")[0],
        step=now.step or 0,
        steps=steps,
        train_loss=statistics.fmean(losses) if losses else None,
        validation_loss=_number(now.validation_loss),
        eval_loss=_number(score.get("loss")),
        bits_per_byte=_number(score.get("bits_per_byte")),
        eval_step=evaluated,
        tokens_per_second=statistics.median(rates) if rates else None,
    )


def _state(now: RunStatus, steps: int) -> str:
    if is_done(now.run, steps):
        return "done"
    if now.state == "done":
        return "trained"
    return "not started" if now.state == "nothing known" else now.state


def _evaluated(run: Path) -> tuple[int | None, dict[str, Any]]:
    """The newest evaluated step and its figures over all sources."""
    for file in reversed(report_files(run)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = storage.read_object(file)
            return int(value["step"]), dict(value["blended"])
    return None, {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _loss(result: Result, name: str) -> float | None:
    value: float | None = getattr(result, name)
    return value


def _table(found: Sequence[Result], keys: Sequence[str], best: str | None) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in short_names(keys).values():
        table.add_column(name, min_width=6, overflow="fold")
    table.add_column("state", no_wrap=True)
    for column in ("step", "train", "valid", "eval", "bits/byte", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in found:
        table.add_row(
            *(each.values.get(key, "") for key in keys),
            each.state,
            f"{each.step:,}/{each.steps:,}",
            *(_shown(each.train_loss), _shown(each.validation_loss), _shown(each.eval_loss)),
            _shown(each.bits_per_byte),
            "-" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}",
            "*" if each.name == best else "",
            style="bold" if each.name == best else None,
        )
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _csv(found: Sequence[Result], keys: Sequence[str], best: str | None) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [name for name in asdict(found[0]) if name != "values"]
    writer.writerow([*figures, *keys, "best"])
    for each in found:
        row = asdict(each)
        writer.writerow([*(row[name] for name in figures), *(each.values.get(key) for key in keys), each.name == best])
    return text.getvalue()
