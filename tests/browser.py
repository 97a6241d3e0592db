"""The machine's own Chromium, headless, and what it has to say about a page of ours.

A module of tests that needs it imports the fixture: `from tests.browser import browser`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
WAIT_MS = 60_000
"""For what a page should do at once; the machine may be busy."""

# Elements that show text of their own, as [element, text, size in pixels of the screen].
_TEXTS = """
const texts = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
  if (!text || element.closest('script, style, title, desc')) continue;
  if (!element.checkVisibility({visibilityProperty: true})) continue;
  const range = document.createRange();
  range.selectNode(walker.currentNode);
  const box = range.getBoundingClientRect();
  if (box.width <= 1 || box.height <= 1) continue;  // for screen readers only
  let size = parseFloat(getComputedStyle(element).fontSize);
  const matrix = element instanceof SVGGraphicsElement ? element.getScreenCTM() : null;
  if (matrix) size *= Math.sqrt(Math.abs(matrix.a * matrix.d - matrix.b * matrix.c));
  texts.push([element, text.slice(0, 40), size]);
}
"""

_SMALL = (
    "smallest => {" + _TEXTS + "return texts.filter(t => t[2] < smallest).map(t => `${t[2].toFixed(1)} px: ${t[1]}`); }"
)

# WCAG 2.2: relative luminance of what is painted, backgrounds laid over each other from the page upwards.
_FAINT = (
    "least => {"
    + _TEXTS
    + """
const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const dark = matchMedia('(prefers-color-scheme: dark)').matches;
const paint = colours => {
  pen.fillStyle = dark ? '#121212' : '#fff';  // of a page that sets none
  pen.fillRect(0, 0, 1, 1);
  for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
  const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3)
    .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
return texts.filter(([element]) => !element.closest('svg, :disabled')).map(([element, text]) => {
  const grounds = [];
  for (let e = element; e; e = e.parentElement) grounds.unshift(getComputedStyle(e).backgroundColor);
  const ground = paint(grounds), ink = paint([...grounds, getComputedStyle(element).color]);
  return [(Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05), text];
}).filter(([ratio]) => ratio < least).map(([ratio, text]) => `${ratio.toFixed(2)} to 1: ${text}`);
}"""
)

_WIDE = """width => [...document.querySelectorAll('body *')]
  .map(e => [e.getBoundingClientRect().right, e]).filter(([right]) => right > width + 1)
  .map(([right, e]) => `${e.tagName} #${e.id} .${e.getAttribute('class') ?? ''} ends at ${Math.round(right)}`)
  .slice(0, 8)"""


@dataclass
class Opened:
    """A page that is open, and what went wrong on it so far."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Errors and warnings of the console (what a content security policy forbade among them), uncaught exceptions."""
    failed: list[str] = field(default_factory=list)
    """Requests to the page's own origin without an answer, those that the page itself ended not among them."""
    foreign: list[str] = field(default_factory=list)
    """Requests to anywhere else that were tried; none is let through."""

    def check_quiet(self) -> None:
        """No error, and nothing was asked of anybody else."""
        assert (self.errors, self.failed, self.foreign) == ([], [], [])

    def check_readable(self, smallest_px: float = 11, least_contrast: float = 4.5) -> None:
        """Nothing hangs over the right edge, no text is tiny or (outside of SVG) faint."""
        assert self.page.viewport_size is not None
        # Not innerWidth: a phone zooms out when a page is too wide for it.
        width = self.page.viewport_size["width"]
        wide = self.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"the page is {wide} px wide on {width}: {self.page.evaluate(_WIDE, width)}"
        assert self.page.evaluate(_SMALL, smallest_px) == []
        assert self.page.evaluate(_FAINT, least_contrast) == []


class Chromium:
    """A browser in which each page has a profile of its own."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def open(self, what: str | Path, *, dark: bool = False, phone: bool = False) -> Iterator[Opened]:
        """Load a file or an address and watch it.

        Args:
            what: a file, or an address with its scheme.
            dark: the user prefers dark colours.
            phone: 390 x 844 points with touch instead of 1280 x 900 with a mouse.
        """
        address = what.resolve().as_uri() if isinstance(what, Path) else what
        context = self._browser.new_context(**(PHONE if phone else DESKTOP), color_scheme="dark" if dark else "light")
        try:
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            opened = _watch(page, address)
            page.goto(address)
            yield opened
        finally:
            context.close()


def _watch(page: Page, address: str) -> Opened:
    opened = Opened(page)

    # Of files, only the page itself: one that needs another file is not self-contained. An expression, which the
    # browser's side can match by itself: our own requests do not wait for this process.
    origin = "{0.scheme}://{0.netloc}/".format(urlsplit(address))
    own = re.escape(address.partition("#")[0]) + "(#|$)" if address.startswith("file:") else re.escape(origin)
    foreign = re.compile(f"^(?!{own}|data:|blob:)")

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            opened.errors.append(message.text)

    def asked(request: Request) -> None:
        if foreign.search(request.url):
            opened.foreign.append(request.url)

    def lost(request: Request) -> None:
        # ERR_ABORTED: the page changed its mind.
        if not foreign.search(request.url) and request.failure != "net::ERR_ABORTED":
            opened.failed.append(f"{request.url}: {request.failure}")

    page.context.route(foreign, lambda route: route.abort())
    page.context.on("request", asked)
    page.context.on("requestfailed", lost)
    page.on("websocket", lambda socket: opened.foreign.append(socket.url))
    page.on("console", said)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    return opened


def _cannot(reason: str) -> None:
    """Skip; continuous integration (`CI=true`) takes it for a failure."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


# Of the module: while it lives, no other code of this thread can run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """Headless Chromium; without one the tests are skipped."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        _cannot(f"none of {', '.join(PROGRAMS)} is on PATH (Debian, Ubuntu: apt install chromium)")
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        _cannot("playwright is not installed (it is in the extra `dev`)")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = playwright.chromium.launch(executable_path=program, args=arguments, timeout=3 * WAIT_MS)
        yield Chromium(launched)
        launched.close()
