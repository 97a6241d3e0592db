"""Charts before they are drawn: the same for the page and for the picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.common.page.html import Table
from pipeline.eval.report.series import Curve, Detail, Floats, Positions

Axis = Literal["tokens", "time", "steps"]
SLOTS = 8
"""Colours that can be told apart."""
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Look:
    """Style of one of several things: colour and line, so that neither is needed alone."""

    slot: str
    """Name of a colour."""
    dash: str = "-"

    @classmethod
    def of(cls, number: int) -> Look:
        """Style of the n-th thing. The colours come back with another line after `SLOTS`."""
        return cls(f"s{number % SLOTS}", _DASHES[(number + number // SLOTS) % len(_DASHES)])

    def dotted(self, number: int) -> Look:
        """Style with the same colour and the n-th line."""
        return Look(self.slot, _DASHES[number % len(_DASHES)])


@dataclass(frozen=True)
class Line:
    """A curve and what it is called in the legend."""

    label: str
    curve: Curve
    look: Look
    points: bool = False
    """True if each value is marked, as of something that is measured now and then."""
    run: int | None = None
    """Number of the run that it belongs to, which the page switches on and off; None for a line of no single run."""
    detail: Detail | None = None
    """Its values on every axis, for the page to show at the pointer; None for those of the curve alone."""
    smooth: bool = False
    """True if the page may smooth it: a noisy number of each step."""


@dataclass(frozen=True)
class Marks:
    """Steps at which something happened, at the lower edge."""

    label: str
    x: Floats
    symbol: str
    """As matplotlib calls it."""
    slot: str
    places: tuple[tuple[int, Positions], ...] = ()
    """By the number of the run, the same on every axis."""


@dataclass(frozen=True)
class LineChart:
    """Values over tokens, time or steps."""

    title: str
    description: str
    axis: Axis
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    table: Table
    marks: tuple[Marks, ...] = ()
    rules: tuple[tuple[float, str], ...] = ()
    """Positions at which attempts began, and the number of each."""
    logarithmic: bool = False
    from_zero: bool = False
    note: str = ""
    drawn_note: str = ""
    """What the curves are as they are drawn; the page says it of its own values itself."""
    rule_places: Positions | None = None
    """The rules on every axis, in their order."""


@dataclass(frozen=True)
class BarPart:
    """A piece of a bar."""

    label: str
    value: float
    look: Look
    outline: bool = False
    """Drawn as the frame that the other parts fill."""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar."""

    label: str
    parts: tuple[BarPart, ...]
    text: str = ""
    """At its end."""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars. Parts that are outlines begin at zero, the others one after the other."""

    title: str
    description: str
    x_label: str
    bars: tuple[Bar, ...]
    table: Table
    axis: Axis | Literal["share"] = "tokens"
    note: str = ""
    legend: tuple[BarPart, ...] = field(default=())


@dataclass(frozen=True)
class HeatChart:
    """Numbers around 1 over steps, a row for each of several things: colours for more than 1 and for less."""

    title: str
    description: str
    x_label: str
    y_label: str
    values: Floats
    """[rows, columns]; columns are at equal distances from `first` to `last`."""
    first: float
    last: float
    full: float
    """Number above 1 in full colour; 0 is, too."""
    table: Table
    axis: Axis = "steps"
    note: str = ""

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """Slots of colours, and their meaning."""
        return ("s1", f"more than the mean, up to {self.full:.3g} times"), ("s0", "less, down to no token")


Chart = LineChart | BarChart | HeatChart
