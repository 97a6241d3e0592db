"""SentencePiece's `.model` files, read from the wire format of protobuf without its packages.

The numbers of the fields are those of SentencePiece's `sentencepiece_model.proto`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.layers.mixers import MAX_ROWS
from pipeline.data.sources.records import printable

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
UNIGRAM, BPE = 1, 2
"""Types of models that are converted."""
SPACE = "\u2581"
"""Stands for a space in pieces."""
MAX_PIECE = 512
"""Characters of a piece, which is cut at each place. SentencePiece's own default is 16."""
_MAX_FIELDS = 2**24
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class VocabularyPiece:
    """A piece of the vocabulary; its place in the list is its id.

    Attributes:
        text: with `SPACE` for spaces.
        score: higher is merged first.
        type: one of the types of pieces.
    """

    text: str
    score: float
    type: int


@dataclass
class PieceModel:
    """Parts of a `.model` that decide ids.

    Attributes:
        pieces: by id.
        charsmap: rules that replace characters, as SentencePiece compiled them; empty for none.
        end: piece that ends a text; empty if the model has none.
    """

    pieces: list[VocabularyPiece] = field(default_factory=list)
    type: int = UNIGRAM
    byte_fallback: bool = False
    spaces_behind: bool = False
    end: str = "</s>"
    end_id: int = 2
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_spaces: bool = True
    escape_spaces: bool = True


def read_pieces(data: bytes, file: Path) -> PieceModel:
    """Read a `.model`.

    Args:
        data: content of the file.
        file: for messages.

    Raises:
        UserError: it is truncated, no such file, or its pieces are not a vocabulary.
    """
    model = PieceModel()
    try:
        budget = [_MAX_FIELDS]
        for number, value in _fields(memoryview(data), budget):
            if number == 1:
                model.pieces.append(_piece(_message(value, "a piece"), budget, len(model.pieces)))
                if len(model.pieces) > MAX_ROWS:
                    raise ValueError(f"it has more than {MAX_ROWS:,} pieces")
            elif number == 2:
                _read_trainer(model, _message(value, "trainer_spec"), budget)
            elif number == 3:
                _read_normalizer(model, _message(value, "normalizer_spec"), budget)
        _check_pieces(model)
    except ValueError as error:
        raise UserError(
            f"{file} cannot be read as a .model of SentencePiece: {error}; is the file whole, and of that kind?"
        ) from None
    return model


def _fields(data: memoryview, budget: list[int]) -> Iterator[tuple[int, int | memoryview]]:
    """Fields of a message with their numbers; ValueError if the bytes are none."""
    at = 0
    while at < len(data):
        budget[0] -= 1
        if budget[0] < 0:
            raise ValueError(f"it has more than {_MAX_FIELDS:,} fields")
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError(f"byte {at - 1:,} of a message begins a field 0")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"field {number} has the wire type {kind}")
        if size > len(data) - at:
            raise ValueError(f"field {number} is truncated: it has {size:,} bytes, and {len(data) - at:,} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(data):
            raise ValueError("it ends in the middle of a number")
        byte = data[at + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number has more than ten bytes")


def _message(value: int | memoryview, name: str) -> memoryview:
    if isinstance(value, int):
        raise ValueError(f"{name} is a number")
    return value


def _number(value: int | memoryview, name: str) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{name} is not a number")
    return value - 2**64 if value >= 2**63 else value


def _text(value: int | memoryview, name: str) -> str:
    try:
        return bytes(_message(value, name)).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8") from None


def _piece(data: memoryview, budget: list[int], place: int) -> VocabularyPiece:
    text, score, kind = "", 0.0, NORMAL
    name = f"piece {place}"
    for number, value in _fields(data, budget):
        if number == 1:
            text = _text(value, name)
        elif number == 2:
            raw = _message(value, f"the score of {name}")
            if len(raw) != 4:
                raise ValueError(f"the score of {name} is not of four bytes")
            (score,) = struct.unpack("<f", raw)
        elif number == 3:
            kind = _number(value, f"the type of {name}")
    if not text or len(text) > MAX_PIECE:
        raise ValueError(f"{name} has {len(text):,} characters; 1 to {MAX_PIECE} are read")
    if not math.isfinite(score):
        raise ValueError(f"{name} ({shown(text)}) has the score {score}")
    if kind not in range(NORMAL, BYTE + 1):
        raise ValueError(f"{name} ({shown(text)}) has the type {kind}")
    return VocabularyPiece(text, score, kind)


def _read_trainer(model: PieceModel, data: memoryview, budget: list[int]) -> None:
    for number, value in _fields(data, budget):
        if number == 3:
            model.type = _number(value, "model_type")
        elif number == 24:
            model.spaces_behind = bool(_number(value, "treat_whitespace_as_suffix"))
        elif number == 35:
            model.byte_fallback = bool(_number(value, "byte_fallback"))
        elif number == 42:
            model.end_id = _number(value, "eos_id")
        elif number == 47:
            model.end = _text(value, "eos_piece")


def _read_normalizer(model: PieceModel, data: memoryview, budget: list[int]) -> None:
    flags = {3: "dummy_prefix", 4: "remove_spaces", 5: "escape_spaces"}
    for number, value in _fields(data, budget):
        if number == 2:
            model.charsmap = bytes(_message(value, "precompiled_charsmap"))
        elif number in flags:
            setattr(model, flags[number], bool(_number(value, flags[number])))


def _check_pieces(model: PieceModel) -> None:
    if not model.pieces:
        raise ValueError("it has no pieces")
    seen: dict[str, int] = {}
    for place, piece in enumerate(model.pieces):
        if piece.text in seen:
            raise ValueError(f"pieces {seen[piece.text]} and {place} are both {shown(piece.text)}")
        seen[piece.text] = place
    unknown = [piece for piece in model.pieces if piece.type == UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"it has {len(unknown)} pieces for unknown text, in place of one")
    if model.byte_fallback:
        missing = [name for name in byte_pieces() if name not in seen or model.pieces[seen[name]].type != BYTE]
        if missing:
            raise ValueError(
                f"it has byte_fallback, and {len(missing)} of the 256 bytes are missing, like {missing[0]}"
            )


def byte_pieces() -> list[str]:
    """Names of the pieces that stand for bytes."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def shown(value: Any) -> str:
    """A piece or a text in messages, cut and without what a terminal would obey."""
    return printable(repr(value)[:80])
