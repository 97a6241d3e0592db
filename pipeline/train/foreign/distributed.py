"""Distributed checkpoints (DCP) of other programs: their list of tensors, and reads of any part of a tensor.

They have no hashes, so damage shows where a list and its files do not fit together, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.checkpoint.dcp_metadata import METADATA, largest_list, parse_metadata
from pipeline.train.checkpoint.tensors import Stored, load_parts
from pipeline.train.foreign.pickles import LARGEST_FILE, parse_saved
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

    def borders(self, name: str) -> set[int]:
        """First and last indices of the pieces of a tensor of one dimension."""
        entry = self._reader.read_metadata().state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return {end for each in entry.chunks for end in (each.offsets[0], each.offsets[0] + each.sizes[0])}

    def read_settings(self, name: str) -> Any:
        """An object beside the tensors, as `parse_saved` gives it: nothing of it is imported or called.

        Raises:
            UserError: there is none of this name, or it is damaged.
        """
        where = f"{self.folder}: {storage.shown(name)}"
        place = self._reader.read_metadata().storage_data.get(MetadataIndex(name))
        if place is None or name in self.tensors:
            raise UserError(f"{where} is missing; are the files complete?")
        if place.length > LARGEST_FILE:
            raise UserError(f"{where} is not read: it has {place.length:,} bytes, and settings have less")
        with storage.open_regular(self.folder / place.relative_path, symlinks=False) as file:
            file.seek(place.offset)
            return parse_saved(file.read(place.length), where)

    def read(self, name: str, part: Sequence[slice]) -> Tensor:
        """A part of a tensor, [first, end) of each dimension; of dimensions without one everything."""
        stored = self.tensors[name]
        whole = [slice(0, size) for size in stored.shape[len(part) :]]
        ranges = [*part, *whole]
        target = torch.empty([each.stop - each.start for each in ranges], dtype=stored.dtype)
        planner = PartPlanner([each.start for each in ranges])
        load_parts({name: target}, self._reader, planner, f"{self.folder}: {name}")
        return target
