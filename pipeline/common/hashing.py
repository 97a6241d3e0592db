"""Hashes and keys, equal on every machine and in every run; and JSON files with a hash of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError

CHUNK_BYTES = 2**24
"""Files are checked and copied in pieces of this size."""
_HASHED_AT_ONCE = 2**20
"""Bytes; so few are still in the processor's cache when they are hashed."""
SEAL = "seal"
"""Key of the xxh3-128 of the file without this key, as `storage.json_bytes` writes it."""


def key(*parts: str | int) -> int:
    """A 64-bit key from a seed and what it is for, like `key(seed, "documents", unit_identity)`."""
    return xxhash.xxh3_64_intdigest(orjson.dumps(parts))


def value_hash(value: Any) -> str:
    """xxh3-128 of a JSON value, independent of the order of keys."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def file_hash(path: Path, advance: Callable[[int], None] = lambda size: None, *, symlinks: bool = True) -> int:
    """xxh3-64 of a regular file's bytes.

    Args:
        path: of the file.
        advance: told how many bytes have been read, piece by piece.
        symlinks: as for `storage.open_regular`.
    """
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_HASHED_AT_ONCE))
    with storage.open_regular(path, symlinks=symlinks) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            advance(size)
    return digest.intdigest()


def mix(rows: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Keyed numbers of 64 bits: the finalizer of SplitMix64 (Steele, Lea, Flood 2014) of row + key.

    A bijection of 64 bits for every key, so different rows never tie, and no library's random generator is in it.
    """
    z = rows + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keyed_order(count: int, key: int) -> npt.NDArray[np.int64]:
    """A permutation of [0, count) that depends on `key` alone: the numbers sorted by `mix`.

    Returns:
        int64 of shape (count,): what stands at each place.
    """
    return np.argsort(mix(np.arange(count, dtype=np.uint64), key)).astype(np.int64, copy=False)


def put_sealed(final: Path, value: dict[str, Any]) -> None:
    """`storage.put_json` of an object, with its seal."""
    storage.put(final, sealed_bytes(value))


def sealed_bytes(value: dict[str, Any]) -> bytes:
    """The file of an object. A seal that is there is replaced."""
    without = {key: each for key, each in value.items() if key != SEAL}
    return storage.json_bytes(without | {SEAL: xxhash.xxh3_128_hexdigest(storage.json_bytes(without))})


def has_broken_seal(value: dict[str, Any]) -> bool:
    """Tell whether an object has a seal that is not its own."""
    return SEAL in value and orjson.loads(sealed_bytes(value))[SEAL] != value[SEAL]


def check_seal(path: Path, data: bytes, keys: Collection[str]) -> bool:
    """Check every byte of a file against its seal; returns whether it has one.

    Args:
        path: of the file, for messages.
        data: its bytes.
        keys: that a file without a seal, of an earlier version, may have. Another one may be its seal, changed.

    Raises:
        UserError: it was changed after it was written.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: it is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it is not an object")
    if SEAL not in value:
        if more := sorted(value.keys() - set(keys)):
            raise UserError(f"{path} was changed after it was written: it has the key {storage.shown(ascii(more[0]))}")
        return False
    if data != sealed_bytes(value):
        raise UserError(f"{path} was changed after it was written: its bytes differ from its own hash ({SEAL})")
    return True
