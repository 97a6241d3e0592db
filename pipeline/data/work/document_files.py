"""Files of documents for other programs, as JSON Lines or Parquet; and the folder that an export has to itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson

from pipeline.common import storage
from pipeline.common.errors import UserError

ExportFormat = Literal["jsonl", "parquet"]
EXPORT_FILE = "exported.json"
"""Beside the files: what they are of."""
_BATCH = 1000
_BATCH_CHARACTERS = 2**24


def claim_folder(folder: Path, about: Mapping[str, Any], option: str, theirs: str) -> None:
    """Take a folder for an export, or compare with the one that is there.

    Args:
        folder: is made if need be.
        about: what decides the files.
        option: that names the folder, for messages.
        theirs: what another export differs in, for messages.

    Raises:
        UserError: it has other files, or another export.
        MachineError: it cannot be made.
    """
    with storage.writing(f"{option} {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / EXPORT_FILE
    there = storage.find_json(path, *about)
    if there is None and any(folder.iterdir()) and not path.exists():
        raise UserError(f"{option}: {folder} is not empty, and no export; name another folder")
    if there is not None and there != about:
        raise UserError(f"{option}: {folder} has an export of other {theirs}; name another folder")
    if there is None:
        storage.put_json(path, dict(about))


def document_file(path: Path, form: ExportFormat, columns: Mapping[str, str]) -> DocumentFile:
    """A new file of documents.

    Args:
        path: of the file.
        form: of the file.
        columns: name and type (`string`, `int64`, `float32`, `bool`, `list<int32>`) of each column of a table.
    """
    return JsonLinesFile(path) if form == "jsonl" else ParquetFile(path, columns)


class DocumentFile(ABC):
    """A file of documents. As a context manager it removes what is not committed."""

    def __init__(self, path: Path) -> None:
        self._file = storage.NewFile(path)

    @abstractmethod
    def add(self, record: Mapping[str, Any]) -> None:
        """Write a document."""

    def commit(self) -> None:
        """Flush the file to disk and give it its name."""
        self._file.commit()

    def __enter__(self) -> DocumentFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class JsonLinesFile(DocumentFile):
    """A JSON object per line."""

    def add(self, record: Mapping[str, Any]) -> None:
        with storage.naming(self._file.final):
            self._file.file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


class ParquetFile(DocumentFile):
    """A row per document. Memory: some hundred documents, or some megabytes."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        super().__init__(path)
        types = {
            "string": pa.string(),
            "int64": pa.int64(),
            "float32": pa.float32(),
            "bool": pa.bool_(),
            "list<int32>": pa.list_(pa.int32()),
        }
        self._schema = pa.schema({name: types[kind] for name, kind in columns.items()})
        self._pa = pa
        self._parquet = parquet.ParquetWriter(self._file.file, self._schema, compression="zstd")
        self._batch: list[Mapping[str, Any]] = []
        self._held = 0

    def add(self, record: Mapping[str, Any]) -> None:
        self._batch.append(record)
        self._held += len(record["text"])
        if len(self._batch) >= _BATCH or self._held >= _BATCH_CHARACTERS:
            self._flush()

    def commit(self) -> None:
        self._flush()
        self._parquet.close()
        super().commit()

    def _flush(self) -> None:
        if self._batch:
            self._parquet.write_table(self._pa.Table.from_pylist(self._batch, schema=self._schema))
        self._batch, self._held = [], 0
