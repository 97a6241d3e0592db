"""Parameters with a learning rate or weight decay of their own: `train.optimizer.groups`.

The group of a parameter is a function of its name alone, so every layout has the same ones, and checkpoints store none.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod

from pipeline.common.format import counted
from pipeline.config.train import OptimizerConfig, ParameterGroupConfig
from pipeline.train.model.decoder_spec import DecoderSpec

Groups = Sequence[ParameterGroupConfig]
_NEAREST = 3


def group_number(name: str, groups: Groups) -> int | None:
    """The place of the group that a parameter belongs to, the first that matches; None: it is in none."""
    return next((place for place, group in enumerate(groups) if _matches(name, group.patterns)), None)


def weight_decay(name: str, dimensions: int, optimizer: OptimizerConfig) -> float:
    """Weight decay of a parameter: that of its group, else that of matrices, and 0 for vectors.

    Args:
        name: Its name.
        dimensions: Its own, of experts those of one of them.
        optimizer: The `train.optimizer:` section.
    """
    number = group_number(name, optimizer.groups)
    own = None if number is None else optimizer.groups[number].weight_decay
    if own is not None:
        return own
    return optimizer.weight_decay if dimensions >= 2 else 0.0


def group_lr_scale(name: str, groups: Groups) -> float:
    """Factor of its group on the learning rate of a parameter."""
    number = group_number(name, groups)
    return 1.0 if number is None else groups[number].lr_scale


def unmatched_patterns(groups: Groups, spec: DecoderSpec) -> Iterator[str]:
    """Patterns that match no parameter of the whole model, as messages with the nearest names."""
    names = list(_shapes(spec))
    # The layers have the same names; one of each is enough.
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    for place, group in enumerate(groups):
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, kinds, n=_NEAREST, cutoff=0.0)
                yield (
                    f"train.optimizer.groups.{place}.match: {pattern!r} matches no parameter of the model; the nearest "
                    f"names are {', '.join(near)}"
                )


def empty_groups(groups: Groups, spec: DecoderSpec) -> list[int]:
    """Places of groups all of whose parameters earlier groups have."""
    found = {group_number(name, groups) for name in _shapes(spec)}
    return [place for place in range(len(groups)) if place not in found]


def group_lines(optimizer: OptimizerConfig, spec: DecoderSpec) -> Iterator[str]:
    """The groups and their sizes in words, nothing where the run file has none; the vocabulary with its padding."""
    groups = optimizer.groups
    if not groups:
        return
    tensors: Counter[int | None] = Counter()
    elements: Counter[int | None] = Counter()
    for name, shape in _shapes(spec).items():
        number = group_number(name, groups)
        tensors[number] += 1
        elements[number] += prod(shape)
    yield f"optimizer: {counted(len(groups), 'parameter group')}, of which the first that matches wins"
    for place, group in enumerate(groups):
        decay = [] if group.weight_decay is None else [f"weight decay {group.weight_decay:g}"]
        own = ", ".join([f"learning rate x {group.lr_scale:g}", *decay])
        yield f"  {place} ({', '.join(group.patterns)}): {_size(tensors[place], elements[place])}; {own}"
    yield f"  others: {_size(tensors[None], elements[None])}"


def _size(tensors: int, elements: int) -> str:
    return f"{elements:,} parameters in {counted(tensors, 'tensor')}"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@lru_cache(maxsize=4)  # a search for a layout checks many, all of one model
def _shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the whole model, by name."""
    # Both import torch, which a run file without groups is checked without.
    from pipeline.train.model.decoder import Decoder
    from pipeline.train.model.meta import on_meta

    with on_meta():
        return {name: tuple(parameter.shape) for name, parameter in Decoder(spec).named_parameters()}
