"""Held-out text that an evaluation reads: a split of each source, and the sets of `heldout_sets`."""

from __future__ import annotations

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.datasets.open import has_split
from pipeline.data.loading.heldout import HeldOut
from pipeline.train.start.open_run import open_heldout, open_set_windows


def heldout_splits(config: Config) -> dict[str, HeldOut]:
    """The held-out splits that have documents, by source; none is wanted where there are named sets.

    Raises:
        UserError: none has.
    """
    wanted = config.eval
    if config.heldout_sets and not has_split(config, wanted.split):
        return {}
    opened = open_heldout(config, wanted.split, stride=wanted.stride, documents=wanted.documents)
    splits = {name: split for name, split in opened.items() if len(split)}
    if not splits and not config.heldout_sets:
        raise UserError(
            f"nothing is held out (data.splits.{config.eval.split} is {config.data.splits.get(config.eval.split)}), so "
            "there is nothing to evaluate on; raise it, or add sources with more documents, and preprocess into a new "
            "data.dir"
        )
    return splits


def named_sets(config: Config) -> dict[str, dict[str, HeldOut]]:
    """The windows of the sets of `heldout_sets`, by source; without sources that have no token.

    Raises:
        UserError: as `open_set_windows`.
    """
    wanted = config.eval
    return {
        name: {
            source: split
            for source, split in open_set_windows(
                config, name, stride=wanted.stride, documents=wanted.documents
            ).items()
            if len(split)
        }
        for name in config.heldout_sets
    }


def check_heldout(config: Config) -> None:
    """Check that there is something to evaluate on, and that it can be opened.

    Raises:
        UserError: as `heldout_splits` and `named_sets`.
    """
    heldout_splits(config)
    named_sets(config)
