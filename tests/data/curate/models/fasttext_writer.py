"""A writer of small fastText models, since the library that is installed only predicts.

A model of words alone: a text is the mean of the vectors of its words, and softmax of the products with the vectors of
labels is the score, plus fastText's 0.00001. So scores are known in closed form.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

EOS = "</s>"
EPSILON = 1e-5
SOFTMAX = 3


def write_model(
    path: Path,
    words: Mapping[str, Sequence[float]],
    labels: Mapping[str, Sequence[float]],
    *,
    loss: int = SOFTMAX,
    ngrams: tuple[int, int, int, int] = (1, 0, 0, 0),
) -> None:
    """Write a supervised model, version 12, not quantized.

    Args:
        path: of the file.
        words: vectors of the words.
        labels: vectors of the labels.
        loss: number of the loss (1: hierarchical softmax, 3: softmax).
        ngrams: words of an n-gram, bucket, and fewest and most characters of an n-gram. Vectors of n-grams are zero.
    """
    size = len(next(iter(labels.values())))
    words = {EOS: [0.0] * size, **words}
    word_ngrams, bucket, minn, maxn = ngrams
    data = struct.pack("<ii", 793712314, 12)
    # dim, ws, epoch, minCount, neg, wordNgrams, loss, model (3: supervised), bucket, minn, maxn, rate, t
    data += struct.pack("<12id", size, 5, 1, 1, 0, word_ngrams, loss, 3, bucket, minn, maxn, 100, 1e-4)
    data += struct.pack("<iiiqq", len(words) + len(labels), len(words), len(labels), 100, -1)
    for kind, names in enumerate((words, labels)):
        for place, name in enumerate(names):
            data += name.encode() + b"\0" + struct.pack("<qb", 1000 - place, kind)
    for table, zeros in ((words, bucket), (labels, 0)):
        data += b"\0" + struct.pack("<qq", len(table) + zeros, size)
        data += b"".join(struct.pack(f"<{size}f", *vector) for vector in table.values()) + bytes(4 * size * zeros)
    path.write_bytes(data)


def expected_score(
    text: str, label: str, words: Mapping[str, Sequence[float]], labels: Mapping[str, Sequence[float]]
) -> float:
    """The score that a model should give, the end of the line being a word, too."""
    size = len(labels[label])
    vectors = [words[word] for word in text.split() if word in words] + [[0.0] * size]
    mean = [sum(vector[i] for vector in vectors) / len(vectors) for i in range(size)]
    powers = {name: math.exp(sum(a * b for a, b in zip(mean, vector, strict=True))) for name, vector in labels.items()}
    return powers[label] / sum(powers.values()) + EPSILON


def mutations(data: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Changed copies of a model file with their names: all numbers before the dictionary, then random places."""
    fields = [*(f"header {place}" for place in range(0, 56, 4)), *(f"counts {place}" for place in (64, 68, 72))]
    for name in fields:
        place = int(name.split()[1])
        for value in (0, -1, 1, 2, 7, 100, 2**20, 2**31 - 1, -(2**31)):
            yield f"{name} = {value}", data[:place] + struct.pack("<i", value) + data[place + 4 :]
    for place in (76, 84):
        for value in (0, -1, 1, 2, 2**62):
            yield f"counts {place} = {value}", data[:place] + struct.pack("<q", value) + data[place + 8 :]
    chosen = random.Random(seed)
    for number in range(count):
        place = chosen.randrange(92, len(data)) if number % 2 else chosen.randrange(92, min(len(data), 400))
        if number % 3 == 0:
            yield (
                f"bit of byte {place}",
                data[:place] + bytes([data[place] ^ 1 << chosen.randrange(8)]) + data[place + 1 :],
            )
        elif number % 3 == 1:
            value = chosen.choice([0, 1, 255, 2**31 - 1, -1])
            yield f"number {value} at {place}", data[:place] + struct.pack("<i", value) + data[place + 4 :]
        else:
            yield f"cut at {place}", data[:place]
