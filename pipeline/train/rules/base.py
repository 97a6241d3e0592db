"""The type of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.model.part_spec import LayerPartSpec

Check = Callable[[Config, Layout], Iterable[str]]


def spec_of(config: Config) -> DecoderSpec:
    """The model, for rules to which its vocabulary does not matter."""
    return decoder_spec(config.model, config.model.vocab_size or 1, config.max_positions)


def parts_of(config: Config) -> list[LayerPartSpec]:
    """The different mixers and mlps of the layers, each once."""
    return list(dict.fromkeys(part for layer in spec_of(config).different_layers for part in layer.parts.values()))


def key_of(config: Config, part: LayerPartSpec, key: str) -> str:
    """The whole key that sets a number of a part: that of the kind of layers which has it, or of `model:`."""
    kinds = [*config.model.encoder_kinds, *config.model.layer_kinds]
    layers = zip(kinds, spec_of(config).layers, strict=True)
    kind = next(name for name, layer in layers if part in layer.parts.values())
    of_kind = kind is not None and key.partition(".")[0] in config.model.kinds[kind].model_fields_set
    return f"model.kinds.{kind}.{key}" if of_kind else f"model.{key}"


@dataclass(frozen=True)
class Rule:
    """A condition on a run file and its layout that must hold, or that is worth a warning."""

    keys: tuple[str, ...]
    """Keys of the run file that it is about."""
    text: str
    """A sentence for the documentation."""
    check: Check
    """Config and layout -> a message for each violation, with the values and the nearest allowed setting."""
    of_training: bool = False
    """True if only training demands it: not an evaluation, which has no backward pass."""


def nearest_degrees(degree: int, allows: Callable[[int], bool], most: int) -> str:
    """`2 or 8`: the allowed degrees around one."""
    below = next((d for d in range(min(degree, most), 0, -1) if allows(d)), None)
    above = next((d for d in range(degree + 1, most + 1) if allows(d)), None)
    return " or ".join(str(d) for d in (below, above) if d is not None)


def nearest_multiples(value: int, of: int) -> str:
    """`24 or 32`: the multiples around a value."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"
