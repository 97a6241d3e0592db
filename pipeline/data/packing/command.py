"""`pipeline data pack`: packs of finished datasets, for lengths that a run will have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import rich.console

from pipeline.common.console import Console, say
from pipeline.common.format import counted, size
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.manifest import datasets_below
from pipeline.data.packing.make import PackMaker, packs_in_words

PACK_BYTES = 12
"""Bytes of the packs of a document, about."""


def pack(
    folder: Path,
    lengths: Sequence[int],
    *,
    workers: int | None = None,
    dry_run: bool = False,
    console: rich.console.Console | None = None,
) -> None:
    """Make the packs of a dataset that are missing or damaged. All files that are there are read and compared.

    Args:
        folder: a dataset, or a folder of several, of which the training splits are packed.
        lengths: sequence lengths.
        workers: processes; by default one for each core.
        dry_run: only print what there is to do.
        console: where to print.

    Raises:
        UserError: there is no dataset, or it is damaged, or packs cannot have such a length.
    """
    console = console or Console()
    found = datasets_below(folder)
    for path in [path for path in found if path.name == TRAIN] or found:
        dataset = Dataset.open(path)
        for length in sorted(set(lengths)):
            packing = PackMaker(dataset, length)
            if dry_run:
                say(console, f"{path}: {plan_in_words(packing)}")
            else:
                index = packing.make(console, workers or len(os.sched_getaffinity(0)), hashes=True)
                say(console, f"{path}: {packs_in_words(index)}")


def plan_in_words(packing: PackMaker) -> str:
    """Work that is left for the packs of a dataset, in words."""
    state = packing.state()
    if state.index is not None:
        return f"{packs_in_words(state.index)}; nothing to do"
    documents = sum(job.documents[1] - job.documents[0] for job in state.jobs)
    return (
        f"packs of {packing.length:,} tokens: {len(state.jobs):,} of {counted(state.blocks, 'block')} to make, "
        f"{counted(documents, 'document')}, about {size(PACK_BYTES * documents)}"
    )
