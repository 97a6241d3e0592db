"""Bounds of a `tokenizer.json`, read from its JSON before the library sees it.

A stranger's file of 1 KB must not take gigabytes.
`COMPONENTS` has every type of component of the `tokenizers` library and what it may do to a text. A type that it lacks
is refused, so that a newer library brings none that nobody looked at.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import tokenizers

from pipeline.common.errors import UserError
from pipeline.common.paths import StrPath
from pipeline.config.layers.mixers import MAX_ROWS
from pipeline.data.sources.records import printable

MAX_FILE_BYTES = 2**27
MAX_VALUES = 2**24
"""Commas and brackets of the file: as Python objects, their values take up to 60 bytes each."""
MAX_NESTING = 8
"""Sequences in sequences."""
MAX_STEPS = 64
"""Normalizers, pre-tokenizers, decoders or post-processors in all."""
MAX_STRING = 256
"""Characters of a string of a component, like the content of a Replace, but for patterns."""
MAX_PATTERN = 2**14
"""Characters of a regex."""
MAX_GROWTH = 4096
"""Product of what the normalizers and pre-tokenizers may each do: far above what they do together."""
MAX_ENTRY = 4096
"""Characters of an entry of the vocabulary: a Unigram model compares each place of a text with all."""
MAX_ADDED = 2**17
MAX_ADDED_CHARACTERS = 2**20
"""Characters of all added tokens: each takes up to 1 KB in the library's automaton."""
MAX_WORD = 512
"""`max_input_chars_per_word` of a WordPiece model, which takes the cube of it for a word. BERT has 100."""
PROVED_WORD = 200
PROVED_ENTRY = 256
"""Lengths whose cost is known."""
FREE_IDS = 2**20
"""Ids without an entry that a vocabulary of any size may have; a large one may have `IDS_PER_ENTRY` for each entry."""
IDS_PER_ENTRY = 16

# The split of Llama 3 (after tiktoken's cl100k): contractions, words with one leading mark, up to three digits,
# punctuation with its line ends, line ends, spaces. Nothing is dropped, so decoding gives the text back.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ONE_DIGIT = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
KNOWN_PATTERNS = frozenset(
    [
        SPLIT,
        _ONE_DIGIT,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\s+",
    ]
)
"""Regexes of known tokenizers (GPT-2, Llama 3, Qwen, DeepSeek), whose time grows with the length of a text."""

_LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""Section of the file -> key of the list of a Sequence."""


class ComponentBound(NamedTuple):
    """Bound of what a type of component may do to a text.

    Attributes:
        why: how it is bounded, in words.
        growth: bytes of its output per byte of its input, at most, or a function that reads them from its keys. The
            function raises ValueError, with the rest of a sentence about the component, if there is no bound.
    """

    why: str
    growth: float | Callable[[Mapping[str, Any]], float] = 1.0


@dataclass
class Definition:
    """A `tokenizer.json` within bounds.

    Attributes:
        state: its JSON, without truncation and padding.
        growth: bytes after all normalizers and pre-tokenizers per byte of text, at most.
        patterns: regexes by where they stand, like `pre_tokenizer.pretokenizers.0.pattern`.
        doubts: places of parts whose cost their bounds do not prove, besides growth and patterns.
    """

    state: dict[str, Any]
    growth: float = 1.0
    patterns: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> bytes:
        """JSON for the library: written anew, so that it reads what was checked (a key may stand twice in a file)."""
        return orjson.dumps(self.state)


def _replace(state: Mapping[str, Any]) -> float:
    pattern, content = state.get("pattern"), state.get("content")
    if not isinstance(pattern, dict) or not isinstance(content, str):
        raise ValueError("has no pattern and content")
    size = len(content.encode())
    if text := pattern.get("String"):
        return max(1.0, size / len(str(text).encode()))
    return 1.0 + size  # a regex may match between any two characters


def _prepend(state: Mapping[str, Any]) -> float:
    return 1.0 + len(str(state.get("prepend", "")).encode())  # before each piece of text between two added tokens


def _charsmap(state: Mapping[str, Any]) -> float:
    """The longest of the texts that a SentencePiece charsmap puts in place of a character."""
    try:
        data = base64.b64decode(state.get("precompiled_charsmap") or "", validate=True)
        (size,) = struct.unpack_from("<I", data)
    except (binascii.Error, struct.error, TypeError, ValueError):
        raise ValueError("has a precompiled_charsmap that is not one of SentencePiece") from None
    if size % 4 or size == 0 or 4 + size > len(data):
        raise ValueError(f"has a precompiled_charsmap of {len(data)} bytes whose table would take {size}")
    return max(1.0, *map(len, data[4 + size :].split(b"\0")))


def _template(state: Mapping[str, Any]) -> float:
    """A template copies the ids of a text each time that it names it, also if it adds no special tokens."""
    for key, names in (("single", ["A"]), ("pair", ["A", "B"])):
        pieces = state.get(key)
        if not isinstance(pieces, list) or len(pieces) > MAX_STEPS or not all(isinstance(p, dict) for p in pieces):
            raise ValueError(f"has a {key} that is not a list of at most {MAX_STEPS} pieces")
        named = sorted(str(piece["Sequence"].get("id")) for piece in pieces if isinstance(piece.get("Sequence"), dict))
        # Only the template of one text is used; that of a pair may leave one out, as some libraries write it.
        if named != names if key == "single" else len(set(named)) < len(named) or not set(named) <= set(names):
            raise ValueError(f"has a {key} that names {', '.join(named[:5]) or 'no text'}, not {' and '.join(names)}")
    return 1.0


def _length(state: Mapping[str, Any]) -> float:
    if not _is_id(length := state.get("length"), 2**31) or length == 0:
        raise ValueError(f"has the length {_shown(length)}; a piece has at least one character")
    return 1.0


_SPLITS = ComponentBound("cannot grow: it cuts a text into pieces")
_REGEX = ComponentBound("cannot grow: it cuts a text into pieces; its regex is probed for time")
_ADDS_NOTHING = ComponentBound("cannot grow: special tokens are not added")
_REPLACES = ComponentBound("bounded by the bytes of content per byte of its pattern", _replace)

COMPONENTS: dict[str, dict[str, ComponentBound]] = {
    "normalizer": {
        "BertNormalizer": ComponentBound("bounded: spaces around ideographs, decomposition, lowercase", 5.0),
        "ByteLevel": ComponentBound("bounded: a byte becomes a character of at most two", 2.0),
        "Lowercase": ComponentBound("bounded by Unicode", 1.5),
        "NFC": ComponentBound("bounded by Unicode (UAX 15)", 3.0),
        "NFD": ComponentBound("bounded by Unicode (UAX 15)", 3.0),
        "NFKC": ComponentBound("bounded by Unicode (UAX 15)", 11.0),
        "NFKD": ComponentBound("bounded by Unicode (UAX 15)", 11.0),
        "Nmt": ComponentBound("cannot grow: it removes controls, or makes spaces of them"),
        "Precompiled": ComponentBound("bounded by the longest text of its charsmap", _charsmap),
        "Prepend": ComponentBound("bounded by its text per piece, which has a byte at least", _prepend),
        "Replace": _REPLACES,
        "Strip": ComponentBound("cannot grow"),
        "StripAccents": ComponentBound("cannot grow"),
    },
    "pre_tokenizer": {
        "BertPreTokenizer": _SPLITS,
        "ByteLevel": ComponentBound(
            "bounded: a byte becomes a character of at most two, after a space for each piece", 4.0
        ),
        "CharDelimiterSplit": _SPLITS,
        "Digits": _SPLITS,
        "FixedLength": ComponentBound("cannot grow: it cuts a text into pieces of at least one character", _length),
        "Metaspace": ComponentBound(
            "bounded: a space becomes a character of at most four bytes, after one for each piece", 8.0
        ),
        "Punctuation": _SPLITS,
        "Split": _REGEX,
        "UnicodeScripts": _SPLITS,
        "Whitespace": _SPLITS,
        "WhitespaceSplit": _SPLITS,
    },
    "post_processor": {
        "BertProcessing": _ADDS_NOTHING,
        "ByteLevel": ComponentBound("cannot grow: it trims offsets"),
        "RobertaProcessing": _ADDS_NOTHING,
        "TemplateProcessing": ComponentBound("bounded: it names each text once, or is refused", _template),
    },
    "decoder": {
        "BPEDecoder": ComponentBound("bounded: a space in place of the suffix, or between any two characters", 2.0),
        "ByteFallback": ComponentBound("cannot grow: <0xFF> becomes a byte or a replacement character"),
        "ByteLevel": ComponentBound("bounded: a byte that is not text becomes a replacement character", 3.0),
        "CTC": ComponentBound("bounded: a space in place of a delimiter, or between any two characters", 2.0),
        "Fuse": ComponentBound("cannot grow"),
        "Metaspace": ComponentBound("cannot grow"),
        "Replace": _REPLACES,
        "Strip": ComponentBound("cannot grow"),
        "WordPiece": ComponentBound("bounded: a space before each token", 2.0),
    },
    "model": {
        "BPE": ComponentBound("bounded: at most one id for each byte, by a queue of pairs"),
        "Unigram": ComponentBound("bounded: at most one id for each byte, by entries of bounded length"),
        "WordLevel": ComponentBound("bounded: one id for each word"),
        "WordPiece": ComponentBound("bounded: at most one id for each character, in words of bounded length"),
    },
}
"""Types by section of the file. A Sequence, which all sections but `model` have, is walked."""


def check_definition(data: bytes, file: StrPath) -> Definition:
    """Check the bounds of a `tokenizer.json`.

    Args:
        data: content of the file.
        file: for messages.

    Raises:
        UserError: it is not a tokenizer.json, or exceeds a bound; the message names file, place and value.
    """
    definition = Definition(_json(data, file))
    state = definition.state
    try:
        _check_section("normalizer", definition)
        added = list(_added(state, definition.growth))
        for section in ("pre_tokenizer", "post_processor", "decoder"):
            _check_section(section, definition)
        entries = _entries(state["model"])
        _check_ids(entries, added)
    except ValueError as error:
        raise UserError(
            f"{file}: {error}; use a tokenizer.json from another place, or one that its author saved anew"
        ) from None
    definition.doubts += _model_doubts(state["model"], entries)
    state["truncation"] = state["padding"] = None
    return definition


def load_definition(data: bytes, file: StrPath) -> tokenizers.Tokenizer:
    """Open a `tokenizer.json` with the library: the one place that does.

    Args:
        data: what `check_definition` gave, or what the library wrote of that.
        file: for messages.

    Raises:
        UserError: it is not a tokenizer.json.
    """
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:  # the library raises plain Exception for whatever it cannot read, and panics
        if is_panic(error) or (isinstance(error, Exception) and not isinstance(error, MemoryError)):
            raise UserError(f"{file} is not a tokenizer.json of the tokenizers library: {error}") from None
        raise


def _json(data: bytes, file: StrPath) -> dict[str, Any]:
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{file} has {len(data):,} bytes; a tokenizer.json may have {MAX_FILE_BYTES:,}")
    if (values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_VALUES:
        raise UserError(f"{file} has {values:,} values; a tokenizer.json may have {MAX_VALUES:,}")
    try:
        state = orjson.loads(data)
    except orjson.JSONDecodeError as bad:
        raise UserError(f"{file} is not JSON ({bad})") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UserError(f"{file} has no model: it is not a tokenizer.json of the tokenizers library")
    return state


def _check_section(section: str, definition: Definition) -> None:
    steps = list(_steps(section, definition.state.get(section), section, 0))
    growth = 1.0
    for where, state in steps:
        bound = _bound(section, where, state)
        for key, value in _strings(state):
            limit = MAX_PATTERN if key == "pattern" else MAX_STRING
            if len(value) > limit and key != "precompiled_charsmap":
                raise ValueError(f"{where}.{key} has {len(value):,} characters of at most {limit:,}")
        try:
            growth *= bound.growth if isinstance(bound.growth, float) else bound.growth(state)
        except ValueError as error:
            raise ValueError(f"{where} ({state['type']}) {error}") from None
        if state["type"] == "Precompiled":
            definition.doubts.append(where)
        pattern = state.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
            definition.patterns[f"{where}.pattern"] = pattern["Regex"]
    if growth > MAX_GROWTH:
        names = ", ".join(f"{where} ({state['type']})" for where, state in steps[:4])
        raise ValueError(f"{names}{', ...' if len(steps) > 4 else ''} may make a text {growth:.3g} times as long")
    if section in ("normalizer", "pre_tokenizer"):
        definition.growth *= growth
    if definition.growth > MAX_GROWTH:
        raise ValueError(f"normalizer and pre_tokenizer may make a text {definition.growth:.3g} times as long")


def _steps(section: str, state: Any, where: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The components of a section with their places, those of sequences one by one."""
    left = [(where, state, depth)]
    found = 0
    while left:
        where, state, depth = left.pop()
        if state is None and depth == 0:
            return
        if not isinstance(state, dict) or not isinstance(state.get("type"), str):
            raise ValueError(f"{where} names no type of a {section}")
        if depth > MAX_NESTING:
            raise ValueError(f"{where} is nested more than {MAX_NESTING} deep")
        if state["type"] != "Sequence":
            found += 1
            if found > MAX_STEPS:
                raise ValueError(f"{section} has more than {MAX_STEPS} steps")
            yield where, state
            continue
        key = _LISTS[section]
        parts = state.get(key)
        if not isinstance(parts, list) or len(parts) > MAX_STEPS:
            raise ValueError(f"{where}.{key} is not a list of at most {MAX_STEPS} steps")
        left += [(f"{where}.{key}.{i}", part, depth + 1) for i, part in reversed(list(enumerate(parts)))]
        if len(left) > MAX_STEPS:
            raise ValueError(f"{section} has more than {MAX_STEPS} steps")


def _bound(section: str, where: str, state: Mapping[str, Any]) -> ComponentBound:
    try:
        return COMPONENTS[section][state["type"]]
    except KeyError:
        known = ", ".join(sorted(COMPONENTS[section]))
        raise ValueError(f"{where} has the type {state['type'][:80]!r}, which is not one of {known}") from None


def _strings(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Strings of a component and of what is in it, each with the key of the component."""
    left: list[tuple[str, Any]] = list(state.items())
    while left:
        key, value = left.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict):
            left += [(key, part) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            left += [(key, part) for part in value]


def _entries(model: dict[str, Any]) -> Mapping[str, Any]:
    """Entries of a vocabulary with their ids."""
    model.setdefault("type", _model_type(model))
    if model["type"] not in COMPONENTS["model"]:
        raise ValueError(f"model.type is {str(model['type'])[:80]!r}, not one of {', '.join(COMPONENTS['model'])}")
    if model["type"] == "WordPiece" and not _is_id(word := model.get("max_input_chars_per_word", 100), MAX_WORD + 1):
        raise ValueError(f"model.max_input_chars_per_word is {word}; it may be {MAX_WORD}")
    for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(key) or "")) > MAX_STRING:
            raise ValueError(f"model.{key} has more than {MAX_STRING} characters")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return vocabulary
    if not isinstance(vocabulary, list):
        raise ValueError("model.vocab is missing")
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in vocabulary):
        raise ValueError("model.vocab is not a list of entries with scores")
    return {pair[0]: i for i, pair in enumerate(vocabulary)}


def _model_doubts(model: Mapping[str, Any], entries: Mapping[str, Any]) -> Iterator[str]:
    if model["type"] == "Unigram" and max(map(len, entries), default=0) > PROVED_ENTRY:
        yield "model.vocab"
    if model["type"] == "WordPiece" and model.get("max_input_chars_per_word", 0) > PROVED_WORD:
        yield "model.max_input_chars_per_word"


def _model_type(model: Mapping[str, Any]) -> str:
    """Type of a model in files of early versions of the library, which do not have it."""
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def _added(state: Mapping[str, Any], growth: float) -> Iterator[tuple[str, Any]]:
    """Added tokens with their ids; `growth` is what the normalizers may make of those that are normalized."""
    entries = state.get("added_tokens") or []
    if not isinstance(entries, list) or len(entries) > MAX_ADDED:
        raise ValueError(f"added_tokens is not a list of at most {MAX_ADDED:,} tokens")
    characters = 0.0
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ValueError(f"added_tokens.{i} has no content")
        characters += len(entry["content"]) * (growth if entry.get("normalized") else 1)
        if characters > MAX_ADDED_CHARACTERS:
            raise ValueError(f"added_tokens may have more than {MAX_ADDED_CHARACTERS:,} characters in all, normalized")
        yield entry["content"], entry.get("id")


def _check_ids(entries: Mapping[str, Any], added: list[tuple[str, Any]]) -> None:
    limit = min(MAX_ROWS, FREE_IDS + IDS_PER_ENTRY * (len(entries) + len(added)))
    pairs = {"model.vocab": list(entries.items()), "added_tokens": added}
    for where, found in pairs.items():
        tokens, numbers = zip(*found, strict=True) if found else ((), ())
        if not set(map(type, numbers)) <= {int} or not 0 <= min(numbers, default=0) <= max(numbers, default=0) < limit:
            token, number = next(pair for pair in found if not _is_id(pair[1], limit))
            raise ValueError(f"{where} gives {_shown(token)} the id {_shown(number)}; ids are from 0 to {limit - 1:,}")
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"{where} has the id {Counter(numbers).most_common(1)[0][0]} twice")
        if (longest := max(map(len, tokens), default=0)) > MAX_ENTRY:
            token = next(token for token in tokens if len(token) == longest)
            raise ValueError(f"{where} has an entry of {longest:,} characters, {_shown(token)}, of {MAX_ENTRY:,}")


def is_panic(error: BaseException) -> bool:
    """Tell whether a Rust library panicked: the class is no `Exception`, and no module has it."""
    return type(error).__name__ == "PanicException"


def _is_id(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _shown(value: object) -> str:
    return printable(repr(value)[:60])
