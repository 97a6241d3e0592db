"""Split of a document: a keyed hash of its text or id, so that more documents move none of the others.

The hash is a point in [0, 2^64). Splits take intervals of it from 0 on, in the order of the run file, those of a fixed
number of documents first; the rest is the training split. So a split that is appended moves no document of the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from pipeline.common.errors import UserError
from pipeline.common.format import percent
from pipeline.common.hashing import key
from pipeline.config.data import HELD_OUT
from pipeline.data.datasets.files import TRAIN

if TYPE_CHECKING:
    from pipeline.config.data import DataConfig

# The same in every run and source: a text is on one side everywhere.
_KEY = key("heldout")


def split_hash(value: bytes) -> int:
    """The point of a text or id, in [0, 2^64)."""
    return xxhash.xxh3_64_intdigest(value, seed=_KEY)


@dataclass(frozen=True)
class Splits:
    """The intervals of a source.

    Attributes:
        names: the training split first, then the others by their intervals.
        ends: where the interval of each of the others ends.
        by_id: whether ids are hashed, and not texts.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    by_id: bool

    def of(self, raw: bytes, id: str) -> int:
        """Number of the split (in `names`) of a document.

        Args:
            raw: its text in UTF-8.
            id: its id.
        """
        place = bisect_right(self.ends, split_hash(id.encode() if self.by_id else raw))
        return place + 1 if place < len(self.ends) else 0

    @property
    def settings(self) -> dict[str, Any]:
        """The ends by name, for the plan."""
        return dict(zip(self.names[1:], self.ends, strict=True))


def all_held_out(config: DataConfig) -> Splits:
    """The one split of a source that is never trained on."""
    return Splits((HELD_OUT,), (), config.split_by == "id")


def split_names(config: DataConfig) -> list[str]:
    """All splits in the order of the run file, the training split first."""
    return [TRAIN, *config.splits]


def splits_in_words(config: DataConfig) -> str:
    """`data.splits` in one line."""
    return ", ".join(f"{name}: {split}" for name, split in config.splits.items())


def documents_wanted(config: DataConfig) -> int:
    """Documents of all splits that have a number of them; 0 if all have shares."""
    return sum(split.documents or 0 for split in config.splits.values())


def make_splits(config: DataConfig, smallest: Sequence[int] = (), source: str = "") -> Splits:
    """The splits of a source.

    Args:
        config: names, shares and numbers.
        smallest: if a split has a number: the smallest hashes of the source's documents, as many as
            `documents_wanted`, ascending. Equal texts have equal hashes and
            stay together, so a split may get some more.
        source: its name, for the message.

    Raises:
        UserError: numbers and shares together leave nothing to train on.
    """
    names = [TRAIN]
    ends: list[int] = []
    end = wanted = 0
    for name, split in config.splits.items():
        if split.documents is not None:
            wanted += split.documents
            end = max(end, smallest[wanted - 1] + 1) if wanted else end
            names.append(name)
            ends.append(end)
    counted = end
    for name, split in config.splits.items():
        if split.documents is None:
            end += int(split.share * 2**64)
            names.append(name)
            ends.append(end)
    if end >= 2**64:
        raise UserError(
            f"source {source!r}: data.splits ({splits_in_words(config)}) leave nothing to train on: the documents "
            f"that are counted take {percent(counted / 2**64, 1)} of its hashes, the shares "
            f"{percent((end - counted) / 2**64, 1)}; lower the numbers or the shares"
        )
    return Splits(tuple(names), tuple(ends), config.split_by == "id")


def splits_from_settings(config: DataConfig, ends: Mapping[str, int]) -> Splits:
    """The splits of a plan that was made before."""
    ordered = sorted(config.splits, key=lambda name: config.splits[name].documents is None)
    return Splits((TRAIN, *ordered), tuple(ends[name] for name in ordered), config.split_by == "id")
