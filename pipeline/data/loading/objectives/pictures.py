"""Pictures of what objectives make of a text, for the documentation: made by the objectives themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.config.objective import DenoiserConfig, ObjectiveConfig
from pipeline.data.loading.objectives.base import Arranged, Objective, sample_key
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.fim import FillInTheMiddle
from pipeline.data.loading.objectives.masked import Masked
from pipeline.data.loading.objectives.prefix import Prefix
from pipeline.data.loading.objectives.spans import SpanCorruption, Tokens
from pipeline.data.loading.objectives.ul2 import MixtureOfDenoisers
from pipeline.data.loading.objectives.words import WordTable

_TEXT = "the cat sat on the red mat END so did the dog too"
"""L + 1 tokens of two documents, of which the window has the second one in part."""
_ADDED = ("END", "START", "MASK", "PRE", "SUF", "MID", "S0", "S1", "S2", "S3", "[R]", "[X]", "[S]")
_NOTHING = "·"


def pictures() -> dict[str, str]:
    """Pictures by the name of their place in docs/objectives.md."""
    words = [*_ADDED, *dict.fromkeys(word for word in _TEXT.split() if word not in _ADDED)]
    number = {word: place for place, word in enumerate(words)}
    ordinary = np.arange(len(_ADDED), len(words))
    tokens = Tokens(np.array([number[f"S{n}"] for n in range(4)]), number["START"], number["END"])
    # As if "red mat" were one word of two tokens.
    continues = np.array([word == "mat" for word in words])
    parts = WordTable(continues, np.ones(len(words), np.bool_))
    modes = {"[R]": (0.3, 2.0), "[X]": (0.5, 3.0), "[S]": (0.3, None)}
    denoisers = [DenoiserConfig(rate=rate, mean_span=mean, mode=mode) for mode, (rate, mean) in modes.items()]
    mixture = MixtureOfDenoisers(
        ObjectiveConfig(type="ul2", denoisers=denoisers), tokens, [number[mode] for mode in modes]
    )
    fim = FillInTheMiddle(1.0, 0.5, (number["PRE"], number["SUF"], number["MID"]), number["END"])
    single: dict[str, tuple[Objective, int]] = {
        "causal": (Causal(), 0),
        "fim": (fim, 4),
        "masked": (Masked(0.3, number["MASK"], ordinary), 7),
        "whole words": (Masked(0.3, number["MASK"], ordinary, words=parts), 2),
        "prefix": (Prefix(), 1),
        "spans": (SpanCorruption(0.35, 2.0, tokens), 0),
    }
    found = {name: _picture(words, objective, sample_key(1, index)) for name, (objective, index) in single.items()}
    keys = [next(key for key in range(99) if mixture.which(key) == place) for place in range(len(denoisers))]
    found["ul2"] = "\n\n".join(_picture(words, mixture, key) for key in keys)
    return {name: f"```text\n{picture}\n```" for name, picture in found.items()}


def _picture(words: Sequence[str], objective: Objective, key: int) -> str:
    """The text, and what an objective makes of it, one token below the other."""
    text = _TEXT.split()
    ids = np.array([words.index(word) for word in text])
    begins = np.array([0, text.index("END") + 1])
    length = len(text) - 1
    arranged, shape = objective.arrange(ids, begins, key), objective.shape(length)
    starts = set(arranged.begins.tolist())
    lines = []
    if shape.encoder:
        sides = range(shape.encoder), range(shape.encoder, shape.length)
        lines += _columns(starts, {"encoder": [words[t] for t in arranged.tokens[: shape.encoder]]}, sides[0])
        lines += _columns(starts, {"decoder": [words[arranged.tokens[p]] for p in sides[1]]}, sides[1])
        lines += _columns(starts, {"target": [_target(words, arranged, p) for p in sides[1]]}, sides[1])
        return "\n".join(lines)
    rows = {
        "input": [words[token] for token in arranged.tokens],
        "target": [_target(words, arranged, position) for position in range(length)],
    }
    if arranged.prefix is not None:
        in_front = np.arange(length) < arranged.prefix
        rows["sees"] = ["prefix" if prefix else "before" for prefix in in_front]
    return "\n".join(_columns(starts, rows, range(length)))


def _target(words: Sequence[str], arranged: Arranged, position: int) -> str:
    return words[arranged.targets[position]] if arranged.weight[position] else _NOTHING


def _columns(starts: set[int], rows: dict[str, list[str]], positions: range) -> list[str]:
    """Rows of one side, with `|` where a document begins."""
    lines = {name: f"{name:<8}" for name in rows}
    for place, position in enumerate(positions):
        bar = "|" if position in starts else " "
        width = max(len(cells[place]) for cells in rows.values())
        for name, cells in rows.items():
            lines[name] += f"{bar} {cells[place]:<{width}} "
    return [line.rstrip() for line in lines.values()]
