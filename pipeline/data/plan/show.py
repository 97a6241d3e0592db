"""Printing of the data plan of a run: tables for people, or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import orjson
from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.common.console import Console, print_table, say, verbatim, warn
from pipeline.common.format import counted, first_and_last, percent, rounded, size
from pipeline.config.root import Config
from pipeline.data.order.consumption import SliceAccount
from pipeline.data.order.journal import Journal
from pipeline.data.order.run_length import range_text
from pipeline.data.plan.build import HASHED_STEPS, make_data_plan
from pipeline.data.plan.rows import DataPlan, ObjectiveRow, PreviewRow, SegmentRow, SliceRow
from pipeline.data.sources.records import printable

_WIDE = 1000
"""Columns of tables that go to a file or a pipe: enough that nothing is broken."""
_PHASES = 5
"""Columns of a table of weights."""
_NEAR = 0.01
"""A share that is so near to its weight, relatively, is not shown beside it."""
_SEGMENTS = 40
"""That are all shown; JSON has all of more."""


def print_data_plan(
    config: Config,
    console: Console,
    *,
    ranks: int = 1,
    hashed_steps: int = HASHED_STEPS,
    preview: int = 0,
    assume: Sequence[str] = (),
    as_json: bool = False,
    check: Callable[[Journal, int], Sequence[str]] = lambda journal, steps: (),
) -> None:
    """Print the data plan of a run.

    Args:
        config: The run file.
        console: Where to.
        ranks: Data-parallel ranks.
        hashed_steps: Steps whose order is hashed, at most those of the run.
        preview: Windows to show.
        assume: `SOURCE=TOKENS` for sources that have no dataset yet.
        as_json: One JSON object instead of tables.
        check: What else training would refuse, from the journal and the steps of the run.

    Raises:
        UserError: The run would be refused.
    """
    plan = make_data_plan(config, ranks=ranks, hashed_steps=hashed_steps, preview=preview, assume=assume, check=check)
    if as_json:
        verbatim(console, orjson.dumps(plan.to_json(), option=orjson.OPT_INDENT_2).decode())
    else:
        show(plan, console if console.is_terminal else Console(file=console.file, width=_WIDE))


def show(plan: DataPlan, console: Console) -> None:
    """Print a data plan for people."""
    say(console, f"run: {plan.run}")
    packed = any(row.packing != "windows" for row in plan.segments)
    tokens = f"{plan.tokens:,} {'slots' if packed else 'tokens'}"
    say(console, f"length: {plan.steps:,} steps, {plan.samples:,} samples, {tokens} ({plan.ends})")
    if packed:
        drawn = sum(row.end.drawn for row in plan.sources)
        empty = percent(1 - drawn / plan.tokens)
        say(console, f"targets: about {drawn:,}; {empty} of the slots are padding (data.loader.packing: best_fit)")
    if plan.steps_so_far is not None:
        say(console, f"so far: {plan.steps_so_far:,} steps, by the newest checkpoint")
    for table in _tables(plan):
        console.print()
        print_table(console, table)
    console.print()
    for source in plan.remote:
        per_step = source.range_requests / plan.steps
        say(
            console,
            f"{source.source}: {source.url}, {counted(source.parts, 'part')}, {size(source.bytes)} of tokens. Requests "
            f"of each node: {source.open_requests:,} before the first step, {source.copy_requests:,} for copies of all "
            f"parts (stage.data: local). Of all nodes, for samples that are read by ranges: about {per_step:,.1f} per "
            f"step, {source.range_requests:,} if no part is copied",
        )
    for line in plan.skips:
        say(console, f"skip: {line}")
    for line in plan.warnings:
        warn(console, line)
    if plan.order_hash is not None:
        say(console, f"order hash of steps 1 to {plan.hashed_steps:,}: {plan.order_hash}")
    say(console, f"journal: {plan.journal}")
    for row in plan.preview:
        _show_window(row, console)


def _tables(plan: DataPlan) -> Iterator[Table]:
    yield _sources_table(plan)
    phases = [phase for phase, _ in groupby(row.phase for row in plan.segments)]
    if len(phases) > 1:
        for first in range(0, len(phases), _PHASES):
            yield _weights_table(plan, phases[first : first + _PHASES])
    if plan.weighs:
        for first in range(0, len(phases), _PHASES):
            yield _loss_weights_table(plan, phases[first : first + _PHASES])
    yield _segments_table(plan)
    if any(row.objective != "causal" for row in plan.objectives):
        yield _objectives_table(plan)
    if plan.steps_so_far and plan.steps_so_far != plan.steps:
        yield _accounts_table(f"after {plan.steps_so_far:,} steps", [(row, row.so_far) for row in plan.sources])
    yield _accounts_table(f"at the end, after {plan.steps:,} steps", [(row, row.end) for row in plan.sources])


def _sources_table(plan: DataPlan) -> Table:
    # The weights of several phases have tables of their own.
    weight = ["weight"] if len({row.phase for row in plan.segments}) == 1 else []
    table = _table("sources", "source", "slice", "documents", "tokens", *weight, "given", "epochs", "max_epochs")
    for row in plan.sources:
        limit = "-" if row.max_epochs is None else f"{row.max_epochs:g}, {row.on_exhausted}"
        if row.exhausted_step is not None:
            limit += f"\nreached at\nstep {row.exhausted_step:,}"
        _add(
            table,
            row.source + (" (assumed)" if row.assumed else ""),
            _slice(row),
            _count(row.document_count) if not row.assumed else "-",
            _count(row.end.tokens),
            *(_weight(next(iter(row.weights.values()), None)) for _ in weight),
            _weight(row.share),
            f"{row.end.epochs:.4g}",
            limit,
        )
    return table


def _weights_table(plan: DataPlan, phases: Sequence[str]) -> Table:
    table = _table("weights", "source", "slice", *phases)
    for row in plan.sources:
        if not row.weights.keys().isdisjoint(phases):
            _add(table, row.source, _slice(row), *(_given(row, phase) for phase in phases))
    return table


def _loss_weights_table(plan: DataPlan, phases: Sequence[str]) -> Table:
    columns = phases if len(phases) > 1 else ["weight"]
    table = _table("loss weights", "source", "slice", *columns, "documents")
    for row in plan.sources:
        if not row.loss_weights.keys().isdisjoint(phases):
            weights = (row.loss_weights.get(phase) for phase in phases)
            cells = ("-" if weight is None else f"{weight:g}" for weight in weights)
            _add(table, row.source, _slice(row), *cells, "x weight_key" if row.document_weights else "-")
    return table


def _given(row: SliceRow, phase: str) -> str:
    """Weight in a phase, and the share that is really given where that is another one."""
    weight, share = row.weights.get(phase), row.shares.get(phase)
    given = (
        "" if share is None or weight is None or abs(share - weight) < _NEAR * weight else f"\n{percent(share)} given"
    )
    return _weight(weight) + given


def _segments_table(plan: DataPlan) -> Table:
    ranks = f", on {plan.ranks:,} data-parallel ranks" if plan.ranks > 1 else ""
    columns = ("phase", "steps", "batch", "length", "samples", "tokens", "samples\nper rank", "padding")
    trained = ["trained\nper step"] if any(row.trained_per_step is not None for row in plan.segments) else []
    table = _table(f"segments{ranks}", *columns, *trained)
    first, left_out, last = first_and_last(plan.segments, _SEGMENTS)
    middle = [(left_out,)] if left_out else []
    for cells in (*map(_segment_cells, first), *middle, *map(_segment_cells, last)):
        _add(table, *cells)
    return table


def _segment_cells(row: SegmentRow) -> tuple[str, ...]:
    return (
        row.phase,
        range_text(row.first_step, row.last_step + 1),
        f"{row.batch_size:,}",
        f"{row.sequence_length:,}" + (" (packs)" if row.packing != "windows" else ""),
        _count(row.samples),
        _count(row.tokens),
        f"{row.micro_batches:,} x {row.micro_batch_size:,}",
        percent(row.padding / (row.batch_size + row.padding), 1) if row.padding else "-",
        *([] if row.trained_per_step is None else [_count(round(row.trained_per_step))]),
    )


def _objectives_table(plan: DataPlan) -> Table:
    columns = ("phase", "steps", "source", "objective", "length", "encoder", "decoder", "predicted", "padding")
    table = _table("objectives, by window", *columns)
    first, left_out, last = first_and_last(plan.objectives, _SEGMENTS)
    middle = [(left_out,)] if left_out else []
    for cells in (*map(_objective_cells, first), *middle, *map(_objective_cells, last)):
        _add(table, *cells)
    return table


def _objective_cells(row: ObjectiveRow) -> tuple[str, ...]:
    return (
        row.phase,
        range_text(row.first_step, row.last_step + 1),
        row.source or "all",
        row.objective,
        f"{row.sequence_length:,}",
        f"{row.encoder:,}" if row.encoder else "-",
        f"{row.decoder:,}",
        f"{row.predicted:,}",
        percent(row.padding, 1) if row.padding else "-",
    )


def _accounts_table(title: str, rows: Sequence[tuple[SliceRow, SliceAccount | None]]) -> Table:
    table = _table(
        title, "source", "slice", "drawn", "epochs", "now in epoch", "unique", "left out", "until\nmax_epochs"
    )
    for row, account in rows:
        if account is not None:
            _add(
                table,
                row.source,
                _slice(row),
                _count(account.drawn),
                f"{account.epochs:.4g}",
                f"{account.lap:,} + {percent(account.lap_share)}",
                ("" if account.exact else "~ ") + _percent(account.unique, account.tokens),
                _count(account.unseen) if account.unseen else "-",
                "-" if account.remaining is None else _count(account.remaining),
            )
    return table


def _table(title: str, *columns: str) -> Table:
    """All columns but the first to the right. Only names and ranges are broken where the terminal is narrow."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        breaks = column in ("source", "slice", "phase", "steps")
        table.add_column(Text(column), justify="right" if number else "left", no_wrap=not breaks, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Names of phases may have what rich takes for markup."""
    table.add_row(*map(Text, cells))


def _slice(row: SliceRow) -> str:
    return "all" if row.documents is None else range_text(*row.documents)


def _weight(fraction: float | None) -> str:
    return "-" if fraction is None else percent(fraction)


def _count(number: int) -> str:
    """Four digits of what is long, with the letters of the run file; JSON has all of them."""
    return rounded(number, 4) if number >= 10**7 else f"{number:,}"


def _percent(count: int, whole: int) -> str:
    """Rounded down: what is shown as 100 % is all of it. What is shown as 0 % is nothing."""
    thousandths = 1000 * count // whole
    return f"{thousandths / 10:g} %" if thousandths or not count else "< 0.1 %"


def _show_window(row: PreviewRow, console: Console) -> None:
    console.print()
    place = f"sample {row.sample:,} (step {row.step:,}): {row.source}, epoch {row.lap}, position {row.position:,}"
    console.print(Text(place, style="dim"), soft_wrap=True)
    if row.text is None:
        say(console, "(assumed: no text)")
        return
    pieces = ", ".join(f"{document:,} [{start:,}, {start + length:,})" for document, start, length in row.documents)
    console.print(Text(f"documents and their tokens: {pieces}", style="dim"), soft_wrap=True)
    verbatim(console, printable(row.text, keep="\n\t"))
