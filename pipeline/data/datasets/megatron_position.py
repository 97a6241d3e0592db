"""Documents that a run of Megatron-LM has read: from the indices in its cache, which hold the order of all samples.

A sample is a range of the tokens of the documents in `document_index`, one behind the other; `sample_index` has its
beginning, as (place in `document_index`, token), which is the end of the sample before; `shuffle_index` has the order
of samples. A blend has, for each of its samples, a dataset and a sample of it. All are files of `numpy.save`.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.foreign import open_foreign
from pipeline.data.datasets.indexed import IndexedPart

_BLOCK = 2**20
"""Samples that are looked at together."""
_DESCRIPTION = "description.txt"
_MOST_BYTES = 2**26
_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Position:
    """The documents of a file by what a run has read of them.

    Attributes:
        prefix: of the `.bin` and `.idx`.
        documents: of the file.
        weight: of the file in the blend.
        splits: documents [first, end) of each split that has any.
        touched: numbers of the documents of which a token was read, ascending.
        whole: those that were read from the first token to the last at least once.
        tokens: that were read, each as often as it was.
        lost: tokens of touched documents that were not read.
        repeated: tokens of documents that were touched and not read whole.
    """

    prefix: Path
    documents: int
    weight: float
    splits: dict[str, tuple[int, int]]
    touched: npt.NDArray[np.int64]
    whole: npt.NDArray[np.int64]
    tokens: int
    lost: int
    repeated: int

    def left_out(self, split: str, *, keep_cut: bool = False) -> npt.NDArray[np.int64]:
        """Numbers of the documents that a split does not have.

        Args:
            split: `train`, `valid` or `test`.
            keep_cut: whether documents that were read in part are in it, to be read again.
        """
        first, end = self.splits[split]
        outside = np.concatenate([np.arange(first), np.arange(end, self.documents)]).astype(np.int64)
        if split != "train":
            return outside
        return np.union1d(outside, self.whole if keep_cut else self.touched)


def read_positions(cache: Path, consumed: int, of: str | None = None) -> list[Position]:
    """The documents of each file of a blend that its first samples have read.

    Args:
        cache: folder of the indices (`--data-cache-path`, or `cache/GPTDataset_indices` beside a single file).
        consumed: number of samples.
        of: beginning of the name of the description to use, where there are several.

    Raises:
        UserError: indices are missing, damaged, or of other files than are there now.
    """
    kind, path = _description(cache, of)
    about = _json(path)
    if kind == "GPTDataset":
        name = path.name.removesuffix(_DESCRIPTION)
        data = _Indices(cache, name, about)
        if consumed > len(data.shuffle):
            raise _too_many(consumed, len(data.shuffle), path)
        return [data.position(1.0, np.asarray(data.shuffle[:consumed], np.int64))]
    base = path.name.removesuffix(_DESCRIPTION)
    dataset = _array(cache / f"{base}dataset_index.npy", 1)
    sample = _array(cache / f"{base}dataset_sample_index.npy", 1)
    if len(dataset) != len(sample):
        raise UserError(f"{cache / base}dataset_sample_index.npy is not of the same blend as the file beside it")
    if consumed > len(dataset):
        raise _too_many(consumed, len(dataset), path)
    parts, weights = about.get("datasets"), about.get("weights")
    if not isinstance(parts, list) or not isinstance(weights, list) or len(parts) != len(weights):
        raise UserError(f"{path} does not list datasets with their weights")
    if consumed and not (int(dataset[:consumed].min()) >= 0 and int(dataset[:consumed].max()) < len(parts)):
        raise UserError(f"{path} has {len(parts)} datasets, but the index beside it names others")
    found = []
    for number, part in enumerate(parts):
        text = json.dumps(part, indent=4)
        name = f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-GPTDataset-train-"
        data = _Indices(cache, name, part)
        samples = np.asarray(sample[:consumed][dataset[:consumed] == number], np.int64)
        if len(samples) and not (int(samples.min()) >= 0 and int(samples.max()) < len(data.shuffle)):
            raise UserError(f"{cache / name}shuffle_index.npy has fewer samples than the blend has drawn")
        found.append(data.position(float(weights[number]), np.asarray(data.shuffle[samples], np.int64)))
    return found


def _description(cache: Path, of: str | None) -> tuple[str, Path]:
    """The description of the training data: of a blend, or of a file where there is no blend."""
    if not cache.is_dir():
        raise UserError(f"{cache}: there is no such folder; give the one that --data-cache-path named")
    for kind in ("BlendedDataset", "GPTDataset"):
        found = sorted(cache.glob(f"{glob.escape(of or '')}*-{kind}-train-{_DESCRIPTION}"))
        if len(found) > 1:
            names = "; ".join(f"{path.name[:8]} ({_json(path).get('size', 'no')} samples)" for path in found[:10])
            raise UserError(f"{cache} has {len(found)} descriptions of training data: choose one with --of: {names}")
        if found:
            return kind, found[0]
    raise UserError(
        f"{cache} has no indices of training data (*-GPTDataset-train-{_DESCRIPTION}); without them nothing says what "
        "was read. Megatron-LM writes them again if it starts with the same arguments"
    )


def _too_many(consumed: int, there: int, path: Path) -> UserError:
    return UserError(
        f"{path}: the run has read {consumed:,} samples, and this order has {there:,}; it is of another run, or of the "
        "same run with another --train-iters"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(storage.read_bytes(path, _MOST_BYTES))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a description of a dataset")
    return found


def _array(path: Path, dimensions: int) -> npt.NDArray[Any]:
    try:
        found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; Megatron-LM writes it again if it starts with the same arguments"
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if found.ndim != dimensions or found.dtype.kind not in "iu":
        raise UserError(f"{path} has {found.dtype} of shape {found.shape}; an index of Megatron-LM has whole numbers")
    return found


class _Indices:
    """The order of the samples of one file."""

    def __init__(self, cache: Path, name: str, about: dict[str, Any]) -> None:
        path = about.get("dataset_path")
        if not isinstance(path, str) or about.get("index_split") != "train":
            raise UserError(f"{cache / name}{_DESCRIPTION} does not describe training data in a file")
        self._prefix, self._name = Path(path), f"{cache / name}*"
        self._part: IndexedPart = open_foreign(self._prefix)
        if self._part.sequences != self._part.documents:
            raise UserError(
                f"{self._part.idx_path} has documents of several sequences, of which Megatron-LM reads each by itself; "
                "their position is not supported"
            )
        self._documents = _array(cache / f"{name}document_index.npy", 1)
        self._samples = _array(cache / f"{name}sample_index.npy", 2)
        self.shuffle = _array(cache / f"{name}shuffle_index.npy", 1)
        fits = self._samples.shape[1] == 2 and len(self._samples) == len(self.shuffle) + 1
        if fits and len(self.shuffle):
            fits = int(self.shuffle.min()) >= 0 and int(self.shuffle.max()) < len(self.shuffle)
        if not fits:
            raise UserError(f"{self._name}: the indices do not fit together")
        self._splits = _splits(about.get("split_matrix"), self._part.documents)

    def position(self, weight: float, samples: npt.NDArray[np.int64]) -> Position:
        """The documents that samples have read.

        Args:
            weight: of the file in its blend.
            samples: numbers of the samples, without their order.
        """
        lengths = self._part.lengths.astype(np.int64)
        places = np.asarray(self._documents, np.int64)
        if len(places) and not (places.min() >= 0 and places.max() < len(lengths)):
            raise UserError(f"{self._name} is of another file than {self._prefix} is now: it has more documents")
        of_place = np.append(lengths[places], 0)
        read = self._tokens_read(of_place, samples)[:-1]
        of_place = of_place[:-1]
        if (read > of_place).any():
            raise UserError(f"{self._name} is of another file than {self._prefix} is now: its documents are longer")
        touched = np.unique(places[read > 0])
        whole = np.unique(places[(read == of_place) & (of_place > 0)])
        cut = np.setdiff1d(touched, whole)
        most = np.zeros(len(lengths), np.int64)
        np.maximum.at(most, places, read)
        return Position(
            self._prefix,
            self._part.documents,
            weight,
            self._splits,
            touched,
            whole,
            int(read.sum()),
            int((lengths - most)[touched].sum()),
            int(most[cut].sum()),
        )

    def _tokens_read(self, of_place: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that were read at each place of the order of documents."""
        read = np.zeros(len(of_place), np.int64)
        inside = np.zeros(len(of_place) + 1, np.int64)
        for block in _blocks(samples):
            (first, start), (last, end) = self._bounds(block), self._bounds(block + 1)
            if (first > last).any() or last.max() >= len(of_place) or (start > of_place[first]).any():
                raise UserError(f"{self._name} is of another file than {self._prefix} is now")
            same = first == last
            np.add.at(read, first, np.where(same, end - start, of_place[first] - start))
            np.add.at(read, last, np.where(same, 0, end))
            np.add.at(inside, np.where(same, first, first + 1), 1)
            np.add.at(inside, np.where(same, first, last), -1)
        return read + np.cumsum(inside)[:-1] * of_place

    def _bounds(self, samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Places of documents, and tokens in them, at which samples begin."""
        found = np.asarray(self._samples[samples], np.int64)
        return found[:, 0], found[:, 1]


def _blocks(samples: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    for at in range(0, len(samples), _BLOCK):
        yield samples[at : at + _BLOCK]


def _splits(matrix: Any, documents: int) -> dict[str, tuple[int, int]]:
    """Documents of each split: shares of the file by position, rounded as Megatron-LM rounds them."""
    if not isinstance(matrix, list) or len(matrix) != len(_SPLITS):
        return {"train": (0, documents)}
    found = {}
    for split, share in zip(_SPLITS, matrix, strict=True):
        if isinstance(share, list) and len(share) == 2:
            if not all(isinstance(each, int | float) and 0 <= each <= 1 for each in share) or share[0] > share[1]:
                raise UserError(f"split_matrix {matrix} is not one of shares from 0 to 1")
            found[split] = (round(share[0] * float(documents)), round(share[1] * float(documents)))
    return found or {"train": (0, documents)}
