"""Rules for a teacher, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.rules.base import Rule


def _pipeline(config: Config, layout: Layout) -> Iterator[str]:
    if config.train.teacher is not None and layout.pp > 1:
        yield (
            f"train.distill does not work with parallel.pp={layout.pp}: the teacher would need a pipeline of its own; "
            "set parallel.pp=1 and a larger parallel.dp_shard or parallel.tp"
        )


def _models(config: Config, layout: Layout) -> Iterator[str]:
    if config.train.teacher is None:
        return
    model = config.model
    if model.mtp is not None:
        yield "train.distill does not work with model.mtp: set model.mtp=null, or train.distill=null"
    if model.direction == "both" or model.encoder is not None:
        key = "model.encoder" if model.encoder is not None else "model.direction=both"
        yield f"train.distill does not work with {key}: it needs a decoder that predicts the next token"


DISTILLATION_RULES: Sequence[Rule] = (
    Rule(("train.distill", "parallel.pp"), "`train.distill` works without `pp`.", _pipeline, of_training=True),
    Rule(
        ("train.distill", "model.mtp", "model.direction", "model.encoder"),
        "`train.distill` trains decoders without multi-token prediction; its teacher may have some.",
        _models,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
