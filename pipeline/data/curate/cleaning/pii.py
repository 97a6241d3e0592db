"""Masks of personal data, like `<email:7f3a9c>`: a keyed hash of kind and value.

The same value has the same mask in all documents, in any order of them, so who wrote to whom stays in the text. The
seed is the key: without it nobody can try addresses until a mask fits, so keep the seed of published data to yourself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.hashing import key
from pipeline.config.curation.curate import PiiConfig
from pipeline.data.curate.cleaning.patterns import FINDERS

_VERSION = 1
_BITS = 24
_PASSES = 4
"""A mask can uncover another match (of words before it, say), seldom once and never for long."""


@dataclass(frozen=True, order=True)
class MaskedSpan:
    """A place in a text that is masked.

    Attributes:
        start: of the place, in characters.
        end: of it, exclusive.
        kind: `email`, `ip`, `phone` or `secret`.
        mask: that takes its place.
    """

    start: int
    end: int
    kind: str
    mask: str


def masked_kinds(config: PiiConfig) -> tuple[str, ...]:
    """Kinds that are masked."""
    return tuple(kind for kind in FINDERS if getattr(config, kind) == "mask")


def pii_settings(config: PiiConfig, seed: int) -> dict[str, Any]:
    """Settings that masks depend on, as JSON."""
    return {"version": _VERSION, "kinds": sorted(masked_kinds(config)), "seed": seed}


def mask_of(seed: int, kind: str, value: str) -> str:
    """The mask of a value."""
    return f"<{kind}:{key(seed, 'pii', kind, value) % 2**_BITS:06x}>"


def find_masked(text: str, kinds: tuple[str, ...], seed: int) -> list[MaskedSpan]:
    """All places that are masked, ascending, none over another. Masks themselves are left alone."""
    found = _find(text, kinds, seed)
    if not found:
        return []
    for _ in range(_PASSES):
        more = _find(apply_masks(text, found), kinds, seed)
        if not more:
            break
        found = sorted(found + _original(found, more))
    return found


def apply_masks(text: str, found: list[MaskedSpan]) -> str:
    """The text with masks at the places of `find_masked`."""
    pieces, at = [], 0
    for each in found:
        pieces += [text[at : each.start], each.mask]
        at = each.end
    return "".join([*pieces, text[at:]])


def _find(text: str, kinds: tuple[str, ...], seed: int) -> list[MaskedSpan]:
    taken: list[MaskedSpan] = []
    for kind in kinds:
        new = [MaskedSpan(start, end, kind, mask_of(seed, kind, value)) for start, end, value in FINDERS[kind](text)]
        taken = _without_overlaps(taken, sorted(new)) if new else taken
    return taken


def _without_overlaps(first: list[MaskedSpan], second: list[MaskedSpan]) -> list[MaskedSpan]:
    """Both lists in one, ascending; of the second only what touches none before it."""
    found: list[MaskedSpan] = []
    place = free = 0
    for each in second:
        while place < len(first) and first[place].end <= each.start:
            place += 1
        if each.start >= free and (place == len(first) or each.end <= first[place].start):
            found.append(each)
            free = each.end
    return sorted(first + found)


def _original(found: list[MaskedSpan], more: list[MaskedSpan]) -> list[MaskedSpan]:
    """Places of the masked text `more` in the original one: they never overlap a mask."""
    moved, place, shift = [], 0, 0
    for each in more:
        while place < len(found) and found[place].start + shift < each.start:
            shift += len(found[place].mask) - (found[place].end - found[place].start)
            place += 1
        moved.append(MaskedSpan(each.start - shift, each.end - shift, each.kind, each.mask))
    return moved
