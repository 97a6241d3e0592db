"""Order of merges that gives the ids of a program that has a score per piece, and no list of merges.

SentencePiece and tiktoken merge the two neighbors whose joined piece has the highest score, and the leftmost ones of
equal score. A `tokenizer.json` has a list of merges. What stands first in it is merged first, and of one place the
leftmost.
Each way to cut a piece in two is a merge here, so one score becomes several places in the list.

Their order does not matter. As long as nothing is merged over the ends of a part of the text, what is merged inside
depends on this part alone. So the last two tokens that become a piece are always the same two: the others are never
side by side.

That needs pieces of different scores. Where some are equal, the leftmost is merged first, whichever piece that is, and
no list of merges can say so. Models of the Llama kind have one score for all runs of spaces. In the order of ids a list
gives the same for those that were compared; `Merges.runs` has to be compared each time. Others are doubts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.common.errors import UserError
from pipeline.data.tokenization.conversion.piece_file import shown

_MAX_WORK = 2**31
"""Sum of the squares of the lengths of all pieces: characters that are copied to cut them."""


@dataclass
class Merges:
    """Merges in order.

    Attributes:
        pairs: left and right; the first is merged first.
        runs: words that a piece repeats three times or more, with the most repetitions.
        doubts: reasons why the list may give other ids for some text.
    """

    pairs: list[tuple[str, str]] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)


def ordered_merges(scores: Mapping[str, float]) -> Merges:
    """The merges of a vocabulary.

    Args:
        scores: of pieces that may be merged, and of single characters, by id. The highest is merged first.

    Raises:
        UserError: the pieces are so long that this takes hours.
    """
    if (work := sum(len(piece) ** 2 for piece in scores)) > _MAX_WORK:
        raise UserError(f"the pieces of the vocabulary are too long: the squares of their lengths add up to {work:,}")
    found = Merges()
    by_score: dict[float, list[str]] = defaultdict(list)
    for piece, score in scores.items():
        if _cuts(piece, scores):
            by_score[score].append(piece)
            root = _root(piece)
            if len(piece) >= 3 * len(root):
                found.runs[root] = max(found.runs.get(root, 0), len(piece) // len(root))
    for score in sorted(by_score, reverse=True):
        pieces = by_score[score]
        if len(pieces) > 1 and (len(set(map(_root, pieces))) > 1 or score > min(by_score)):
            found.doubts.append(f"{_named(pieces)} have the same score, and it merges the leftmost of them first")
        for piece in pieces:
            found.pairs += _cuts(piece, scores)
    return found


def _cuts(piece: str, scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pieces in two that a piece is made of, with the longest left one first."""
    cuts = ((piece[:at], piece[at:]) for at in range(len(piece) - 1, 0, -1))
    return [(left, right) for left, right in cuts if left in scores and right in scores]


def _root(piece: str) -> str:
    """The shortest word that a piece repeats."""
    return piece[: (piece + piece).find(piece, 1)]


def _named(pieces: list[str]) -> str:
    more = f" and {len(pieces) - 3:,} more" if len(pieces) > 3 else ""
    return f"the pieces {', '.join(map(shown, pieces[:3]))}{more}"
