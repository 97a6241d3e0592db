"""Pass `shingles`: sets of shingles, by which the similarity of documents is counted. A job is a chunk.

Signatures propose which documents resemble each other; the sets decide. A set is nearly as long as its text, so there
are sets of those documents alone that share a band with another one. Their texts are read a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.data.curate.batch import BATCH_BYTES
from pipeline.data.curate.chunk_texts import ChunkTexts
from pipeline.data.curate.duplicates.compared import Compared, ComparedChunk, read_compared
from pipeline.data.curate.duplicates.files import CANDIDATE, ResultFile
from pipeline.data.curate.duplicates.kinds import SIGNATURES
from pipeline.data.curate.duplicates.normalize import NORMALIZATION_VERSION
from pipeline.data.curate.duplicates.signature import SIGNATURE_VERSION
from pipeline.data.curate.duplicates.signatures.signer import Signer, make_signer, text_batch
from pipeline.data.datasets.indexed import numbered
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import SectionFile, write_sections
from pipeline.data.work.worker_pool import Progress

SHINGLES_VERSION = 1
SHINGLE = np.dtype([("hash", "<u4")])
"""Hash of a shingle; a section has those of a document, ascending, each once."""
Sets = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
"""Hashes of several sets one behind the other, and where each begins, shape (sets + 1,)."""
_GAP, _MOST = 32, 1024
"""Sets that are read though they are not asked for, rather than asking twice; and that are read at once."""
_LOW = np.uint64(2**32 - 1)


def shingle_file(folder: Path, place: int) -> Path:
    """Sets of a chunk, by its place among all that are compared."""
    return numbered(folder / "shingles", place).with_suffix(".shingles")


@dataclass(frozen=True)
class ShingleJob(ReceiptJob):
    """The sets of a chunk.

    Attributes:
        place: of the chunk.
        chunks: of `write_compared`.
        candidates: what `join` wrote.
        words: of a shingle.
        engine: `numba` or `python`; the results are the same.
        read_texts: reads the texts.
    """

    place: int
    chunks: Path
    candidates: Path
    words: int
    engine: Literal["numba", "python"]
    read_texts: ChunkTexts

    @property
    def receipt(self) -> Path:
        return numbered(self.folder / "receipts" / "shingles", self.place).with_suffix(".json")

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Write a section for each candidate of the chunk.

        Raises:
            DamagedResult: a file is not as it was written.
            UserError: the texts cannot be read, or are others than those that were measured.
        """
        each = read_compared(self.chunks).chunks[self.place]
        with SectionFile(self.candidates, CANDIDATE, "join") as file:
            documents = file.read_sections(self.place, self.place + 1)["document"]
        rows = (documents - np.uint64(each.base)).astype(np.int64)
        hashes, starts = [np.zeros(0, np.uint32)], [np.zeros(1, np.int64)]
        for some, bounds in self._sets(each, rows, progress) if len(rows) else ():
            starts.append(bounds[1:] + starts[-1][-1])
            hashes.append(some)
        path = shingle_file(self.folder, self.place)
        storage.make_below(self.folder, path.parent)
        with write_sections(path, np.concatenate(hashes).view(SHINGLE), np.concatenate(starts)) as file:
            receipt = self.commit({str(path.relative_to(self.folder)): file}, {"documents": len(rows)})
        progress(self.bytes)
        return receipt

    def _sets(self, each: ComparedChunk, rows: npt.NDArray[np.int64], progress: Progress) -> Iterator[Sets]:
        signer = make_signer(self.engine, self.words, 1)
        texts: list[str] = []
        size = 0
        with _reading(each):
            for text in self.read_texts(each.chunk, rows, progress):
                texts.append(text)
                size += len(text)
                if size >= BATCH_BYTES:
                    yield shingle_sets(signer, texts)
                    progress(0)  # a sign of life
                    texts, size = [], 0
        yield shingle_sets(signer, texts)


def shingle_sets(signer: Signer, texts: list[str]) -> Sets:
    """Sets of shingles of texts, each sorted."""
    hashes, starts = signer.shingles(text_batch(texts))
    keys = np.repeat(np.arange(len(texts), dtype=np.uint64) << np.uint64(32), np.diff(starts)) | hashes
    keys.sort()
    kept = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=kept[1:])
    keys = keys[kept]
    bounds = np.searchsorted(keys, np.arange(len(texts) + 1, dtype=np.uint64) << np.uint64(32))
    return (keys & _LOW).astype(np.uint32), bounds.astype(np.int64)


@contextlib.contextmanager
def _reading(each: ComparedChunk) -> Iterator[None]:
    """Read its texts inside; if they are of a finished curation and cannot be read, the message says why they are."""
    try:
        yield
    except (UserError, FileNotFoundError) as error:
        if each.verdicts is None:
            raise
        raise UserError(
            f"data.curate.against: texts of {each.chunk.curation} are read again, to count how similar they are to "
            f"those here, and cannot be: {error}. Restore them, or leave it out of data.curate.against"
        ) from error


def read_sets(
    folder: Path, compared: Compared, numbers: npt.NDArray[np.uint64], sections: npt.NDArray[np.uint32]
) -> Sets:
    """Sets of documents, in their order, checked.

    Args:
        folder: of the scope.
        compared: all chunks.
        numbers: of documents.
        sections: of each in the file of its chunk.

    Raises:
        DamagedResult: a file is not as it was written.
    """
    found: list[npt.NDArray[np.uint32]] = [np.zeros(0, np.uint32)] * len(numbers)
    for place, inside, _ in compared.by_chunk(numbers):
        order = inside[np.argsort(sections[inside], kind="stable")]
        wanted = sections[order].astype(np.int64)
        cuts = np.flatnonzero((np.diff(wanted) > _GAP) | (np.arange(1, len(wanted)) % _MOST == 0)) + 1
        with SectionFile(shingle_file(folder, place), SHINGLE, "shingles") as file:
            for documents, some in zip(np.split(order, cuts), np.split(wanted, cuts), strict=True):
                hashes, starts = file.read_ragged(int(some[0]), int(some[-1]) + 1)
                for document, section in zip(documents.tolist(), (some - some[0]).tolist(), strict=True):
                    found[document] = hashes["hash"][starts[section] : starts[section + 1]]
    bounds = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum([len(each) for each in found], out=bounds[1:])
    return np.concatenate([np.zeros(0, np.uint32), *found]), bounds


def shingle_jobs(
    folder: Path,
    chunks: Path,
    candidates: ResultFile,
    words: int,
    engine: Literal["numba", "python"],
    read_texts: ChunkTexts,
) -> list[ReceiptJob]:
    """Jobs of the pass.

    Args:
        folder: of the scope.
        chunks: of `write_compared`.
        candidates: what `join` wrote.
        words: of a shingle.
        engine: of the shingles.
        read_texts: reads texts.
    """
    jobs: list[ReceiptJob] = []
    settings = [SHINGLES_VERSION, SIGNATURE_VERSION, NORMALIZATION_VERSION, words, candidates.xxh3]
    for place, each in enumerate(read_compared(chunks).chunks):
        # Signatures stand for the texts: they were measured together.
        inputs = value_hash([settings, each.base, each.chunk.records, each.chunk.hashes[SIGNATURES]])
        name, size = f"shingles-{place:05d}", each.size(SIGNATURES)
        jobs.append(ShingleJob(folder, name, inputs, size, place, chunks, candidates.path, words, engine, read_texts))
    return jobs
