"""Contamination: documents with items of evaluations, and items that are in documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.curation.curate import DecontaminateConfig
from pipeline.data.curate.decontamination.index import NgramIndex, unchecked_items
from pipeline.data.curate.decontamination.items import PIECE
from pipeline.data.curate.decontamination.matching import reference_ngrams
from pipeline.data.curate.decontamination.measure import CONTAMINATED
from pipeline.data.curate.rules.base import DocumentRule, Ratio

RULE = "decontaminate"
_KEY = "data.curate.decontaminate.max_ngrams"
_EXAMPLES = 3
_LISTED = 100
_NOBODY = np.uint64(2**64 - 1)


def contamination_rules(config: DecontaminateConfig | None) -> tuple[DocumentRule, ...]:
    """The rule that removes documents with items, if they are to be removed."""
    if config is None or config.action != "remove":
        return ()
    about = "n-grams of items of evaluations, without common ones"
    return (Ratio(RULE, _KEY, config.max_ngrams, "max", about, CONTAMINATED),)


def count_documents(index: NgramIndex, chunks: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Documents with each n-gram: int64 of shape (n-grams,).

    Args:
        index: of items.
        chunks: hits of all chunks, one after the other.
    """
    counts = np.zeros(len(index), np.int64)
    for hits in chunks:
        if len(hits):
            numbers, found = np.unique(hits["ngram"], return_counts=True)
            counts[numbers] += found
    return counts


def common_ngrams(counts: npt.NDArray[np.int64], max_documents: int) -> npt.NDArray[np.bool_]:
    """Tell which n-grams are common text, by the documents with each: they are reported, and remove nothing."""
    return counts > max_documents


def fill_contamination(table: npt.NDArray[Any], hits: npt.NDArray[Any], common: npt.NDArray[np.bool_]) -> None:
    """Write the different n-grams of each document that are not common into the column for the rule.

    Args:
        table: of the measures of a chunk; changed.
        hits: of the chunk.
        common: bool of shape (n-grams,).
    """
    rows = hits["row"][~common[hits["ngram"]]]
    table[CONTAMINATED] = np.bincount(rows, minlength=len(table))


class TouchedItems:
    """Items that documents have n-grams of, added up over chunks in the order of documents.

    Args:
        index: of items.
        counts: of `count_documents`.
        common: n-grams that are not used.
    """

    def __init__(self, index: NgramIndex, counts: npt.NDArray[np.int64], common: npt.NDArray[np.bool_]) -> None:
        self._index = index
        self._counts = counts
        self._common = common
        items = len(index.arrays["tasks"])
        self._documents = np.zeros(items, np.int64)
        self._examples = np.full((items, _EXAMPLES), _NOBODY)
        self._of_tasks = np.zeros(len(index.task_names), np.int64)

    def add(self, hits: npt.NDArray[Any], first: int) -> None:
        """Add a chunk.

        Args:
            hits: of the chunk.
            first: number of its first record as a document of the scope; the next ones follow.
        """
        used = hits[~self._common[hits["ngram"]]]
        if not len(used):
            return
        offsets = self._index.arrays["offsets"].astype(np.int64)
        starts = offsets[used["ngram"]]
        sizes = offsets[used["ngram"].astype(np.int64) + 1] - starts
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1]) + np.repeat(starts - ends + sizes, sizes)
        items = self._index.arrays["items"][places].astype(np.uint64)
        rows = np.repeat(used["row"], sizes).astype(np.uint64)
        pairs = np.unique(items << np.uint64(32) | rows)  # by item, then by row
        items, rows = pairs >> np.uint64(32), pairs & np.uint64(2**32 - 1)
        self._add_pairs(items.astype(np.int64), rows + np.uint64(first))
        tasks = self._index.arrays["tasks"][items].astype(np.uint64)
        by_task = np.unique(tasks << np.uint64(32) | rows) >> np.uint64(32)
        self._of_tasks += np.bincount(by_task.astype(np.int64), minlength=len(self._of_tasks))

    def _add_pairs(self, items: npt.NDArray[np.int64], documents: npt.NDArray[np.uint64]) -> None:
        touched, starts, counts = np.unique(items, return_index=True, return_counts=True)
        for item, start, count in zip(touched.tolist(), starts.tolist(), counts.tolist(), strict=True):
            had = min(int(self._documents[item]), _EXAMPLES)
            new = documents[start : start + min(count, _EXAMPLES - had)]
            self._examples[item, had : had + len(new)] = new
        self._documents[touched] += counts

    def found_ngrams(self) -> npt.NDArray[np.int64]:
        """Different n-grams of each item that documents have and that are not common: int64 of shape (items,)."""
        seen = (self._counts > 0) & ~self._common
        offsets = self._index.arrays["offsets"].astype(np.int64)
        of_pairs = np.repeat(seen, np.diff(offsets))
        return np.bincount(self._index.arrays["items"][of_pairs], minlength=len(self._documents))

    def listed(self) -> Iterator[dict[str, Any]]:
        """All items touched, those with the largest share of their n-grams found first.

        Each has `task`, `item`, `text` (its beginning), `documents`, `ngrams`, `found`, `share` and `examples`, the
        numbers of its first documents.
        """
        found, counts = self.found_ngrams(), self._index.arrays["counts"].astype(np.int64)
        touched = np.flatnonzero(self._documents)
        order = np.lexsort((touched, -self._documents[touched], -found[touched] / counts[touched]))
        for number in touched[order].tolist():
            item = self._index.item(number)
            yield {
                "task": item.task,
                "item": item.name,
                "text": item.text.replace(PIECE, " ")[:200],
                "documents": int(self._documents[number]),
                "ngrams": int(counts[number]),
                "found": int(found[number]),
                "share": int(found[number]) / int(counts[number]),
                "examples": [int(each) for each in self._examples[number] if each != _NOBODY],
            }

    def report(self) -> dict[str, Any]:
        """Contamination in both directions, as JSON: `tasks`, first `items`, `common` n-grams, `too_short` items."""
        listed: list[dict[str, Any]] = []
        for item in self.listed():
            if len(listed) == _LISTED:
                break
            listed.append(item)
        short = unchecked_items(self._index)
        return {
            "tasks": self._tasks(),
            "items": listed,
            "common": self._common_list(),
            "too_short": {
                "items": len(short),
                "examples": [f"{each.task} {each.name}" for each in map(self._index.item, short[:_LISTED].tolist())],
            },
        }

    def _tasks(self) -> dict[str, dict[str, int]]:
        """By task: its items, those long enough, those touched, and documents with n-grams of any."""
        tasks, names = self._index.arrays["tasks"], self._index.task_names
        columns = {
            "items": np.ones(len(tasks), np.bool_),
            "checked": self._index.arrays["counts"] > 0,
            "touched": self._documents > 0,
        }
        sums = {name: np.bincount(tasks[column], minlength=len(names)) for name, column in columns.items()}
        sums["documents"] = self._of_tasks
        return {task: {name: int(sums[name][i]) for name in sums} for i, task in enumerate(names)}

    def _common_list(self) -> dict[str, Any]:
        numbers = np.flatnonzero(self._common)
        first = numbers[np.lexsort((numbers, -self._counts[numbers]))][:_LISTED].tolist()
        listed = [{"text": self._index.ngram_text(each), "documents": int(self._counts[each])} for each in first]
        return {"ngrams": len(numbers), "listed": listed}


def matches(index: NgramIndex, text: str, common: npt.NDArray[np.bool_] | None = None) -> list[dict[str, Any]]:
    """N-grams of items in one document, in its order, for reports.

    Each has `ngram` (its number), `start`, `end`, `text`, `items` and `common`.

    Args:
        index: of items.
        text: of the document, cleaned.
        common: n-grams that are not used.
    """
    found = []
    for ngram, start, end in reference_ngrams(index, text):
        items = [index.item(number) for number in index.items_of(ngram)[:_EXAMPLES].tolist()]
        found.append(
            {
                "ngram": ngram,
                "start": start,
                "end": end,
                "text": text[start:end],
                "items": [{"task": item.task, "item": item.name} for item in items],
                "common": bool(common is not None and common[ngram]),
            }
        )
    return found
