"""The cost of a page's budget beside its extraction, on pages of a folder; and what hostile shapes take.

Each page is extracted with the budget and without, in turns; prints CPU seconds and the ratio of the medians. Hostile
shapes run in a process of their own with a limit of CPU seconds.

Run it as `python benchmarks/data/html_budget.py --pages FOLDER --most 100 --shapes 4000,16000`.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import trafilatura

from pipeline.data.sources.records import UnusableRecord
from pipeline.data.sources.web.pages import main_text

ARTICLE = "<html><body><article>{}</article></body></html>"
SHAPES = {
    "inline elements of a paragraph": lambda n: ARTICLE.format("<p>" + "<b>x</b> <i>y</i>" * (n // 2) + "</p>"),
    "attributes of a tag": lambda n: ARTICLE.format("<p " + " ".join(f"a{i}='1'" for i in range(n)) + ">text</p>"),
    "class names of contents": lambda n: ARTICLE.format("<div class='post-content'>x</div>" * n),
    "elements in one another": lambda n: ARTICLE.format("<div>" * n + "text" + "</div>" * n),
    "rows of a table": lambda n: ARTICLE.format("<table>" + "<tr><td>ab</td></tr>" * (n // 2) + "</table>"),
    "items without an end": lambda n: ARTICLE.format("<ul>" + "<li>item of text" * n),
}


def bare_text(html: str) -> str:
    """The same extraction without a budget."""
    return trafilatura.extract(html, favor_precision=True, include_comments=False, deduplicate=False) or ""


def seconds(html: str, extract: Callable[[str], str] = main_text) -> float | None:
    """CPU seconds of an extraction; None for a page that is rejected."""
    begin = time.process_time()
    try:
        extract(html)
    except UnusableRecord:
        return None
    return time.process_time() - begin


def ordinary(folder: Path, most: int, rounds: int) -> None:
    found = sorted(path for path in folder.rglob("*.html") if path.stat().st_size < 3_000_000)
    pages = random.Random(1).sample(found, min(most, len(found)))
    with_budget, without, rejected = [0.0] * rounds, [0.0] * rounds, 0
    for path in pages:
        html = path.read_text(errors="replace")
        if seconds(html) is None:
            rejected += 1
            continue
        for each in range(rounds):
            for sums, extract in ((with_budget, main_text), (without, bare_text)):
                sums[each] += seconds(html, extract) or 0.0
    ratio = statistics.median(with_budget) / statistics.median(without)
    print(f"{len(pages)} pages, {rejected} rejected; CPU s without {without}, with {with_budget}; medians {ratio:.3f}")


def hostile(name: str, count: int, limit: int) -> None:
    html = SHAPES[name](count)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        begin = time.process_time()
        answer = seconds(html)
        took = f"rejected after {time.process_time() - begin:.2f} s" if answer is None else f"{answer:.2f} s"
        os.write(writer, took.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    print(f"{name}, {count:,}, {len(html) / 1e6:.2f} MB: {os.read(reader, 1000).decode() or f'more than {limit} s'}")
    os.close(reader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=Path, required=True, help="folder with ordinary pages")
    parser.add_argument("--most", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="4000,16000", help="numbers of elements of the hostile shapes")
    parser.add_argument("--limit", type=int, default=60, help="CPU seconds of a shape")
    args = parser.parse_args()
    main_text("<html><body><p>warm up</p></body></html>")
    ordinary(args.pages, args.most, args.rounds)
    for name in SHAPES:
        for count in map(int, args.shapes.split(",")):
            hostile(name, count, args.limit)


if __name__ == "__main__":
    main()
