"""`type: arrow`: one document a row, of Arrow files and of folders of `Dataset.save_to_disk`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from pipeline.common.errors import UserError
from pipeline.data.sources.globs import File, find_files
from pipeline.data.sources.reader import Cursor
from pipeline.data.sources.records import Document, Piece
from pipeline.data.sources.tables import TableReader

if TYPE_CHECKING:
    import pyarrow as pa


class ArrowReader(TableReader):
    """One document a row, of record batches whose message begins in the piece."""

    type = "arrow"

    def find(
        self, paths: list[str], exclude: list[str], key: str, planned: Callable[[], Mapping[str, Any]]
    ) -> tuple[Self, list[File]]:
        """The files; a path may be a folder of `Dataset.save_to_disk`, which stands for its data."""
        return self, find_files(paths, exclude, key, in_folder=_saved_dataset, remote=self.remote)

    def expected_text_bytes(self, file: File) -> int:
        """Its size, whatever its name ends with."""
        return file.size

    def schema(self, file: File) -> pa.Schema:
        """Schema of a file, from its first message."""
        from pipeline.data.sources.arrow_messages import arrow_schema

        return arrow_schema(file, self.remote)

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """The rows of a piece."""
        from pipeline.data.sources.arrow_messages import read_arrow

        return read_arrow(cursor, piece)


def _saved_dataset(folder: str, key: str) -> list[str]:
    """The data files of a folder that `Dataset.save_to_disk` wrote.

    Raises:
        UserError: it is another folder, or holds several splits, or its rows are in another order than its files.
    """
    splits, state = os.path.join(folder, "dataset_dict.json"), os.path.join(folder, "state.json")
    try:
        if os.path.isfile(splits):
            with open(splits, "rb") as file:
                names = json.load(file)["splits"]
            ways = ", ".join(os.path.join(folder, name) for name in names)
            raise UserError(f"{key}: {folder} holds the splits {names}; give the folder of one: {ways}")
        with open(state, "rb") as file:
            content = json.load(file)
        if any(content.get(name) for name in ("_indices_files", "_indices_data_files")):
            raise UserError(
                f"{key}: the rows of {folder} are chosen by an indices mapping, which a plain reading of its files "
                "would ignore; save it again with `dataset.flatten_indices().save_to_disk(FOLDER)`"
            )
        found = [os.path.join(folder, entry["filename"]) for entry in content["_data_files"]]
    except FileNotFoundError:
        raise UserError(
            f"{key}: {folder} is a folder, but not one of `Dataset.save_to_disk` (it has no state.json); for plain "
            f"Arrow files write {os.path.join(folder, '*.arrow')!r}"
        ) from None
    except UserError:
        raise
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{key}: state.json or dataset_dict.json of {folder} is damaged; save the dataset again"
        ) from None
    if missing := [path for path in found if not os.path.isfile(path)]:
        raise UserError(
            f"{key}: {folder} lacks its file {missing[0]}; copy the whole folder, or save the dataset again"
        )
    return found
