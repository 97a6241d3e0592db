"""The picture of a report in the README: the page on a desk, light, and on a phone, dark, as Chromium shows it.

python benchmarks/eval/report_picture.py runs/quickstart --to docs/report.png
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console

from pipeline.eval.report.command import report

DESK, PHONE = (1180, 940), (390, 940)
GAP = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium, chromium-browser or google-chrome on PATH")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = report(arguments.runs, Console(), out=Path(folder, "report.html"))
        without = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=without)
        shots = []
        for (width, height), colours in ((DESK, "light"), (PHONE, "dark")):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)
            page.goto(page_file.resolve().as_uri())
            shots.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        browser.close()
    picture = Image.new("RGB", (DESK[0] + GAP + PHONE[0], DESK[1]), "white")
    picture.paste(shots[0], (0, 0))
    picture.paste(shots[1], (DESK[0] + GAP, 0))
    picture.save(arguments.to, optimize=True)
    print(f"{arguments.to}: {arguments.to.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
