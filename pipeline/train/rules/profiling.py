"""Rules for profiles, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.rules.base import Rule


def _ranks(config: Config, layout: Layout) -> Iterator[str]:
    profile, world = config.train.profile, layout.world_size
    unknown = [] if profile is None else [rank for rank in profile.ranks if rank >= world]
    if profile is not None and unknown:
        known = [rank for rank in profile.ranks if rank < world]
        count = f"{world} processes, 0 to {world - 1}" if world > 1 else "one process, 0"
        yield (
            f"train.profile.ranks={profile.ranks} names {', '.join(map(str, unknown))}, but the run has {count}: set "
            f"train.profile.ranks={known or [0]}"
        )


PROFILE_RULES: Sequence[Rule] = (
    Rule(("train.profile.ranks",), "`train.profile.ranks` are processes of the run.", _ranks, of_training=True),
)
