"""Files of other tokenizers, written here without their packages."""

from __future__ import annotations

import base64
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.data.tokenization.definition import SPLIT

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def block(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def flag(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def piece(text: str | bytes, score: float, kind: int = NORMAL) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return block(1, block(1, raw) + varint(2 << 3 | 5) + struct.pack("<f", score) + flag(3, kind))


def model(pieces: list[tuple[str, float, int]], *, trainer: bytes = b"", normalizer: bytes | None = None) -> bytes:
    """A `.model` of type BPE with a dummy prefix, which keeps spaces."""
    normalizer = flag(3, 1) + flag(4, 0) if normalizer is None else normalizer
    return b"".join(piece(*each) for each in pieces) + block(2, flag(3, 2) + trainer) + block(3, normalizer)


def scored(texts: list[str]) -> list[tuple[str, float, int]]:
    """Pieces in order of their scores, as training gives them: pieces of several characters before single ones."""
    return [*SPECIAL, *((text, -float(place), NORMAL) for place, text in enumerate(texts))]


def tiktoken_file(path: Path, tokens: list[bytes]) -> Path:
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


def tekken_file(path: Path, tokens: list[bytes], special: int, **changes: Any) -> Path:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(tokens)]
    config = {
        "pattern": SPLIT,
        "default_num_special_tokens": special,
        "default_vocab_size": special + len(tokens),
    }
    path.write_text(json.dumps({"config": config | changes, "vocab": vocab}))
    return path


def joined(parts: list[str], scores: dict[str, float]) -> list[str]:
    """Tokens by the rule itself: the neighbors whose joined piece has the highest score, of equal ones the leftmost."""
    parts = list(parts)
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
