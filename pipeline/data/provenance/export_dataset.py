"""`data export`: documents of a dataset as text with their places, in shards of bounded size, for other programs.

The text is that of the token ids. A document whose text, encoded again, gives other ids is flagged and counted: its
text is not what it was made from, like that of a normalizer that drops something.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ValidationError
from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say, warn
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config.blend import Range
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import MANIFEST_FILE, TRAIN
from pipeline.data.datasets.indexed import SPLIT
from pipeline.data.provenance.adopted_location import AdoptedOrigins, known_id, open_origins
from pipeline.data.provenance.source_location import Origin, Origins
from pipeline.data.tokenization.chat_encoding import TRAINED
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.document_files import ExportFormat, claim_folder, document_file
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.worker_pool import Progress, Workers

SHARD_BYTES = 2**28
"""About so much text has a file."""
SHARDS_FILE = "shards.jsonl"
"""Beside the files: a line per file that is complete."""
_COLUMNS = {
    "document": "int64",
    "id": "string",
    "text": "string",
    "exact": "bool",
    "metadata": "string",
    "source": "string",
    "file": "string",
    "line": "int64",
    "row": "int64",
}
_BLOCK_TOKENS = 2**18


@dataclass(frozen=True)
class ShardJob:
    """A file to write: documents [first, end)."""

    folder: Path
    path: Path
    form: ExportFormat
    first: int
    end: int
    bytes: int
    """Of token ids, for progress."""
    ids: bool
    tokens: bool

    def __str__(self) -> str:
        return f"documents {self.first}-{self.end - 1} of {self.folder}"


@dataclass(frozen=True)
class ShardCounts:
    """A file that is complete, as `shards.jsonl` has it."""

    file: str
    documents: int
    tokens: int
    inexact: int
    """Documents whose text, encoded again, gives other ids."""
    without_id: int = 0
    """Documents whose id is not known."""


def export_dataset(
    data: Path,
    to: Path,
    form: ExportFormat,
    console: Console,
    *,
    documents: str | None = None,
    split: str | None = None,
    ids: bool | None = None,
    tokens: bool = False,
    shard_bytes: int | None = None,
    workers: int | None = None,
) -> list[ShardCounts]:
    """Write documents of a dataset; returns the counts of each file. The same call resumes.

    Memory of a worker: some hundred thousand tokens and their text, or the longest document; with `ids` also the ids of
    the documents of a part.

    Args:
        data: folder of a dataset, or of a source.
        to: folder of the files.
        form: of the files.
        console: for progress.
        documents: `A-B`, both ends included; all by default.
        split: of the source.
        ids: read ids from the source files where they are stored nowhere else; by default unless these are on the hub,
            or `shuffle: global` has spread the documents of each unit, so that each part would read all files again.
        tokens: also write the token ids.
        shard_bytes: text of a file, about.
        workers: processes; by default one per core.

    Raises:
        UserError: there is no such dataset or document, or the folder has another export.
    """
    folder = _dataset(data, split)
    dataset = Dataset.open(folder)
    if ids is None:
        settings = dataset.manifest.settings
        ids = settings.get("data.preprocess.shuffle") != "global" and settings.get("type") != "hub"
    first, end = _range(documents, dataset)
    shard = shard_bytes or SHARD_BYTES
    step = max(1, shard * dataset.tokens // max(dataset.text_bytes, 1))
    about = {
        "dataset": dataset.fingerprint,
        "documents": [first, end],
        "format": form,
        "ids": ids,
        "tokens": tokens,
        "shard_tokens": step,
    }
    if dataset.manifest.has_weights:
        about["weights"] = True
    if dataset.manifest.has_mask:
        about["mask"] = True
    claim_folder(to, about, "--to", "documents, format or options")
    for path in to.glob(f".*{storage.TEMPORARY_SUFFIX}"):
        storage.remove_if_stale(path)
    done = {row["file"]: ShardCounts(**row) for row in storage.read_json_lines(to / SHARDS_FILE)}
    counts, jobs = [], []
    for low, high in _shards(dataset, first, end, step):
        path = to / f"documents-{low:012d}-{high - 1:012d}.{form}"
        if path.name in done and path.exists():
            counts.append(done[path.name])
            continue
        size = (dataset.document_start(high) - dataset.document_start(low)) * dataset.dtype.itemsize
        jobs.append(ShardJob(folder, path, form, low, high, size, ids, tokens))
    processes = min(workers or len(os.sched_getaffinity(0)), max(len(jobs), 1))
    lines = storage.JsonLines(to / SHARDS_FILE)
    with (
        Workers[ShardJob, ShardCounts](make_export_shard, (), processes) as pool,
        ProgressLine(console, sum(job.bytes for job in jobs), len(jobs), len(counts), "exporting", "file") as line,
    ):
        for result in line.results(pool, jobs, "could not be exported"):
            lines.write(vars(result))
            counts.append(result)
    lines.close()
    total, inexact = sum(each.documents for each in counts), sum(each.inexact for each in counts)
    say(console, f"{counted(total, 'document')} of {folder} in {counted(len(counts), 'file')} below {to}")
    if nameless := sum(each.without_id for each in counts):
        why = "their source files are gone or have changed" if ids else "they are in the source files: --ids reads them"
        warn(console, f"the {'id' if nameless == 1 else 'ids'} of {counted(nameless, 'document')} are not known; {why}")
    if inexact:
        warn(
            console,
            f"{counted(inexact, 'document')} of these, encoded again, {'has' if inexact == 1 else 'have'} other token "
            "ids; they have exact: false",
        )
    return sorted(counts, key=lambda each: each.file)


def _dataset(data: Path, split: str | None) -> Path:
    """The folder of a dataset, by its own folder or that of its source."""
    if (data / MANIFEST_FILE).exists():
        if split is not None and split != data.name:
            raise UserError(
                f"--split {split}: {data} is one split already; name the folder of the source, {data.parent}"
            )
        return data
    folder = data / (split or TRAIN)
    if not (folder / MANIFEST_FILE).exists():
        known = sorted(path.parent.name for path in data.glob(f"*/{MANIFEST_FILE}"))
        splits = f"it has {', '.join(known)}: choose with --split" if known else "name DATA_DIR/SOURCE or a split in it"
        raise UserError(f"{folder} is not a dataset; {splits}")
    return folder


def _range(documents: str | None, dataset: Dataset) -> tuple[int, int]:
    """Documents [first, end)."""
    if documents is None:
        return 0, dataset.documents
    try:
        asked = Range.model_validate(documents)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--documents {documents}: {problem}") from None
    if asked.last >= dataset.documents:
        raise UserError(
            f"--documents {documents}: {dataset.folder} has {counted(dataset.documents, 'document')}, numbered from 0"
        )
    return asked.first, asked.last + 1


def _shards(dataset: Dataset, first: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of documents; each begins with the first document at or behind a multiple of `step` tokens."""
    base, last = dataset.document_start(first), dataset.document_start(end)
    low = first
    for token in range(base + step, last, step):
        high = dataset.document_at(token)
        high += dataset.document_start(high) < token
        if low < high < end:
            yield low, high
            low = high
    if low < end:
        yield low, end


def make_export_shard() -> Any:
    """In a worker process: returns the function that runs a `ShardJob`."""
    return export_shard


@lru_cache(maxsize=1)
def _open(folder: Path) -> tuple[Dataset, Tokenizer, Origins | AdoptedOrigins | None]:
    dataset = Dataset.open(folder)
    return dataset, Tokenizer.open(folder), open_origins(folder, dataset.manifest)


def export_shard(job: ShardJob, progress: Progress) -> ShardCounts:
    """Write a file; returns its counts."""
    dataset, tokenizer, origins = _open(job.folder)
    shard = _Shard(job, dataset, tokenizer, origins)
    columns = dict(_COLUMNS)
    if dataset.manifest.has_weights:
        columns["weight"] = "float32"
    if dataset.manifest.has_mask:
        columns["trained_tokens"] = "int64"
    if job.tokens:
        columns["tokens"] = "list<int32>"
        if dataset.manifest.has_mask:
            columns["mask"] = "list<int32>"
    inexact = without_id = 0
    with document_file(job.path, job.form, columns) as file:
        for low, high in shard.blocks():
            for record in shard.records(low, high):
                inexact += not record["exact"]
                without_id += record["id"] is None
                if job.form == "parquet":
                    record["metadata"] = orjson.dumps(record["metadata"]).decode()
                file.add(record)
            progress(shard.tokens(low, high) * dataset.dtype.itemsize)
        file.commit()
    return ShardCounts(job.path.name, job.end - job.first, shard.tokens(job.first, job.end), inexact, without_id)


class _Shard:
    """Documents of a file."""

    def __init__(
        self, job: ShardJob, dataset: Dataset, tokenizer: Tokenizer, origins: Origins | AdoptedOrigins | None
    ) -> None:
        self._job = job
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._origins = origins
        self._read: dict[tuple[int, int], Origin] = {}
        # Places with ids of the documents of `_read_part`, which are read from the source files at once.
        self._read_part = -1

    def tokens(self, low: int, high: int) -> int:
        """Tokens of documents [low, high)."""
        return self._dataset.document_start(high) - self._dataset.document_start(low)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The documents in pieces of some hundred thousand tokens."""
        return _shards(self._dataset, self._job.first, self._job.end, _BLOCK_TOKENS)

    def records(self, low: int, high: int) -> Iterator[dict[str, Any]]:
        """Records of documents [low, high)."""
        dataset = self._dataset
        starts = [dataset.document_start(number) for number in range(low, high + 1)]
        ids = dataset.read(starts[0], starts[-1] - starts[0])
        found = [dataset.provenance(number) for number in range(low, high)]
        keys = [(unit, row) for unit, row, _, _ in found]
        places = self._origins.places(dict.fromkeys(keys)) if self._origins else {}
        pieces: list[list[npt.NDArray[Any]]] = []
        for number, (_, _, flags, _) in zip(range(low, high), found, strict=True):
            own = ids[starts[number - low] - starts[0] : starts[number - low + 1] - starts[0]]
            lengths = dataset.sequences(number)[:-1] if flags & SPLIT else []
            closed = len(own) > 0 and own[-1] == self._tokenizer.end_of_document
            pieces.append(np.split(own[: len(own) - closed], np.cumsum(lengths, dtype=np.int64)))
        texts = [[self._tokenizer.decode(piece) for piece in each] for each in pieces]
        exact = self._are_exact(texts, pieces)
        for number, key in zip(range(low, high), keys, strict=True):
            place, id_hash = places.get(key), found[number - low][3]
            id = known_id(dataset, self._origins, number, place, id_hash)
            if id is None and self._job.ids and isinstance(self._origins, Origins):
                place = self._with_ids(self._origins, number, key)
                id = known_id(dataset, self._origins, number, place, id_hash)
            record: dict[str, Any] = {
                "document": number,
                "id": id,
                "text": "".join(texts[number - low]),
                "exact": exact[number - low],
                "metadata": dataset.metadata(number),
                "source": dataset.manifest.source,
                "file": place.file if place else None,
                "line": place.number if place and place.kind == "line" else None,
                "row": place.number if place and place.kind in ("row", "document") else None,
            }
            if dataset.manifest.has_weights:
                record["weight"] = dataset.weight(number)
            if dataset.manifest.has_mask:
                mask = dataset.mask(number)
                record["trained_tokens"] = int(np.count_nonzero(mask == TRAINED))
                if self._job.tokens:
                    record["mask"] = mask.tolist()
            if self._job.tokens:
                record["tokens"] = ids[starts[number - low] - starts[0] : starts[number - low + 1] - starts[0]].tolist()
            yield record

    def _are_exact(self, texts: list[list[str]], wanted: list[list[npt.NDArray[Any]]]) -> list[bool]:
        """Tell of each document whether its text gives the same ids; those of pieces are encoded piece by piece."""
        flat = [text for each in texts for text in each]
        try:
            encoded = iter(self._tokenizer.encode_batch(flat))
        except UserError:  # of a text that the model has no ids for
            encoded = iter([self._encoded(text) for text in flat])
        same = [[np.array_equal(next(encoded), ids) for ids in each] for each in wanted]
        return [all(each) for each in same]

    def _encoded(self, text: str) -> npt.NDArray[Any]:
        try:
            return self._tokenizer.encode_batch([text])[0]
        except UserError:
            return np.array([-1])

    def _with_ids(self, origins: Origins, number: int, key: tuple[int, int]) -> Origin | None:
        """The place of a document with its id, read from the source files with those of its part."""
        part, documents = self._dataset.part_of(number)
        if part != self._read_part:
            wanted = range(max(documents.start, self._job.first), min(documents.stop, self._job.end))
            keys = {self._dataset.provenance(each)[:2] for each in wanted}
            self._read, self._read_part = origins.places(keys, read=True), part
        return self._read.get(key)
