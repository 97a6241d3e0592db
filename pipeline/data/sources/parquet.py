"""`type: parquet`: one document a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.data.sources.compression import MAGIC, StreamError
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor
from pipeline.data.sources.records import Document, Piece
from pipeline.data.sources.tables import TableReader

if TYPE_CHECKING:
    import pyarrow as pa

EXPANSION = 3
"""As `COMPRESSED_EXPANSION` of `reader`."""
_ENDS = (b"PAR1", b"PARE")


class ParquetReader(TableReader):
    """One document a row, of row groups whose first byte lies in the piece."""

    type = "parquet"
    magic = b"PAR1"
    title = "Parquet"

    def schema(self, file: File) -> pa.Schema:
        """Schema of a file, from its footer."""
        from pipeline.data.sources.parquet_groups import parquet_schema

        return parquet_schema(file, self.remote)

    def expected_text_bytes(self, file: File) -> int:
        """About how much text a file holds: pages are compressed."""
        return file.size * EXPANSION

    def suspects(self, files: Sequence[File]) -> Sequence[File]:
        """All files: each ends with a footer."""
        return files

    def check_ends(self, file: File) -> None:
        """Look for the mark of the footer."""
        with file.open_to_look(self.remote) as raw:
            raw.seek(max(0, file.size - 4))
            if raw.read(4) in _ENDS:
                return
            raw.seek(0)
            head = raw.read(8) or b""
        kinds = [f"; it is {name}-compressed: decompress it" for name in MAGIC if head.startswith(MAGIC[name])]
        raise StreamError("damaged Parquet file", "it does not end with a footer" + "".join(kinds), 0)

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """The rows of a piece."""
        from pipeline.data.sources.parquet_groups import read_parquet

        return read_parquet(cursor, piece)
