"""The charts of a page as a reader uses them: pointer, keyboard, touch, zoom, smoothing, runs, and no script at all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from pipeline.eval.report.command import report
from pipeline.eval.report.series import DETAIL
from tests.browser import DESKTOP, Chromium, browser  # noqa: F401
from tests.eval.report.test_odd import begin, end, row, write

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.guard
STEPS, SECOND = 60, 31
"""Steps of the first run, and the first one of its second attempt."""
LONG = 2 * DETAIL
SPIKE = 5001


def loss(step: int) -> float | None:
    """Of the first run, with a gap."""
    return None if 10 <= step < 20 else 3 + math.sin(step)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("charts")
    rows = [row(step, 1 + (step >= SECOND), loss=loss(step), grad_norm=1.0) for step in range(1, STEPS + 1)]
    ledger = (begin(), end(1, SECOND - 1), begin(2, SECOND - 1, time=1e9 + SECOND - 1), end(2, STEPS))
    values: dict[str, Any] = {"run": {"dir": "x"}, "train": {"lr": 0.1, "decay": None}, "experts": None}
    one = write(root / "one", rows, *ledger, values=values)
    many = [row(step, loss=100.0 if step == SPIKE else 2.0) for step in range(1, LONG + 1)]
    other: dict[str, Any] = {
        "run": {"dir": "y"},
        "train": {"lr": 0.01, "path": "/a/long/path/of/a/file/that/no/table/has/room/for/" * 4},
        "experts": {"count": 8},
    }
    two = write(root / "a-run-with-quite-a-long-name-as-people-give-them", many, begin(), end(1, LONG), values=other)
    report([one], Console(quiet=True), out=root / "one.html")
    report([one, two], Console(quiet=True), out=root / "two.html")
    return {"one": root / "one.html", "two": root / "two.html"}


def readout(page: Page) -> str:
    return page.locator("#chart-0 .tip").inner_text()


def at(page: Page, part: float, chart: str = "#chart-0") -> tuple[float, float]:
    """A place in the plot, by the ends of its horizontal axis."""
    box = page.evaluate(
        "s => { const b = document.querySelector(s + ' .axis').getBoundingClientRect();"
        "return [b.left, b.width, b.top]; }",
        chart,
    )
    return box[0] + part * box[1], box[2] - 40


def until(page: Page, condition: str) -> None:
    """Wait for something; the page's own policy forbids the browser to evaluate text again and again."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def choose(page: Page, axis: str) -> None:
    page.locator("#tools label").filter(has_text=axis).click()
    until(page, f"document.querySelector('#chart-0 .plot').textContent.includes('{axis}')")


def smoothed(over: float) -> dict[int, float]:
    """By a loop over all pairs of steps of an attempt."""
    found = {}
    for step in range(1, STEPS + 1):
        since = SECOND if step >= SECOND else 1
        parts = [(math.exp(-(step - s) / over), loss(s)) for s in range(since, step + 1)]
        known = [(weight, value) for weight, value in parts if value is not None]
        if loss(step) is not None:
            found[step] = sum(w * v for w, v in known) / sum(w for w, _ in known)
    return found


def test_values_by_pointer_and_keyboard(browser: Chromium, pages: dict[str, Path]) -> None:  # noqa: F811
    with browser.open(pages["one"]) as opened:
        page = opened.page
        choose(page, "steps")
        plot = page.locator("#chart-0 .plot svg")
        plot.scroll_into_view_if_needed()
        page.mouse.move(*at(page, 40 / (STEPS * 1.015)))
        until(page, "!document.querySelector('#chart-0 .tip').hidden")
        assert readout(page).splitlines()[0] == "step 40 · 4k tokens · 40 seconds"
        assert f"{loss(40):.6g}" in readout(page)
        plot.focus()
        page.keyboard.press("Home")
        said = []
        for _ in range(STEPS):
            said.append(page.locator("#live").inner_text())
            page.keyboard.press("ArrowRight")
        for step, words in enumerate(said, 1):
            value = loss(step)
            shown = "no value" if value is None else f"{float(f'{value:.6g}')}"
            assert words.startswith(f"step {step} ·") and words.endswith(f"training {shown}"), words
        opened.check_quiet()


def test_smoothing_bridges_no_gap(browser: Chromium, pages: dict[str, Path]) -> None:  # noqa: F811
    with browser.open(pages["one"]) as opened:
        page = opened.page
        page.locator("#smooth").fill("3")
        over = int(page.locator("#smoothed").inner_text().split()[0])
        assert over == 10
        expected = smoothed(over)
        page.locator("#chart-0 .plot svg").focus()
        page.keyboard.press("Home")
        for step in range(1, STEPS + 1):
            found = re.search(r"smoothed (\S+)$", page.locator("#live").inner_text())
            assert (found is None) == (step not in expected) or (found is not None and found[1] == "no")
            if step in expected:
                assert found is not None and float(found[1]) == pytest.approx(expected[step], rel=1e-5)
            page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('#chart-0 .raw') !== null")  # drawn again
        # Three pieces: until the gap, until the second attempt, and that.
        assert page.locator("#chart-0 .curve").first.get_attribute("d").count("M") == 3  # type: ignore[union-attr]


def test_zoom_axis_and_what_is_chosen_outlive_a_reload(browser: Chromium, pages: dict[str, Path]) -> None:  # noqa: F811
    with browser.open(pages["one"]) as opened:
        page = opened.page
        choose(page, "steps")
        page.locator("#chart-0 .plot svg").scroll_into_view_if_needed()
        page.mouse.move(*at(page, 0.5))
        page.mouse.down()
        page.mouse.move(*at(page, 0.75), steps=3)
        page.mouse.up()
        until(page, "!document.querySelector('#whole').disabled && location.hash.includes('view')")

        def labels() -> list[float]:
            texts = page.locator("#chart-1 .plot text[text-anchor=middle]").all_text_contents()
            return [float(text) for text in texts if re.fullmatch(r"[0-9.]+", text) and text != "2"]

        assert labels() and all(30 <= label <= 46 for label in labels())  # every chart, not only this one
        zoomed = labels()
        page.reload()
        until(page, "document.querySelectorAll('#chart-1 .plot text').length > 0")
        assert labels() == zoomed and page.locator("[name=axis][value=steps]").is_checked()
        # Another axis shows the same steps, and the first one again the same stretch.
        seen = []
        for axis in ("time", "steps", "tokens", "steps"):
            page.evaluate(f"document.querySelector('[name=axis][value={axis}]').click()")
            until(page, f"(new URLSearchParams(location.hash.slice(1)).get('axis') ?? 'tokens') === '{axis}'")
            seen.append(page.evaluate("new URLSearchParams(location.hash.slice(1)).get('view')"))
        first, last = map(float, seen[1].split())
        assert 28 <= first < last <= 48 and seen[3] == seen[1]
        assert seen[2] == f"{100 * first:g} {100 * last:g}"  # tokens of these steps
        # The buttons of a chart are kept by its title.
        for button in ("log", "large"):
            page.locator("#chart-1 .buttons button", has_text=button).click()
        kept = page.locator("#chart-1 .buttons [aria-pressed=true]").all_text_contents()
        until(page, "location.hash.includes('large')")
        page.reload()
        until(page, "document.querySelectorAll('#chart-1 .plot text').length > 0")
        assert page.locator("#chart-1 .buttons [aria-pressed=true]").all_text_contents() == kept
        assert page.locator("figure.large").count() == 1 and "large" in kept
        page.locator("#whole").click()
        until(page, "!location.hash.includes('view')")
        assert min(labels()) == 0 and max(labels()) == 60
        page.locator("#chart-0 .plot svg").focus()
        page.keyboard.press("+")
        until(page, "location.hash.includes('view')")
        page.keyboard.press("Escape")
        until(page, "!location.hash.includes('view')")
        opened.check_quiet()


def test_runs_are_switched_off_in_all_charts(browser: Chromium, pages: dict[str, Path]) -> None:  # noqa: F811
    with browser.open(pages["two"]) as opened:
        page = opened.page
        lines = page.locator("#chart-0 .curve")
        assert lines.count() == 2
        # The spike of one step among 8,000 is in the band, whatever the resolution.
        top = page.locator("#chart-0 .plot text[text-anchor=end]").last.text_content()
        assert float(top or 0) >= 50
        page.locator(".run").last.click()
        until(page, "document.querySelectorAll('#chart-0 .curve').length === 1")
        until(page, "location.hash === '#off=1'")
        assert float(page.locator("#chart-0 .plot text[text-anchor=end]").last.text_content() or 0) <= 5
        button = page.locator("#chart-0 button", has_text="log")
        assert button.get_attribute("aria-pressed") == "true"
        before = page.locator("#chart-0 .curve").first.get_attribute("d")
        button.click()
        until(page, f"document.querySelector('#chart-0 .curve').getAttribute('d') !== {json.dumps(before)}")
        opened.check_quiet()


@pytest.mark.parametrize("phone", [False, True])
def test_no_table_of_the_page_is_cut_off(browser: Chromium, pages: dict[str, Path], phone: bool) -> None:  # noqa: F811
    with browser.open(pages["two"], phone=phone) as opened:
        page = opened.page
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        opened.check_readable()
        hidden = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth + 1)"
            ".map(each => each.getAttribute('aria-label'))"
        )
        assert "Differences between the run files" not in hidden and (phone or not hidden)
        differences = page.locator("section", has_text="Differences between the run files")
        keys = differences.locator("tbody td:first-child").all_inner_texts()
        assert keys == ["train.lr", "train.path", "experts.count"]  # nothing is null in one and missing in the other
        narrow = differences.locator("td").evaluate_all("all => Math.min(...all.map(each => each.clientWidth))")
        assert narrow >= 60
        if phone:
            plot = page.locator("#chart-0 .plot svg")
            plot.scroll_into_view_if_needed()
            page.touchscreen.tap(*at(page, 0.5))
            until(page, "!document.querySelector('#chart-0 .tip').hidden")
            assert "step" in readout(page)
            opened.check_readable()


@pytest.fixture
def plain(browser: Chromium) -> Iterator[Any]:  # noqa: F811
    """A page without scripts."""
    context = browser._browser.new_context(**DESKTOP, java_script_enabled=False)
    yield context.new_page()
    context.close()


def test_without_scripts_the_charts_are_drawn(plain: Page, pages: dict[str, Path]) -> None:
    plain.goto(pages["one"].as_uri())
    drawn = plain.locator("figure > svg")
    assert drawn.count() > 2 and all(each.is_visible() for each in drawn.all())
    assert plain.locator("#tools").is_hidden() and plain.locator(".live").first.is_hidden()
    assert plain.get_by_text("Thin: each step").first.is_visible() or plain.get_by_text("Each point").first.is_visible()
