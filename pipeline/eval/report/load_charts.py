"""Pictures of the loads of experts over the steps of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.common.page.html import Table
from pipeline.common.page.words import count, figure
from pipeline.eval.report.gather import RunFacts
from pipeline.eval.report.loads import Loads
from pipeline.eval.report.model import HeatChart

_COLUMNS = 128
_LEAST_FULL = 2.0
"""Load that is drawn in full colour, at least."""


def load_charts(runs: Sequence[RunFacts]) -> Iterator[HeatChart]:
    """A picture of the layer with the most uneven experts, for each run that tells their loads."""
    for each in runs:
        layer = each.columns.loads.worst_layer()
        if layer is not None:
            yield _chart(each, layer, several=len(runs) > 1)


def _chart(facts: RunFacts, layer: str, *, several: bool) -> HeatChart:
    loads = facts.columns.loads
    steps, values = loads.of(layer)
    grid = np.linspace(steps[0], steps[-1], min(_COLUMNS, len(steps)))
    # Between two steps that tell loads, those of the earlier one are shown.
    shown = values[np.searchsorted(steps, grid, side="right") - 1].T
    finite = shown[np.isfinite(shown)]
    full = max(_LEAST_FULL, float(finite.max()) if finite.size else 0.0)
    experts = values.shape[1]
    return HeatChart(
        title=f"Load per expert: {facts.name}, layer {layer}" if several else f"Load per expert: layer {layer}",
        description=(
            f"Tokens of each of the {experts:,} experts of layer {layer} over the mean, from step {steps[0]:,} to "
            f"{steps[-1]:,}; the busiest has {figure(float(np.nanmax(values[-1], initial=0.0)))} times the mean in the "
            "last of them."
        ),
        x_label="steps",
        y_label="expert",
        values=shown,
        first=float(steps[0]),
        last=float(steps[-1]),
        full=full,
        table=_table(loads),
        note=f"The layer with the most uneven experts of {len(loads.layers()):,}; the table has all.",
    )


def _table(loads: Loads) -> Table:
    """Loads of the newest step by layer."""
    rows = []
    for layer in loads.layers():
        newest = np.nan_to_num(np.array(loads.by_layer[-1][layer]))
        busiest = int(newest.argmax())
        ends = (figure(float(newest.max())), count(busiest), figure(float(newest.min())))
        rows.append((layer, count(loads.step[-1]), *ends, count(int((newest == 0).sum()))))
    return Table(("layer", "step", "highest load", "of expert", "lowest load", "experts without a token"), tuple(rows))
