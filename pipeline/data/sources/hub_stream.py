"""Datasets of the Hugging Face hub, or local ones, streamed shard by shard through `datasets`.

Nothing but data is read: no code of a dataset is ever run. This module imports `datasets`, which takes more than a
second: import it where it is used.
"""

from __future__ import annotations

import dataclasses
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import datasets
import pyarrow as pa

from pipeline.common.errors import UserError
from pipeline.data.sources.compression import StreamError, compression_of, open_stream
from pipeline.data.sources.globs import File
from pipeline.data.sources.parquet_groups import read_parquet
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import HUB_PREFIX, Document, Hub, Piece
from pipeline.data.sources.table_rows import check_schema, one_line, rows

_BATCH_ROWS = 64
"""Rows that are asked for at a time."""
_COMMIT = re.compile("[0-9a-f]{40}")
_SHARD = re.compile(r"(\d+)-of-(\d+)$")
_BUILDERS = ("arrow", "csv", "json", "parquet", "text", "webdataset", "xml")
"""Names that stand for a way to read `data_files`, and for no dataset."""
_DAMAGED = (
    *(pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, TypeError, EOFError),
    *(gzip.BadGzipFile, zlib.error, lzma.LZMAError, datasets.exceptions.DatasetGenerationError),
)
"""Errors of `datasets` about the content of a shard. Errors of the network are others."""


def hub_files(hub: Hub) -> tuple[Hub, list[File]]:
    """The dataset with its revision pinned to a commit, and its shards as files.

    Shards that are files on this machine have their sizes and times. Those on the hub have size 1, which is unknown.

    Raises:
        UserError: there is no such dataset, it is private, or the hub cannot be reached; it says what to do.
    """
    _refuse(hub)
    hub = dataclasses.replace(hub, revision=_commit(hub))
    config = _builder(hub).config
    count = _stream(hub, ()).num_shards
    paths = [str(path) for path in (config.data_files or {}).get(hub.split, ())]
    result = []
    for shard in range(count):
        path, size, time = f"{HUB_PREFIX}{hub.path}@{hub.revision}/{hub.split}/{shard}", 1, 0
        if len(paths) == count:
            path = paths[shard] if "://" in paths[shard] else os.path.abspath(paths[shard])
            if os.path.isfile(path):
                stat = os.stat(path)
                size, time = max(stat.st_size, 1), stat.st_mtime_ns
            elif not path.startswith(HUB_PREFIX):
                path = f"{HUB_PREFIX}{path}"
        result.append(File(f"{config.name}/{hub.split}/{shard:05d}-of-{count:05d}", path, size, time))
    return hub, result


def check(hub: Hub, reader: Reader) -> None:
    """Look for the columns, if the dataset says which it has.

    Raises:
        UserError: a column is missing or cannot hold text.
    """
    features = _stream(hub, ()).features
    if features is not None:
        check_schema(features.arrow_schema, reader, hub.path)


def read_shard(cursor: Cursor, piece: Piece, hub: Hub) -> Iterator[Document]:
    """One document a row of a shard. Rows read before are streamed again and dropped."""
    reader, found = cursor.reader, _SHARD.search(piece.file.name)
    assert found is not None
    if os.path.isfile(piece.file.path) and _is_parquet(_builder(hub)):
        yield from read_parquet(cursor, piece)  # the same rows, but `datasets` holds whole row groups
        return
    if cursor.reader.verify and os.path.isfile(piece.file.path) and compression_of(piece.file.path):
        try:
            # `datasets` would give what lies before damage.
            with open_stream(piece.file.path, beat=cursor.beat, max_window=cursor.reader.max_zstd_window) as whole:
                while whole.read1():
                    pass
        except StreamError as error:
            cursor.give_up(piece, error.reason, error.detail)
            return
    shard, count = int(found[1]), int(found[2])
    wanted = (*reader.text_keys, reader.id_key, *reader.metadata, *reader.weight_keys)
    stream = _stream(hub, (*wanted, *(key.partition(".")[0] for key in wanted)))
    if stream.num_shards != count:
        raise UserError(f"{hub.path} had {count} shards when the plan was made, and {stream.num_shards} now")
    if count > 1:
        stream = stream.shard(num_shards=count, index=shard)
    base, span, begun = cursor.bytes_read, piece.end - piece.start, cursor.input_bytes
    first = 0
    tables = iter(stream.with_format("arrow").iter(batch_size=_BATCH_ROWS))
    while True:
        try:
            table = next(tables, None)
        except _DAMAGED as error:
            if "Cast" in type(error).__name__ or "Couldn't cast" in str(error) or "No match for FieldRef" in str(error):
                raise UserError(
                    f"{piece.file.path}: its columns are not those of the other files of {hub.path} "
                    f"({one_line(error)}); choose files of one kind with hub.data_files or hub.name"
                ) from error
            cursor.ended = True
            left = max(0, base + span - cursor.bytes_read)
            cursor.damaged("damaged shard", f"from row {first} on: {one_line(error)}", left)
            break
        if table is None:
            break
        columns = check_schema(table.schema, reader, piece.file.path)
        for batch in table.select(columns.top).combine_chunks().to_batches():
            # How much of the shard that is, nobody knows; it is at most all of it.
            bytes_read = min(base + span, max(cursor.bytes_read, base + cursor.input_bytes - begun))
            yield from rows(cursor, piece, columns.of_keys(batch), first, (bytes_read, bytes_read))
            first += len(batch)
    cursor.bytes_read = base + span


def _refuse(hub: Hub) -> None:
    """Refuse what `datasets` would take for all files of the working folder, or for plain JSON."""
    if hub.path in _BUILDERS and not hub.data_files:
        raise UserError(
            f"hub.path {hub.path!r} is a reader of files, not a dataset: name the files with hub.data_files"
        )
    if any(os.path.isfile(os.path.join(hub.path, name)) for name in ("state.json", "dataset_dict.json")):
        raise UserError(f"hub.path {hub.path} was written by `save_to_disk`: use type: arrow with this folder in paths")


def _is_parquet(builder: Any) -> bool:
    return hasattr(builder.config, "columns") and hasattr(builder.config, "batch_size")


def _commit(hub: Hub) -> str | None:
    """The commit that a revision of a dataset on the hub is by now; None for local ones."""
    if hub.path in _BUILDERS or os.path.exists(hub.path):
        return None
    if hub.revision is not None and _COMMIT.fullmatch(hub.revision):
        return hub.revision
    import huggingface_hub

    try:
        return huggingface_hub.HfApi().dataset_info(hub.path, revision=hub.revision).sha
    except Exception as error:  # whatever the library or its transport raises
        raise _failed(hub, error) from error


@lru_cache(maxsize=4)
def _builder(hub: Hub) -> Any:
    """The builder of a dataset, which knows its files. Kept, because on the hub it takes several requests."""
    files = {hub.split: list(hub.data_files)} if hub.data_files else None
    try:
        return datasets.load_dataset_builder(hub.path, hub.name, revision=hub.revision, data_files=files)
    except Exception as error:
        raise _failed(hub, error) from error


@lru_cache(maxsize=8)
def _stream(hub: Hub, wanted: tuple[str, ...]) -> Any:
    """A dataset as a stream of the columns that are wanted and there, or of all."""
    builder = _builder(hub)
    try:
        stream = builder.as_streaming_dataset(split=hub.split)
        columns = [name for name in dict.fromkeys(wanted) if name in (stream.column_names or ())]
        if not columns:
            return stream
        if _is_parquet(builder):
            # Other columns are not even fetched. A builder of its own: what it knows by then is bound to the columns.
            builder = _builder.__wrapped__(hub)
            builder.config.columns, builder.config.batch_size = columns, _BATCH_ROWS
            stream = builder.as_streaming_dataset(split=hub.split)
        return stream.select_columns(columns)
    except Exception as error:
        raise _failed(hub, error) from error


def _failed(hub: Hub, error: Exception) -> UserError:
    """Error about a dataset that cannot be opened, with what to do."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    kinds |= {kind.__name__ for kind in type(error.__cause__).__mro__} if error.__cause__ else set()
    message = " ".join(str(error).split())[:300]
    if "GatedRepoError" in kinds or "gated" in message:
        advice = f"accept its terms at https://huggingface.co/datasets/{hub.path}, then log in with `hf auth login`"
    elif kinds & {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "Timeout", "TimeoutException"}:
        advice = (
            "this machine cannot reach the hub, or HF_HUB_OFFLINE is set; try again where it can, or fetch it there "
            f"with `hf download --repo-type dataset {hub.path} --local-dir FOLDER` and set hub.path to FOLDER"
        )
    elif kinds & {"RevisionNotFoundError"}:
        advice = f"check hub.revision {hub.revision!r}"
    elif kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        advice = "check the spelling of hub.path; if the dataset is private, log in with `hf auth login`"
    elif "scripts are no longer supported" in message or "trust_remote_code" in message:
        advice = (
            "its data comes from a script, and scripts are never run; many such datasets have a copy as Parquet: "
            "hub.revision refs/convert/parquet"
        )
    else:
        advice = "check hub.path, hub.name, hub.split and hub.data_files"
    return UserError(f"hub dataset {hub.path!r} (split {hub.split!r}): {type(error).__name__}: {message}; {advice}")
