"""Two reference lines for a held-out loss, on the same held-out bytes: a unigram model of the tokens, and zstd -19.

Whoever reads "1.9 bits per byte" wants to know whether that is good. The first line is what the frequencies of the
tokens alone are worth, the second what a strong general compressor makes of the documents, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import zstandard

from pipeline.data.datasets.dataset import Dataset
from pipeline.data.tokenization.tokenizer import Tokenizer

_BLOCK = 1 << 22
_MAX_TRAIN_TOKENS = 1 << 28
_MAX_ZSTD_BYTES = 1 << 28  # some minutes at level 19


def unigram_bits_per_byte(train: Sequence[Dataset], heldout: Sequence[Dataset], vocab_size: int) -> float:
    """Bits per byte of a unigram model: counts of the training tokens (2^28 of each source at most), add-one smoothing.

    The held-out tokens are those that the model is scored on, end-of-document tokens included.
    """
    counts = np.ones(vocab_size, dtype=np.int64)
    for dataset in train:
        for block in _blocks(dataset, _MAX_TRAIN_TOKENS):
            counts += np.bincount(block, minlength=vocab_size)
    bits = -np.log2(counts / counts.sum())
    total = sum(float(bits[block].sum()) for dataset in heldout for block in _blocks(dataset, dataset.tokens))
    text_bytes = sum(dataset.text_bytes for dataset in heldout)
    return total / text_bytes if text_bytes else math.nan


def zstd_bits_per_byte(heldout: Sequence[Dataset], tokenizer: Tokenizer) -> float | None:
    """Bits per byte of `zstd -19` over the held-out documents, concatenated.

    The text comes back from the tokens. None if the tokenizer does not give it back byte for byte (one that
    normalizes, say), or if there is more of it than some minutes are worth.
    """
    text_bytes = sum(dataset.text_bytes for dataset in heldout)
    if not 0 < text_bytes <= _MAX_ZSTD_BYTES:
        return None
    compressor = zstandard.ZstdCompressor(level=19).compressobj(size=text_bytes)
    compressed = read = 0
    for dataset in heldout:
        for document in range(dataset.documents):
            start, stop = dataset.document_start(document), dataset.document_start(document + 1)
            text = tokenizer.decode(dataset.read(start, stop - start - 1)).encode()
            read += len(text)
            if read > text_bytes:
                return None
            compressed += len(compressor.compress(text))
    if read != text_bytes:
        return None
    return 8 * (compressed + len(compressor.flush())) / text_bytes


def _blocks(dataset: Dataset, limit: int) -> Iterator[np.ndarray]:
    stop = min(dataset.tokens, limit)
    for start in range(0, stop, _BLOCK):
        yield dataset.read(start, min(_BLOCK, stop - start))
