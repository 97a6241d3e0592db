"""Safetensors files, written tensor by tensor, so that a model need not fit into memory.

The format (huggingface/safetensors): the length of the header as u64, little-endian; the header, JSON, that has dtype,
shape and place of each tensor; the tensors' bytes one after the other. Several files have an index beside them, as
Hugging Face writes it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
import xxhash
from torch import Tensor

from pipeline.common import links, storage
from pipeline.train.checkpoint.committed import Files, record_of
from pipeline.train.checkpoint.tensors import Stored, groups

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of elements by their names in the format."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def split_into_files(tensors: Mapping[str, Stored], max_bytes: int | None) -> dict[str, dict[str, Stored]]:
    """File name -> tensors in it, in order. A tensor that is larger than a file may be has one of its own."""
    shards = list(groups(tensors, math.inf if max_bytes is None else max_bytes))
    if len(shards) < 2:
        return {SINGLE: dict(tensors)}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def write_weight_files(
    folder: Path,
    shards: Mapping[str, Mapping[str, Stored]],
    read: Callable[[Mapping[str, Stored]], Iterable[tuple[str, Tensor]]],
    advance: Callable[[int], None],
) -> Files:
    """Write the files of a model; returns size and hash of each.

    Args:
        folder: where to.
        shards: from `split_into_files`.
        read: gives the tensors that it is asked for, in that order; a large one as several of its rows, in order.
        advance: gets the bytes as they are written.
    """
    files: Files = {}
    for name, tensors in shards.items():
        # Large elements first, so that each tensor begins at a multiple of its element's size.
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
        files[name] = _write(folder / name, ordered, read(ordered), advance)
    if len(shards) > 1:
        total = sum(each.bytes for tensors in shards.values() for each in tensors.values())
        places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        storage.put_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        files[INDEX] = record_of(folder / INDEX)
    return files


def _write(
    path: Path,
    tensors: Mapping[str, Stored],
    values: Iterable[tuple[str, Tensor]],
    advance: Callable[[int], None],
) -> tuple[int, str]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, each in tensors.items():
        header[name] = {
            "dtype": _NAMES[each.dtype],
            "shape": each.shape,
            "data_offsets": (offset, offset + each.bytes),
        }
        offset += each.bytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    digest = xxhash.xxh3_64(head)
    with links.create(path) as file:
        file.write(head)
        pieces = iter(values)
        for wanted, each in tensors.items():
            missing = each.bytes
            while True:
                name, value = next(pieces)
                assert name == wanted and value.shape[1:] == each.shape[1:] and value.dtype == each.dtype, name
                body = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
                file.write(body)
                digest.update(body)
                advance(len(body))
                missing -= len(body)
                del value, body  # or it is in memory while the next ones are read
                if missing <= 0:
                    break
            assert missing == 0, name
        assert next(pieces, None) is None
        file.flush()
        os.fsync(file.fileno())
    return len(head) + offset, digest.hexdigest()
