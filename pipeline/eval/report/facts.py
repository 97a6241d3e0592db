"""The figures above the charts and the tables below them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from pipeline.common.format import cut
from pipeline.common.page.html import Fact, Table
from pipeline.common.page.words import NONE, count, figure, in_percent, moment, seconds, si
from pipeline.common.redaction import masked, without_secrets
from pipeline.common.run_files import RunFiles
from pipeline.data.order.journal_file import read_journal
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.eval.report.gather import RunFacts
from pipeline.train.distributed.axes import axis_names
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import num_parameters
from pipeline.train.monitor.phase_log import describe_run
from pipeline.train.run.goodput import number

_MOST_ATTEMPTS = 60
_LONGEST = 400
"""Characters of a value."""
_LONGEST_REASON = 240


def headline(facts: RunFacts) -> Iterator[Fact]:
    """Main figures of a run, the same rows for every run."""
    columns, spent = facts.columns, facts.goodput
    done = facts.step
    yield Fact(
        "step",
        count(done),
        f"of {count(facts.steps)}" if facts.steps else "of an unknown number",
        done / facts.steps if facts.steps else None,
    )
    saved = facts.checkpoint.get("tokens") if facts.checkpoint.get("step") == done else None
    trained = number(columns.tokens[-1] if len(columns) else saved)
    tokens = trained if math.isfinite(trained) else None
    yield Fact(
        "tokens trained on",
        si(tokens) if tokens is not None else NONE,
        f"of {si(facts.tokens)}" if facts.tokens else "",
        tokens / facts.tokens if facts.tokens and tokens is not None else None,
    )
    loss = next((value for value in reversed(columns.numbers["loss"]) if math.isfinite(value)), None)
    yield Fact("training loss", figure(loss), "newest step")
    looks = [each for each in columns.validations if math.isfinite(each.loss)]
    yield Fact(
        "validation loss", figure(looks[-1].loss if looks else None), f"step {looks[-1].step:,}" if looks else ""
    )
    lowest = min(looks, key=lambda each: each.loss, default=None)
    yield Fact("best validation", figure(lowest.loss if lowest else None), f"step {lowest.step:,}" if lowest else "")
    yield _held_out(facts)
    yield Fact("throughput", si(rate) if (rate := facts.recent("tokens_per_second")) else NONE, "tokens per second")
    if (mfu := facts.recent("mfu")) is not None:
        yield Fact("MFU", in_percent(mfu), "full attention counted")
    yield from _experts(facts)
    for name, label, detail in (
        ("reserved", "GPU memory", "GiB held by rank 0"),
        ("host", "host memory", "GiB of rank 0's process"),
    ):
        if (used := facts.recent(name)) is not None:
            yield Fact(label, figure(float(f"{used:.3g}")), detail)
    yield Fact("goodput", in_percent(spent.share) if spent else NONE, f"of {seconds(spent.wall)}" if spent else "")
    left = _left(facts)
    day, _, clock = moment(facts.start).partition(" ")
    yield Fact("started", day, f"{clock}, {seconds(left)} left" if left is not None else clock)
    yield Fact("attempts", count(len(facts.tries)), f"{columns.lost:,} steps lost" if columns.lost else "")


def _experts(facts: RunFacts) -> Iterator[Fact]:
    """The load of the busiest expert, of a model that has some."""
    load = facts.recent("load_max_over_mean")
    if load is None:
        return
    if facts.columns.balance_forced:
        detail = "forced: tokens were dealt in turn"
    else:
        dead = facts.recent("dead_experts") or 0.0
        detail = f"of the mean load; {dead:.0f} experts of a layer get no token"
    yield Fact("busiest expert", f"{load:.2f}x", detail)


def _held_out(facts: RunFacts) -> Fact:
    """The best of the evaluations that can be compared with the newest one."""
    scores = [each for each in facts.evaluations if not each.replaced and each.scores["loss"] is not None]
    if not scores:
        return Fact("held-out loss", NONE, "not evaluated")
    newest = max(scores, key=lambda each: (each.time, each.step))
    kind = [each for each in scores if each.measure == newest.measure]
    chosen = min(kind, key=lambda each: each.scores["loss"] or 0.0)
    of = f"best of {len(kind)} evaluations, " if len(kind) > 1 else ""
    return Fact("held-out loss", figure(chosen.scores["loss"]), f"{of}step {chosen.step:,}")


def _left(facts: RunFacts) -> float | None:
    """Seconds until the end, by the newest steps of the attempt that is running: no pause lies between them."""
    columns = facts.columns
    if facts.state.word != "running" or facts.steps is None or len(columns) < 2:
        return None
    steps, times, tries = (np.asarray(each[-100:]) for each in (columns.step, columns.time, columns.attempt))
    known = (tries == tries[-1]) & np.isfinite(times)
    steps, times = steps[known], times[known]
    if len(steps) < 2:
        return None
    return float(max(0.0, (facts.steps - facts.step) * (times[-1] - times[0]) / (steps[-1] - steps[0])))


def attempts_table(runs: Sequence[RunFacts]) -> tuple[Table, str]:
    """Table of attempts, and a note on those left out."""
    rows = []
    for facts in runs:
        for each in facts.tries[-_MOST_ATTEMPTS:]:
            end = each.end if each.end is not None else facts.columns.time[-1] if len(facts.columns) else None
            where = each.host + (f", job {each.job}" if each.job else "")
            step = facts.step if each.end is None else each.step
            cells = (f"{each.number}", moment(each.begin), where, each.outcome)
            numbers = (seconds(end - each.begin) if end else NONE, count(each.first_step), count(step))
            row = (*cells, *numbers, _cut(each.reason, _LONGEST_REASON) if each.end else "")
            rows.append((facts.name, *row) if len(runs) > 1 else row)
    head = ("attempt", "began", "on", "outcome", "lasted", "from step", "to step", "why it ended")
    several = len(runs) > 1
    left = sum(max(0, len(facts.tries) - _MOST_ATTEMPTS) for facts in runs)
    note = f"{left:,} earlier attempts are in ledger.jsonl." if left else ""
    return Table(("run", *head) if several else head, tuple(rows), 5 if several else 4, last_words=True), note


def layout_table(runs: Sequence[RunFacts]) -> Table:
    """Table of model, steps, processes and versions, a column for each run."""
    columns = [_layout(facts) for facts in runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = tuple((key, *(column.get(key, NONE) for column in columns)) for key in keys)
    return Table(("", *(facts.name for facts in runs)), rows, 1 + len(runs))


def _layout(facts: RunFacts) -> dict[str, str]:
    found: dict[str, str] = {"folder": str(facts.folder)}
    origin = facts.checkpoint.get("origin")
    if isinstance(origin, dict) and origin:
        if origin.get("kind") == "fork":
            found["began as"] = f"a fork of {origin.get('run')} at step {origin.get('step')}"
        else:
            found["began as"] = f"weights of {origin.get('path')}"
    if facts.config is not None:
        config, model = facts.config, facts.config.model
        with suppress(OSError, ValueError, KeyError, TypeError):
            spec = decoder_spec(model, run_tokenizer(config).vocab_size, config.max_positions)
            found["parameters"] = f"{num_parameters(spec):,}"
        heads = "" if model.heads is None else f", {model.heads} heads"
        found["model"] = f"{model.layers} layers, width {model.dim}{heads}"
        with suppress(OSError, ValueError):
            journal = read_journal(facts.folder) if RunFiles(facts.folder).journal.exists() else None
            if journal is not None and facts.steps:
                found["steps"] = describe_run(config, journal, 0, facts.steps)
        found["ends"] = facts.length_reason
        found["compute"] = config.train.precision.compute
    layout = facts.tries[-1].layout if facts.tries else {}
    if layout:
        found["processes"] = count(layout.get("world_size", 1))
        found |= {axis: count(layout[axis]) for axis in axis_names() if axis in layout}
    versions = facts.checkpoint.get("versions")
    for name, version in (versions if isinstance(versions, dict) else {}).items():
        if isinstance(version, dict):
            changed = ", changed files" if version.get("changed") else ""
            found[f"version of {name}"] = f"{str(version.get('revision'))[:12]}{changed}"
        else:
            found[f"version of {name}"] = str(version)
    return {key: _cut(value) for key, value in found.items()}


def config_table(runs: Sequence[RunFacts]) -> Table:
    """Table of keys: of several runs those that differ, of one those that are not the default."""
    if len(runs) == 1:
        config = runs[0].config
        changed = _flat(config.model_dump(mode="json", exclude_defaults=True)) if config else _flat(runs[0].values)
        return Table(("key", "value"), tuple((key, _shown(key, value)) for key, value in changed.items()), 2)
    flat = [_flat(facts.values) for facts in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    rows = []
    for key in keys:
        values = [each.get(key, _MISSING) for each in flat]
        if all(value is _MISSING or value is None for value in values):
            continue  # a section that one run leaves out, and of which the other has keys: these have rows of their own
        if key != "run.dir" and any(value != values[0] or type(value) is not type(values[0]) for value in values[1:]):
            rows.append((key, *(NONE if value is _MISSING else _shown(key, value) for value in values)))
    return Table(("key", *(facts.name for facts in runs)), tuple(rows), 1 + len(runs))


_MISSING = object()


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Values by dotted key. Entries of lists that have names go by these, so that another order makes no difference."""
    found: dict[str, Any] = {}
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            found |= _flat(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for number, each in enumerate(value):
            found |= _flat({k: v for k, v in each.items() if k != "name"}, f"{path}.{each.get('name', number)}")
    elif path:
        found[path] = value
    return found


def _shown(key: str, value: Any) -> str:
    value = without_secrets(value, key)
    return _cut(value if isinstance(value, str) else orjson.dumps(value, default=str).decode())


def _cut(text: str, most: int = _LONGEST) -> str:
    return cut(masked(text), most)  # masked first: half an address would not be known as one
