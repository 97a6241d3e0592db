"""datatrove's filters for `curate_rules.py`: a variant per line of the input, CPU seconds (or decisions) as an answer.

Nothing of this package is imported, so that a Python with datatrove alone can run it.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import datatrove.pipeline.filters.c4_filters as c4
import datatrove.pipeline.filters.fineweb_quality_filter as fineweb
import datatrove.pipeline.filters.gopher_quality_filter as quality
import datatrove.pipeline.filters.gopher_repetition_filter as repetition
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter

OF_WORDS = (repetition, quality, fineweb)
SHIPPED = fineweb.split_into_words


def run(variant: str, texts: list[str]) -> float:
    """CPU seconds of the filters over all texts."""
    split = variant != "shipped"
    for module in OF_WORDS:
        module.split_into_words = (lambda text, language: text.split()) if split else SHIPPED
    filters = [repetition.GopherRepetitionFilter(), quality.GopherQualityFilter(), fineweb.FineWebQualityFilter()]
    filters += [] if split else [c4.C4QualityFilter()]
    chained = variant == "split_chained"
    start = time.process_time()
    for text in texts:
        for each in filters:
            if not keeps(each, text) and chained:
                break
    return time.process_time() - start


def decide(texts: list[str]) -> dict[str, list[bool]]:
    """Documents that each filter removes, with words from `str.split()`; sentences are not counted."""
    for module in OF_WORDS:
        module.split_into_words = lambda text, language: text.split()
    filters = {
        "gopher_quality": quality.GopherQualityFilter(),
        "gopher_repetition": repetition.GopherRepetitionFilter(),
        "c4": c4.C4QualityFilter(min_num_sentences=-1, remove_citations=False),
        "fineweb": fineweb.FineWebQualityFilter(),
    }
    return {name: [not keeps(each, text) for text in texts] for name, each in filters.items()}


def keeps(each: BaseFilter, text: str) -> bool:
    """Tell whether a filter keeps a document. Some fail for texts without words."""
    try:
        return each.filter(Document(text=text, id="")) is True
    except (ZeroDivisionError, AssertionError):
        return False


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    path, most = sys.argv[1], int(sys.argv[2])
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(most), strict=False)]
    run("shipped", texts[:10])  # loads tokenizers
    print(json.dumps({"version": version("datatrove")}), file=out, flush=True)
    for line in sys.stdin:
        variant = line.strip()
        answer = {"removed": decide(texts)} if variant == "decide" else {"seconds": run(variant, texts)}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
