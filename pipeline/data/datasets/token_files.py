"""Token files of OLMo-core, datatrove, nanotron and MosaicML become `.bin/.idx` files, without a second tokenization.

Formats: `npy`, ids one behind the other, with or without the header of `numpy.save` (OLMo-core); `ds`, the same with
the ends of documents in `FILE.index` (datatrove, nanotron); `mds`, a folder of shards with `index.json` (MosaicML's
streaming). Where no file says where documents end, the token that ends them does.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import IndexedWriter

TokenFormat = Literal["npy", "ds", "mds"]
IdType = Literal["uint16", "uint32", "int32", "int64"]
_BLOCK = 2**20
"""Tokens that are looked at together."""
_LOOKED_AT = 2**16
"""Bytes of a file that are looked at for ids of another type."""
_MOST_REST = 2**28
"""Tokens of a document, above which the token that ends documents is taken for another one."""
_MAGIC = b"\x93NUMPY"
_MOST_INDEX_BYTES = 2**28
Ids = npt.NDArray[Any]


def write_pairs(
    form: TokenFormat,
    paths: Sequence[Path],
    ids: IdType | None,
    vocab_size: int,
    end_of_document: int,
    place: Path,
    advance: Callable[[int], None],
) -> list[tuple[str, Path]]:
    """Write a pair of files for each file of another format.

    Args:
        form: their format.
        paths: of the files; of `mds`, folders with an `index.json`.
        ids: type of the ids, where the files do not say it; by default the smaller unsigned one of 16 and 32 bits that
            has room for the vocabulary.
        vocab_size: of the tokenizer, whose ids all ids must be.
        end_of_document: id that ends documents.
        place: folder for the pairs.
        advance: told bytes of ids that were read.

    Returns:
        Name of each file, and prefix of its pair.

    Raises:
        UserError: a file is missing, damaged or not of the format, or has ids that are none of the tokenizer's.
    """
    kind = np.dtype(ids or ("uint16" if vocab_size <= 2**16 else "uint32")).newbyteorder("<")
    if twice := {path for path in paths if [each.resolve() for each in paths].count(path.resolve()) > 1}:
        raise UserError(f"{sorted(twice)[0]} is given twice")
    base = os.path.commonpath([path.absolute().parent for path in paths])
    found = []
    for number, path in enumerate(paths):
        prefix = place / f"{number:06d}"
        blocks, ends = _opened(form, path, kind, has_type=ids is not None)
        with IndexedWriter(prefix, np.uint16 if vocab_size <= 2**16 else np.int32) as writer:
            add = _Adder(writer, path, vocab_size, end_of_document, ends)
            for block in blocks:
                add.block(block)
                advance(block.nbytes)
            add.finish()
        found.append((os.path.relpath(path, base), prefix))
    return found


def token_file_bytes(form: TokenFormat, paths: Sequence[Path]) -> int:
    """Bytes of files, about those of their ids."""
    return sum(
        sum(each.stat().st_size for each in path.glob("*.mds")) if form == "mds" else path.stat().st_size
        for path in paths
        if path.exists()
    )


class _Adder:
    """Documents that are made of ids which come in blocks."""

    def __init__(
        self, writer: IndexedWriter, path: Path, vocab_size: int, end: int, ends: npt.NDArray[np.int64] | None
    ) -> None:
        self._writer, self._path, self._vocab_size, self._end = writer, path, vocab_size, end
        self._ends = ends
        self._rest: list[Ids] = []
        self._held = 0
        """Tokens behind the last end."""
        self._at = 0
        """Tokens of the documents that were written."""

    def block(self, block: Ids) -> None:
        """Take ids, and write the documents that end in them."""
        if len(block) and not (int(block.min()) >= 0 and int(block.max()) < self._vocab_size):
            wrong = int(np.flatnonzero((block < 0) | (block >= self._vocab_size))[0])
            raise UserError(
                f"{self._path}: token {self._at + self._held + wrong:,} has the id {block[wrong]}, but the "
                f"tokenizer's ids end with {self._vocab_size - 1}: the file is of another tokenizer, or its ids are of "
                "another type (--ids)"
            )
        self._rest.append(block.astype(self._writer.dtype))
        if self._ends is None:
            ends = np.flatnonzero(block == self._end) + 1 + self._held
        else:
            low, high = self._ends.searchsorted([self._at, self._at + self._held + len(block)], "right")
            ends = self._ends[low:high] - self._at
        self._held += len(block)
        if len(ends):
            self._write(ends)
        elif self._held > _MOST_REST:
            raise UserError(
                f"{self._path}: {self._held:,} tokens follow each other without the token that ends documents (id "
                f"{self._end}); give that token with --end-of-document"
            )

    def _write(self, ends: npt.NDArray[np.int64]) -> None:
        ids, whole = np.concatenate(self._rest), int(ends[-1])
        self._writer.add_documents(ids[:whole].tobytes(), np.diff(ends, prepend=0))
        self._rest, self._held = [ids[whole:]], len(ids) - whole
        self._at += whole

    def finish(self) -> None:
        """Write what is left as a document."""
        if self._held:
            if self._ends is not None:
                raise UserError(f"{self._path} has tokens behind its last document; it is not of its index")
            self._write(np.array([self._held]))


def _opened(
    form: TokenFormat, path: Path, kind: np.dtype[Any], *, has_type: bool
) -> tuple[Iterator[Ids], npt.NDArray[np.int64] | None]:
    """Blocks of the ids of a file, and the ends of its documents where it says them."""
    if form == "mds":
        return _shards(path, kind if has_type else None), None
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if form == "ds":
        return _opened_ds(path)
    with storage.open_regular(path) as file:
        head = file.read(_LOOKED_AT)
    if head.startswith(_MAGIC):
        return _of_array(path), None
    every_second = np.frombuffer(head[: len(head) // 8 * 8], f"<u{kind.itemsize}")[1::2]
    if not has_type and len(every_second) > 1 and not every_second.any():
        raise UserError(
            f"{path}: every second id is 0 if ids are {kind.name}, so they are probably wider: give their type with "
            "--ids"
        )
    return _of_ids(path, kind), None


def _of_array(path: Path) -> Iterator[Ids]:
    try:
        found: Ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UserError(f"{path} has {found.dtype} of shape {found.shape}; ids are whole numbers in one dimension")
    for at in range(0, len(found), _BLOCK):
        yield np.asarray(found[at : at + _BLOCK])


def _of_ids(path: Path, kind: np.dtype[Any]) -> Iterator[Ids]:
    with storage.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size % kind.itemsize:
            raise UserError(f"{path}: its size is not a number of ids of {kind.name}; it is cut, or --ids is another")
        while data := file.read(_BLOCK * kind.itemsize):
            yield np.frombuffer(data, kind)


def _opened_ds(path: Path) -> tuple[Iterator[Ids], npt.NDArray[np.int64]]:
    index = path.with_name(path.name + ".index")
    if not index.is_file():
        raise UserError(f"{index} is missing: it has the ends of the documents of {path}")
    data = storage.read_bytes(index, _MOST_INDEX_BYTES + 1)
    if len(data) > _MOST_INDEX_BYTES or len(data) % 8:
        raise UserError(f"{index} has {len(data):,} bytes; it is damaged, or too large")
    ends = np.frombuffer(data, "<i8")
    size, tokens = path.stat().st_size, int(ends[-1]) if len(ends) else 0
    if len(ends) and (ends[0] < 0 or (ends[1:] < ends[:-1]).any()):
        raise UserError(f"{index} is damaged: its ends are not ascending")
    if not tokens and not size:
        return iter(()), ends
    if not tokens or size % tokens or size // tokens not in (2, 4):
        raise UserError(f"{path} has {size:,} bytes for the {tokens:,} tokens of {index.name}: one of them is damaged")
    return _of_ids(path, np.dtype("<u2" if size // tokens == 2 else "<u4")), ends


def _shards(folder: Path, kind: np.dtype[Any] | None) -> Iterator[Ids]:
    """Ids of the samples of shards, one behind the other."""
    index = folder / "index.json"
    if not index.is_file():
        raise UserError(f"{index} is missing; give the folder of an MDS dataset")
    shards = storage.get_json(index, "shards")["shards"]
    if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
        raise UserError(f"{index} is damaged: shards must be a list of objects")
    for shard in shards:
        yield from _samples(folder, index, shard, kind)


def _samples(folder: Path, index: Path, shard: dict[str, Any], kind: np.dtype[Any] | None) -> Iterator[Ids]:
    names, encodings, sizes = (shard.get(f"column_{key}") for key in ("names", "encodings", "sizes"))
    raw, samples = shard.get("raw_data"), shard.get("samples")
    if shard.get("format") != "mds" or names != ["tokens"] or shard.get("zip_data") is not None:
        raise UserError(
            f"{index}: only shards in the format mds with the single column `tokens`, not compressed, can be read; "
            f"this one: format {shard.get('format')!r}, columns {names!r}, compression {shard.get('compression')!r}"
        )
    if not (isinstance(encodings, list) and isinstance(sizes, list) and len(encodings) == len(sizes) == 1):
        raise UserError(f"{index} is damaged: column_encodings and column_sizes must have an entry each")
    if not isinstance(raw, dict) or not isinstance(samples, int) or samples < 0:
        raise UserError(f"{index} is damaged: a shard lacks raw_data or samples")
    encoding = str(encodings[0])
    has_size = isinstance(sizes[0], int)
    if encoding.startswith("ndarray:") and has_size:
        try:
            kind = np.dtype(encoding.split(":")[1]).newbyteorder("<")
        except TypeError:
            raise UserError(f"{index}: the encoding {encoding!r} cannot be read") from None
    elif encoding != "bytes":
        raise UserError(f"{index}: the encoding {encoding!r} cannot be read; only bytes and ndarray:TYPE:SIZE can")
    if kind is None:
        raise UserError(
            f"{index} has samples of bytes, of which nothing says the type: give it with --ids (int64, say)"
        )
    if kind.kind not in "iu":
        raise UserError(f"{index}: the encoding {encoding!r} is not one of whole numbers")
    path = folder / storage.plain_name(raw.get("basename"), index)
    if not path.is_file():
        raise UserError(f"{path} is missing, which {index} lists")
    with storage.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 4 * (samples + 2):
            raise UserError(f"{path} is cut: it has {size:,} bytes")
        with closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
            table = np.frombuffer(data[: 4 * (samples + 2)], "<u4").astype(np.int64)
            bounds = table[1:]
            if table[0] != samples or (np.diff(bounds) < 0).any() or bounds[-1] > size:
                raise UserError(f"{path} is cut or damaged: its samples do not lie in it")
            for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                sample = data[begin if has_size else begin + 4 : end]
                if len(sample) % kind.itemsize or (not has_size and end - begin < 4):
                    raise UserError(f"{path}: a sample is not a number of ids of {kind.name}; --ids may be another")
                yield np.frombuffer(sample, kind)
