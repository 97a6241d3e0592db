"""Rules for training on pairs, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.rules.base import Rule


def _refused(config: Config, layout: Layout) -> Iterator[str]:
    train, model = config.train, config.model
    if train.preference is None:
        return
    key = "train.preference does not work with"
    if train.init_from is None:
        yield "train.preference needs train.init_from: the model that the run starts from is the reference"
    if train.distill is not None:
        yield f"{key} train.distill: set one of them to null"
    if model.mtp is not None:
        yield f"{key} model.mtp: set model.mtp=null"
    if model.dropout:
        yield f"{key} model.dropout={model.dropout:g}: model and reference would differ by chance: set model.dropout=0"
    if train.loss.z_loss:
        yield f"{key} train.loss.z_loss={train.loss.z_loss:g}, which is per token: set train.loss.z_loss=0"
    if model.direction == "both" or model.encoder is not None:
        other = "model.encoder" if model.encoder is not None else "model.direction=both"
        yield f"{key} {other}: it needs a decoder that predicts the next token"


PREFERENCE_RULES: Sequence[Rule] = (
    Rule(
        (
            "train.preference",
            "train.init_from",
            "train.distill",
            "model.mtp",
            "train.loss.z_loss",
            "model.dropout",
            "model.direction",
            "model.encoder",
        ),
        "`train.preference` trains decoders that start from weights, without multi-token prediction, z-loss, dropout "
        "and a teacher.",
        _refused,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
