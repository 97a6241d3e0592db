"""JSON files with a hash of their own, in which any changed byte is found."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson
import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError

SEAL = "seal"
"""Key of the xxh3-128 of the file without this key, as `storage.json_bytes` writes it."""


def put_sealed(final: Path, value: dict[str, Any]) -> None:
    """`storage.put_json` of an object, with its seal."""
    storage.put(final, sealed_bytes(value))


def sealed_bytes(value: dict[str, Any]) -> bytes:
    """The file of an object. A seal that is there is replaced."""
    without = {key: each for key, each in value.items() if key != SEAL}
    return storage.json_bytes(without | {SEAL: xxhash.xxh3_128_hexdigest(storage.json_bytes(without))})


def is_broken(value: dict[str, Any]) -> bool:
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
