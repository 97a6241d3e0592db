"""Rules for exports while training, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.rules.base import Rule

_KEY = "train.checkpoint.export"


def _family(config: Config, layout: Layout) -> Iterator[str]:
    if config.train.checkpoint.export is None:
        return
    # A launcher looks at rules, too, and is not to wait for what only conversion needs.
    from pipeline.train.huggingface.configs import to_hf_config

    try:
        # Whether a family computes the model does not depend on the vocabulary.
        to_hf_config(config.model, config.model.vocab_size or 1, config.max_positions)
    except UserError as error:
        yield f"{_KEY} is set, and {error}: remove {_KEY}, or change that key"


EXPORT_RULES: Sequence[Rule] = (
    Rule(
        (_KEY,),
        f"With `{_KEY}`, the model is one that a supported family of Hugging Face's models computes.",
        _family,
        of_training=True,
    ),
)
