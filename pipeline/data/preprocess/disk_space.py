"""Room for the datasets of a run on their disk, before they are made."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.common.capacity import free_space, room_of
from pipeline.common.format import size
from pipeline.config import Config
from pipeline.data.preprocess.status import read_state
from pipeline.data.work.units import SourceFiles

_TOKENS_PER_BYTE = 0.25
"""Tokens per byte of text; a guess for English."""


def dataset_warning(config: Config, sources: Sequence[SourceFiles], token_bytes: int) -> str | None:
    """Warning where the datasets will probably not fit on the disk of `data.dir`; None where they will.

    Nothing is read for it, so it is a guess, and refuses nothing.

    Args:
        config: The run.
        sources: What is tokenized.
        token_bytes: Bytes of a token on disk.
    """
    free, _ = free_space(config.data_dir)
    copies = 2 if config.data.preprocess.shuffle == "global" else 1
    needed = {source.source.name: copies * _TOKENS_PER_BYTE * token_bytes * source.text_bytes for source in sources}
    if sum(needed.values()) <= free:
        return None
    for state in read_state(config):
        if state.units:
            needed[state.name] = needed.get(state.name, 0.0) * (1 - state.done / state.units)
    if sum(needed.values()) <= free:
        return None
    return (
        f"{room_of('data.dir', config.data_dir, free)}, and the datasets will take about {size(sum(needed.values()))} "
        "more (estimated from the size of the files): free some space, or set data.dir to a folder on another disk"
    )
