"""Records of a part about its documents, beside their tokens: where each came from, and metadata that was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import PROVENANCE, HashedFile, part_files


def metadata_file(prefix: Path) -> Path:
    """The file of a part that keeps metadata: `.meta`."""
    return prefix.with_name(prefix.name + ".meta")


def read_provenance(prefix: Path, document: int) -> tuple[int, int, int, int]:
    """(unit, row in the unit, flags, xxh3-64 of the id) of a document of a part, from its `.prov` file."""
    path = part_files(prefix)[2]
    try:
        with storage.open_regular(path) as file:
            file.seek(document * PROVENANCE.itemsize)
            data = file.read(PROVENANCE.itemsize)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    if len(data) < PROVENANCE.itemsize:
        raise UserError(f"{path} is truncated: it has no record of document {document}")
    record = np.frombuffer(data, PROVENANCE)[0]
    return int(record["unit"]), int(record["row"]), int(record["flags"]), int(record["id_hash"])


class MetadataWriter:
    """Writes PREFIX.meta: u64[documents + 1] offsets from the end of this table, then a JSON object a document.

    Use `file` as a context manager; its `commit` gives the file its name.
    """

    def __init__(self, prefix: Path, lengths: npt.NDArray[Any]) -> None:
        table = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<u8").tobytes()
        self.file = HashedFile(metadata_file(prefix))
        try:
            self.file.write(table)
        except BaseException as error:
            self.file.__exit__(type(error), error, None)
            raise

    def write(self, objects: bytes) -> None:
        """Append the objects of the next documents, back to back."""
        self.file.write(objects)


def metadata_bytes(path: Path, documents: int) -> int:
    """Size of a `.meta` file by its own table.

    Args:
        path: of the file.
        documents: of the part.
    """
    table = 8 * (documents + 1)
    with storage.open_regular(path) as file:
        file.seek(table - 8)
        return table + int.from_bytes(file.read(8), "little")


def read_metadata(prefix: Path, document: int, documents: int) -> dict[str, Any]:
    """Metadata that was kept of a document beside its text, from the part's `.meta` file."""
    path = metadata_file(prefix)
    try:
        with storage.open_regular(path) as file:
            file.seek(8 * document)
            start, end = np.frombuffer(file.read(16), "<u8").tolist()
            file.seek(8 * (documents + 1) + start)
            value: dict[str, Any] = orjson.loads(file.read(end - start))
            return value
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except ValueError:
        raise UserError(f"{path} is truncated or damaged: it has no object of document {document}") from None
