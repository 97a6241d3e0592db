"""Opening a dataset in a bucket: what readers need before the first token is fetched, checked and kept on this node.

In the folder of copies, `FINGERPRINT/` has the dataset with the names of its files: manifest, `parts.bin`, tokenizer,
indices, loss weights, trained targets, packs, and the hashes of the blocks of each `.bin`, which itself comes later or
never. So a dataset that was copied from a disk and the same one in a bucket share their files.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash
from pydantic import ValidationError

from pipeline.common import storage
from pipeline.common.console import Console, say
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import file_hash
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.content import REWRITE, read_content
from pipeline.common.objects.failures import ObjectChanged, ObjectMissing
from pipeline.common.objects.urls import ObjectUrl
from pipeline.common.objects.writing import read_small
from pipeline.data.datasets.dataset import ReadBy
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE
from pipeline.data.datasets.in_threads import in_threads
from pipeline.data.datasets.manifest import Manifest, read_manifest, read_parts
from pipeline.data.datasets.node_folder import CHECKED_FILE, alone, checked_row
from pipeline.data.datasets.packing.files import INDEX_FILE, PACKS, packs_folder
from pipeline.data.datasets.remote.dataset import RemoteDataset
from pipeline.data.datasets.remote.layout import (
    file_url,
    manifest_url,
    pack_file_hashes,
    part_file_hashes,
    sums_url,
    tokenizer_hashes,
)
from pipeline.data.datasets.remote.ranges import REQUESTS
from pipeline.data.datasets.remote.sums import SUFFIX, BlockSums
from pipeline.data.datasets.validate import part_prefixes


def is_there(url: ObjectUrl, access: RemoteAccess) -> bool:
    """Tell whether there is a dataset at a URL."""
    return read_small(manifest_url(url), access) is not None


def open_remote(
    url: ObjectUrl,
    access: RemoteAccess,
    base: Path,
    *,
    read: ReadBy = "mmap",
    pack_lengths: Sequence[int] = (),
    generation: int = -1,
) -> RemoteDataset:
    """Open a dataset in a bucket. Of the processes of a node one fetches, and the others wait for it.

    Args:
        url: of the dataset.
        access: settings of requests.
        base: folder of this user's copies on this node.
        read: how files are read.
        pack_lengths: sequence lengths whose packs are needed.
        generation: index in the lineage of the manifest.

    Raises:
        UserError: there is no dataset, or an object of it is missing or has other bytes than were written.
        MachineError: the bucket cannot be reached, or the folder cannot be used.
        OSError: the disk is full, say.
    """
    found = read_small(manifest_url(url), access)
    if found is None:
        raise UserError(
            f"{url} is not a dataset: it has no {MANIFEST_FILE}, which `pipeline data push` writes last; check the URL"
        )
    node = _NodeCopy(url, access, base, found[0], pack_lengths)
    if not node.is_complete():
        with alone(base, Console(stderr=True)):
            node.fetch()
    manifest, parts = node.read()
    return RemoteDataset(url, access, node.folder, manifest, parts, read, generation)


def opening_requests(dataset: RemoteDataset, pack_lengths: Sequence[int]) -> int:
    """Requests for all that `open_remote` fetches to a node that has nothing of a dataset."""
    whole = dataset.whole
    lengths = [length for length in pack_lengths if (dataset.folder / PACKS / str(length)).is_dir()]
    packs = sum(1 + len(pack_file_hashes(dataset.folder, dataset.newer, length)) for length in lengths)
    # The manifest is two, `parts.bin` is one; of a part the index, the hashes of its blocks, loss weights and trained
    # targets; of packs one more for the hashes of their index.
    return 3 + len(whole.files) + (2 + whole.has_weights + whole.has_mask) * len(dataset.files) + packs


@dataclass(frozen=True)
class _File:
    """A file that is fetched as a whole.

    Attributes:
        name: in the folder of the dataset.
        hash: its xxh3-64; None of one that has its own hash.
        size: of the `.bin` whose hashes of blocks it has.
    """

    name: str
    hash: str | None = None
    size: int = 0


class _NodeCopy:
    """A dataset of a bucket, and what this node has of it."""

    def __init__(
        self, url: ObjectUrl, access: RemoteAccess, base: Path, manifest: bytes, pack_lengths: Sequence[int]
    ) -> None:
        try:
            self._model = Manifest.model_validate(orjson.loads(manifest))
        except (ValueError, ValidationError):
            raise UserError(f"{manifest_url(url)} is damaged: it is not the manifest of a dataset; {REWRITE}") from None
        self._url, self._access, self._base = url, access, base
        self._fingerprint = self._model.fingerprint
        self._manifest, self._pack_lengths = manifest, pack_lengths
        self.folder = base / self._fingerprint

    def read(self) -> tuple[Manifest, npt.NDArray[Any]]:
        """Manifest and `parts.bin`."""
        manifest = read_manifest(self.folder)
        return manifest, read_parts(self.folder, manifest)

    def is_complete(self) -> bool:
        """True if there is nothing to fetch."""
        try:
            if storage.read_bytes(self.folder / MANIFEST_FILE) != self._manifest:
                return False
            manifest, parts = self.read()
            files = [*self._files(manifest, parts), *self._packs(manifest)]
        except (OSError, UserError):
            return False
        checked = self._checked()
        return not self._unchecked(parts, checked) and all(self._is_right(file, checked) for file in files)

    def fetch(self) -> None:
        """Fetch what is missing. One process at a time is here."""
        storage.make_below(self._base, self.folder)
        self._sweep()
        storage.put(self.folder / MANIFEST_FILE, self._manifest)
        manifest = read_manifest(self.folder)
        try:
            parts = read_parts(self.folder, manifest)
        except UserError:
            self._fetch_parts_file(manifest)
            parts = read_parts(self.folder, manifest)
        self._verify(parts)
        self._bring(self._files(manifest, parts))
        for length in self._pack_lengths:
            self._fetch_pack_index(length)
        self._bring(self._packs(manifest))

    def _sweep(self) -> None:
        """Remove what processes that were killed left behind."""
        for path in self.folder.rglob(f".*{storage.TEMPORARY_SUFFIX}"):
            storage.remove_if_stale(path)

    def _fetch_parts_file(self, manifest: Manifest) -> None:
        url = file_url(self._url, self._fingerprint, PARTS_FILE)
        size = manifest.parts * manifest.part.itemsize
        for _ in range(2):
            data = read_content(url, self._access)
            if xxhash.xxh3_128_hexdigest(data[:size]) == manifest.parts_hash:
                storage.put(self.folder / PARTS_FILE, data[:size])
                return
        raise _changed(url)

    def _files(self, manifest: Manifest, parts: npt.NDArray[Any]) -> list[_File]:
        """The files that every reader needs, but for those of packs."""
        suffixes = ["idx", *(["weight"] if manifest.has_weights else []), *(["mask"] if manifest.has_mask else [])]
        hashes = tokenizer_hashes(manifest, self.folder / MANIFEST_FILE) | part_file_hashes(manifest, parts, suffixes)
        sizes = (parts["tokens"].astype(np.int64) * np.dtype(manifest.dtype).itemsize).tolist()
        names = [f"{prefix[len(str(self.folder)) + 1 :]}.bin{SUFFIX}" for prefix in part_prefixes(self.folder, parts)]
        sums = [_File(name, size=size) for name, size in zip(names, sizes, strict=True)]
        return [*(_File(name, listed) for name, listed in hashes.items()), *sums]

    def _packs(self, manifest: Manifest) -> list[_File]:
        """The files of packs, whose indices are there."""
        fingerprints = [each.fingerprint for each in manifest.lineage]
        return [
            _File(name, listed)
            for length in self._pack_lengths
            for name, listed in pack_file_hashes(self.folder, fingerprints, length).items()
        ]

    def _fetch_pack_index(self, length: int) -> None:
        name = f"{PACKS}/{length}/{INDEX_FILE}"
        if (self.folder / name).exists():
            return
        url = file_url(self._url, self._fingerprint, name)
        try:
            data = self._read_index(url)
        except ObjectMissing:
            raise UserError(
                f"{self._url} has no packs of {length:,} tokens, which `data.loader.packing: best_fit` needs: where "
                f"the dataset is on a disk, run `pipeline data pack FOLDER --length {length}` and `pipeline data push`"
            ) from None
        storage.make_below(self._base, packs_folder(self.folder, length))
        storage.put(self.folder / name, data)
        digest = xxhash.xxh3_64_intdigest(data)
        storage.add_json_line(self.folder / CHECKED_FILE, checked_row(self.folder, name, digest))

    def _read_index(self, url: ObjectUrl) -> bytes:
        """A file whose hash nothing else has, compared with the hashes beside it."""
        for _ in range(2):
            data, sums = read_content(url, self._access), read_content(sums_url(url), self._access)
            with suppress(ValueError):
                if BlockSums(sums, len(data)).first_wrong(0, data) is None:
                    return data
        raise _changed(url)

    def _checked(self) -> dict[Any, dict[str, Any]]:
        return {row.get("file"): row for row in storage.read_json_lines(self.folder / CHECKED_FILE)}

    def _is_right(self, file: _File, checked: dict[Any, dict[str, Any]]) -> bool:
        """Tell whether a file is there with the right bytes."""
        path = self.folder / file.name
        if file.hash is not None:
            row = checked_row(self.folder, file.name, int(file.hash, 16))
            return row != {} and row == checked.get(file.name)
        try:
            BlockSums(storage.read_bytes(path), file.size)
        except (OSError, ValueError):
            return False
        return True

    def _unchecked(self, parts: npt.NDArray[Any], checked: dict[Any, dict[str, Any]]) -> list[_File]:
        """Tokens that are there, and were not compared."""
        hashes = part_file_hashes(self._model, parts, ["bin"])
        return [
            _File(name, listed)
            for name, listed in hashes.items()
            if (row := checked_row(self.folder, name, int(listed, 16))) and row != checked.get(name)
        ]

    def _verify(self, parts: npt.NDArray[Any]) -> None:
        """Compare tokens that are there with their hashes, and remove wrong ones: later a name is enough."""
        if not (files := self._unchecked(parts, self._checked())):
            return
        with closing(storage.JsonLines(self.folder / CHECKED_FILE)) as notes:
            for file in files:
                path = self.folder / file.name
                if f"{file_hash(path):016x}" == file.hash:
                    notes.write(checked_row(self.folder, file.name, int(file.hash, 16)))
                else:
                    path.unlink()

    def _bring(self, files: list[_File]) -> None:
        """Fetch those files that are not there."""
        checked = self._checked()
        missing = [file for file in files if not self._is_right(file, checked)]
        if not missing:
            return
        say(Console(stderr=True), f"fetching {counted(len(missing), 'file')} of {self._url} to {self.folder}")
        for folder in {(self.folder / file.name).parent for file in missing}:
            storage.make_below(self._base, folder)
        with closing(storage.JsonLines(self.folder / CHECKED_FILE)) as notes:
            for file in in_threads(self._fetch, missing, max(REQUESTS, self._access.concurrency), "fetch"):
                if file.hash is not None:
                    notes.write(checked_row(self.folder, file.name, int(file.hash, 16)))

    def _fetch(self, file: _File) -> None:
        url, target = file_url(self._url, self._fingerprint, file.name), self.folder / file.name
        if file.hash is None:
            url = sums_url(url.with_key(url.key.removesuffix(SUFFIX)))
        for _ in range(2):
            data = read_content(url, self._access)
            if _has_right_bytes(file, data):
                storage.put(target, data)
                return
        raise _changed(url)


def _has_right_bytes(file: _File, data: bytes) -> bool:
    if file.hash is not None:
        return xxhash.xxh3_64_hexdigest(data) == file.hash
    try:
        BlockSums(data, file.size)
    except ValueError:
        return False
    return True


def _changed(url: ObjectUrl) -> ObjectChanged:
    return ObjectChanged(
        f"{url}: its bytes are not those that were written, in two answers: the object was replaced, or is damaged; "
        f"{REWRITE}"
    )
