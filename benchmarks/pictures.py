"""Every picture of the documentation, made anew from a run.

python benchmarks/pictures.py runs/quickstart [NAME ...]

Pictures of pages are what Chromium shows, those of commands what they print. `experts-balance.svg` takes an hour and a
text, so it is made only if it is named: `--text FILE`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

if TYPE_CHECKING:
    from PIL.Image import Image
    from playwright.sync_api import Browser

DOCS = Path(__file__).parents[1] / "docs"
PIPELINE = [sys.executable, "-m", "pretraining_pipeline"]
DESK, PHONE = (1180, 940), (390, 940)
GAP = 28
MOST_BYTES = 150_000


def picture_of_report(to: Path, run: Path, text: Path | None) -> None:
    """A report on a desk, light, and on a phone, dark."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder, _browser() as browser:
        file = Path(folder, "report.html")
        subprocess.run([*PIPELINE, "report", str(run), "--out", str(file)], check=True)
        left, right = (
            _screenshot(browser, file.as_uri(), size, colours) for size, colours in ((DESK, "light"), (PHONE, "dark"))
        )
    both = Image.new("RGB", (DESK[0] + GAP + PHONE[0], DESK[1]), "white")
    both.paste(left, (0, 0))
    both.paste(right, (DESK[0] + GAP, 0))
    _save(both, to)


def picture_of_server(to: Path, run: Path, text: Path | None) -> None:
    """The page of `pipeline serve` after it has continued a prompt."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    address = f"http://localhost:{port}/"
    server = subprocess.Popen([*PIPELINE, "serve", str(run), "--no-key", "--port", str(port)])
    try:
        _wait_for(address, server)
        with _browser() as browser:
            page = browser.new_page(viewport={"width": 980, "height": 640})
            page.goto(address)
            page.get_by_label("Prompt").fill("def main(")
            page.get_by_label("Seed").fill("7")
            page.get_by_role("button", name="Continue", exact=True).click()
            page.locator("#more:enabled").wait_for(timeout=300_000)
            _save(_image(page.screenshot()), to)
    finally:
        server.terminate()
        server.wait()


def picture_of_status(to: Path, run: Path, text: Path | None) -> None:
    """The output of `pipeline status`."""
    _terminal(to, ["status", str(run)])


def picture_of_balance(to: Path, run: Path, text: Path | None) -> None:
    """Ways to balance experts, see benchmarks/train/balance.py."""
    if text is None:
        sys.exit(f"{to.name} is made from a text: add --text FILE, of 100 kB or more")
    program = Path(__file__).with_name("train") / "balance.py"
    subprocess.run([sys.executable, str(program), str(text), "--seeds", "1", "2", "--to", str(to)], check=True)


def picture_of_reference_run(to: Path, run: Path, text: Path | None) -> None:
    """Losses of the reference run, from the figures that are kept of it."""
    program = Path(__file__).with_name("reference_run.py")
    subprocess.run([sys.executable, str(program), "--curves", str(to)], check=True)


# Boxes of the data flow: column, row, title, two lines below it.
_BOXES = {
    "documents": (0, 0, "text, code, JSONL,", "Parquet, Arrow, hub"),
    "tokens": (1, 0, ".bin .idx .prov", "and a manifest"),
    "samples": (2, 0, "windows or packs,", "new order per epoch"),
    "batches": (3, 0, "blend by weights,", "in the journal"),
    "evaluation": (1, 1, "loss, perplexity,", "bits per byte"),
    "checkpoints": (2, 1, "committed by", "one rename"),
    "trainer": (3, 1, "fp32 shards,", "bf16 compute"),
    "use": (0, 1, "serve, generate,", "export, report"),
}
_WIDTH, _HEIGHT, _STEP, _ROW, _EDGE = 160, 84, 250, 170, 24
# From, to, label, and how far beside the middle of the boxes the arrow is.
_ARROWS = (
    ("documents", "tokens", "preprocess", 0),
    ("tokens", "samples", "train split", 0),
    ("samples", "batches", "blend", 0),
    ("tokens", "evaluation", "held-out split, by document", 0),
    ("batches", "trainer", "batch of step s", 0),
    ("trainer", "checkpoints", "save", -16),
    ("checkpoints", "trainer", "resume", 16),
    ("checkpoints", "evaluation", "eval", 0),
    ("checkpoints", "use", "", 0),
)
# The ground belongs to the picture, so that it can be read on any page.
_STYLE = """
svg { --ground: #ffffff; --box: #eef3fb; --line: #4a6fa5; --ink: #1b2430; --faint: #55606e; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #12161c; --box: #1f2a3a; --line: #7fa6dd; --ink: #eef2f7; --faint: #b3bdc9; }
}
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; text-anchor: middle; }
.ground { fill: var(--ground); } .box { fill: var(--box); stroke: var(--line); stroke-width: 1.5; }
.title { font-size: 17px; font-weight: 600; fill: var(--ink); } .line { font-size: 14px; fill: var(--faint); }
.label { font-size: 13px; fill: var(--ink); }
.arrow { stroke: var(--line); stroke-width: 2; fill: none; marker-end: url(#head); }
.right { text-anchor: start; } .left { text-anchor: end; } .head { fill: var(--line); }
"""


def picture_of_data_flow(to: Path, run: Path, text: Path | None) -> None:
    """Data flow from documents to checkpoints and what they are used for."""
    parts = []
    for name, (column, row, *lines) in _BOXES.items():
        x, y = _EDGE + column * _STEP, _EDGE + row * _ROW
        middle = x + _WIDTH // 2
        parts.append(f'<rect class="box" x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>')
        parts.append(f'<text class="title" x="{middle}" y="{y + 26}">{name}</text>')
        parts += (
            f'<text class="line" x="{middle}" y="{y + 48 + 19 * at}">{line}</text>' for at, line in enumerate(lines)
        )
    parts += (_arrow(*each) for each in _ARROWS)
    width, height = 2 * _EDGE + 3 * _STEP + _WIDTH, 2 * _EDGE + _ROW + _HEIGHT + 20
    to.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n'
        f"<title>Data flow</title>\n<style>{_STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>\n'
        f'<rect class="ground" width="{width}" height="{height}" rx="10"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _arrow(start: str, end: str, label: str, aside: int) -> str:
    (column, row, *_), (to_column, to_row, *_) = _BOXES[start], _BOXES[end]
    x, y = _EDGE + column * _STEP, _EDGE + row * _ROW + _HEIGHT // 2
    if row != to_row:
        middle, top = x + _WIDTH // 2, y + _HEIGHT // 2
        bottom = top + _ROW - _HEIGHT
        # Within the picture: right of the arrow, in the last column left of it.
        side, at = ("right", middle + 10) if column < 3 else ("left", middle - 10)
        words = f'<text class="label {side}" x="{at}" y="{(top + bottom) // 2 + 5}">{label}</text>'
        return f'<path class="arrow" d="M{middle} {top + 2}V{bottom - 3}"/>{words}'
    if abs(to_column - column) > 1:  # below the box in between
        low = y + _HEIGHT // 2
        first, last = x + _WIDTH // 2, _EDGE + to_column * _STEP + _WIDTH // 2
        return f'<path class="arrow" d="M{first} {low + 2}v22H{last}V{low + 3}"/>'
    level, right = y + aside, to_column > column
    first, last = (x + _WIDTH + 2, x + _STEP - 3) if right else (x - 2, x - _STEP + _WIDTH + 3)
    above = level + 17 if aside > 0 else level - 8
    words = f'<text class="label" x="{(first + last) // 2}" y="{above}">{label}</text>'
    return f'<path class="arrow" d="M{first} {level}H{last}"/>{words}'


PICTURES: dict[str, Callable[[Path, Path, Path | None], None]] = {
    "data-flow.svg": picture_of_data_flow,
    "report.png": picture_of_report,
    "server.png": picture_of_server,
    "status.svg": picture_of_status,
    "reference-run.svg": picture_of_reference_run,
    "experts-balance.svg": picture_of_balance,
}
"""The file in docs/ and what makes it."""


@contextmanager
def _browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no chromium, chromium-browser or google-chrome on PATH")
    with sync_playwright() as playwright:
        without = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=without, timeout=180_000)
        yield browser
        browser.close()


def _screenshot(browser: Browser, address: str, size: tuple[int, int], colours: str) -> Image:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=colours)
    page.goto(address)
    return _image(page.screenshot())


def _image(content: bytes) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(content)).convert("RGB")


def _save(image: Image, to: Path) -> None:
    """As a PNG of 256 colours, which pages of text and lines do not show."""
    image.quantize(256, method=2).save(to, optimize=True)


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urlopen(address, timeout=10).close()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"`pipeline serve` ended with exit code {server.returncode}")


def _terminal(to: Path, arguments: list[str], columns: int = 112) -> None:
    """A command and what it prints, in its colours. No font is asked for on the network."""
    from rich.console import Console
    from rich.text import Text

    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(columns)}
    done = subprocess.run([*PIPELINE, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text("$ pipeline " + " ".join(arguments), style="bold"))
    console.print(Text.from_ansi(done.stdout.rstrip()))
    drawn = console.export_svg(title="pipeline", unique_id=to.stem)
    to.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run of configs/quickstart.yaml")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; default: all but the last")
    parser.add_argument("--text", type=Path, help="for experts-balance.svg")
    given = parser.parse_args()
    if unknown := set(given.names) - set(PICTURES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in given.names or [each for each in PICTURES if each != "experts-balance.svg"]:
        PICTURES[name](DOCS / name, given.run, given.text)
        size = (DOCS / name).stat().st_size
        print(f"docs/{name}: {size:,} bytes")
        if size > MOST_BYTES:
            sys.exit(f"docs/{name} has more than {MOST_BYTES:,} bytes")


if __name__ == "__main__":
    main()
