"""Charts drawn with matplotlib: as SVG whose colours are the page's, and together as one picture.

matplotlib is imported here alone, and only when something is drawn; there is no state of pyplot's.
"""

from __future__ import annotations

import html
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.common.format import cut, percent
from pipeline.common.page.html import LIGHT
from pipeline.common.page.words import clean, si
from pipeline.eval.report.model import BarChart, Chart, HeatChart, LineChart
from pipeline.eval.report.ticks import linear_ticks, log_ticks, tick_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Where the home folder has no room for its cache, matplotlib takes a temporary folder; nobody needs to hear of it.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

_PLACEHOLDERS = {name: f"#fe01{number:02x}" for number, name in enumerate(LIGHT)}
"""Colours that nothing else has, replaced by the page's variables in the SVG."""
_WIDTH, _HEIGHT = 4.4, 2.9
_BAR_HEIGHT, _BAR_ROOM = 0.36, 0.75
_BAR_LETTERS = 44
"""Letters that have room above a bar: its label and its text."""
_FONT = 11.0
"""Points, of which a chart is so few wide that they are as many pixels or more on a phone."""
_SHEET_COLUMNS, _SHEET_DPI, _SHEET_LEGEND = 3, 130, 0.75
_MOST_LABELS, _LABEL = 8, 26
_RULE_NAMES = 8
"""Attempts whose number is shown."""
_RULES_APART = 0.06
"""Share of the width from one of these numbers to the next."""
UNDRAWN = "This chart cannot be drawn."
_TICKS = 5
_MARKS_FROM, _MARKS_APART = 0.035, 0.06
"""Shares of the height of a chart."""


def svg(chart: Chart, key: str) -> str:
    """A chart as an `<svg>` element for a page that has the colours as variables `--s0` and so on.

    Args:
        chart: what to draw.
        key: begins all ids in it, which are the page's.
    """
    from matplotlib.figure import Figure

    with _style(), io.StringIO() as file:
        figure = Figure(figsize=(_WIDTH, height(chart)), layout="constrained")
        _draw(figure.add_subplot(), chart, _PLACEHOLDERS)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
    return _embeddable(text, key, chart)


def png(charts: Sequence[Chart], title: str, lines: Sequence[str]) -> bytes:
    """All charts on one sheet, on white.

    Args:
        charts: what to draw.
        title: above all.
        lines: below it.
    """
    try:
        return _sheet(charts, title, lines, [])
    except Exception:  # figures of others may be what no axis is made for
        return _sheet(charts, title, lines, [chart for chart in charts if not _can_be_drawn(chart)])


def _can_be_drawn(chart: Chart) -> bool:
    try:
        return bool(svg(chart, "k"))
    except Exception:
        return False


def _sheet(charts: Sequence[Chart], title: str, lines: Sequence[str], undrawn: Sequence[Chart]) -> bytes:
    from matplotlib.figure import Figure

    rows = [charts[start : start + _SHEET_COLUMNS] for start in range(0, len(charts), _SHEET_COLUMNS)]
    heights = [max(height(chart) for chart in row) + _SHEET_LEGEND for row in rows]
    head = 0.7 + 0.28 * len(lines)
    with _style(), io.BytesIO() as file:
        figure = Figure(figsize=(_WIDTH * _SHEET_COLUMNS, head + sum(heights)), layout="constrained", dpi=_SHEET_DPI)
        figure.set_facecolor(LIGHT["card"])
        figure.get_layout_engine().set(w_pad=0.16, h_pad=0.12)  # type: ignore[union-attr, call-arg]
        top, *below = figure.subfigures(len(rows) + 1, 1, height_ratios=[head, *heights], squeeze=False)[:, 0]
        top.text(0.012, 0.93, _short(title, 90), size=17, weight="bold", va="top", color=LIGHT["ink"])
        top.text(0.012, 0.93 - 0.42 / head, "\n".join(lines), size=12, va="top", color=LIGHT["muted"], linespacing=1.5)
        for row, place in zip(rows, below, strict=True):
            for chart, cell in zip(row, place.subfigures(1, _SHEET_COLUMNS, squeeze=False)[0], strict=False):
                axes = cell.add_subplot()
                # The numbers of attempts stand above the axes.
                pad = 18.0 if isinstance(chart, LineChart) and chart.rules else None
                title = _short(chart.title, 44)
                axes.set_title(title, loc="left", size=13, weight="bold", color=LIGHT["ink"], pad=pad)
                if any(chart is each for each in undrawn):
                    axes.set_axis_off()
                    axes.text(0.5, 0.5, UNDRAWN, ha="center", wrap=True, color=LIGHT["muted"])
                    continue
                _draw(axes, chart, LIGHT)
                _legend(cell, chart)
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()


def height(chart: Chart) -> float:
    """Height of a chart in inches."""
    return _BAR_ROOM + _BAR_HEIGHT * 2 * max(1, len(chart.bars)) if isinstance(chart, BarChart) else _HEIGHT


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "font.size": _FONT,
        # Names of runs and sources are text, whatever dollars are in them.
        "text.parse_math": False,
        "text.usetex": False,
        "axes.unicode_minus": True,
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def _draw(axes: Axes, chart: Chart, colours: dict[str, str]) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colours["grid"])
    axes.tick_params(which="both", length=0, colors=colours["muted"], labelsize=_FONT)
    axes.set_axisbelow(True)
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart, colours)
    elif isinstance(chart, HeatChart):
        _draw_heat(axes, chart, colours)
    else:
        _draw_bars(axes, chart, colours)


def _draw_lines(axes: Axes, chart: LineChart, colours: dict[str, str]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
    if chart.logarithmic:
        axes.set_yscale("log")
    for line in chart.lines:
        colour, curve = colours[line.look.slot], line.curve
        if curve.low is not None and curve.high is not None:
            low, high = (_drawable(values, chart) for values in (curve.low, curve.high))
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.22, linewidth=0)
        if curve.each is not None and curve.each_x is not None:
            axes.plot(curve.each_x, _drawable(curve.each, chart), color=colour, linewidth=0.6, alpha=0.45)
        axes.plot(
            curve.x,
            _drawable(curve.mean, chart),
            color=colour,
            linestyle=line.look.dash,
            linewidth=1.7,
            marker="o" if line.points else None,
            markersize=3.6,
        )
        if not line.points and (alone := _alone(_drawable(curve.mean, chart))).any():
            axes.plot(curve.x[alone], curve.mean[alone], color=colour, linestyle="none", marker="o", markersize=3.6)
    _limits(axes, chart)
    for number, marks in enumerate(chart.marks):
        axes.plot(
            marks.x,
            np.full(len(marks.x), _MARKS_FROM + number * _MARKS_APART),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            markersize=6,
            clip_on=False,
            **_marker(marks.symbol, colours[marks.slot]),
        )
    few = len(chart.rules) <= _RULE_NAMES
    left, right = axes.get_xlim()
    named: list[list[Any]] = []
    for place, name in chart.rules:
        if not left <= place <= right:
            continue  # by a clock that was set: its number would lie beside the chart and leave it no room
        axes.axvline(place, color=colours["muted"], linewidth=0.8, linestyle=(0, (2, 2)), alpha=1 if few else 0.4)
        if named and abs(place - named[-1][0]) < _RULES_APART * (right - left):
            named[-1][2] = name  # no room for both
        else:
            named.append([place, name, name])
    for place, first, last in named if few else ():
        name = first if first == last else f"{first}–{last}"
        text = axes.text(place, 1.0, name, transform=axes.get_xaxis_transform(), va="bottom", ha="center")
        text.set(color=colours["muted"], size=_FONT)
    axes.set_xlabel(chart.x_label, color=colours["muted"])
    axes.set_ylabel(chart.y_label, color=colours["muted"])
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS, integer=chart.axis == "steps"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
    low, high = axes.get_ylim()
    ticks = log_ticks(low, high) if chart.logarithmic else linear_ticks(low, high)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FixedFormatter(tick_labels(ticks)))


def _limits(axes: Axes, chart: LineChart) -> None:
    """Room for what is drawn; where nothing is, or a single value, an axis that says so."""
    shown = [
        curve
        for line in chart.lines
        for curve in (line.curve.mean, line.curve.each, line.curve.high)
        if curve is not None
    ]
    values = np.concatenate([_drawable(each, chart) for each in shown]) if shown else np.array([])
    values = values[np.isfinite(values)]
    if not values.size:
        axes.set_ylim(0.1 if chart.logarithmic else 0.0, 1.0)
    elif chart.from_zero:
        axes.set_ylim(0, max(float(values.max()) * 1.08, 1e-12))
    elif values.min() == values.max():
        value = float(values[0])
        room = abs(value) * 0.1 or 1.0
        axes.set_ylim(value - room, value + room)
    places = [line.curve.x for line in chart.lines]
    xs = np.concatenate(places) if places else np.array([])
    xs = xs[np.isfinite(xs)]
    if not xs.size or xs.min() == xs.max():
        at = float(xs[0]) if xs.size else 0.0
        axes.set_xlim(max(0.0, at - (at or 1.0)), at + (at or 1.0))
    elif chart.axis != "steps":
        low = 0.0 if xs.min() < 0.3 * xs.max() else float(xs.min())
        axes.set_xlim(low, float(xs.max()) + 0.015 * (float(xs.max()) - low))  # a point at the end is seen whole
    low, high = axes.get_xlim()
    if (last := max((place for place, _ in chart.rules), default=high)) > high:
        axes.set_xlim(low, last + 0.015 * (last - low))  # an attempt that has made no step yet


def _drawable(values: Any, chart: LineChart) -> Any:
    return np.where(values > 0, values, np.nan) if chart.logarithmic else values


def _alone(values: Any) -> Any:
    """[n], true of each value without one beside it, which no line would show: an attempt of one step."""
    finite = np.concatenate([[False], np.isfinite(values), [False]])
    return finite[1:-1] & ~finite[:-2] & ~finite[2:]


def _draw_bars(axes: Axes, chart: BarChart, colours: dict[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.grid(axis="x", color=colours["grid"], linewidth=0.8)
    end = 0.0
    for number, bar in enumerate(chart.bars):
        place, left = -number, 0.0
        for part in bar.parts:
            colour = colours[part.look.slot]
            if part.outline:
                axes.barh(place, part.value, 0.5, facecolor=colour, alpha=0.18, linewidth=0)
                axes.barh(place, part.value, 0.5, facecolor="none", edgecolor=colour, linewidth=1.2)
            else:
                axes.barh(place, part.value, 0.5, left=left, color=colour, edgecolor="none")
                left += part.value
            end = max(end, left, part.value)
        axes.text(
            0,
            place + 0.33,
            _short(bar.label, max(8, _BAR_LETTERS - len(bar.text))),
            va="bottom",
            ha="left",
            color=colours["ink"],
        )
        if bar.text:
            text = axes.text(1, place + 0.33, bar.text, va="bottom", ha="right", color=colours["muted"])
            text.set_transform(axes.get_yaxis_transform())
    axes.set_ylim(-len(chart.bars) + 0.6, 0.85)
    axes.set_xlim(0, end or 1.0)
    axes.set_yticks([])
    axes.set_xlabel(chart.x_label, color=colours["muted"])
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: percent(value, 0) if chart.axis == "share" else si(value))
    )


def _draw_heat(axes: Axes, chart: HeatChart, colours: dict[str, str]) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    values = np.nan_to_num(chart.values, nan=1.0, posinf=chart.full, neginf=0.0)
    more, less = np.clip((values - 1) / (chart.full - 1), 0, 1), np.clip(1 - values, 0, 1)
    # A mean load shows the card, light or dark. Pixels cannot have the page's colours, which are variables.
    pixels = np.empty((*values.shape, 4))
    pixels[..., :3] = np.where((values > 1)[..., None], to_rgb(LIGHT["s1"]), to_rgb(LIGHT["s0"]))
    pixels[..., 3] = np.maximum(more, less)
    room = 0.5 if chart.first == chart.last else 0.0
    extent = (chart.first - room, chart.last + room, len(values) - 0.5, -0.5)
    axes.imshow(pixels, extent=extent, aspect="auto", interpolation="none")
    axes.set_xlabel(chart.x_label, color=colours["muted"])
    axes.set_ylabel(chart.y_label, color=colours["muted"])
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(_TICKS, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))


def _marker(symbol: str, colour: str) -> dict[str, Any]:
    """Look of a mark: a circle is hollow, as values of lines are full ones."""
    return {"marker": symbol, "color": colour, **({"markerfacecolor": "none"} if symbol == "o" else {})}


def _legend(cell: Any, chart: Chart) -> None:
    """Below a chart of the sheet; the page has one of its own."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    if isinstance(chart, LineChart):
        handles = [
            Line2D(
                [],
                [],
                color=LIGHT[line.look.slot],
                ls=line.look.dash,
                marker="o" if line.points else None,
                label=line.label,
            )
            for line in {line.label: line for line in chart.lines}.values()
        ]
        handles += [
            Line2D([], [], linestyle="none", label=marks.label, **_marker(marks.symbol, LIGHT[marks.slot]))
            for marks in chart.marks
        ]
    elif isinstance(chart, HeatChart):
        handles = [Patch(facecolor=LIGHT[slot], label=label) for slot, label in chart.legend]
    else:
        handles = [
            Patch(
                facecolor=LIGHT[part.look.slot] if not part.outline else "none",
                edgecolor=LIGHT[part.look.slot],
                label=part.label,
            )
            for part in chart.legend
        ]
    if len(handles) < 2 and not isinstance(chart, BarChart):
        return
    for handle in handles:
        handle.set_label("\u200b" + _short(handle.get_label(), _LABEL))  # one that begins with "_" is left out
    if (more := len(handles) - _MOST_LABELS) > 0:
        handles = [*handles[:_MOST_LABELS], Line2D([], [], linestyle="none", label=f"and {more} more")]
    cell.legend(
        handles=handles,
        loc="outside lower center",
        ncols=2 if any(len(handle.get_label()) > 15 for handle in handles) else 3,
        frameon=False,
        fontsize=10,
        labelcolor=LIGHT["ink"],
    )


def _short(text: str, most: int) -> str:
    return cut(" ".join(clean(text).split()), most)


def _embeddable(text: str, key: str, chart: Chart) -> str:
    """The SVG of matplotlib as a part of an HTML page: no prolog, no ids twice, the page's colours and fonts."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', text))

    def tag(found: re.Match[str]) -> str:
        # Of tags alone: texts may have anything in them.
        one = re.sub(r' id="([^"]*)"', lambda name: f' id="{key}-{name[1]}"' if name[1] in used else "", found[0])
        one = re.sub(r'((?:xlink:href="|url\()#)', rf"\1{key}-", one)
        one = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", one)
        for name, colour in _PLACEHOLDERS.items():
            one = one.replace(colour, f"var(--{name})")
        return one

    text = re.sub(r"<[^<>]+>", tag, text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib gives each SVG its size"
    title, description = (html.escape(clean(each)) for each in (chart.title, chart.description))
    names = f'<title id="{key}-t">{title}</title><desc id="{key}-d">{description}</desc>'
    opening = f'<svg role="img" aria-labelledby="{key}-t {key}-d" {box[0]} xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"\n\s*", "\n", opening + names + text[text.index(">") + 1 :])
