"""The list of a checkpoint's tensors, `.metadata`, read as data: a checkpoint of a stranger must not run code.

torch's distributed checkpoint (DCP) writes that list as a pickle. To unpickle is to import what the pickle names, and
to call it. Here nothing is imported and nothing is called: names that torch writes become markers, any other name is
refused, and torch's classes are filled from the markers when all that they say has been checked.
"""

from __future__ import annotations

import gc
import io
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.checkpoint.committed import Checkpoint
from pipeline.train.checkpoint.inert_pickle import PLAIN_OPCODES, InertName, InertObject, InertUnpickler
from pipeline.train.torch_compat.checkpoint_files import Place

METADATA = ".metadata"
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DCP = "torch.distributed.checkpoint.metadata"
_CLASSES = frozenset(
    {
        (_DCP, "Metadata"),
        (_DCP, "TensorStorageMetadata"),
        (_DCP, "BytesStorageMetadata"),
        (_DCP, "ChunkStorageMetadata"),
        (_DCP, "TensorProperties"),
        (_DCP, "MetadataIndex"),
        (_DCP, "StorageMeta"),
        (_DCP, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # A foreign list may say which process planned to write what; none of it is needed.
        ("torch.distributed.checkpoint.planner", "SavePlan"),
        ("torch.distributed.checkpoint.planner", "WriteItem"),
        ("torch.distributed.checkpoint.planner", "WriteItemType"),
        ("torch.distributed.checkpoint.planner", "TensorWriteData"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # its name in Python 3.13
        ("builtins", "getattr"),  # of _MEM_FORMAT_ENCODING: how Python 3.11.0 to 3.11.4 pickle a value of an enum
    }
)
"""Classes that torch 2.11 to 2.15 names in a list of tensors, besides the types of their elements."""
_MOST_DIMENSIONS = 64
_LARGEST = 2**30
"""Bytes of a list: some millions of pieces."""
_ALLOWANCE = 2**20
"""A list may be larger by this than the tensors that it lists, each piece of which takes a kilobyte or more."""


class _Forbidden(Exception):
    """A name that no list of tensors has."""


class _Unpickler(InertUnpickler):
    """Refuses what no list of tensors has."""

    dispatch: ClassVar[dict[int, Any]] = InertUnpickler.operations(PLAIN_OPCODES)

    def find_class(self, module: str, name: str) -> Any:
        """The name of a class, or a type of elements."""
        if (module, name) in _CLASSES:
            return InertName(name)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise _Forbidden(storage.shown(f"{module}.{name}"))

    def check_call(self, kind: InertName, arguments: Any) -> None:
        """See `InertUnpickler`."""
        if kind == "getattr" and not _is_value_of_enum(arguments):
            raise _Forbidden("builtins.getattr")

    def set_item(self, target: Any, key: Any, value: Any) -> None:
        """See `InertUnpickler`."""
        if type(target) is not dict or type(key) not in (str, InertObject):
            raise ValueError("it has a key that is not allowed")
        target[key] = value


def _is_value_of_enum(arguments: Any) -> bool:
    """True for the arguments of `getattr` in the pickle of a memory format."""
    if type(arguments) is not tuple or len(arguments) != 2:
        return False
    enum, name = arguments
    return type(enum) is InertName and enum == "_MEM_FORMAT_ENCODING" and type(name) is str


def read_metadata(checkpoint: Checkpoint) -> Metadata:
    """The list of a checkpoint's tensors and their places, checked.

    Raises:
        UserError: it is damaged or forged: it names something that is not part of such a list, or describes tensors
            that cannot be in the files of the checkpoint.
    """
    path = checkpoint.path / METADATA
    files = checkpoint.files()
    if METADATA not in files:
        raise UserError(f"{checkpoint.path} has no list of tensors: its COMMIT does not name {METADATA}")
    size, digest = files.pop(METADATA)
    if size > largest_list(size for size, _ in files.values()):
        raise UserError(f"{path} is not read: {size:,} bytes are more than the tensors of the checkpoint can need")
    with storage.open_regular(path, symlinks=False) as file:
        data = file.read(size + 1)
    if len(data) != size or xxhash.xxh3_64_hexdigest(data) != digest:
        raise UserError(f"{path} has changed since it was written (xxh3 differs)")
    return parse_metadata(data, path, {name: size for name, (size, _) in files.items()})


def largest_list(sizes: Iterable[int]) -> int:
    """Most bytes of a list of tensors that are in files of these sizes."""
    return min(_LARGEST, sum(sizes) + _ALLOWANCE)


def parse_metadata(data: bytes, path: Path, sizes: Mapping[str, int]) -> Metadata:
    """The list of a checkpoint's tensors from the bytes of its file, checked.

    Args:
        data: all of the file.
        path: of the file, for messages.
        sizes: bytes of the other files of the checkpoint, by name.

    Raises:
        UserError: see `read_metadata`.
    """
    try:
        with _no_collection():
            return _metadata(_Unpickler(io.BytesIO(data)).load(), sizes)
    except _Forbidden as name:
        raise UserError(
            f"{path} asks for {name}, which no list of tensors needs; as a pickle it could run any code. None of it "
            "was run, and the checkpoint is not read. Do not trust its source; hashes, where there are some, show "
            "damage, not who wrote the files"
        ) from None
    except Exception as error:  # whatever a pickle can lead to that was cut or made by hand
        raise UserError(f"{path} is damaged or forged: {error or type(error).__name__}") from None


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection: to search millions of objects for cycles takes as long as to make them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _metadata(found: Any, sizes: Mapping[str, int]) -> Metadata:
    """The metadata that torch reads, from markers; a `ValueError` says what is wrong.

    Args:
        found: all of the pickle.
        sizes: bytes of the other files of the checkpoint, by name.
    """
    fields = _fields(found, "Metadata")
    entries: dict[str, STORAGE_TYPES] = {}
    bytes_of: dict[tuple[str, tuple[int, ...] | None], int] = {}
    for name, entry in _dict(fields["state_dict_metadata"]).items():
        if type(name) is not str:
            raise ValueError("a tensor's name is not a string")
        if _is(entry, "BytesStorageMetadata"):
            entries[name] = BytesStorageMetadata()
            bytes_of[name, None] = 0
            continue
        tensor = entries[name] = _tensor(name, entry)
        item = tensor.properties.dtype.itemsize
        for chunk in tensor.chunks:
            bytes_of[name, tuple(chunk.offsets)] = prod(chunk.sizes) * item
    places = dict(_places(_dict(fields["storage_data"]), sizes))
    for index, needed in bytes_of.items():
        if index not in places:
            raise ValueError(f"it has no place for {index[0]}")
        if places[index].length < needed:
            raise ValueError(f"{index[0]} needs {needed:,} bytes, but has {places[index].length:,}")
    if more := next((name for name, _ in places.keys() - bytes_of.keys()), None):
        raise ValueError(f"it has a place for {more}, but no other entry")
    _check_apart(places.values())
    return Metadata(
        state_dict_metadata=entries,
        storage_data={MetadataIndex(name, offset): place for (name, offset), place in places.items()},
        storage_meta=StorageMeta(),
    )


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    fields = _fields(entry, "TensorStorageMetadata")
    dtype, *_ = _state(fields["properties"], "TensorProperties", tuple)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the type of {name} is not a dtype of torch")
    size = _numbers(fields["size"])
    if type(fields["chunks"]) is not list:
        raise ValueError(f"{name} has no pieces")
    boxes = []
    for chunk in fields["chunks"]:
        values = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(values["offsets"]), _numbers(values["sizes"])
        if not len(offsets) == len(sizes) == len(size) or any(
            offset + length > whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"a piece of {name} lies outside of its shape")
        boxes.append((offsets, sizes))
    if not _covers(size, boxes):
        raise ValueError(f"the pieces of {name} do not cover it exactly once")
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _covers(size: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """True if boxes in a larger one fill it, and no two overlap.

    Each axis gets another scale, at random. Only where every place is covered once do the volumes add up to the whole
    one on any scale: Schwartz and Zippel (1979, 1980).
    """
    scale: defaultdict[tuple[int, int], int] = defaultdict(lambda: secrets.randbits(62))

    def volume(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        sides = enumerate(zip(offsets, sizes, strict=True))
        return prod(scale[axis, start + length] - scale[axis, start] for axis, (start, length) in sides)

    return sum(volume(offsets, sizes) for offsets, sizes in boxes) == volume((0,) * len(size), size)


def _places(
    stored: dict[Any, Any], sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Place]]:
    """(name, offsets in the tensor) of each piece, and where it is."""
    for index, info in stored.items():
        where, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, file, begin, length = where["fqn"], place["relative_path"], place["offset"], place["length"]
        if type(name) is not str or type(file) is not str:  # what else it is may take for ever to spell out
            raise ValueError("the name of a place is not a string")
        if file not in sizes:
            raise ValueError(
                f"it looks for {storage.shown(name)} in {storage.shown(file)}, which is not a file of the checkpoint"
            )
        if not _is_size(begin) or not _is_size(length) or begin + length > sizes[file]:
            raise ValueError(f"it looks for {name} outside of {file}")
        if place.get("transform_descriptors"):
            raise ValueError(f"{name} is in a format that is not supported")
        offset = where.get("offset")
        yield (name, None if offset is None else _numbers(offset)), Place(file, begin, length)


def _check_apart(places: Any) -> None:
    """A `ValueError` if two places share bytes: a small file could then stand for any amount of tensors."""
    ends: dict[str, int] = {}
    for place in sorted(places, key=lambda place: (place.relative_path, place.offset)):
        if place.length and place.offset < ends.get(place.relative_path, 0):
            raise ValueError(f"two tensors share bytes of {place.relative_path}")
        ends[place.relative_path] = place.offset + place.length


def _is(value: Any, kind: str) -> bool:
    return type(value) is InertObject and value.kind == kind


def _state(value: Any, kind: str, of: type[Any]) -> Any:
    if not _is(value, kind) or type(value.state) is not of:
        raise ValueError(f"it has something else in place of a {kind}")
    return value.state


def _fields(value: Any, kind: str) -> dict[str, Any]:
    return cast(dict[str, Any], _state(value, kind, dict))


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError("it has something else in place of a table")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """The numbers of a `torch.Size`."""
    arguments = value.arguments if _is(value, "Size") else None
    if type(arguments) is tuple and len(arguments) == 1 and type(arguments[0]) is tuple:
        numbers = arguments[0]
        if len(numbers) <= _MOST_DIMENSIONS and all(map(_is_size, numbers)):
            return numbers
    raise ValueError("it has something else in place of a size")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
