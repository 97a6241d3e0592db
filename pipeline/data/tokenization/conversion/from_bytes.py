"""Vocabularies of bytes as a `tokenizer.json`: those of tiktoken, tekken.json, and GPT-2's vocab.json and merges.txt.

An entry of bytes is written with a character for each byte, as GPT-2 introduced it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from pipeline.common.errors import UserError
from pipeline.config.layers.mixers import MAX_ROWS
from pipeline.data.sources.foreign_parser import parsing
from pipeline.data.tokenization.conversion.converted import (
    Converted,
    added_token,
    run_texts,
    tokenizer_state,
)
from pipeline.data.tokenization.conversion.merge_order import ordered_merges
from pipeline.data.tokenization.conversion.piece_file import MAX_PIECE, shown
from pipeline.data.tokenization.definition import SPLIT

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_O200K_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
PATTERNS = {
    "gpt2": GPT2_SPLIT,
    "cl100k": SPLIT,
    "o200k": "|".join(
        [
            _O200K_WORD % ("*", "+"),
            _O200K_WORD % ("+", "*"),
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ]
    ),
}
"""Patterns of published vocabularies of tiktoken, by name."""
_END = "<|endoftext|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
PUBLISHED: dict[str, tuple[str, str, dict[str, int]]] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": ("r50k_base", "gpt2", {_END: 50256}),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": ("p50k_base", "gpt2", {_END: 50256}),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": (
        "cl100k_base",
        "cl100k",
        {_END: 100257, **{name: 100258 + i for i, name in enumerate(_FIM)}, "<|endofprompt|>": 100276},
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": (
        "o200k_base",
        "o200k",
        {_END: 199999, "<|endofprompt|>": 200018},
    ),
}
"""SHA-256 of published `.tiktoken` files: name, pattern and special tokens."""
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Names of the first special tokens, where a tekken.json does not list them."""
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d{1,10}")


@cache
def alphabet() -> list[str]:
    """Character of each byte: itself if it is printable in Latin-1, one from U+0100 on otherwise."""
    shown_as_is = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown_as_is else next(others)) for byte in range(256)]


def spelled(token: bytes) -> str:
    """An entry of bytes in that alphabet."""
    return "".join(alphabet()[byte] for byte in token)


def text_of(entry: str) -> str | None:
    """Text of an entry in that alphabet; None if it is not a whole text."""
    numbers = _numbers()
    if not all(character in numbers for character in entry):
        return None
    try:
        return bytes(numbers[character] for character in entry).decode()
    except UnicodeDecodeError:
        return None


@cache
def _numbers() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(alphabet())}


def is_tiktoken(data: bytes) -> bool:
    """Tell whether a file begins as one of ranks does."""
    return _RANK.fullmatch(data[:4096].split(b"\n", 1)[0].rstrip(b"\r")) is not None


class _Tiktoken:
    """See `Reference`."""

    def __init__(self, pattern: str, ranks: dict[bytes, int], first: int) -> None:
        import tiktoken

        self.name = f"tiktoken {metadata.version('tiktoken')}"
        self._encoding = tiktoken.Encoding("converted", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._first = first

    def encode(self, texts: list[str]) -> list[list[int]]:
        """See `Reference`."""
        with parsing("tiktoken"):
            return [[self._first + number for number in self._encoding.encode_ordinary(text)] for text in texts]


def from_tiktoken(data: bytes, file: Path, pattern: str | None, special: Mapping[str, int]) -> Converted:
    """Convert a `.tiktoken` file, which has ranks alone.

    Args:
        data: content of the file.
        file: for messages.
        pattern: regex that splits a text, or a name in `PATTERNS`; None: that of a published file.
        special: ids of special tokens; if empty, those of a published file.

    Raises:
        UserError: it cannot be read, or a pattern is needed.
    """
    known = PUBLISHED.get(hashlib.sha256(data).hexdigest())
    if pattern is None:
        if known is None:
            raise UserError(
                f"{file} has the ranks of tiktoken, but not the regex that splits a text, and is not a published file "
                f"that is known; give it with --pattern, as a regex or one of the names {', '.join(PATTERNS)}"
            )
        pattern = known[1]
    special = dict(special) or (dict(known[2]) if known else {})
    converted = _from_ranks(_read_ranks(data, file), file, PATTERNS.get(pattern, pattern), special, 0)
    converted.format = f"tiktoken's {known[0]}" if known else "tiktoken"
    converted.end = _END if _END in special else None
    if not special:
        converted.notes.append("it has no special tokens: give them with --special TOKEN=ID")
    return converted


def _read_ranks(data: bytes, file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        if not _RANK.fullmatch(line):
            raise UserError(f"{file}, line {number}: {shown(line)} is not a token in base64 with its rank")
        text, _, rank = line.partition(b" ")
        _add_rank(ranks, _decoded(text, f"{file}, line {number}"), int(rank), f"{file}, line {number}")
    return ranks


def _decoded(text: str | bytes, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"{where}: {shown(text)} is not base64") from None


def _add_rank(ranks: dict[bytes, int], token: bytes, rank: int, where: str) -> None:
    if token in ranks:
        raise UserError(f"{where}: the token {shown(token)} stands twice")
    if not 0 < len(token) <= MAX_PIECE:
        raise UserError(f"{where}: a token of {len(token):,} bytes; 1 to {MAX_PIECE} are read")
    if rank >= MAX_ROWS:
        raise UserError(f"{where}: the rank {rank:,}; ranks are below {MAX_ROWS:,}")
    ranks[token] = rank


def from_tekken(value: Mapping[str, Any], file: Path) -> Converted:
    """Convert Mistral's `tekken.json`: special tokens have the first ids, and the ranks follow.

    Args:
        value: content of the file.
        file: for messages.

    Raises:
        UserError: it cannot be read.
    """
    try:
        settings = value["config"]
        pattern, first = settings["pattern"], settings["default_num_special_tokens"]
        size = settings["default_vocab_size"]
        if not isinstance(pattern, str) or not _is_count(first) or not _is_count(size) or size < first:
            raise TypeError("pattern, default_num_special_tokens or default_vocab_size")
        entries = value["vocab"][: size - first]
        ranks: dict[bytes, int] = {}
        for place, entry in enumerate(entries):
            where = f"{file}, vocab.{place}"
            if entry["rank"] != place:
                raise UserError(f"{where}: the rank {shown(entry['rank'])}; ranks are in order")
            _add_rank(ranks, _decoded(entry["token_bytes"], where), place, where)
        names = _tekken_names(value.get("special_tokens"), first)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is not a tekken.json: {error} is missing or of another type") from None
    converted = _from_ranks(ranks, file, pattern, {name: number for number, name in enumerate(names)}, first)
    converted.format, converted.end = "tekken", "</s>" if "</s>" in names else None
    if not value.get("special_tokens"):
        converted.notes.append(
            "it does not name its special tokens: they have the names that mistral-common gives them"
        )
    return converted


def _tekken_names(entries: Any, count: int) -> list[str]:
    names = [f"<SPECIAL_{number}>" for number in range(count)]
    listed = (
        list(enumerate(_TEKKEN_SPECIAL)) if not entries else [(each["rank"], each["token_str"]) for each in entries]
    )
    for number, name in listed:
        if not _is_count(number) or not isinstance(name, str) or not name:
            raise TypeError("a rank or token_str of special_tokens")
        if number < count:
            names[number] = name
    if len(set(names)) < len(names):
        raise TypeError("a special token that stands twice, so one")
    return names


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ROWS


def _from_ranks(
    ranks: Mapping[bytes, int], file: Path, pattern: str, special: Mapping[str, int], first: int
) -> Converted:
    """Vocabulary of ranks; `first` is the id of rank 0."""
    _check_pattern(pattern)
    if len(set(ranks.values())) < len(ranks):
        raise UserError(f"{file} gives a rank to two tokens")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{file} has no token for {len(missing)} of the 256 bytes, like 0x{missing[0]:02X}")
    in_order = sorted(ranks, key=ranks.__getitem__)
    vocabulary = {spelled(token): first + ranks[token] for token in in_order}
    merges = ordered_merges({spelled(token): -float(ranks[token]) for token in in_order})
    numbers = set(vocabulary.values())
    for name, number in special.items():
        if name in vocabulary or number in numbers:
            raise UserError(f"{file} has a token with the name or the id of the special token {shown(name)} ({number})")
        numbers.add(number)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return Converted(
        "",
        _byte_state(
            _bpe({**vocabulary, **special}, merges.pairs, ignore_merges=True),
            special,
            {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]},
        ),
        reference=lambda: _Tiktoken(pattern, dict(ranks), first),
        package="tiktoken",
        pieces=[text for token in vocabulary if (text := text_of(token)) is not None] + list(special),
        hard=run_texts({text: most for word, most in merges.runs.items() if (text := text_of(word)) is not None}),
        doubts=merges.doubts,
    )


def _check_pattern(pattern: str) -> None:
    """Refuse what Oniguruma, the regex engine of `tokenizers`, reads otherwise than the engine of tiktoken."""
    if re.search(r"\{\d*,?\d*\}\+", pattern):
        raise UserError(
            "--pattern has a possessive {m,n}+, which the tokenizers library reads as a repetition; write it without "
            "the +, or as an atomic group (?>...{m,n})"
        )
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    if "$" in outside or "^" in outside:
        raise UserError(
            r"--pattern has a ^ or $, which the tokenizers library takes for ends of lines; write \A or \z for those "
            "of the text"
        )


class _Gpt2:
    """See `Reference`: the merges of GPT-2, one after another, in words of the package `regex`."""

    def __init__(self, vocabulary: Mapping[str, int], merges: list[tuple[str, str]]) -> None:
        import regex

        self.name = f"GPT-2's merges, with regex {metadata.version('regex')}"
        self._words = regex.compile(GPT2_SPLIT)
        self._vocabulary = vocabulary
        self._places = {pair: place for place, pair in enumerate(merges)}
        self._known: dict[str, list[int]] = {}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """See `Reference`."""
        with parsing("regex"):
            return [[number for word in self._words.findall(text) for number in self._ids(word)] for text in texts]

    def _ids(self, word: str) -> list[int]:
        if (found := self._known.get(word)) is not None:
            return found
        parts = list(spelled(word.encode()))
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda pair: self._places.get(pair, len(self._places)))
            if pair not in self._places:
                break
            merged: list[str] = []
            for part in parts:  # all places at once, from the left
                if merged and (merged[-1], part) == pair:
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        found = [self._vocabulary[part] for part in parts]
        if len(self._known) < 2**20 and len(word) < 64:
            self._known[word] = found
        return found


def from_gpt2(value: Mapping[str, Any], file: Path, merges: bytes, merges_file: Path) -> Converted:
    """Convert `vocab.json` and `merges.txt`. Entries that text cannot become are special tokens.

    Args:
        value: content of the vocabulary.
        file: of the vocabulary, for messages.
        merges: content of the merges.
        merges_file: for messages.

    Raises:
        UserError: one cannot be read, or they do not belong together.
    """
    if not all(_is_count(number) and name for name, number in value.items()):
        raise UserError(f"{file} is not a vocabulary of texts with their ids")
    vocabulary = dict(value)
    if missing := [byte for byte, character in enumerate(alphabet()) if character not in vocabulary]:
        raise UserError(f"{file} has no entry for {len(missing)} of the 256 bytes, like 0x{missing[0]:02X}")
    pairs = _read_merges(merges, merges_file, vocabulary, file)
    reachable = {*alphabet(), *(left + right for left, right in pairs)}
    special = {name: number for name, number in vocabulary.items() if name not in reachable}
    return Converted(
        "GPT-2 BPE",
        _byte_state(_bpe(vocabulary, pairs, ignore_merges=False), special, _byte_level(use_regex=True)),
        reference=lambda: _Gpt2(vocabulary, pairs),
        package="regex",
        end=_END if _END in special else None,
        pieces=[text for token in vocabulary if (text := text_of(token)) is not None],
    )


def _read_merges(
    data: bytes, file: Path, vocabulary: Mapping[str, int], vocabulary_file: Path
) -> list[tuple[str, str]]:
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8: {error}") from None
    pairs: dict[tuple[str, str], None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not left or not right or " " in right:
            raise UserError(f"{file}, line {number}: {shown(line)} is not two tokens with a space between")
        if (left, right) in pairs:
            raise UserError(f"{file}, line {number}: {shown(line)} stands twice")
        if lost := [each for each in (left, right, left + right) if each not in vocabulary]:
            raise UserError(
                f"{file}, line {number}: {shown(lost[0])} is not in {vocabulary_file}; do the files belong together?"
            )
        pairs[left, right] = None
    if not pairs:
        raise UserError(f"{file} has no merges")
    return list(pairs)


def _bpe(vocabulary: Mapping[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocabulary),
        "merges": merges,
    }


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _byte_state(model: dict[str, Any], special: Mapping[str, int], pre_tokenizer: dict[str, Any]) -> dict[str, Any]:
    return tokenizer_state(
        model,
        [added_token(name, number, special=True) for name, number in special.items()],
        pre_tokenizer=pre_tokenizer,
        decoder=_byte_level(use_regex=True),
    )


def read_json(data: bytes, file: Path) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        UserError: it is none.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is JSON, but no object")
    return value
