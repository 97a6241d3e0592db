"""`pipeline data inspect`: what is in a dataset, printed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from pipeline.common.console import Console, print_table, say, verbatim
from pipeline.common.errors import UserError
from pipeline.data.chat.show import print_trained
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.manifest import REPAIR, WEIGHT_KEY, Manifest, datasets_below
from pipeline.data.datasets.packing.files import lengths_there, read_index
from pipeline.data.packing.make import packs_in_words
from pipeline.data.provenance.adopted_location import open_origins
from pipeline.data.provenance.run import shortened
from pipeline.data.sources.records import printable
from pipeline.data.tokenization.chat_encoding import TRAINED
from pipeline.data.tokenization.tokenizer import Tokenizer

SHOWN_CHARACTERS = 300
SHOWN_TOKENS = 600
"""Tokens of a conversation that are shown."""
HISTOGRAM_DOCUMENTS = 20_000
"""Documents at most, evenly spaced, whose lengths are counted."""
_BAR = 40


def inspect(folder: Path, documents: int = 3) -> None:
    """Print counts, tokenizer, the first documents and a histogram of lengths of every dataset in a folder.

    Args:
        folder: a dataset, the folder of a source, or a data folder.
        documents: how many documents to show.

    Raises:
        UserError: there is no dataset, or it is damaged.
    """
    console = Console()
    for path in datasets_below(folder):
        dataset = Dataset.open(path)
        _print_counts(console, path, dataset)
        _print_documents(console, dataset, min(documents, dataset.documents))
        if dataset.documents:
            _print_histogram(console, dataset)
        console.print()


def _print_counts(console: Console, path: Path, dataset: Dataset) -> None:
    manifest = dataset.manifest
    per_token = f"{manifest.text_bytes / manifest.tokens:.3f}" if manifest.tokens else "-"
    tokenizer = manifest.tokenizer
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in [
        ("source, split", f"{manifest.source}, {manifest.split}"),
        ("documents", f"{manifest.documents:,}"),
        *([("generations", _generations(manifest))] if manifest.generations else []),
        ("tokens", f"{manifest.tokens:,}"),
        *([] if manifest.trained_tokens is None else [("trained tokens", f"{manifest.trained_tokens:,}")]),
        ("text bytes", f"{manifest.text_bytes:,}"),
        ("bytes per token", per_token),
        ("dtype", manifest.dtype),
        ("parts", f"{manifest.parts:,}"),
        ("tokenizer", f"{tokenizer.vocab_size:,} entries, fingerprint {tokenizer.fingerprint}"),
        ("end of document", f"{tokenizer.end_of_document_token!r} = {tokenizer.end_of_document}"),
        *(("packs", line) for line in _packs(dataset)),
    ]:
        table.add_row(Text(name, style="dim"), Text(value))
    if manifest.has_weights and dataset.documents:
        weights = np.array([dataset.weight(document) for document in spread(dataset, HISTOGRAM_DOCUMENTS)])
        few = f" ({len(weights):,} documents, evenly spaced)" if len(weights) < dataset.documents else ""
        found = f"{weights.min():.4g} to {weights.max():.4g}, mean {weights.mean():.4g}{few}"
        table.add_row(Text("loss weights", style="dim"), Text(f"{manifest.settings.get(WEIGHT_KEY)}: {found}"))
    console.print(Text(str(path), style="bold"), soft_wrap=True)
    print_table(console, table)


def _packs(dataset: Dataset) -> Iterator[str]:
    """A line for each length that there are packs of."""
    for length in lengths_there(dataset.folder):
        try:
            yield packs_in_words(read_index(dataset.folder, dataset.newer, length))
        except UserError as error:
            yield str(error)


def _generations(manifest: Manifest) -> str:
    """Numbers of the documents of each generation."""
    ends = [each.documents for each in manifest.lineage]
    ranges = zip([0, *ends], ends, strict=False)
    return ", ".join(f"{start:,}-{end - 1:,}" if start < end else "no documents" for start, end in ranges)


def _print_documents(console: Console, dataset: Dataset, count: int) -> None:
    try:
        tokenizer = Tokenizer.open(dataset.folder)
    except UserError as error:
        raise UserError(f"{error}; {REPAIR}") from None
    records = [dataset.provenance(document)[:2] for document in range(count)]
    origins = open_origins(dataset.folder, dataset.manifest)
    places = origins.places(records, report=partial(say, console)) if origins else {}
    for document, record in enumerate(records):
        start, end = dataset.document_start(document), dataset.document_start(document + 1)
        # Four tokens a character is the most (one for each byte of it); the end of the document is not shown.
        text = tokenizer.decode(dataset.read(start, min(end - start - 1, SHOWN_CHARACTERS * 4)))
        console.print()
        about = f"document {document}: {end - start:,} tokens"
        if record in places:
            about += f", {printable(str(places[record]))}"
        if record not in places or places[record].kind != "text":  # a file of one document has no rows
            about += f", row {record[1]:,} of unit {record[0]:,}"
        if dataset.manifest.has_mask:
            about += f", {np.count_nonzero(dataset.mask(document) == TRAINED):,} trained"
        if dataset.manifest.has_weights:
            about += f", loss weight {dataset.weight(document):g}"
        console.print(Text(about, style="dim"), soft_wrap=True)
        if metadata := dataset.metadata(document):
            kept = ", ".join(f"{name}: {value}" for name, value in metadata.items())
            console.print(Text(printable(shortened(kept, SHOWN_CHARACTERS)), style="dim"), soft_wrap=True)
        if dataset.manifest.has_mask:
            print_trained(console, _trained_pieces(dataset, tokenizer, document))
        else:
            verbatim(console, printable(shortened(text, SHOWN_CHARACTERS), keep="\n\t"))
    console.print()


def _trained_pieces(dataset: Dataset, tokenizer: Tokenizer, document: int) -> Iterator[tuple[str, bool]]:
    """The beginning of a conversation in parts, with whether each is trained on."""
    start = dataset.document_start(document)
    mask = dataset.mask(document)[: SHOWN_TOKENS + 1] == TRAINED
    ids = dataset.read(start, len(mask))
    if len(ids) <= SHOWN_TOKENS and ids[-1] == tokenizer.end_of_document and not mask[-1]:
        ids, mask = ids[:-1], mask[:-1]
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for low, high in pairwise(edges):
        if high > low:
            yield printable(tokenizer.decode(ids[low:high]), keep="\n\t"), bool(mask[low])
    if len(ids) > SHOWN_TOKENS:
        yield " ...", False


def document_lengths(dataset: Dataset, limit: int) -> npt.NDArray[np.int64]:
    """Lengths in tokens of at most `limit` documents, evenly spaced over the dataset."""
    chosen = spread(dataset, limit)
    return np.array([dataset.document_start(d + 1) - dataset.document_start(d) for d in chosen], np.int64)


def spread(dataset: Dataset, limit: int) -> list[int]:
    """At most `limit` documents, evenly spaced over the dataset."""
    places = np.linspace(0, dataset.documents - 1, min(limit, dataset.documents))
    return list(map(int, np.unique(places.astype(np.int64))))


def _print_histogram(console: Console, dataset: Dataset) -> None:
    lengths = document_lengths(dataset, HISTOGRAM_DOCUMENTS)
    # Bucket b holds the lengths in [2^b, 2^(b+1)).
    buckets = np.bincount(np.frexp(lengths.astype(np.float64))[1] - 1)
    title = "tokens of a document"
    if len(lengths) < dataset.documents:
        title += f" ({len(lengths):,} documents, evenly spaced)"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("from", justify="right")
    table.add_column("to", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("")
    for bucket in range(int(np.flatnonzero(buckets)[0]), len(buckets)):
        count = int(buckets[bucket])
        bar = "█" * max(round(_BAR * count / int(buckets.max())), 1 if count else 0)
        table.add_row(f"{2**bucket:,}", f"{2 ** (bucket + 1) - 1:,}", f"{count:,}", bar)
    print_table(console, table)
