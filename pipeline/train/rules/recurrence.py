"""Rules for the backends of recurrences, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.rules.base import Rule

_OTHERWISE = "or train.recurrence.backend=auto"


def _device(config: Config, _: Layout) -> Iterator[str]:
    if config.train.recurrence.backend == "fla" and config.launch.device == "cpu":
        yield (
            "train.recurrence.backend=fla needs a CUDA device, but launch.device=cpu: set "
            "train.recurrence.backend=plain, or launch.device=auto"
        )


def _sixteen_bits(config: Config, _: Layout) -> Iterator[str]:
    if config.train.recurrence.backend == "fla" and config.train.precision.compute == "fp32":
        yield (
            "train.recurrence.backend=fla computes in 16 bits only, but train.precision.compute=fp32: set "
            f"train.precision.compute=bf16, {_OTHERWISE}"
        )


def _deterministic(config: Config, _: Layout) -> Iterator[str]:
    if config.train.recurrence.backend == "fla" and config.train.deterministic:
        yield (
            "train.recurrence.backend=fla does not give the same bits each time, but train.deterministic=true: set "
            f"train.deterministic=false, {_OTHERWISE}"
        )


RECURRENCE_RULES: Sequence[Rule] = (
    Rule(
        ("train.recurrence.backend", "launch.device"),
        "`fla` needs a GPU.",
        _device,
        of_training=True,
    ),
    Rule(
        ("train.recurrence.backend", "train.precision.compute"),
        "`fla` computes in bf16 or fp16.",
        _sixteen_bits,
        of_training=True,
    ),
    Rule(
        ("train.recurrence.backend", "train.deterministic"),
        "`fla` does not go with `deterministic`.",
        _deterministic,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
