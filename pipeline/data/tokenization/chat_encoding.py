"""Token ids of a conversation, and which of them are trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.sources.records import NO_TARGET, UnusableRecord
from pipeline.data.tokenization.tokenizer import Tokenizer

Spans = tuple[tuple[int, int], ...]
TRAINED = 1
"""In a mask: a token that is a target."""
SECOND = 2
"""In a mask: the first token of the second conversation of a pair, which is no target."""


class EncodedChat(NamedTuple):
    """A conversation as it is stored, but for the end-of-document token behind it."""

    ids: npt.NDArray[Any]
    """Token ids, in the dtype of the tokenizer."""
    mask: bytes
    """1 for each token that is trained on, else 0; the end-of-document token has the last. Without spans all are 1, but
    for the first. The first token of the second conversation of a pair has 2."""
    text: str
    """The text that the ids are of: all, or what a limit has left."""


@dataclass(frozen=True)
class ChatRules:
    """Limits and marks by which conversations are stored.

    Attributes:
        masks: only spans are trained on.
        longest: tokens at most, with end of document; None for any number.
        cuts: longer ones are cut behind the last span that fits, and not rejected.
        pairs: a text is that of two conversations, each with an end-of-document token.
    """

    masks: bool
    longest: int | None = None
    cuts: bool = False
    pairs: bool = False


def encode_chat(tokenizer: Tokenizer, text: str, spans: Spans, rules: ChatRules) -> EncodedChat:
    """The ids of a conversation, in whose text special tokens count as such.

    Args:
        tokenizer: of the dataset.
        text: of the conversation.
        spans: characters [first, end) of it that are trained on, ascending; of a pair see `RecordText`.
        rules: what is stored.

    Raises:
        UnusableRecord: it cannot be stored.
    """
    return _encode_pair(tokenizer, text, spans, rules) if rules.pairs else _encode(tokenizer, text, spans, rules)


def _encode_pair(tokenizer: Tokenizer, text: str, spans: Spans, rules: ChatRules) -> EncodedChat:
    """Both conversations of a pair, each encoded alone."""
    place = next(number for number, (start, end) in enumerate(spans) if start == end)
    border, alone = spans[place][0], replace(rules, longest=None)
    chosen = _encode(tokenizer, text[:border], spans[:place], alone)
    moved = tuple((start - border, end - border) for start, end in spans[place + 1 :])
    rejected = _encode(tokenizer, text[border:], moved, alone)
    size = len(chosen.mask) + len(rejected.mask)
    if rules.longest is not None and size > rules.longest:
        raise UnusableRecord(f"longer than chat.max_tokens ({rules.longest})", f"{size:,} tokens in both conversations")
    ids = np.concatenate([chosen.ids, np.array([tokenizer.end_of_document], tokenizer.dtype), rejected.ids])
    return EncodedChat(ids, chosen.mask + bytes([SECOND]) + rejected.mask[1:], text)


def _encode(tokenizer: Tokenizer, text: str, spans: Spans, rules: ChatRules) -> EncodedChat:
    ids, offsets = tokenizer.encode_parsed(text)
    found, bounds = np.array(ids, tokenizer.dtype), np.array(offsets, np.int64).reshape(-1, 2)
    mask, ends = np.zeros(len(found), np.uint8), []
    # Where a character is several tokens, or none, both columns still ascend.
    begins, stops = np.maximum.accumulate(bounds[:, 0]), np.maximum.accumulate(bounds[:, 1])
    for start, end in spans:
        first, after = int(stops.searchsorted(start, "right")), int(begins.searchsorted(end, "left"))
        if first < after and begins[first] < start:
            around = text[int(begins[first]) : int(stops[first])]
            raise UnusableRecord("a token straddles the start of what is trained on", repr(around[:60]))
        mask[first:after] = 1
        ends.append(after)
    limit = len(found)
    # The end-of-document token takes one place, be it the template's own or not.
    own_end = bool(len(found)) and found[-1] == tokenizer.end_of_document
    if rules.longest is not None and len(found) + (not own_end) > rules.longest:
        limit = max((end for end in ends if end <= rules.longest - 1), default=0) if rules.cuts else 0
        if not limit:
            raise UnusableRecord(
                f"longer than chat.max_tokens ({rules.longest})", f"{len(found) + (not own_end):,} tokens"
            )
        text = text[: int(stops[limit - 1])]
    found, mask = found[:limit], mask[:limit]
    last = 0
    if len(found) and found[-1] == tokenizer.end_of_document:
        last, found, mask = int(mask[-1]), found[:-1], mask[:-1]
    mask = np.append(mask, np.uint8(last)) if rules.masks else np.ones(len(found) + 1, np.uint8)
    mask[0] = 0  # it is predicted from another document
    if rules.masks and not mask.any():
        raise UnusableRecord(NO_TARGET, "no token is marked as trained")
    return EncodedChat(found, mask.tobytes(), text)
