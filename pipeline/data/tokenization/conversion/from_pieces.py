"""SentencePiece models (`.model`) as a `tokenizer.json`."""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.data.sources.foreign_parser import parsing
from pipeline.data.tokenization.conversion.converted import (
    Converted,
    Reference,
    added_token,
    run_texts,
    tokenizer_state,
)
from pipeline.data.tokenization.conversion.merge_order import ordered_merges
from pipeline.data.tokenization.conversion.piece_file import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    PieceModel,
    read_pieces,
    shown,
)

_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_MARKS = "\u0301\u0308\u05b0\u3099\u200d\ufe0f"
"""Characters that belong to the one before them."""


class _SentencePiece:
    """See `Reference`."""

    def __init__(self, data: bytes) -> None:
        import sentencepiece

        self.name = f"sentencepiece {sentencepiece.__version__}"
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=data)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """See `Reference`."""
        with parsing("sentencepiece"):
            found: list[list[int]] = self._processor.encode(texts)
        return found


def from_pieces(data: bytes, file: Path) -> Converted:
    """Convert a SentencePiece model.

    Args:
        data: content of the file.
        file: for messages.

    Raises:
        UserError: it cannot be read, or has a feature that no `tokenizer.json` has.
    """
    model = read_pieces(data, file)
    _refuse(model, file)
    doubts: list[str] = []
    if model.type == UNIGRAM:
        doubts.append("it is a unigram model, whose paths of equal score are chosen in another order")
        body, runs = _unigram(model), {}
    else:
        merges = ordered_merges({each.text: each.score for each in model.pieces if each.type == NORMAL})
        doubts += [*merges.doubts, *_lost_characters(model)]
        body, runs = _bpe(model, merges.pairs), merges.runs
    # SentencePiece looks for its own symbols where spaces are replaced already: one with a space is never found.
    own = [piece.text for piece in model.pieces if piece.type == USER_DEFINED and " " not in piece.text]
    matched = set(own)
    if own and model.dummy_prefix:
        doubts.append(
            f"a text that is nothing but one of its own symbols, like {shown(own[0])}, lacks the first {SPACE}"
        )
    if model.charsmap:
        doubts.append("it replaces characters, and the tokenizers library drops a mark behind some that are replaced")
    special = (CONTROL, UNKNOWN)
    added = [
        added_token(piece.text, number, special=piece.type in special)
        for number, piece in enumerate(model.pieces)
        if piece.type in special or piece.text in matched
    ]
    has_end = 0 <= model.end_id < len(model.pieces) and model.pieces[model.end_id].text == model.end
    return Converted(
        "SentencePiece " + _TYPES[model.type],
        tokenizer_state(body, added, normalizer=_normalizer(model, own), decoder=_decoder(model)),
        reference=lambda: _opened(data),
        package="sentencepiece",
        end=model.end if has_end else None,
        pieces=[piece.text.replace(SPACE, " ") for piece in model.pieces],
        hard=[
            *run_texts({word.replace(SPACE, " "): most for word, most in runs.items()}),
            *_symbols(own),
            *_spaced(),
            *_marked(),
        ],
        doubts=doubts,
    )


def _opened(data: bytes) -> Reference:
    return _SentencePiece(data)


def _refuse(model: PieceModel, file: Path) -> None:
    """Refuse what no `tokenizer.json` has."""
    reasons = {
        f"its model_type is {_TYPES.get(model.type, model.type)}, neither bpe nor unigram": model.type
        not in (BPE, UNIGRAM),
        "it has treat_whitespace_as_suffix": model.spaces_behind,
        "it has escape_whitespaces: false": not model.escape_spaces,
        f"it has remove_extra_whitespaces and a symbol of its own that ends with {SPACE}": model.remove_spaces
        and any(piece.type == USER_DEFINED and piece.text.endswith(SPACE) for piece in model.pieces),
        "it has pieces of the type UNUSED": any(piece.type == UNUSED for piece in model.pieces),
        "it has a symbol of one character that is not for text": any(
            piece.type in (CONTROL, UNKNOWN, BYTE) and len(piece.text) == 1 for piece in model.pieces
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"{file} is not converted: {reason}, which the tokenizers library does not compute")


def _lost_characters(model: PieceModel) -> Iterator[str]:
    """Doubts about characters that only stand in longer pieces: SentencePiece merges them, the library drops them."""
    known = {piece.text for piece in model.pieces if piece.type == NORMAL and len(piece.text) == 1}
    for piece in model.pieces:
        if piece.type == NORMAL and (lost := set(piece.text) - known):
            yield f"the piece {shown(piece.text)} has the character {shown(min(lost))}, which is not a piece itself"
            return


def _bpe(model: PieceModel, merges: list[tuple[str, str]]) -> dict[str, Any]:
    (unknown,) = [piece.text for piece in model.pieces if piece.type == UNKNOWN]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: number for number, piece in enumerate(model.pieces)},
        "merges": merges,
    }


def _unigram(model: PieceModel) -> dict[str, Any]:
    # No path goes through what is not for text.
    least = min((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0) - 1000
    return {
        "type": "Unigram",
        "unk_id": next(number for number, piece in enumerate(model.pieces) if piece.type == UNKNOWN),
        "vocab": [(piece.text, piece.score if piece.type == NORMAL else least) for piece in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _normalizer(model: PieceModel, own: list[str]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_spaces:
        # SentencePiece removes spaces at the start before it replaces them, and at the end after that: a mark of the
        # text itself goes there, too.
        ends = f"[ {SPACE}]"
        steps.append(_replace({"Regex": rf"\A{ends}+\z|\A +|(?<!{ends}){ends}+\z"}, ""))
        steps.append(_replace({"Regex": " {2,}"}, " "))
    steps.append(_replace({"String": " "}, SPACE))
    if model.dummy_prefix and own:
        # The library normalizes its added tokens by the same steps; there must be nothing before them in the middle of
        # a text.
        symbols = "|".join(map(re.escape, sorted(own, key=len, reverse=True)))
        steps.append(_replace({"Regex": rf"\A(?!(?:{symbols})\z)(?=[\s\S])"}, SPACE))
    elif model.dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(model: PieceModel) -> dict[str, Any]:
    steps = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _symbols(own: list[str]) -> Iterator[str]:
    """User-defined symbols at the ends and beside each other, letters, spaces and marks."""
    for one, other in zip(own, [*own[1:], *own[:1]], strict=True):
        text = one.replace(SPACE, " ")
        yield from (
            text,
            f" {text}",
            f"{text} ",
            f"a{text}b {text} c",
            text + other,
            f"{text}{text} x",
            f"{text}\u0301",
        )


def _spaced() -> Iterator[str]:
    """Spaces, and the mark that replaces them, in all orders around a letter."""
    for length in range(1, 6):
        yield from map("".join, product(("a", " ", SPACE), repeat=length))


def _marked() -> Iterator[str]:
    """Every character with marks behind it, by 64 code points."""
    for first in range(0, 0x30000, 64):
        assigned = [c for c in map(chr, range(first, first + 64)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
        if assigned:
            yield "".join(f"{c}{mark}" for c in assigned for mark in _MARKS)
