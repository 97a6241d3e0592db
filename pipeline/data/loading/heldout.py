"""A held-out split, read front to back or document by document: each token counts as a target exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from pipeline.common.hashing import key as hash_key
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.loading.arranged_rows import padded, stack
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.objectives.base import Objective
from pipeline.data.loading.pack_masks import mask_of
from pipeline.data.loading.pair_rows import second_begin, second_begins
from pipeline.data.tokenization.chat_encoding import TRAINED


@dataclass(frozen=True)
class HeldOutTexts:
    """Windows that a training validates on, by source."""

    split: dict[str, HeldOut]
    """Of the split that the run file names; empty where none is wanted."""
    sets: dict[str, dict[str, HeldOut]]
    """Of named sets, by the name of the set."""


class HeldOut:
    """Windows over a split: over the whole of it as one text, or over each document as a text of its own.

    The windows of a text begin every `stride` targets. The first one has its first L targets, and all count. Of each
    further one the last `stride` count, which no other window has scored; the targets before them are context. The last
    window may be shorter.

    The input before the first target of a text is the end-of-document token.

    Of a dataset with a mask each document is a text, since a conversation is predicted from all that precedes it in it,
    and only targets that the mask names count.

    With an objective, each window is what the objective makes of L tokens, keyed by the window's number: the same at
    every evaluation. A shorter last window is padded with a document without weight, on both sides of an
    encoder-decoder; there it may lose a few tokens, or be left out, where it is too short for the objective.

    Args:
        dataset: The split.
        sequence_length: L, targets of a window.
        stride: From 1 to L; by default L, windows that do not overlap.
        documents: Whether each document is a text.
        objective: That windows are arranged by; None: text is scored as it is. Not for a dataset with a mask.
    """

    def __init__(
        self,
        dataset: Dataset,
        sequence_length: int,
        *,
        stride: int | None = None,
        documents: bool = False,
        objective: Objective | None = None,
    ) -> None:
        assert objective is None or (stride in (None, sequence_length) and not documents)
        self.masked = dataset.manifest.has_mask
        assert objective is None or not self.masked
        documents = documents or self.masked
        self.dataset = dataset
        self.objective = objective
        self._length = sequence_length
        self._stride = stride or sequence_length
        assert 1 <= self._stride <= sequence_length
        self._end_of_document = dataset.manifest.tokenizer.end_of_document
        texts = np.zeros(min(1, dataset.tokens), np.int64)
        if documents:
            # An empty document begins where the next one does, and has no text.
            texts = np.unique(dataset.document_starts(0, dataset.tokens))
        # [texts + 1] each: the target with which a text begins, and its first window.
        self._texts = np.append(texts, dataset.tokens)
        further = np.maximum(np.diff(self._texts) - self._length, 0)
        self._windows = np.concatenate([[0], np.cumsum(1 + -(-further // self._stride))])
        if objective is not None and len(self) and not self._arranged_length(len(self) - 1):
            self._windows[-1] -= 1

    def __len__(self) -> int:
        return int(self._windows[-1])

    def spread(self, count: int) -> list[int]:
        """At most `count` windows at equal distances: the same ones whenever the split is the same."""
        return [i * len(self) // count for i in range(count)] if count < len(self) else list(range(len(self)))

    def targets(self, windows: Sequence[int]) -> npt.NDArray[np.int64]:
        """Targets of each window as tokens of the dataset, [len(windows), 3]: first, first that counts, end."""
        window = np.asarray(windows, np.int64)
        text = np.searchsorted(self._windows, window, side="right") - 1
        number = window - self._windows[text]
        first = self._texts[text] + number * self._stride
        counts = np.where(number > 0, first + self._length - self._stride, first)
        return np.stack([first, counts, np.minimum(first + self._length, self._texts[text + 1])], axis=1)

    def longest_first(self, windows: Sequence[int]) -> Sequence[int]:
        """The windows in an order in which those of one length are neighbours; unchanged for a single text."""
        if len(self._texts) <= 2:
            return windows
        places = self.targets(windows)
        return [windows[index] for index in np.argsort(places[:, 0] - places[:, 2], kind="stable")]

    def length_of(self, windows: Sequence[int], multiple: int) -> int:
        """Targets of the longest of some windows, rounded up to a multiple, at most L; positions of an objective."""
        if self.objective is not None:
            return self.objective.shape(self._length).length
        places = self.targets(windows)
        return min(self._length, -(-int((places[:, 2] - places[:, 0]).max()) // multiple) * multiple)

    def batch(self, windows: Sequence[int], length: int | None = None) -> Batch:
        """The windows as one batch [len(windows), length], padded at their ends; what does not count has weight 0.

        Args:
            windows: Which.
            length: Room for the longest of them; by default L. All that an objective arranges are as long.
        """
        if self.objective is not None:
            return self._arranged(self.objective, windows)
        length = length or self._length
        places = self.targets(windows)
        numbers = np.asarray(windows, np.int64)
        is_first = self._windows[np.searchsorted(self._windows, numbers, side="right") - 1] == numbers
        tokens = np.zeros((len(windows), length + 1), dtype=np.int64)
        weight = np.zeros((len(windows), length), dtype=np.float32)
        starts = []
        for row, (first, counts, end) in enumerate(places.tolist()):
            start = first - 1
            skip = int(is_first[row])  # the end-of-document token that stands before the text
            if skip:
                tokens[row, 0] = self._end_of_document
            tokens[row, skip : end - start] = self.dataset.read(start + skip, end - start - skip)
            begins = self.dataset.document_starts(start + skip, end - start - skip) - start
            if self.masked:
                mask = mask_of(self.dataset, first, end - first)
                weight[row, counts - first : end - first] = mask[counts - first :] == TRAINED
                begins = np.union1d(begins, second_begins(mask))
            else:
                weight[row, counts - first : end - first] = 1
            starts.append(row * length + np.union1d(0, begins[begins < length]))
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1]),
            targets=torch.from_numpy(tokens[:, 1:]),
            weight=torch.from_numpy(weight),
            starts=torch.from_numpy(np.concatenate(starts).astype(np.int32)),
            sources=torch.zeros(len(windows), dtype=torch.int64),
            extras={},
        )

    def _arranged_length(self, window: int) -> int:
        """Tokens of a window that an objective arranges; 0 if it is too short for that."""
        assert self.objective is not None
        whole = self.objective.shape(self._length)
        length = int(min(self._length, self.dataset.tokens - window * self._length))
        while length and length < self._length and self.objective.takes(length):
            shape = self.objective.shape(length)
            if not whole.encoder or (shape.encoder < whole.encoder and shape.decoder < whole.decoder):
                break
            length -= 1
        return length if length and self.objective.takes(length) else 0

    def _arranged(self, objective: Objective, windows: Sequence[int]) -> Batch:
        """Windows as an objective arranges them."""
        whole, rows = objective.shape(self._length), []
        for window in windows:
            length = self._arranged_length(window)
            start = window * self._length - objective.shifts
            ids = np.full(length + 1, self._end_of_document, np.int64)
            first, end = max(start, 0), min(start + length + 1, self.dataset.tokens)
            ids[first - start : end - start] = self.dataset.read(first, end - first)
            begins = self.dataset.document_starts(first, end - first) - start
            if end == self.dataset.tokens:  # what would follow is another document
                begins = np.append(begins, end - start)
            begins = np.union1d(0, begins[begins <= length])
            arranged = objective.arrange(ids, begins, hash_key("heldout", window))
            rows.append(arranged if length == self._length else padded(arranged, objective.shape(length), whole))
        return Batch(
            sources=torch.zeros(len(windows), dtype=torch.int64), extras={}, **stack(rows, len(windows), whole)
        )


class PairTexts(HeldOut):
    """Documents of a dataset of pairs as rows of batches, which say whose conversation each target is of.

    Args:
        dataset: of pairs, none of which is longer than a row.
        sequence_length: L, of a row.
    """

    def __init__(self, dataset: Dataset, sequence_length: int) -> None:
        assert dataset.manifest.has_pairs
        super().__init__(dataset, sequence_length)
        assert len(self) == dataset.documents, "documents have tokens, and fit"

    def batch(self, windows: Sequence[int], length: int | None = None) -> Batch:
        """Some documents as a batch; `conversation` counts 2 per row, and `samples` has the documents."""
        found, places = super().batch(windows, length), self.targets(windows)
        conversation = torch.arange(len(windows))[:, None].mul(2).expand(found.tokens.shape).clone()
        for row, (first, _, end) in enumerate(places.tolist()):
            conversation[row, second_begin(mask_of(self.dataset, first, end - first)) :] += 1
        return replace(found, conversation=conversation, samples=torch.tensor(windows, dtype=torch.int64))


def sample(splits: Mapping[str, HeldOut], count: int | None) -> dict[str, Sequence[int]]:
    """Windows by source: about `count` in all, or all of them. The same ones whenever the splits are the same.

    Each source has its share, and at least one window.
    """
    everything = sum(len(split) for split in splits.values())
    if count is None or count >= everything:
        return {name: range(len(split)) for name, split in splits.items()}
    return {name: split.spread(max(1, count * len(split) // everything)) for name, split in splits.items()}
