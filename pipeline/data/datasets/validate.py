"""Checks before training: that all parts are there, with the sizes that they were written with. Reads no tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.retry import retried
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import HEADER, PARTS_A_FOLDER, numbered, part_name
from pipeline.data.datasets.manifest import REPAIR, REPAIR_ADOPTED, read_parts
from pipeline.data.datasets.target_mask import mask_bytes
from pipeline.data.datasets.weights import WEIGHT

_SHOWN = 10
_THREADS = 32
_TRIED = 32
"""So many files are looked at first, to see whether the file system is a slow one."""
_SLOW_S = 50e-6
"""A local disk takes some microseconds a file, and threads would only get in each other's way; a network file system
takes a hundred or more, which threads overlap."""


def check_datasets(datasets: Mapping[str, Dataset]) -> None:
    """Check that datasets fit together, and that the files of their parts have the sizes that they should have.

    The size of a `.bin` follows from `parts.bin`. That of an `.idx` does so but for its number of sequences: at least
    one a document, at most one a token.

    Args:
        datasets: by source.

    Raises:
        UserError: sources have different tokenizers; or files are missing or have another size.
        MachineError: the file system does not answer.
    """
    check_tokenizers(datasets)
    problems, repairs = [], {}
    for dataset in {dataset.folder: dataset for dataset in datasets.values()}.values():
        found = list(_problems(dataset))
        if found:
            repairs[repair(dataset)] = True
        problems += found
    if problems:
        more = f"\n  and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else ""
        raise UserError(
            "datasets are missing files, or have damaged ones:\n"
            + "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
            + f"{more}\n{'; or '.join(repairs)}"
        )


def check_tokenizers(datasets: Mapping[str, Dataset]) -> None:
    """Check that all sources have the same tokenizer.

    Raises:
        UserError: two do not; the message names them.
    """
    (first, one), *others = datasets.items()
    for name, dataset in others:
        a, b = one.manifest.tokenizer, dataset.manifest.tokenizer
        if a.fingerprint != b.fingerprint:
            raise UserError(
                f"sources {first!r} and {name!r} were tokenized with different tokenizers ({a.vocab_size} entries, "
                f"fingerprint {a.fingerprint}, and {b.vocab_size} entries, {b.fingerprint}): preprocess both with the "
                "same tokenizer section, or leave one out of data.sources"
            )


def repair(dataset: Dataset) -> str:
    """Advice about files of a dataset that are missing or have another size."""
    return REPAIR_ADOPTED if "adopted" in dataset.manifest.settings else REPAIR


def part_prefixes(folder: Path, parts: npt.NDArray[Any]) -> list[str]:
    """Prefix of the files of each part of a dataset; quicker than `part_prefix` for many.

    Args:
        folder: the dataset.
        parts: `PART` records.
    """
    units = parts["unit"].tolist()
    thousands = {unit // PARTS_A_FOLDER for unit in units}
    folders = {number: str(numbered(folder / "parts", number * PARTS_A_FOLDER).parent) for number in thousands}
    return [
        f"{folders[unit // PARTS_A_FOLDER]}/{part_name(unit, chunk)}"
        for unit, chunk in zip(units, parts["link"].tolist(), strict=True)
    ]


def file_sizes(paths: Sequence[str]) -> npt.NDArray[np.int64]:
    """Sizes of files in bytes, -1 for those that are missing.

    Raises:
        MachineError: the file system does not answer.
    """
    sizes, times = [], []
    for path in paths[:_TRIED]:
        began = time.perf_counter()
        sizes.append(_size(path))
        times.append(time.perf_counter() - began)
    rest = paths[_TRIED:]
    # The median, since on a busy machine some take long anywhere.
    if rest and sorted(times)[_TRIED // 2] > _SLOW_S:
        with ThreadPoolExecutor(_THREADS) as pool:
            sizes += pool.map(_size, rest)
    else:
        sizes += map(_size, rest)
    return np.array(sizes, np.int64)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except OSError:
        return retried(lambda: os.stat(path).st_size, Path(path), "looking at its size")


def _problems(dataset: Dataset) -> Iterator[str]:
    """The files of a dataset that are missing or have another size than they should."""
    parts = read_parts(dataset.folder, dataset.whole)
    tokens, documents = parts["tokens"].astype(np.int64), parts["documents"].astype(np.int64)
    none = np.zeros(len(parts), np.int64)
    prefixes = part_prefixes(dataset.folder, parts)
    # (suffix, fixed bytes of the file, least and most sequences); an .idx has 12 bytes more for each sequence.
    files = [(".idx", HEADER.size + 8 * (documents + 1), documents, tokens)]
    if dataset.has_files:
        files.insert(0, (".bin", tokens * dataset.dtype.itemsize, none, none))
    if dataset.manifest.has_weights:
        files.append((".weight", documents * WEIGHT.itemsize, none, none))
    if dataset.manifest.has_mask:
        files.append((".mask", mask_bytes(documents, tokens), none, none))
    for suffix, fixed, least, most in files:
        sizes = file_sizes([prefix + suffix for prefix in prefixes])
        sequences, remainder = np.divmod(sizes - fixed, 12)
        for index in np.flatnonzero((remainder != 0) | (sequences < least) | (sequences > most)).tolist():
            size = "is missing" if sizes[index] < 0 else f"has {sizes[index]:,} bytes"
            expected = f"{fixed[index] + 12 * least[index]:,} bytes"
            if suffix == ".idx":
                expected += f" for {documents[index]:,} documents, or 12 more for each further sequence"
            yield f"{prefixes[index]}{suffix} {size}; expected: {expected}"
