"""Names of the objects of a dataset.

`URL/manifest.json` is the manifest as it is on a disk, and is created last: a dataset is there if and only if its
manifest is. All else lies below `URL/FINGERPRINT/`, with the names of the files in the dataset's folder, so datasets
that are written to one URL at the same time never mix. Readers derive all names from the manifest and `parts.bin`.
Beside each file but these two is an object with the hashes of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.objects.urls import ObjectUrl
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE
from pipeline.data.datasets.indexed import PART_FILES, part_prefix
from pipeline.data.datasets.manifest import Manifest
from pipeline.data.datasets.packing.files import file_hashes, packs_folder
from pipeline.data.datasets.remote.sums import SUFFIX


def manifest_url(dataset: ObjectUrl) -> ObjectUrl:
    """Object of the manifest of a dataset."""
    return dataset.below(MANIFEST_FILE)


def file_url(dataset: ObjectUrl, fingerprint: str, name: str) -> ObjectUrl:
    """Object of a file of a dataset.

    Args:
        dataset: its URL.
        fingerprint: of its manifest.
        name: of the file in the folder of the dataset, with `/`.
    """
    return dataset.below(fingerprint).below(name)


def sums_url(file: ObjectUrl) -> ObjectUrl:
    """Object with the hashes of the blocks of a file."""
    return file.with_key(file.key + SUFFIX)


def part_file_hashes(manifest: Manifest, parts: npt.NDArray[Any], suffixes: Sequence[str] = ()) -> dict[str, str]:
    """xxh3-64 of the files of a dataset's parts by name, in the order of the parts.

    Args:
        manifest: of the dataset.
        parts: records of `parts.bin`.
        suffixes: of the files: some of `PART_FILES`; all by default.
    """
    found = {}
    names = [name for name in PART_FILES if name in (parts.dtype.names or ())]
    for record in parts:
        prefix = part_prefix(Path(), int(record["unit"]), int(record["link"]))
        for name in suffixes or names:
            if name == "meta" and not record["meta"]:
                continue
            found[f"{prefix}.{name}"] = f"{int(record[name]):016x}"
    return found


def tokenizer_hashes(manifest: Manifest, where: Path) -> dict[str, str]:
    """xxh3-64 of the files of a dataset's tokenizer by name.

    Args:
        manifest: of the dataset.
        where: its file, for messages: it may come from a stranger.

    Raises:
        UserError: a name is none of a file beside it.
    """
    for name in manifest.files:
        if storage.plain_name(name, where) in (MANIFEST_FILE, PARTS_FILE) or name.endswith(SUFFIX):
            raise UserError(f"{where} names {name} as a file of the tokenizer, which it cannot be; it is damaged")
    return dict(manifest.files)


def pack_file_hashes(folder: Path, fingerprints: Sequence[str], length: int) -> dict[str, str]:
    """xxh3-64 of the files of a dataset's packs by name; the index, which makes them count, is the last.

    Args:
        folder: of the dataset, with the index of the packs.
        fingerprints: as for `packing.files.read_index`.
        length: tokens of a pack.

    Raises:
        UserError: there are no packs of the length, or their index is damaged.
    """
    place = packs_folder(folder, length).relative_to(folder)
    found = {f"{place}/{name}": f"{listed:016x}" for name, listed in file_hashes(folder, fingerprints, length).items()}
    index = next(iter(found))
    return {name: found[name] for name in [*(name for name in found if name != index), index]}
