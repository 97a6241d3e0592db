"""Print the plan of a run: tables for people, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.config.root import Config
from pipeline.console import say
from pipeline.data.accounting import SliceAccount
from pipeline.data.paper import HASHED_STEPS, Plan, PreviewRow, SliceRow, make_plan
from pipeline.data.records import printable

_WIDE = 160
"""Columns of tables that go to a file or a pipe."""


def print_plan(
    config: Config,
    console: Console,
    *,
    ranks: int = 1,
    hashed_steps: int = HASHED_STEPS,
    preview: int = 0,
    assume: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Print the plan of a run.

    Args:
        config: The run file.
        console: Where to.
        ranks: Data-parallel ranks.
        hashed_steps: Steps whose order is hashed, if the run has so many.
        preview: Windows to show.
        assume: `SOURCE=TOKENS` for sources that have no dataset yet.
        as_json: One JSON object instead of tables.

    Raises:
        UserError: The run would be refused.
    """
    plan = make_plan(config, ranks=ranks, hashed_steps=hashed_steps, preview=preview, assume=assume)
    if as_json:
        console.file.write(orjson.dumps(plan.to_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        show(plan, console if console.is_terminal else Console(file=console.file, width=_WIDE))


def show(plan: Plan, console: Console) -> None:
    """Print a plan for people."""
    say(console, f"run: {plan.run}")
    say(console, f"length: {plan.steps:,} steps, {plan.samples:,} samples, {plan.tokens:,} tokens ({plan.ends})")
    if plan.steps_so_far is not None:
        say(console, f"so far: {plan.steps_so_far:,} steps, by the newest checkpoint")
    console.print(_sources_table(plan))
    console.print(_segments_table(plan))
    if plan.steps_so_far and plan.steps_so_far != plan.steps:
        console.print(_accounts_table(f"after {plan.steps_so_far:,} steps", [(r, r.so_far) for r in plan.sources]))
    console.print(_accounts_table(f"at the end, after {plan.steps:,} steps", [(r, r.end) for r in plan.sources]))
    for line in plan.skips:
        say(console, f"skip: {line}")
    for line in plan.warnings:
        say(console, f"warning: {line}")
    say(console, f"order hash of the first {plan.hashed_steps:,} steps: {plan.order_hash}")
    say(console, f"journal: {plan.journal}")
    for row in plan.preview:
        _show_window(row, console)


def _sources_table(plan: Plan) -> Table:
    phases = [phase for phase, _ in groupby(row.phase for row in plan.segments)]
    shares = ["weight"] if len(phases) == 1 else [f"weight\n{phase}" for phase in phases]
    table = _table("source", "slice", "documents", "tokens", *shares, "epochs", "max_epochs", title="sources")
    before = ""
    for row in plan.sources:
        limit = "-" if row.max_epochs is None else f"{row.max_epochs:g}, {row.on_exhausted}"
        if row.exhausted_step is not None:
            limit += f"\nreached at step {row.exhausted_step:,}"
        table.add_row(
            "" if row.source == before else row.source + (" (assumed)" if row.assumed else ""),
            "all" if row.documents is None else f"{row.documents[0]:,} to {row.documents[1] - 1:,}",
            f"{row.document_count:,}" if not row.assumed else "-",
            f"{row.end.tokens:,}",
            *(f"{100 * row.weights[phase]:.4g} %" if phase in row.weights else "-" for phase in phases),
            f"{row.end.epochs:.4g}",
            limit,
        )
        before = row.source
    return table


def _segments_table(plan: Plan) -> Table:
    table = _table("phase", "steps", "batch", "length", "samples", "tokens", "samples\na rank", "padding\na step")
    table.title = "segments" if plan.ranks == 1 else f"segments, on {plan.ranks:,} data-parallel ranks"
    for row in plan.segments:
        table.add_row(
            row.phase,
            f"{row.first_step:,} to {row.last_step:,}",
            f"{row.batch_size:,}",
            f"{row.sequence_length:,}",
            f"{row.samples:,}",
            f"{row.tokens:,}",
            f"{row.micro_batches:,} x {row.micro_batch_size:,}",
            f"{row.padding:,}" + (f" ({_percent(row.padding, row.batch_size + row.padding)})" if row.padding else ""),
        )
    return table


def _accounts_table(title: str, rows: list[tuple[SliceRow, SliceAccount | None]]) -> Table:
    table = _table("source", "slice", "drawn", "epochs", "lap", "unique", "left out", "until max_epochs", title=title)
    for row, account in rows:
        if account is None:
            continue
        table.add_row(
            row.source,
            "all" if account.documents is None else f"{account.documents[0]:,} to {account.documents[1] - 1:,}",
            f"{account.drawn:,}",
            f"{account.epochs:.4g}",
            f"{account.lap:,}, {account.lap_share:.1%} done",
            ("" if account.exact else "about ") + f"{account.unique:,} ({_percent(account.unique, account.tokens)})",
            f"{account.unseen:,}" if account.unseen else "-",
            "-" if account.remaining is None else f"{account.remaining:,}",
        )
    return table


def _table(*columns: str, title: str = "") -> Table:
    """All but the first column to the right."""
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _percent(part: int, whole: int) -> str:
    """Rounded down: what is shown as 100 % is all of it."""
    return f"{1000 * part // whole / 10:g} %"


def _show_window(row: PreviewRow, console: Console) -> None:
    console.print()
    place = f"sample {row.sample:,} (step {row.step:,}): {row.source}, lap {row.lap}, position {row.position:,}"
    console.print(Text(place, style="dim"), soft_wrap=True)
    if row.text is None:
        say(console, "(assumed: no text)")
        return
    pieces = ", ".join(f"{document:,} [{start:,}, {start + length:,})" for document, start, length in row.documents)
    console.print(Text(f"documents and their tokens: {pieces}", style="dim"), soft_wrap=True)
    say(console, printable(row.text, keep="\n\t"))
