"""A dataset in a bucket: its indices lie on this node, its tokens as far as they were copied; the rest is fetched."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.urls import ObjectUrl
from pipeline.data.datasets.dataset import MAPPED_AT_ONCE, READ_AT_ONCE, Dataset, ReadBy, open_part
from pipeline.data.datasets.indexed import IndexedPart
from pipeline.data.datasets.manifest import Manifest
from pipeline.data.datasets.remote.layout import file_url
from pipeline.data.datasets.remote.ranges import RangeReader, RemoteFile
from pipeline.data.datasets.validate import part_prefixes


class RangedPart(IndexedPart):
    """A part whose index is on this node, and whose tokens are not.

    Args:
        prefix: of its files on this node.
        number: of the part.
        size: bytes of its tokens.
        ranges: reads them.
    """

    def __init__(self, prefix: Path, number: int, size: int, ranges: RangeReader) -> None:
        self._number, self._size, self._ranges = number, size, ranges
        super().__init__(prefix)

    def _open_tokens(self) -> int:
        return self._size

    def _connect(self) -> None:
        """Nothing to do."""

    def view(self, start: int, end: int) -> npt.NDArray[Any]:
        """The token ids [start, end), fetched."""
        self.check_range(start, end - start)
        size = self.dtype.itemsize
        return np.frombuffer(self._ranges.read(self._number, start * size, end * size), self.dtype)


class RemoteDataset(Dataset):
    """A dataset in a bucket. Parts are read on this node from when they have been copied there.

    Attributes:
        url: of the dataset.
        files: the `.bin` of each part.
        ranges: reads what has not been copied.

    Args:
        url: of the dataset.
        access: settings of requests.
        folder: on this node, with all but the tokens.
        manifest: of the dataset.
        parts: of the dataset, by `read_parts`.
        read: how files are read.
        generation: index in `manifest.lineage`.
    """

    has_files = False

    def __init__(
        self,
        url: ObjectUrl,
        access: RemoteAccess,
        folder: Path,
        manifest: Manifest,
        parts: npt.NDArray[Any],
        read: ReadBy = "mmap",
        generation: int = -1,
    ) -> None:
        super().__init__(folder, manifest, parts, read, generation)
        self.url, self.access = url, access
        self._paths = [Path(f"{prefix}.bin") for prefix in part_prefixes(folder, parts)]
        sizes = (parts["tokens"].astype(np.int64) * self.dtype.itemsize).tolist()
        self.files = [
            RemoteFile.of(file_url(url, manifest.fingerprint, str(path.relative_to(folder))), size, path)
            for path, size in zip(self._paths, sizes, strict=True)
        ]
        self.ranges = RangeReader(self.files, access)
        self._part = self._cached_part
        self._opened: dict[int, IndexedPart] = {}
        self._opening = threading.Lock()

    def copy_of(self, part: int) -> Path:
        """The file on this node that a part's tokens are copied to."""
        return self._paths[part]

    def has_copy(self, part: int) -> bool:
        """Tell whether the tokens of a part are on this node. The file has its name only if they are right."""
        return os.path.exists(self._paths[part])

    def want(self, pieces: Iterable[tuple[int, int, int]], step: int) -> None:
        """Ask for tokens that a step will read.

        Args:
            pieces: number of the part, its first token and the one behind the last, of each.
            step: that reads them.
        """
        size, local = self.dtype.itemsize, dict[int, bool]()
        wanted = []
        for part, start, end in pieces:
            if part not in local:
                local[part] = self.has_copy(part)
            if not local[part]:
                wanted.append((part, start * size, end * size))
        self.ranges.want(wanted, step)

    def forget_parts(self, parts: Iterable[int]) -> None:
        """Close parts whose copies were removed, which frees their space."""
        with self._opening:
            for part in parts:
                self._opened.pop(part, None)

    def new_part(self, index: int) -> IndexedPart:
        """A part as it can be read now."""
        if self.has_copy(index):
            try:
                return super().new_part(index)
            except UserError:
                if self.has_copy(index):
                    raise
        return RangedPart(self.prefix(index), index, self.files[index].size, self.ranges)

    def _cached_part(self, dataset: Dataset, index: int) -> IndexedPart:
        part = self._opened.get(index)
        if part is not None and not (isinstance(part, RangedPart) and self.has_copy(index)):
            return part
        with self._opening:
            part = self._opened[index] = open_part(self, index)
            while len(self._opened) > (MAPPED_AT_ONCE if self.read_by == "mmap" else READ_AT_ONCE):
                del self._opened[next(iter(self._opened))]
        return part

    def provenance(self, document: int) -> tuple[int, int, int, int]:
        """Refuse: where documents came from is not fetched."""
        self._not_fetched()

    def metadata(self, document: int) -> dict[str, Any]:
        """Refuse: metadata of documents are not fetched."""
        self._not_fetched()

    def _not_fetched(self) -> NoReturn:
        raise UserError(
            f"{self.url}: origins and metadata of documents are not read from a bucket; write the dataset to a disk "
            f"first: `pipeline data pull {self.url} FOLDER`"
        )
