"""A dataset as a sequence of documents."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.paths import StrPath
from pipeline.common.run_files import RunFiles
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import MANIFEST_FILE, TRAIN
from pipeline.data.tokenization.tokenizer import Tokenizer

_NAMED = 8
"""Folders that a message names."""


class DatasetReader:
    """Documents of a dataset as arrays of token ids.

    `len(dataset)` is the number of documents, `dataset[i]` the tokens of document `i`, [tokens] of `dataset.dtype`,
    with the end-of-document token at its end; negative indices count from the end. `dataset[a:b]` is a list of such
    arrays. All arrays are copies. Only what is asked for is read.

    Attributes:
        path: Folder of the dataset.
        tokens: Tokens in all, the end-of-document tokens included.
        dtype: Type of the token ids as they are stored, `uint16` or `int32` in datasets of this program.
        fingerprint: Hash of the content: equal for equal tokens, documents and tokenizer.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.path = dataset.folder
        self.tokens = dataset.tokens
        self.dtype: np.dtype[Any] = dataset.dtype
        self.fingerprint = dataset.fingerprint

    @classmethod
    def open(
        cls,
        path: StrPath,
        source: str | None = None,
        split: str | None = None,
        *,
        read: Literal["mmap", "pread"] = "mmap",
    ) -> DatasetReader:
        """Open a dataset.

        Args:
            path: Folder of a dataset (the one with `manifest.json`); or with `split` the folder of a source, or with
                `source` a data folder (`data.dir`, by default `data` in the run folder).
            source: Name of the source.
            split: Of the source; by default `train`.
            read: `mmap`, or `pread` for file systems on which mapping is slow or fails.

        Raises:
            UserError: There is no finished dataset, or it is damaged; the message names the file, and what is there.
        """
        folder = Path(path)
        if source is not None:
            folder = folder / source
        if source is not None or split is not None:
            folder = folder / (split or TRAIN)
        if not (folder / MANIFEST_FILE).is_file():
            raise _not_there(folder, Path(path), source, split)
        return cls(Dataset.open(folder, read))

    def __len__(self) -> int:
        return self._dataset.documents

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[npt.NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        if isinstance(index, slice):
            return [self._document(document) for document in range(*index.indices(len(self)))]
        return self._document(self._number(index))

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return map(self._document, range(len(self)))

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}: {len(self):,} documents, {self.tokens:,} tokens, {self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        generation = self._dataset.lineage.index(self.fingerprint)
        return _opened, (self.path, self._dataset.read_by, generation)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the dataset: `encode(text)`, `decode(ids)`, `vocab_size`, `end_of_document` (an id)."""
        return Tokenizer.open(self.path)

    def text(self, index: int) -> str:
        """Text of a document, decoded from its tokens, without the end-of-document token.

        It is the text that was tokenized, unless the tokenizer normalizes texts.

        Raises:
            IndexError: There is no such document.
        """
        ids = self[index]
        end = self._dataset.manifest.tokenizer.end_of_document
        return self.tokenizer.decode(ids[:-1] if len(ids) and ids[-1] == end else ids)

    def metadata(self, index: int) -> dict[str, Any]:
        """Metadata that was kept of a document beside its text (`metadata` of its source); empty if nothing was.

        Raises:
            IndexError: There is no such document.
        """
        return self._dataset.metadata(self._number(index))

    def read_tokens(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens [start, start + count) of all documents, one behind the other: [count] of `dtype`.

        Raises:
            IndexError: Outside of [0, tokens).
        """
        return self._dataset.read(start, count)

    def _number(self, index: int) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} is outside of the {len(self):,} documents of {self.path}")
        return number % len(self)

    def _document(self, number: int) -> npt.NDArray[Any]:
        start, end = (self._dataset.document_start(number + each) for each in (0, 1))
        return self._dataset.read(start, end - start)


def _opened(path: Path, read: Literal["mmap", "pread"], generation: int) -> DatasetReader:
    """Reader of a dataset that another process opens again by its folder."""
    return DatasetReader(Dataset.open(path, read, generation))


def _not_there(folder: Path, path: Path, source: str | None, split: str | None) -> UserError:
    """The error where there is no dataset, with what could have been meant."""
    if not path.is_dir():
        return UserError(f"there is no folder {path}; give the folder of a dataset, or a data folder and a source")
    if RunFiles(path).config.is_file():
        return UserError(f"{path} is a run folder; its datasets: api.Run({str(path)!r}).dataset({source or 'NAME'!r})")
    here = path if source is None else path / source
    if splits := _holding(here, MANIFEST_FILE):
        wanted = f"no split {split!r}" if split is not None or source is not None else f"no {MANIFEST_FILE}"
        return UserError(f"{here} has {wanted}; it has the splits {splits}: name one as `split`")
    if sources := _holding(path, f"*/{MANIFEST_FILE}"):
        wanted = f"no source {source!r} with datasets" if source is not None else f"no {MANIFEST_FILE}"
        return UserError(f"{path} has {wanted}; it has the sources {sources}: name one as `source`")
    return UserError(f"{folder} is not a finished dataset: it has no {MANIFEST_FILE}; run `pipeline preprocess`")


def _holding(folder: Path, pattern: str) -> str:
    """Names of the subfolders of a folder that have such a file."""
    found = sorted({path.relative_to(folder).parts[0] for path in folder.glob(f"*/{pattern}")})
    return ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
