"""The page in Chromium: light, dark, on a phone, by tokens and by time, and with names that would like to be code."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from playwright.sync_api import expect
from rich.console import Console

from pipeline.common.storage import JsonLines
from pipeline.eval.report.command import report
from tests.browser import Chromium, browser  # noqa: F401
from tests.eval.report.reading import Report

pytestmark = pytest.mark.guard

CODE = "</title></desc></text></svg><script>alert(1)</script><img src=x onerror=alert(1)>"
NAMES = [
    CODE,
    "\"'><svg onload=alert(1)>",
    "$\\frac{a}{",
    "&lt;b&gt;",
    "_hidden",
    "\u202egnp.exe",
    "源\U0001f600",
    "x" * 300,
]


@pytest.fixture(scope="module")
def pages(seen: dict[str, Report], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hostile")
    report([hostile(root)], Console(quiet=True), out=root / "hostile.html", picture=True)
    return {"one": seen["again"].file, "two": seen["two"].file, "hostile": root / "hostile.html"}


def hostile(root: Path) -> Path:
    """A run whose name, host, job, sources, reason, tasks and keys are made to break out of where they are put."""
    run = root / "<img src=x onerror=alert(1)>"
    (run / "eval").mkdir(parents=True)
    values: dict[str, Any] = {"run": {"dir": CODE}, "model": {CODE: CODE}, "note": NAMES}
    (run / "config.yaml").write_bytes(orjson.dumps(values))
    lines = JsonLines(run / "metrics.jsonl")
    for step in range(1, 30):
        by_source = dict.fromkeys(NAMES, 1.0 + step)
        lines.write(
            {
                "step": step,
                "attempt": 1 + step // 20,
                "time": time.time() + step,
                "tokens": 100 * step,
                "tokens_by_source": dict.fromkeys(NAMES, 10 * step),
                "loss": 3.0,
                "loss_by_source": by_source,
                "validation_loss": 3.0,
                "validation_loss_by_source": by_source,
                "spike": step % 7 == 0,
            }
        )
    lines.close()
    ledger = JsonLines(run / "ledger.jsonl")
    head = {"host": CODE, "pid": 1, "job": CODE, "config": ""}
    for number, first in ((1, 0), (2, 19)):
        layout = {"world_size": 1, "tp": 1}
        ledger.write(
            {"event": "attempt", "attempt": number, "time": time.time(), "layout": layout, "first_step": first, **head}
        )
        ledger.write({"event": "attempt end", "attempt": number, "seconds": 1.0, "step": 29, "code": 1, "reason": CODE})
    ledger.close()
    results = {"made_with": {"weights": CODE}, "results": {CODE: {CODE: 0.5, f"{CODE},none": 0.5}}}
    (run / "eval/harness-step-00000003.json").write_bytes(orjson.dumps({"step": 3, **results}))
    (run / "exit.json").write_bytes(orjson.dumps({"attempt": 2, "code": 1, "reason": CODE}))
    return run


@pytest.mark.parametrize(
    ("name", "dark", "phone"),
    [
        pytest.param("one", False, False, marks=pytest.mark.slow),
        pytest.param("one", False, True, marks=pytest.mark.slow),
        ("two", True, False),
        pytest.param("two", False, True, marks=pytest.mark.slow),
        pytest.param("hostile", True, True, marks=pytest.mark.slow),
        pytest.param("hostile", False, False, marks=pytest.mark.slow),
    ],
)
def test_it_is_quiet_and_readable(
    browser: Chromium,  # noqa: F811
    pages: dict[str, Path],
    name: str,
    dark: bool,
    phone: bool,
) -> None:
    with browser.open(pages[name], dark=dark, phone=phone) as opened:
        page = opened.page
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        opened.check_readable()
        first = page.locator("#chart-0 .plot svg")
        expect(first).to_contain_text("tokens")
        assert page.locator("figure > svg").first.is_hidden()
        for axis, label in (("time", "since the start"), ("steps", "steps")):
            page.locator("#tools label").filter(has_text=axis).click()
            expect(first).to_contain_text(label)
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        opened.check_readable()
        code = "[...document.querySelectorAll('script')].map(each => each.type)"
        assert page.evaluate(code) == ["application/json", ""]
        assert page.evaluate("document.querySelectorAll('img, iframe, object, [onload], [onerror]').length") == 0
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
        assert len(ids) == len(set(ids))
        # Every chart has a name and a description for those who do not see it.
        charts = page.evaluate(
            "[...document.querySelectorAll('figure > svg')].map(each => each.getAttribute('aria-labelledby')"
            ".split(' ').every(id => document.getElementById(id).textContent.length > 3))"
        )
        assert len(charts) > 6 and all(charts)
        lives = page.locator(".plot svg")
        assert lives.count() > 3 and all(each.get_attribute("aria-label") for each in lives.all())
        assert dialogs == []
        opened.check_quiet()


def test_lines_have_the_colours_of_the_page(browser: Chromium, pages: dict[str, Path]) -> None:  # noqa: F811
    """One drawing for light and dark."""
    seen = []
    for dark in (False, True):
        with browser.open(pages["one"], dark=dark) as opened:
            script = "s => [...new Set([...document.querySelectorAll(s)].map(e => getComputedStyle(e).%s))]"
            inks = opened.page.evaluate(script % "fill", "figure > svg text")
            strokes = opened.page.evaluate(script % "stroke", "figure > svg path[style*='stroke: var(--s0)']")
            seen.append((inks, strokes))
            assert not [colour for colour in [*inks, *strokes] if colour in ("rgb(0, 0, 0)", "none", "rgb(254, 1, 4)")]
    assert seen[0] != seen[1] and all(len(inks) <= 2 and len(strokes) == 1 for inks, strokes in seen)


def test_names_are_shown_as_they_are(pages: dict[str, Path]) -> None:
    found = Report(pages["hostile"])
    assert found.titles == ["<img src=x onerror=alert(1)>"] and found.states == ["failed"]
    shown = {name.replace("\u202e", "\ufffd") for name in NAMES}
    assert set(found.tables["Loss by source"][0][2:]) == shown
    assert found.tags.count("script") == 2 and "img" not in found.tags
    assert CODE in found.text and "\u202e" not in found.text


def test_only_the_script_of_the_page_runs(browser: Chromium, pages: dict[str, Path]) -> None:  # noqa: F811
    """Without a network, and with code that got into the page all the same."""
    with browser.open(pages["hostile"]) as opened:
        opened.page.context.set_offline(True)
        opened.page.reload()
        expect(opened.page.locator(".plot svg").first).to_be_visible()
        opened.check_quiet()
        opened.page.evaluate(
            "() => { const code = document.createElement('script'); code.textContent = 'window.ran = true';"
            "document.body.append(code); document.body.insertAdjacentHTML('beforeend', '<img src=x:y>'); }"
        )
        assert opened.page.evaluate("window.ran") is None
        assert len(opened.errors) >= 1 and all("Content Security Policy" in each for each in opened.errors)


def test_a_page_has_no_address_but_of_name_spaces(pages: dict[str, Path]) -> None:
    text = pages["two"].read_text()
    assert "connect-src" not in text and text.count("script-src 'sha256-") == 1
    for address in ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"):
        text = text.replace(address, "")
    assert (
        "http" not in text.replace("http-equiv", "")
        and "@import" not in text
        and "url(" not in text.replace("url(#", "")
    )
