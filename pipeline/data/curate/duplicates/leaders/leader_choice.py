"""Leaders: of documents in rank order, a document goes if a kept one before it equals or resembles it, else it stays.

A kept document resembles another one if they share a band, all of whose values are equal, and the share of equal values
of their signatures is at least `min_similarity`. What becomes of a document depends on its pairs with those before it
alone, never on which others are in its cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.data.curate.duplicates.signature import band_hashes

EXACT, URL, NEAR = 1, 2, 3
CAN_LEAD, CANNOT_LEAD, MUST_LEAD = 0, 1, 2
"""Roles: a document; one that a rule removes, which keeps nothing out; one of a finished curation, which never goes."""
LARGE = 4096
"""Clusters of more documents are compared by a table of bands; the result is the same."""
Signatures = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Members:
    """Documents of clusters in rank order.

    Attributes:
        signatures: uint32 of shape (documents, values).
        signed: bool of shape (documents,): those that have a signature.
        exact: uint64 of shape (documents,): equal for equal texts.
        url: the same for addresses.
        roles: uint8 of shape (documents,).
    """

    signatures: Signatures
    signed: npt.NDArray[np.bool_]
    exact: npt.NDArray[np.uint64]
    url: npt.NDArray[np.uint64]
    roles: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.roles)


@dataclass(frozen=True)
class LeaderChoice:
    """Outcome for each document.

    Attributes:
        leader: int64 of shape (documents,): place of the kept one that it goes for; -1 if it stays.
        rule: uint8: `EXACT`, `URL` or `NEAR`; 0 if it stays.
        equal: uint16: equal values of the signatures, for `NEAR`.
    """

    leader: Places
    rule: npt.NDArray[np.uint8]
    equal: npt.NDArray[np.uint16]


class ChooseLarge(Protocol):
    """Chooses in one cluster."""

    def __call__(self, blocks: Iterable[Members], bands: int, fewest: int) -> LeaderChoice:
        """Choose; see `choose_large`."""


def empty_choice(documents: int) -> LeaderChoice:
    """All stay."""
    return LeaderChoice(np.full(documents, -1, np.int64), np.zeros(documents, np.uint8), np.zeros(documents, np.uint16))


class ChooseSmall(Protocol):
    """Chooses in many clusters."""

    def __call__(self, members: Members, bounds: Places, bands: int, fewest: int) -> LeaderChoice:
        """Choose.

        Args:
            members: of all clusters.
            bounds: int64 of shape (clusters + 1,): where each cluster begins.
            bands: number; 0 without signatures.
            fewest: equal values from which on documents resemble each other.
        """


def choose_numpy(members: Members, bounds: Places, bands: int, fewest: int) -> LeaderChoice:
    """Compare each document with all kept ones of its cluster."""
    choice = empty_choice(len(members))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        kept: list[int] = []
        for place in range(low, high):
            if members.roles[place] != MUST_LEAD:
                _decide(members, place, np.array(kept, np.int64), bands, fewest, choice)
            if choice.leader[place] < 0 and members.roles[place] != CANNOT_LEAD:
                kept.append(place)
    return choice


def _decide(members: Members, place: int, kept: Places, bands: int, fewest: int, choice: LeaderChoice) -> None:
    for rule, ids in ((EXACT, members.exact), (URL, members.url)):
        same = np.flatnonzero(ids[kept] == ids[place])
        if len(same):
            choice.leader[place], choice.rule[place] = kept[same[0]], rule
            return
    if bands and members.signed[place]:
        found = first_similar(members.signatures[kept], members.signatures[place], bands, fewest, members.signed[kept])
        if found is not None:
            choice.leader[place], choice.rule[place], choice.equal[place] = kept[found[0]], NEAR, found[1]


def first_similar(
    others: Signatures, one: Signatures, bands: int, fewest: int, signed: npt.NDArray[np.bool_]
) -> tuple[int, int] | None:
    """(place, equal values) of the first of some signatures that resembles one."""
    same = others == one
    equal = same.sum(axis=1)
    near = np.flatnonzero((equal >= fewest) & signed)
    for place in near.tolist():
        if same[place].reshape(bands, -1).all(axis=1).any():
            return place, int(equal[place])
    return None


@dataclass
class LargeCluster:
    """Leaders of a cluster whose documents come in blocks, in rank order.

    Memory: a signature, its bands and some bytes for each leader.

    Attributes:
        bands: number; 0 without signatures.
        fewest: equal values from which on documents resemble each other.
    """

    bands: int
    fewest: int
    _before: int = 0
    _exact: dict[int, int] = field(default_factory=dict)
    _url: dict[int, int] = field(default_factory=dict)
    _by_band: dict[int, list[int]] = field(default_factory=dict)
    _leaders: list[int] = field(default_factory=list)
    _signatures: Signatures = field(default_factory=lambda: np.zeros((0, 0), np.uint32))

    def add(self, block: Members) -> LeaderChoice:
        """Choose among the next documents; places of leaders are those in the whole cluster."""
        choice = empty_choice(len(block))
        hashes = band_hashes(block.signatures, self.bands).tolist() if self.bands else []
        exact, url = block.exact.tolist(), block.url.tolist()
        for place, role in enumerate(block.roles.tolist()):
            bands = hashes[place] if self.bands and block.signed[place] else []
            goes = role != MUST_LEAD and self._goes(block, place, exact[place], url[place], bands, choice)
            if not goes and role != CANNOT_LEAD:
                self._lead(block, place, exact[place], url[place], bands)
        self._before += len(block)
        return choice

    def _goes(self, block: Members, place: int, exact: int, url: int, bands: list[int], choice: LeaderChoice) -> bool:
        for rule, value, table in ((EXACT, exact, self._exact), (URL, url, self._url)):
            if value in table:
                choice.leader[place], choice.rule[place] = table[value], rule
                return True
        # Many share all bands with one leader; it is mostly the first.
        slots = sorted({slot for band in bands for slot in self._by_band.get(band, ())})
        for start in range(0, len(slots), 64):
            some = slots[start : start + 64]
            signed = np.ones(len(some), np.bool_)
            found = first_similar(self._signatures[some], block.signatures[place], self.bands, self.fewest, signed)
            if found is not None:
                choice.leader[place] = self._leaders[some[found[0]]]
                choice.rule[place], choice.equal[place] = NEAR, found[1]
                return True
        return False

    def _lead(self, block: Members, place: int, exact: int, url: int, bands: list[int]) -> None:
        number = self._before + place
        self._exact.setdefault(exact, number)
        self._url.setdefault(url, number)
        if not bands:
            return
        slot = len(self._leaders)
        if slot >= len(self._signatures):
            grown = np.zeros((max(2 * slot, 1024), block.signatures.shape[1]), np.uint32)
            grown[:slot] = self._signatures[:slot] if slot else 0
            self._signatures = grown
        self._signatures[slot] = block.signatures[place]
        self._leaders.append(number)
        for band in bands:
            self._by_band.setdefault(band, []).append(slot)


def choose_large(blocks: Iterable[Members], bands: int, fewest: int) -> LeaderChoice:
    """Choose in one cluster.

    Args:
        blocks: of its documents in rank order.
        bands: number; 0 without signatures.
        fewest: equal values from which on documents resemble each other.
    """
    cluster = LargeCluster(bands, fewest)
    return join_choices([cluster.add(block) for block in blocks])


def join_choices(parts: Sequence[LeaderChoice]) -> LeaderChoice:
    """Outcome of all blocks."""
    return LeaderChoice(
        np.concatenate([part.leader for part in parts]),
        np.concatenate([part.rule for part in parts]),
        np.concatenate([part.equal for part in parts]),
    )
