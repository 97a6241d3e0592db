"""Tokenizer: train one, load one, and say which one it is.

The `tokenizers` library defines the ids. Special tokens are declared in the config and cannot come out of text, but for
those that `allow_special` names: a document that contains `<|endoftext|>` literally gets ordinary tokens for it.
"""

from __future__ import annotations

import difflib
import itertools
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.paths import StrPath
from pipeline.data.sources.foreign_parser import parsing
from pipeline.data.tokenization.definition import MAX_FILE_BYTES, SPLIT, check_definition, is_panic, load_definition
from pipeline.data.tokenization.probe import failing_regex, probe

if TYPE_CHECKING:
    from pipeline.config.tokenizer import TokenizerConfig

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_FILE = "special_tokens.json"
LONGEST_WORD = 1024
"""Characters without whitespace that a tokenizer is trained on as one word: the time grows with the square of these."""
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)")
_CACHED_WORDS = 10_000
"""The size of the library's own cache."""

_KEPT = {str, int, float}
"""Types whose values are all kept by `_without_defaults`: `bool` is another."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that writers choose: u16 below 65,500 ids, i32 otherwise (the rule of Megatron-LM)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def short_words(texts: Iterable[str]) -> Iterator[str]:
    """Texts to train on, cut within words longer than `LONGEST_WORD`: there is nothing to learn in them."""
    for text in texts:
        begin = 0
        if max(map(len, text.split()), default=0) > LONGEST_WORD:
            for found in _LONG_WORD.finditer(text):
                yield text[begin : found.end()]
                begin = found.end()
        yield text[begin:]


class Tokenizer:
    """A `tokenizers` tokenizer with the special tokens of the run."""

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        end_of_document: str,
        special_tokens: list[str],
        allow_special: Sequence[str] = (),
        file: StrPath = "the tokenizer",
    ) -> None:
        self._file = file
        engine.no_padding()
        engine.no_truncation()
        # A declared token that the file does not flag as special would be matched in text; flagging keeps its id.
        engine.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in (end_of_document, *special_tokens)]
        )
        if allow_special:
            # The library finds added tokens in a text that are not flagged as special, and offers no way to take the
            # flag away again.
            engine = load_definition(_flagged(engine.to_str(), allow_special, special=False).encode(), file)
        engine.encode_special_tokens = True
        self._engine = engine
        vocabulary = engine.get_vocab(with_added_tokens=True)
        self.end_of_document_token = end_of_document
        self.special_tokens = {token: vocabulary[token] for token in special_tokens}
        """Further special tokens and their ids."""
        self.allow_special = sorted(set(allow_special))
        """Those of them that a text can contain as such."""
        self.end_of_document = vocabulary[end_of_document]
        """Id of the token that closes every document."""
        self.vocab_size = max(vocabulary.values()) + 1
        """Largest id + 1."""
        self.dtype = token_dtype(self.vocab_size)
        """Type that ids are stored in."""
        for token in (end_of_document, *special_tokens):
            if token not in allow_special and vocabulary[token] in self.encode(f"{token} {token}"):
                raise UserError(
                    f"tokenizer: ordinary text can become the special token {token!r}, because it reads as a plain "
                    "word; choose one that text does not have, like '<|endoftext|>'"
                )

    @classmethod
    def load(cls, path: StrPath, config: TokenizerConfig) -> Tokenizer:
        """Load a `tokenizer.json`, or the one in a folder.

        Raises:
            UserError: no such file, not a tokenizer, or a declared special token is not in it.
        """
        path = Path(path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"tokenizer.path: {file} does not exist; give a tokenizer.json or a folder that has one")
        try:
            engine = _open_file(file)
        except UserError as error:
            raise UserError(f"tokenizer.path: {error}") from None
        if getattr(engine.model, "dropout", None):
            raise UserError(
                f"tokenizer.path: {file} has dropout, so a text has no fixed ids; set model.dropout to null in it"
            )
        for key, token in [
            ("end_of_document", config.end_of_document),
            *(("special_tokens", token) for token in config.special_tokens),
        ]:
            if engine.token_to_id(token) is None:
                raise UserError(f"tokenizer.{key}: {file} has no token {token!r}; {_candidates(engine, token)}")
        for token in config.add_tokens:
            if engine.token_to_id(token) is not None:
                raise UserError(
                    f"tokenizer.add_tokens: {file} has {token!r} already; name it in tokenizer.special_tokens instead"
                )
        last = max(engine.get_vocab(with_added_tokens=True).values())
        special = [*config.special_tokens, *config.add_tokens]
        found = cls(engine, config.end_of_document, special, config.allow_special, file)
        if wrong := [token for token in config.add_tokens if found.special_tokens[token] <= last]:
            raise UserError(
                f"tokenizer.add_tokens: the ids of {file} have a hole, and {wrong[0]!r} would get id "
                f"{found.special_tokens[wrong[0]]} in it; write them into its added_tokens, with ids from {last + 1} on"
            )
        return found

    @classmethod
    def train(cls, texts: Iterator[str], config: TokenizerConfig) -> Tokenizer:
        """Train a byte-level BPE (Sennrich et al. 2016; bytes after Radford et al. 2019). Equal texts, equal result.

        All 256 bytes are in the alphabet: every text can be encoded, and decoding gives it back.

        Args:
            texts: the documents of the sample; their order does not matter. Longer words than `LONGEST_WORD` are cut.
            config: with `train`; special tokens get the first ids, `end_of_document` is 0.
        """
        assert config.train is not None
        special = [config.end_of_document, *config.special_tokens]
        if config.train.vocab_size < 256 + len(special):
            raise UserError(
                f"tokenizer.train.vocab_size: {config.train.vocab_size} is too small; 256 bytes and {len(special)} "
                f"special tokens need {256 + len(special)}"
            )
        engine = tokenizers.Tokenizer(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.train.vocab_size,
            min_frequency=config.train.min_frequency,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with parsing("tokenizers"):  # it draws the texts in a thread of its own, while this one handles no signal
            engine.train_from_iterator(short_words(texts), trainer)
        return cls(engine, config.end_of_document, config.special_tokens, config.allow_special)

    @classmethod
    def open(cls, folder: StrPath) -> Tokenizer:
        """Open what `save` wrote: the tokenizer of a dataset, a checkpoint or a run."""
        folder = Path(folder)
        file = folder / TOKENIZER_FILE
        if not file.is_file() or not (folder / SPECIAL_FILE).is_file():
            raise UserError(f"{folder} has no tokenizer ({TOKENIZER_FILE} and {SPECIAL_FILE})")
        special = storage.get_json(folder / SPECIAL_FILE, "end_of_document", "special_tokens")
        end, tokens, allowed = special["end_of_document"], special["special_tokens"], special.get("allow_special", [])
        if not all(isinstance(value, list) for value in (tokens, allowed)) or not all(
            isinstance(token, str) for token in (end, *tokens, *allowed)
        ):
            raise UserError(f"{folder / SPECIAL_FILE} is damaged: its tokens are texts, and lists of texts")
        return cls(_open_file(file), end, tokens, allowed, file)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `special_tokens.json` into a folder, made if need be in one that exists."""
        links.make_folder(folder)
        for name, data in self.files.items():
            storage.put(folder / name, data)

    def is_saved_in(self, folder: Path) -> bool:
        """Tell whether `save` has nothing to do: the files there are the same, or make the same tokenizer."""
        try:
            if all(storage.read_bytes(folder / name, MAX_FILE_BYTES) == data for name, data in self.files.items()):
                return True
            return Tokenizer.open(folder).fingerprint == self.fingerprint
        except (UserError, OSError):
            return False

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files that `save` writes, by name."""
        text = self._engine.to_str(pretty=True)
        special = {"end_of_document": self.end_of_document_token, "special_tokens": list(self.special_tokens)}
        if self.allow_special:
            text = _flagged(text, self.allow_special, special=True)  # what they are for every other reader
            special["allow_special"] = self.allow_special
        return {TOKENIZER_FILE: text.encode(), SPECIAL_FILE: storage.json_bytes(special)}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what decides the ids: model, pre-tokenizer, normalizer, added tokens, end of document.

        It does not depend on the formatting of the file, nor on parts that are absent or off.
        """
        state = orjson.loads(self.definition)
        decisive = {name: state.get(name) for name in ("model", "pre_tokenizer", "normalizer", "added_tokens")}
        return value_hash(_without_defaults(decisive | {"end_of_document": self.end_of_document}))

    @cached_property
    def definition(self) -> str:
        """A `tokenizer.json` where the added tokens without the flag `special` are those that texts can contain."""
        return str(self._engine.to_str())

    @cached_property
    def unknown(self) -> int | None:
        """Id of text that the model has no token for; None if it has none: then it covers all text, or drops some."""
        if isinstance(self._engine.model, models.Unigram):  # the library does not show it
            found: int | None = orjson.loads(self.definition)["model"].get("unk_id")
            return found
        token = getattr(self._engine.model, "unk_token", None)
        return None if token is None else self._engine.token_to_id(token)

    @property
    def decodes(self) -> bool:
        """True if ids can be put together to text: there is a decoder, or tokens are words."""
        words = models.WordLevel | models.WordPiece
        return self._engine.decoder is not None or isinstance(self._engine.model, words)

    def uncovered(self, text: str) -> int:
        """Characters of a text, as the normalizer leaves it and without white space, that no known token stands for."""
        normalizer = self._engine.normalizer
        with self._readable_errors([text]), parsing("tokenizers"):
            normalized = text if normalizer is None else normalizer.normalize_str(text)
            encoding = self._engine.encode(normalized, add_special_tokens=False)
        known = bytearray(len(normalized))
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id != self.unknown:
                known[start:end] = b"\1" * (end - start)
        return sum(not is_known and not each.isspace() for each, is_known in zip(normalized, known, strict=True))

    @cached_property
    def template_note(self) -> str:
        """Note on tokens that the file's template puts around a text, and this class does not; "" for none."""
        with parsing("tokenizers"):
            empty = self._engine.encode("")
        tokens = [token for token, added in zip(empty.tokens, empty.special_tokens_mask, strict=True) if added]
        if not tokens:
            return ""
        return (
            f"tokenizer: its template puts {', '.join(tokens)} around a text, and documents are stored without; each "
            f"ends with {self.end_of_document_token}"
        )

    @property
    def added_tokens(self) -> list[str]:
        """The added tokens, special or not, by id."""
        return [entry.content for _, entry in sorted(self._engine.get_added_tokens_decoder().items())]

    def encode_flat(self, texts: list[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """`encode_batch` as one array: (the ids of all texts, how many each text has)."""
        # The library encodes a text that is alone in the calling thread, whose heap makes it a fifth slower (see
        # `_serve` in worker_pool.py), and others in threads of its own.
        batch = [*texts, ""] if len(texts) == 1 else texts
        with self._readable_errors(texts), parsing("tokenizers"):
            encodings = self._engine.encode_batch_fast(batch, add_special_tokens=False)
        # From a list to memory in one pass, which is faster than any constructor of numpy.
        letter = self.dtype.char
        packed = []
        lengths = np.empty(len(texts), np.int64)
        for i in range(len(texts)):
            ids = encodings[i].ids
            lengths[i] = len(ids)
            packed.append(struct.pack(f"<{len(ids)}{letter}", *ids))
        return np.frombuffer(b"".join(packed), self.dtype), lengths

    def cache_words(self, texts: list[str]) -> None:
        """Have the library forget the words that it caches, and cache the most frequent ones of some texts.

        Ids do not depend on it. Nothing is done for models without such a cache.
        """
        pre_tokenizer, model = self._engine.pre_tokenizer, self._engine.model
        if pre_tokenizer is None or not hasattr(model, "_clear_cache"):  # it has no public name
            return
        counts: Counter[str] = Counter()
        for text in texts:
            with self._readable_errors([text]), parsing("tokenizers"):
                pieces = pre_tokenizer.pre_tokenize_str(text)
            counts.update([text[start:end] for _, (start, end) in pieces])
        model._clear_cache()
        words = [word for word, _ in counts.most_common(_CACHED_WORDS)]
        for first in range(0, len(words), 100):  # few at a time, so that what is cached lies close together in memory
            self.encode_flat(words[first : first + 100])

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        """Ids of each text, without end of document, in the dtype of `dtype`.

        Special-token text is ordinary text; nothing is added before or after.
        """
        ids, lengths = self.encode_flat(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if texts else []

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without end of document."""
        with self._readable_errors([text]), parsing("tokenizers"):
            ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _parser(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that finds special tokens in a text."""
        state = orjson.loads(self.definition)
        for token in state["added_tokens"]:
            # What a normalizer makes of other text must not become one.
            token["normalized"] = token["normalized"] and not token["special"]
        engine = load_definition(orjson.dumps(state), self._file)
        engine.encode_special_tokens = False
        return engine

    def encode_parsed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text in which special tokens count as such, and the characters [first, end) that each id is of."""
        with self._readable_errors([text]), parsing("tokenizers"):
            # Other threads go on while a batch is encoded.
            found = self._parser.encode_batch([text], add_special_tokens=False)[0]
        return found.ids, found.offsets

    def decode(self, ids: Any) -> str:
        """Text of ids (a list or an array). Special tokens appear as their text; cut characters as U+FFFD."""
        with self._readable_errors([]), parsing("tokenizers"):
            text: str = self._engine.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    @contextmanager
    def _readable_errors(self, texts: Sequence[str]) -> Iterator[None]:
        """The library raises plain Exception for text that a model has no ids for, like a WordLevel without [UNK].

        It panics if a regex takes too many steps, say, and a panic is not an Exception: it would pass all handlers.
        """
        try:
            yield
        except BaseException as error:
            if is_panic(error):
                raise UserError(
                    f"{self._file}: {failing_regex(self.definition, texts)} fails on a text: {error}; use another "
                    "tokenizer, or change that part of its tokenizer.json"
                ) from None
            if isinstance(error, Exception) and not isinstance(error, MemoryError):
                raise UserError(
                    f"tokenizer: it cannot encode every text: {error}; use one with byte fallback or an unknown token"
                ) from None
            raise


def _open_file(file: Path) -> tokenizers.Tokenizer:
    """Open a `tokenizer.json` of anybody, after its bounds were checked and what they do not prove was probed."""
    definition = check_definition(storage.read_bytes(file, MAX_FILE_BYTES), file)
    probe(definition, file)
    return load_definition(definition.bytes, file)


def _candidates(engine: tokenizers.Tokenizer, token: str) -> str:
    """Candidates for a special token that a tokenizer does not have."""
    added = [entry.content for entry in engine.get_added_tokens_decoder().values()]
    marked = [name for name in engine.get_vocab() if name[:1] in "<[" and name[-1:] in ">]" and len(name) > 2]
    if near := difflib.get_close_matches(token, {*added, *marked}, n=3, cutoff=0.6):
        return f"did you mean {' or '.join(map(repr, near))}?"
    if known := added or sorted(marked):
        more = f" and {len(known) - 10} more" if len(known) > 10 else ""
        return f"it has the special tokens {', '.join(map(repr, known[:10]))}{more}"
    return "it has no special tokens; add the token to the file"


def _flagged(definition: str, tokens: Sequence[str], special: bool) -> str:
    """A `tokenizer.json` with other flags `special` of some added tokens."""
    state = orjson.loads(definition)
    for entry in state["added_tokens"]:
        if entry["content"] in tokens:
            entry["special"] = special
    return orjson.dumps(state, option=orjson.OPT_INDENT_2).decode()


def _without_defaults(value: Any) -> Any:
    """Drop nulls and falses, which a later version of the library may add or leave out."""
    if isinstance(value, dict):
        if set(map(type, value.values())) <= _KEPT:  # a vocabulary
            return value
        return {k: _without_defaults(v) for k, v in value.items() if v is not None and v is not False}
    if isinstance(value, list):
        pairs = value if set(map(type, value)) == {list} else [value]
        if set(map(type, itertools.chain.from_iterable(pairs))) <= _KEPT:  # merges
            return value
        return [_without_defaults(v) for v in value]
    return value
