"""The type of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.train.model.config import DecoderSpec, decoder_spec
from pipeline.train.parallel.layout import Layout

Check = Callable[[Config, Layout], Iterable[str]]


def spec_of(config: Config) -> DecoderSpec:
    """The model, for rules to which its vocabulary does not matter."""
    return decoder_spec(config.model, config.model.vocab_size or 1, config.max_positions)


@dataclass(frozen=True)
class Rule:
    """Something that must hold, or that is worth a warning."""

    keys: tuple[str, ...]
    """Keys of the run file that it is about."""
    text: str
    """A sentence for the documentation."""
    check: Check
    """Config and layout -> a message for each violation, with the values and the nearest allowed setting."""
    of_training: bool = False
    """True if only training demands it: not an evaluation, which has no backward pass."""
