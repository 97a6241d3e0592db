"""A writer of small fastText models, since the library that is installed only predicts.

A model of words alone: a text is the mean of the vectors of its words, and softmax of the products with the vectors of
labels is the score, plus fastText's 0.00001. So scores are known in closed form.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

EOS = "</s>"
EPSILON = 1e-5


def write_model(path: Path, words: Mapping[str, Sequence[float]], labels: Mapping[str, Sequence[float]]) -> None:
    """Write a supervised model, version 12, not quantized."""
    size = len(next(iter(labels.values())))
    words = {EOS: [0.0] * size, **words}
    data = struct.pack("<ii", 793712314, 12)
    # dim, ws, epoch, minCount, neg, wordNgrams, loss (3: softmax), model (3: supervised), bucket, minn, maxn, rate, t
    data += struct.pack("<12id", size, 5, 1, 1, 0, 1, 3, 3, 0, 0, 0, 100, 1e-4)
    data += struct.pack("<iiiqq", len(words) + len(labels), len(words), len(labels), 100, -1)
    for kind, names in enumerate((words, labels)):
        for place, name in enumerate(names):
            data += name.encode() + b"\0" + struct.pack("<qb", 1000 - place, kind)
    for table in (words, labels):
        data += b"\0" + struct.pack("<qq", len(table), size)
        data += b"".join(struct.pack(f"<{size}f", *vector) for vector in table.values())
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
