"""The formats that a source can have, by the name that its `type` gives.

`SourceConfig.type` lists the same names: the config is read without the data pipeline.
"""

from __future__ import annotations

from pipeline.data.sources.arrow import ArrowReader
from pipeline.data.sources.delimited import CsvReader, TsvReader
from pipeline.data.sources.hub import HubReader
from pipeline.data.sources.jsonl import JsonlReader
from pipeline.data.sources.parquet import ParquetReader
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.text import TextReader
from pipeline.data.sources.web.warc import WarcReader

SOURCE_FORMATS: dict[str, type[Reader]] = {
    each.type: each
    for each in (TextReader, JsonlReader, CsvReader, TsvReader, WarcReader, ParquetReader, ArrowReader, HubReader)
}
