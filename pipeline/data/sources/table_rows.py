"""Rows of tables as documents.

This module imports pyarrow, which takes a third of a second: import it where it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.common.errors import UserError
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import (
    BAD_WEIGHT,
    EMPTY,
    NOT_UTF8,
    NULL_TEXT,
    ROW_BYTES,
    Document,
    Piece,
    RecordKeys,
    UnusableRecord,
    bad_weight,
    loss_weight,
    metadata_json,
)
from pipeline.data.sources.templates.template import RecordTemplate

BATCH_BYTES = 2**22
"""Bytes that are turned into documents at a time."""
BATCH_ROWS = 1024
"""Maximum number of rows; a dictionary of long values says nothing about the size of the text in its rows."""
HELD_BYTES = 2**24
"""Bytes that are held at a time where values repeat, and that a page may ask for however small it is on disk."""
_LENGTH = struct.Struct("<q")

DAMAGED = (
    *(pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowIndexError, pa.ArrowTypeError, pa.ArrowKeyError),
    *(OSError, UnicodeDecodeError),
)
"""Errors of pyarrow about a file that is not what it should be."""
_PARTITION = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class TableColumns:
    """Columns that are read of a table.

    Attributes:
        own: columns of the table itself.
        nested: (key, its parts) of fields of structs.
        partitions: (key, value) of the file.
    """

    own: tuple[str, ...]
    nested: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partitions: tuple[tuple[str, str | None], ...] = ()

    @property
    def leaves(self) -> list[str]:
        """Names by which Parquet selects them: of a struct only the field that is wanted."""
        return [*self.own, *(key for key, _ in self.nested)]

    @property
    def top(self) -> list[str]:
        """Columns of the table that hold them."""
        return list(dict.fromkeys([*self.own, *(parts[0] for _, parts in self.nested)]))

    def of_keys(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch with a column for each key, which has its name.

        Raises:
            pa.ArrowInvalid: a buffer of it is shorter than its rows take.
        """
        if not self.nested and not self.partitions:
            return batch
        batch.validate()
        found = {name: batch.column(name) for name in self.own}
        found |= {key: pc.struct_field(batch.column(parts[0]), list(parts[1:])) for key, parts in self.nested}
        found |= {key: _constant(value, len(batch)) for key, value in self.partitions}
        return pa.RecordBatch.from_arrays(list(found.values()), names=list(found))


def columns_of(schema: pa.Schema, keys: Iterable[str], more: RecordKeys) -> tuple[TableColumns, dict[str, Any]]:
    """The columns of a table for keys of the run file, and their types. A key that there is no column for is missing.

    Args:
        schema: of the table.
        keys: of the run file.
        more: other places of keys.
    """
    kinds: dict[str, Any] = {name: schema.field(name).type for name in keys if _is_once(schema, name)}
    own = tuple(kinds)
    nested = []
    for key, parts in more.nested:
        if key not in schema.names and (kind := _field_type(schema, parts)) is not None:
            kinds[key] = kind
            nested.append((key, parts))
    given = tuple(each for each in more.partitions if each[0] not in schema.names and each[0] not in kinds)
    kinds |= dict.fromkeys((key for key, _ in given), _PARTITION)
    return TableColumns(own, tuple(nested), given), kinds


def _is_once(schema: pa.Schema, name: str) -> bool:
    return len(schema.get_all_field_indices(name)) == 1


def _field_type(schema: pa.Schema, parts: tuple[str, ...]) -> Any:
    """Type of a field inside of structs; None if there is none."""
    if not _is_once(schema, parts[0]):
        return None
    kind = schema.field(parts[0]).type
    for part in parts[1:]:
        if not pa.types.is_struct(kind) or len(kind.get_all_field_indices(part)) != 1:
            return None
        kind = kind.field(part).type
    return kind


def _constant(value: str | None, rows: int) -> pa.Array:
    if value is None:
        return pa.nulls(rows, _PARTITION)
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))


def check_schema(schema: pa.Schema, reader: Reader, path: str) -> TableColumns:
    """The columns to read.

    Raises:
        UserError: the text or a metadata column is missing, or the text column cannot hold text.
    """
    text_key, weights = reader.text_config_key, reader.weight_keys
    wanted_keys = dict.fromkeys([*reader.text_keys, reader.id_key, *reader.metadata, *weights])
    found, kinds = columns_of(schema, wanted_keys, reader.record_keys(path))
    for key, columns in ((text_key, reader.text_keys), ("metadata", reader.metadata), ("weight_key", weights)):
        for name in columns:
            if name not in schema.names and name not in kinds:
                there = ", ".join(map(repr, schema.names)) or "none"
                raise UserError(
                    f"{path} has no column {name!r}; its columns are {there}: set {key} to one of them, or leave the "
                    "file out with exclude"
                )
            if len(schema.get_all_field_indices(name)) > 1:
                raise UserError(f"{path} has several columns named {name!r}; rename all but one")
    for name in reader.text_keys:
        kind = kinds[name]
        if not _gives_text(name, kind, reader) and not pa.types.is_null(kind):
            nested = reader.template is not None and reader.template.nested
            what, wanted = ("lists of messages", "lists") if nested else ("text", "strings")
            raise UserError(
                f"{path}: column {name!r} is of type {kind}, not {what}; set {text_key} to a column of {wanted}, "
                f"or leave the file out with exclude. Its columns are {', '.join(map(repr, schema.names))}"
            )
    if reader.template is not None and reader.template.has_calls:
        for name in reader.text_keys:
            if _has_merged_keys(kinds[name], is_tools=name == reader.template.tools_key):
                raise UserError(
                    f"{path}: column {name!r} has arguments of tool calls, or tools, as structs, which have the keys "
                    "of all rows; write them as JSON text"
                )
    for key, names in (
        ("metadata", reader.metadata),
        ("weight_key", weights),
        (text_key, reader.text_keys if reader.template else ()),
    ):
        for name in names:
            if _shares(kinds[name]):
                raise UserError(
                    f"{path}: column {name!r} is of type {kinds[name]}, which is not kept: its values "
                    f"may share bytes, so their size is unknown. Leave it out of {key}, or write it as another type"
                )
    return found


def _gives_text(name: str, kind: pa.DataType, reader: Reader) -> bool:
    """Tell whether the text of a document can be made from a column."""
    if reader.template is None:
        return _holds_text(kind)
    if reader.template.nested:
        is_text = name in reader.template.either_keys and _holds_text(kind)
        return is_text or _is_list(kind)
    return _holds_text(kind) or pa.types.is_integer(kind)


def _is_list(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _has_merged_keys(kind: pa.DataType, *, is_tools: bool, name: str = "") -> bool:
    """Tell whether arguments of tool calls, or tools, are structs: each then has the keys of all rows."""
    if _is_list(kind):
        return _has_merged_keys(kind.value_type, is_tools=is_tools, name=name)
    if not pa.types.is_struct(kind):
        return False
    if is_tools or name in ("arguments", "parameters"):
        return True
    fields = (kind.field(number) for number in range(kind.num_fields))
    return any(_has_merged_keys(field.type, is_tools=False, name=field.name) for field in fields)


def rows(
    cursor: Cursor, piece: Piece, batch: pa.RecordBatch, first: int, bytes_read: tuple[int, int], trusted: bool = True
) -> Iterator[Document]:
    """The rows of a batch as documents, without those that were read before.

    Args:
        cursor: what was read.
        piece: where they lie.
        batch: the columns.
        first: row of the file that the batch begins with.
        bytes_read: of the cursor, before and after the batch.
        trusted: whether offsets in the batch are sound; else they are checked.
    """
    reader, unit, number, kept = cursor.reader, cursor.unit.index, cursor.piece, cursor.kept
    update, length, name = cursor.digest.update, _LENGTH.pack, piece.file.name
    own_ids, weight_key = reader.id_key in batch.schema.names, reader.weight_key
    others = kept if weight_key is None else (*kept, weight_key)
    (low, high), count = bytes_read, len(batch)
    held = max(batch.get_total_buffer_size(), count * max(map(_longest, batch.columns), default=0), 1)
    step = max(1, min(BATCH_ROWS, BATCH_BYTES * count // held))
    for begin in range(0, count, step):
        skip = max(0, cursor.offset - first - begin)
        if skip >= step:
            continue
        part = batch.slice(begin, step)
        if not trusted:
            _check_offsets(part)
        wide = dict.fromkeys((*others, *(reader.text_keys if reader.template else ())))
        if nested := sum(_expanded(part.column(key)) for key in wide if part.schema.field(key).type.num_fields):
            cursor.check_expansion(piece, nested, "lists and structs of one batch of rows take", free=HELD_BYTES)
        texts = text_bytes(part.column(reader.text_key)) if reader.template is None else [None] * len(part)
        made = None if reader.template is None else _Rendered(part, reader.template)
        spans = None
        ids = values(part.column(reader.id_key)) if own_ids else None
        metadata_values = [(key, values(part.column(key))) for key in kept]
        weights = None if weight_key is None else values(part.column(weight_key))
        for place in range(skip, len(part)):
            row, null = first + begin + place, (NULL_TEXT, "")
            raw, texts[place] = texts[place], None  # one text at a time is held twice
            if made is not None:
                raw, spans, null = made.text(place)
            update(length(-1 if raw is None else len(raw)))
            size = 0
            if raw is not None:
                update(raw)
                size = len(raw)
            own = ""
            if ids is not None:
                found = ids[place]
                own = found if type(found) is str else str(found) if type(found) is int else ""
                encoded = own.encode("utf-8", "replace")
                update(length(len(encoded)))
                update(encoded)
                size += len(encoded)
            metadata = None
            if kept:
                metadata = metadata_json({key: column[place] for key, column in metadata_values})
                update(length(len(metadata)))
                update(metadata)
                size += len(metadata)
            weight = None
            if weights is not None:
                weight = loss_weight(weights[place])
                written = metadata_json({"weight": weights[place]})
                update(length(len(written)))
                update(written)
                size += len(written)
            cursor.expand(piece, size + ROW_BYTES)
            cursor.offset = row + 1
            cursor.input_bytes += size
            cursor.bytes_read = low + (high - low) * (begin + place + 1) // count
            if raw is None:
                yield cursor.rejected(None, row, *null)
                continue
            if len(raw) > reader.max_record_bytes:
                yield cursor.rejected(None, row, reader.too_long, f"{len(raw)} bytes", raw)
                continue
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                around = raw[max(0, error.start - 20) : error.start + 20]
                yield cursor.rejected(
                    None, row, NOT_UTF8, f"byte 0x{raw[error.start]:02x} at {error.start} of the text", around
                )
                continue
            if weight_key is not None and weights is not None and weight is None:
                yield cursor.rejected(None, row, BAD_WEIGHT, bad_weight(weight_key, weights[place]), raw)
                continue
            place_in_unit = cursor.row
            cursor.row = place_in_unit + 1
            reason = None if text else EMPTY
            document = Document(
                text, own or f"{name}#{row}", unit, place_in_unit, number, None, row, reason, "", metadata
            )
            if weight is not None:
                document.weight = weight
            document.spans = spans
            yield document


class _Rendered:
    """Texts that a template makes of the rows of a batch, each when it is asked for: values may repeat."""

    def __init__(self, batch: pa.RecordBatch, template: RecordTemplate) -> None:
        self._template = template
        self._columns = {key: _strictly(batch.column(key)) for key in template.keys}

    def text(self, row: int) -> tuple[bytes | None, tuple[tuple[int, int], ...] | None, tuple[str, str]]:
        """The text and what of it is trained on; or None twice and (one of a few reasons, the detail)."""
        try:
            text, spans = self._template.render({key: value(row) for key, value in self._columns.items()})
            return text.encode(), spans, ("", "")
        except UnusableRecord as unusable:
            return None, None, (unusable.reason, unusable.detail)
        except UnicodeError as error:
            return None, None, (NOT_UTF8, one_line(error))


def _strictly(column: pa.Array) -> Callable[[int], Any]:
    """The value of a row of a column; asking for one that is not UTF-8 raises a UnicodeDecodeError."""
    if not _holds_text(column.type):
        return lambda row: column[row].as_py()
    raw = text_bytes(column)

    def value(row: int) -> str | None:
        found = raw[row]
        return None if found is None else found.decode()

    return value


def _holds_text(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    return any(getattr(pa.types, check)(kind) for check in checks)


def text_bytes(column: pa.Array) -> list[bytes | None]:
    """The values of a column of strings, as they are: nobody has checked that they are UTF-8."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        return _of_dictionary(text_bytes, column)
    result: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return result


def _of_dictionary(read: Callable[[pa.Array], list[Any]], column: pa.DictionaryArray) -> list[Any]:
    """Results of `read` for the values that are used, each once: where they repeat they are the same object."""
    used, places = np.unique(np.asarray(column.indices.fill_null(0)), return_inverse=True)
    if not len(column.dictionary):
        return [None] * len(column)
    found = read(column.dictionary.take(pa.array(used)))
    there = column.indices.is_valid().to_pylist()
    return [found[place] if valid else None for place, valid in zip(places.tolist(), there, strict=True)]


def _longest(column: pa.Array) -> int:
    """Bytes of the longest value of a column of views, which may share their bytes; 0 for others."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary
    if not len(column):
        return 0
    if not pa.types.is_string_view(column.type) and not pa.types.is_binary_view(column.type):
        return 0
    data = column.buffers()[1]
    views = np.frombuffer(data, np.int32, data.size // 16 * 4).reshape(-1, 4)
    return int(views[column.offset : column.offset + len(column), 0].max(initial=0))


def _shares(kind: pa.DataType, *, inside: bool = False) -> bool:
    """Tell whether values of a type may be longer together than the bytes that hold them, and cannot be measured."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if inside and (pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)):
        return True
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind) or pa.types.is_run_end_encoded(kind):
        return True
    if pa.types.is_dictionary(kind):
        return _shares(kind.value_type, inside=True)
    return any(_shares(kind.field(number).type, inside=True) for number in range(kind.num_fields))


def _expanded(column: pa.Array) -> int:
    """Bytes that the values of a column have when each is written out, also those of dictionaries inside of others."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind = column.type
    if pa.types.is_dictionary(kind):
        if not _holds_text(kind):
            return int(column.nbytes)
        lengths = pc.binary_length(column.dictionary.cast(pa.large_binary()))
        return int(pc.sum(lengths.take(column.indices.drop_null())).as_py() or 0)
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        return sum(_expanded(column.field(number)) for number in range(kind.num_fields))
    if pa.types.is_map(kind):
        return _expanded(column.keys) + _expanded(column.items)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _expanded(column.flatten())
    return max(int(column.nbytes), 16 * len(column))  # None takes place in a list, too


def values(column: pa.Array) -> list[Any]:
    """The values of a column of ids or metadata; what Python cannot hold, or is not UTF-8, as near as it gets."""
    if pa.types.is_dictionary(column.type):
        return _of_dictionary(values, column)
    if _holds_text(column.type):
        return [None if raw is None else raw.decode("utf-8", "backslashreplace") for raw in text_bytes(column)]
    try:
        result: list[Any] = column.to_pylist()
        return result
    except (ValueError, OverflowError, TypeError, ImportError):
        pass
    try:
        # A column in Arrow's own words.
        return [None if raw is None else raw.decode() for raw in text_bytes(column.cast(pa.string()))]
    except DAMAGED:
        return [None] * len(column)


def _check_offsets(batch: pa.RecordBatch) -> None:
    """Look whether the values of a batch lie in its buffers: following a wrong offset would end the process."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            # Strings are looked at value by value, and that they are not UTF-8 is the last thing to be found. In nested
            # columns it hides what else is wrong.
            simple = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view
            if "UTF8" not in str(error) or not any(check(column.type) for check in simple):
                raise


def damaged_file(cursor: Cursor, piece: Piece, reason: str, error: Exception) -> None:
    """Take note of a file that cannot be opened, once however many pieces it was cut into."""
    raise_if_machine(error)
    cursor.bytes_read += piece.end - piece.start
    cursor.ended = True
    if piece.start == 0:
        cursor.damaged(reason, one_line(error), piece.file.size)


def raise_if_machine(error: Exception) -> None:
    """Raise what says nothing about the content of a file: a disk that fails, a file that may not be read."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def one_line(error: Exception) -> str:
    """A message of pyarrow, without the addresses that follow."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
