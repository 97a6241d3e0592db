"""Bytes of text that each token stands for, where a tokenizer lets that be told exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import pre_tokenizers

from pipeline.data.datasets.dataset import Dataset
from pipeline.data.tokenization.tokenizer import Tokenizer

_BLOCK = 1 << 22


def token_bytes(tokenizer: Tokenizer) -> npt.NDArray[np.int64] | None:
    """Bytes of text by token id, [vocab_size]; the end of a document has none.

    A byte-level vocabulary (Radford et al. 2019) writes every byte as one character, so the length of an entry is its
    number of bytes, also where a character of the text is cut between two tokens. An added token has the bytes of its
    text.

    Returns:
        None for other vocabularies, and where the text is changed before it is cut into tokens: then nothing says what
        bytes there were.
    """
    sizes = byte_level_sizes(tokenizer)
    if sizes is None or orjson.loads(tokenizer.definition).get("normalizer") is not None:
        return None
    sizes[tokenizer.end_of_document] = 0
    return sizes


def byte_level_sizes(tokenizer: Tokenizer) -> npt.NDArray[np.int64] | None:
    """Bytes that each id of a byte-level tokenizer is decoded to, [vocab_size]; None for other tokenizers."""
    definition = orjson.loads(tokenizer.definition)
    if not _is_byte_level(definition.get("decoder")):
        return None
    vocabulary = definition["model"].get("vocab")
    if not isinstance(vocabulary, dict):  # a Unigram model has a list
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    for entry, number in vocabulary.items():
        sizes[number] = len(entry) if alphabet.issuperset(entry) else len(entry.encode())
    for added in definition["added_tokens"]:
        sizes[added["id"]] = len(added["content"].encode())
    return sizes


def text_bytes(
    dataset: Dataset, tokenizer: Tokenizer, spans: Sequence[tuple[int, int]] | npt.NDArray[np.int64]
) -> int | None:
    """Bytes of the original text of the tokens in some spans [first, end) of a dataset.

    They are counted token by token. That the count is right for this tokenizer is tried on the whole dataset, whose
    bytes are known.

    Returns:
        None where it is not, or where tokens do not tell.
    """
    sizes = token_bytes(tokenizer)
    if sizes is None or _count(dataset, sizes, 0, dataset.tokens) != dataset.text_bytes:
        return None
    return sum(_count(dataset, sizes, int(first), int(end)) for first, end in spans)


def _count(dataset: Dataset, sizes: npt.NDArray[np.int64], first: int, end: int) -> int:
    blocks = (dataset.read(start, min(_BLOCK, end - start)) for start in range(first, end, _BLOCK))
    return sum(int(sizes[block].sum()) for block in blocks)


def _is_byte_level(decoder: Any) -> bool:
    """Tell whether text is made of tokens by taking characters for bytes, and in no other way."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return decoder.get("type") == "ByteLevel"
