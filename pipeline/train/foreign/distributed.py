"""Distributed checkpoints (DCP) of other programs: their list of tensors, and reads of any part of a tensor.

They have no hashes, so damage shows where a list and its files do not fit together, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.checkpoint.dcp_metadata import METADATA, largest_list, parse_metadata
from pipeline.train.checkpoint.tensors import Stored, load_parts
from pipeline.train.torch_compat.checkpoint_files import CheckpointReader, PartPlanner


class DistributedFiles:
    """The files of a checkpoint that another program wrote with DCP.

    Args:
        folder: with `.metadata` and the files that it names.

    Raises:
        UserError: the list is missing, damaged or forged, or names files that are not there or are too short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        if not path.is_file():
            raise UserError(
                f"{folder} has no {METADATA}, the list of its tensors, which is written last: the checkpoint is not "
                "complete, or not in the format torch_dist"
            )
        files = [each for each in folder.iterdir() if each.suffix == ".distcp"]
        if links := [each.name for each in files if each.is_symlink()]:
            raise UserError(f"{folder}: {links[0]} is a link, which is not followed: put the file itself there")
        sizes = {each.name: each.lstat().st_size for each in files}
        most = largest_list(sizes.values())
        with storage.open_regular(path) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UserError(f"{path} is not read: it is larger than the tensors of the checkpoint can need")
        metadata = parse_metadata(data, path, sizes)
        self._reader = CheckpointReader(folder, metadata)
        self.tensors = {
            name: Stored(tuple(entry.size), entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        """Shapes and types by name."""

    def read(self, name: str, part: Sequence[slice]) -> Tensor:
        """A part of a tensor, [first, end) of each dimension; of dimensions without one everything."""
        stored = self.tensors[name]
        whole = [slice(0, size) for size in stored.shape[len(part) :]]
        ranges = [*part, *whole]
        target = torch.empty([each.stop - each.start for each in ranges], dtype=stored.dtype)
        planner = PartPlanner([each.start for each in ranges])
        load_parts({name: target}, self._reader, planner, f"{self.folder}: {name}")
        return target
