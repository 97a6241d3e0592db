"""Finding documents of a dataset by what their `.prov` records say: they are read once, in a few threads."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.curate.files import IDS, measured_file
from pipeline.data.curate.table import read_array
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.indexed import PROVENANCE, part_files, part_prefix
from pipeline.data.datasets.manifest import PLAN_KEYS, REPAIR_DAMAGED, Manifest, read_parts
from pipeline.data.work.receipts import read_receipts

_BLOCK_BYTES = 2**17 * PROVENANCE.itemsize
_THREADS = max(2, min(8, os.cpu_count() or 1))
_HASH = re.compile(r"xxh3:([0-9a-f]{16})")


def hash_of_id(id: str) -> int:
    """The hash of a document's id, as `.prov` has it. No document has an id that is not UTF-8, but one may be given."""
    return xxhash.xxh3_64_intdigest(id.encode(errors="surrogateescape"))


def documents_with_id(folder: Path, manifest: Manifest, id: str) -> list[int]:
    """Numbers of the documents of a dataset that have an id (or another one of equal hash), ascending.

    Args:
        folder: of the dataset.
        manifest: of it.
        id: the id, or `xxh3:` and 16 hexadecimal digits, its hash.

    Raises:
        UserError: a `.prov` file is missing or cut.
    """
    found = _find(folder, manifest, {"id_hash": hash_of_id(id)})
    if not found and (given := _HASH.fullmatch(id)):
        return _find(folder, manifest, {"id_hash": int(given[1], 16)})
    return found


def documents_of_record(folder: Path, manifest: Manifest, unit: int, row: int) -> list[int]:
    """Numbers of the documents of a dataset that were made of a record: one, or none.

    Args:
        folder: of the dataset.
        manifest: of it.
        unit: number of the unit.
        row: of the record in the unit.

    Raises:
        UserError: a `.prov` file is missing or cut.
    """
    # A part is a unit's, or a chunk's of it, unless all documents of the source were shuffled.
    is_shuffled = manifest.settings.get("data.preprocess.shuffle") == "global"
    return _find(folder, manifest, {"row": row, "unit": unit}, None if is_shuffled else unit)


def records_with_id(curation: Path, id: str) -> list[tuple[int, int]] | None:
    """(unit, row) of the records of a curated source whose ids have the hash of this one, ascending.

    Args:
        curation: folder of the curation of the source.
        id: of the records.

    Returns:
        None if a chunk was measured by an earlier version, which did not store the hashes.

    Raises:
        DamagedResult: a file is not as it was written.
    """
    wanted, found = np.uint64(hash_of_id(id)), []
    units = storage.get_json(curation / PLAN_FILE, *PLAN_KEYS)["units"]
    for unit in range(len(units)):
        for receipt in read_receipts(curation, unit):
            about = receipt["files"].get(IDS)
            if about is None:
                return None
            path = measured_file(curation, unit, receipt["link"], IDS)
            hashes = read_array(path, np.dtype("<u8"), about["xxh3"], "measure", receipt["records"])
            found += [(unit, receipt["start"][3] + row) for row in np.flatnonzero(hashes == wanted).tolist()]
    return found


def _find(folder: Path, manifest: Manifest, wanted: dict[str, int], unit: int | None = None) -> list[int]:
    parts = read_parts(folder, manifest)
    firsts = np.concatenate([[0], np.cumsum(parts["documents"], dtype=np.int64)[:-1]])
    chosen = np.arange(len(parts)) if unit is None else np.flatnonzero(parts["unit"] == unit)

    def matches(indices: npt.NDArray[np.int64]) -> list[int]:
        found: list[int] = []
        for index in indices.tolist():
            part = parts[index]
            path = part_files(part_prefix(folder, int(part["unit"]), int(part["link"])))[2]
            found += (firsts[index] + _matches(path, int(part["documents"]), wanted)).tolist()
        return found

    # Many small files a task: handing over one costs about as much as looking through it.
    tasks = np.array_split(chosen, min(len(chosen), 8 * _THREADS) or 1)
    with ThreadPoolExecutor(_THREADS) as threads:
        return sorted(number for found in threads.map(matches, tasks) for number in found)


def _matches(path: Path, documents: int, wanted: dict[str, int]) -> npt.NDArray[np.int64]:
    """Records of a file that have these values."""
    found: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    seen = 0
    try:
        with storage.open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                records = np.frombuffer(block, PROVENANCE, len(block) // PROVENANCE.itemsize)
                equal = [records[name] == value for name, value in wanted.items()]
                found.append(seen + np.flatnonzero(np.logical_and.reduce(equal)))
                seen += len(records)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {REPAIR_DAMAGED}") from None
    if seen != documents:
        raise UserError(f"{path} is truncated: it has {seen:,} records of {documents:,} documents; {REPAIR_DAMAGED}")
    return np.concatenate(found)
