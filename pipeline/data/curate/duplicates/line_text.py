"""Lines and paragraphs of a text: one way to number them, for what finds repeated ones and what removes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

LINES_VERSION = 1
PARAGRAPHS_VERSION = 1
_FENCES = (b"```", b"~~~")


def hashed_lines(raw: bytes, min_bytes: int) -> tuple[list[int], list[int]]:
    """Lines that may be removed: their hashes and their numbers.

    A line ends at a line feed. Lines of fenced code, and the fences, stay whatever they are.

    Args:
        raw: UTF-8 of the text.
        min_bytes: shorter lines are left out; whitespace at both ends counts for nothing.
    """
    lines = raw.split(b"\n")
    code = _in_code(lines) if any(fence in raw for fence in _FENCES) else None
    hashes, numbers = [], []
    for number, line in enumerate(lines):
        bare = line.strip()
        if len(bare) >= min_bytes and not (code is not None and code[number]):
            hashes.append(xxhash.xxh3_64_intdigest(bare))
            numbers.append(number)
    return hashes, numbers


class Paragraph(NamedTuple):
    """A paragraph that may be removed.

    Attributes:
        hash: of its lines, each without whitespace at both ends.
        line: number of its first line.
        lines: number of its lines.
        blank: blank lines behind it, which go with it.
        bytes: of all these lines with their line ends.
    """

    hash: int
    line: int
    lines: int
    blank: int
    bytes: int


def hashed_paragraphs(raw: bytes, min_bytes: int, min_words: int) -> list[Paragraph]:
    """Paragraphs that may be removed: lines up to a blank one. Those with fenced code in them stay.

    Args:
        raw: UTF-8 of the text.
        min_bytes: shorter ones are left out.
        min_words: those of fewer words are, too.
    """
    lines = raw.split(b"\n")
    code = _in_code(lines) if any(fence in raw for fence in _FENCES) else None
    bare = [line.strip() for line in lines]
    found, first = [], 0
    while first < len(lines):
        end = first
        while end < len(lines) and bare[end]:
            end += 1
        behind = end
        while behind < len(lines) and not bare[behind]:
            behind += 1
        text = b"\n".join(bare[first:end])
        is_long = len(text) >= min_bytes and (not min_words or len(text.split()) >= min_words)
        if is_long and not (code is not None and code[first:end].any()):
            size = sum(map(len, lines[first:behind])) + behind - first - (behind == len(lines))
            found.append(Paragraph(xxhash.xxh3_64_intdigest(text), first, end - first, behind - end, size))
        first = behind
    return found


def _in_code(lines: list[bytes]) -> npt.NDArray[np.bool_]:
    """Tell which lines are of fenced code; a fence that is not closed goes to the end."""
    inside = np.zeros(len(lines), np.bool_)
    open_fence = b""
    for number, line in enumerate(lines):
        bare = line.strip()
        if open_fence:
            inside[number] = True
            # The same characters, no fewer, and nothing else.
            if len(bare) >= len(open_fence) and not bare.strip(open_fence[:1]):
                open_fence = b""
        elif bare.startswith(_FENCES):
            open_fence = bare[: len(bare) - len(bare.lstrip(bare[:1]))]
            inside[number] = True
    return inside


def remove_lines(text: str, numbers: Collection[int]) -> str:
    """Text without some lines.

    Args:
        text: as it was measured.
        numbers: of the lines, from 0, as `hashed_lines` numbers them.
    """
    if not len(numbers):
        return text
    gone = {int(number) for number in numbers}
    return "\n".join(line for number, line in enumerate(text.split("\n")) if number not in gone)
