"""Base class of the formats of tables."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pipeline.common.storage import naming
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import Piece

if TYPE_CHECKING:
    import pyarrow as pa

_THREADS = 16


class TableReader(Reader):
    """One document a row; a byte range has the row groups or record batches that begin in it."""

    numbering = "row"
    # They are not read to their ends. Where row groups are large, most smaller pieces would be empty.
    sample_bytes = 2**26

    @abstractmethod
    def schema(self, file: File) -> pa.Schema:
        """The columns of a file."""

    def check_columns(self, files: Sequence[File], *, every: bool = False) -> None:
        """Look for the columns in the schemas of the files."""
        from pipeline.data.sources import table_rows

        def is_sound(file: File) -> bool:
            try:
                table_rows.check_schema(self.schema(file), self, file.path)
            except table_rows.DAMAGED as error:
                with naming(file.path):
                    table_rows.raise_if_machine(error)  # reading it will say what else is wrong
                return False
            return True

        if not every:
            any(map(is_sound, files))
            return
        with ThreadPoolExecutor(_THREADS) as pool:  # a network file system takes long for each
            try:
                deque(pool.map(is_sound, files), maxlen=0)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def pieces(self, file: File, size: int) -> Iterator[Piece]:
        """Byte ranges; an empty file is a piece, and damaged."""
        return self.ranges(file, size, chunked=True) if file.size else iter((Piece(file, 0, 0, chunked=True),))

    def suspects(self, files: Sequence[File]) -> Sequence[File]:
        """None, unless the format says where to look."""
        return ()
