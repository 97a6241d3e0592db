"""Checks of packs: of their sizes before training, and of every byte by `pipeline data verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import file_hash
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.manifest import datasets_below
from pipeline.data.datasets.packing import blocks
from pipeline.data.datasets.packing.best_fit import quickest
from pipeline.data.datasets.packing.blocks import group_lengths, pack_groups
from pipeline.data.datasets.packing.files import (
    PackIndex,
    block_bounds,
    block_bytes,
    block_path,
    groups_bytes,
    lengths_there,
    pack_command,
    packs_folder,
    read_groups,
    read_index,
)
from pipeline.data.datasets.validate import file_sizes


def check_packs(datasets: Mapping[str, Dataset], lengths: Sequence[int]) -> None:
    """Check that the packs of datasets are there with their sizes, before training. Reads the indices alone.

    Args:
        datasets: by source.
        lengths: sequence lengths.

    Raises:
        UserError: a file is missing or has another size; the message names the command that makes it again.
    """
    for dataset in datasets.values():
        for length in lengths:
            index = read_index(dataset.folder, dataset.newer, length)
            read_groups(dataset.folder, index)
            folder = packs_folder(dataset.folder, length)
            paths = [str(block_path(folder, block)) for block in range(len(index.blocks))]
            for path, found, listed in zip(paths, file_sizes(paths).tolist(), index.blocks, strict=True):
                if found != listed.size:
                    what = "is missing" if found < 0 else f"has {found:,} bytes instead of {listed.size:,}"
                    raise UserError(f"{path} {what}; run {pack_command(dataset.folder, length)}")


@dataclass
class PackVerification:
    """Scope and findings of `verify_packs`.

    Attributes:
        checked: packs of one length of one dataset, that many.
        problems: each naming the file.
        repairs: advice about them.
    """

    checked: int = 0
    problems: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return counted(self.checked, "folder") + " of packs" if self.checked else ""


def verify_packs(folder: Path) -> PackVerification:
    """Compare the packs of the datasets in a folder, which are sound, with those that their documents give."""
    result = PackVerification()
    for path in datasets_below(folder):
        for length in lengths_there(path):
            result.checked += 1
            try:
                problems = list(_problems(Dataset.open(path), length))
            except UserError as error:
                problems = [str(error)]
            result.problems += problems
            if problems:
                command, place = pack_command(path, length), packs_folder(path, length)
                result.repairs.append(f"run {command}; if that finds nothing to do, remove {place} before")
    return result


def _problems(dataset: Dataset, length: int) -> Iterator[str]:
    index = read_index(dataset.folder, dataset.newer, length)
    read_groups(dataset.folder, index)
    bounds = block_bounds(dataset.documents)
    if len(index.blocks) != len(bounds):
        yield f"{packs_folder(dataset.folder, length)}: {len(index.blocks)} blocks, but should be {len(bounds)}"
        return
    engine = quickest(dataset.documents)
    groups: list[int] = []
    chunks = cut = 0
    for block, (first, end) in enumerate(bounds):
        path = block_path(packs_folder(dataset.folder, length), block)
        arrays = pack_groups(group_lengths(dataset, first, end, blocks.GROUP), length, engine)
        groups, chunks, cut = groups + arrays.groups, chunks + len(arrays.chunks), cut + arrays.cut
        digest, size = xxhash.xxh3_64(), 0
        for data in block_bytes(arrays):
            digest.update(data)
            size += len(data)
        try:
            if (found := path.stat().st_size) != size:  # which costs less than a hash of what a sparse file says
                yield f"{path}: {found:,} bytes; expected: {size:,}"
            elif file_hash(path) != digest.intdigest():
                yield f"{path}: its bytes are not the packs of the documents (other xxh3)"
        except (OSError, UserError) as error:
            yield f"{path}: {error.strerror if isinstance(error, OSError) else error}"
        if index.blocks[block].xxh3 != digest.hexdigest():
            yield f"{packs_folder(dataset.folder, length)}: the index has another hash of block {block}"
    yield from _wrong_totals(dataset, index, groups, chunks, cut)


def _wrong_totals(dataset: Dataset, index: PackIndex, groups: Sequence[int], chunks: int, cut: int) -> Iterator[str]:
    folder = packs_folder(dataset.folder, index.length)
    if xxhash.xxh3_64_hexdigest(groups_bytes(list(groups))) != index.groups.xxh3:
        yield f"{folder}: the packs of the groups are not those of the documents"
    expected = (dataset.documents, dataset.tokens, sum(groups), chunks, cut)
    if (index.documents, index.tokens, index.packs, index.chunks, index.cut) != expected:
        yield f"{folder}: the totals of the index are not those of the documents"
