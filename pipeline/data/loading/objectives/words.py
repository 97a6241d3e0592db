"""Words of a text of token ids: which tokens continue the word of the one before them, by the tokenizer's own marks.

Three kinds of vocabulary say it. WordPiece marks tokens inside of a word with a prefix (`##`). Byte-level ones and
those of SentencePiece write the space before a word into its first token (`Ġ`, `▁`); there a token continues a word if
it begins, and the token before it ends, with a letter, a digit, or anything beyond ASCII, so that punctuation and line
breaks are words of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.common.errors import UserError
from pipeline.data.order.permutation import IntArray

if TYPE_CHECKING:
    from pipeline.data.tokenization.tokenizer import Tokenizer

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ASCII = 0x80


@dataclass(frozen=True)
class WordTable:
    """Marks of tokens, by id, that say which ones make a word together."""

    continues: npt.NDArray[np.bool_]
    """[vocab_size] the token does not begin a word."""
    is_open: npt.NDArray[np.bool_]
    """[vocab_size] the token does not end its word for certain."""

    def firsts(self, ids: IntArray, begins: IntArray, ends: IntArray) -> IntArray:
        """Positions at which words begin, ascending.

        Args:
            ids: A text.
            begins: Positions at which documents begin; some may lie behind the text.
            ends: Positions with which documents end: they are words of their own.
        """
        first = np.ones(len(ids), np.bool_)
        first[1:] = ~(self.continues[ids[1:]] & self.is_open[ids[:-1]])
        first[begins[begins < len(ids)]] = True
        first[ends] = True
        return np.flatnonzero(first)


def word_table(tokenizer: Tokenizer) -> WordTable:
    """The table of a tokenizer.

    Raises:
        UserError: Its vocabulary does not tell.
    """
    definition = orjson.loads(tokenizer.definition)
    model = definition["model"]
    entries = model["vocab"]
    if isinstance(entries, list):  # of a Unigram model, with scores
        entries = {entry: number for number, (entry, _) in enumerate(entries)}
    continues, is_open = (np.zeros(tokenizer.vocab_size, np.bool_) for _ in range(2))
    inside = _rule(model, definition, entries)
    for entry, number in entries.items():
        continues[number], is_open[number] = inside(entry)
    for added in definition.get("added_tokens") or ():
        continues[added["id"]] = is_open[added["id"]] = False
    return WordTable(continues, is_open)


def _rule(
    model: dict[str, Any], definition: dict[str, Any], entries: dict[str, int]
) -> Callable[[str], tuple[bool, bool]]:
    """A function from an entry of the vocabulary to (continues a word, the word may continue behind it)."""
    if model.get("type") == "WordPiece":
        prefix = model.get("continuing_subword_prefix") or "##"
        return lambda entry: (entry.startswith(prefix), True)
    if "ByteLevel" in {*_types(definition.get("pre_tokenizer")), *_types(definition.get("decoder"))}:
        byte_of = _byte_alphabet()
        return lambda entry: (_in_word(byte_of.get(entry[:1], 0)), _in_word(byte_of.get(entry[-1:], 0)))
    if any(entry.startswith(_SPACE) for entry in entries):
        return lambda entry: (_in_word(_code(entry, 0)), _in_word(_code(entry, -1)))
    raise UserError(
        "train.objective.whole_words: true: the tokenizer's vocabulary does not say which tokens continue a word: it "
        "has no marks of WordPiece (##) or SentencePiece (▁), and it is not byte-level; set "
        "train.objective.whole_words: false"
    )


def _byte_alphabet() -> dict[str, int]:
    """Bytes by the characters that byte-level vocabularies write for them (Radford et al. 2019).

    Printable characters of Latin-1 stand for themselves, the others for those from 256 on, in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _types(part: Any) -> list[str]:
    """Types in a part of a tokenizer's definition, which may be a sequence of parts."""
    if not isinstance(part, dict):
        return []
    nested = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return [str(part.get("type")), *(found for each in nested for found in _types(each))]


def _code(entry: str, at: int) -> int:
    """First or last character of an entry of SentencePiece, or the byte that it stands for."""
    byte = _BYTE.fullmatch(entry)
    if byte:
        return int(byte[1], 16)
    return ord(" " if entry[at] == _SPACE else entry[at])


def _in_word(code: int) -> bool:
    return code >= _ASCII or chr(code).isalnum()
