"""The recorded losses of a run as a Parquet file: a row per sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.provenance.loss_stream import LossView, TargetCounts, located_documents


def export(view: LossView, to: Path, *, documents: bool) -> int:
    """Write the samples of which something is recorded; returns their number.

    Columns: `step` from 1, `sample`, `source`, `epoch`, `position`, `loss` (null where no target counted, inf where it
    was not finite), `tokens` (the targets that counted). With documents also `documents` and `document_targets`, lists
    of one length: the numbers of the documents that have targets in the sample, and how many.

    Raises:
        UserError: the file exists.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if to.exists():
        raise UserError(f"--parquet: {to} exists; remove it or give another name")
    names, counts, rows = view.run.journal.names, TargetCounts(view.run), 0
    schema = {"step": pa.int64(), "sample": pa.int64(), "source": pa.dictionary(pa.int32(), pa.string())}
    schema |= {"epoch": pa.int32(), "position": pa.int64(), "loss": pa.float32(), "tokens": pa.int32()}
    if documents:
        schema |= dict.fromkeys(("documents", "document_targets"), pa.list_(pa.int64()))
    with (
        storage.NewFile(to) as new,
        storage.naming(to),
        parquet.ParquetWriter(new.file, pa.schema(schema), compression="zstd") as writer,
    ):
        for everything in view.blocks():
            block = everything.only(everything.recorded)
            tokens = counts.of(block)
            source = pa.DictionaryArray.from_arrays(pa.array(block.source, pa.int32()), pa.array(names))
            loss = pa.array(block.loss, mask=np.isnan(block.loss))
            columns = [block.step, block.sample, source, block.epoch, block.position, loss, tokens]
            if documents:
                columns += _documents(view, block, pa)
            arrays = [pa.array(column) if isinstance(column, np.ndarray) else column for column in columns]
            table = pa.table(
                [array.cast(kind) for array, kind in zip(arrays, schema.values(), strict=True)], pa.schema(schema)
            )
            writer.write_table(table)
            rows += len(table)
        writer.close()
        new.commit()
    return rows


def _documents(view: LossView, block: Any, pa: Any) -> list[Any]:
    """Documents of each sample, and their targets."""
    rows, numbers, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for source in np.unique(block.source).tolist():
        mine = np.flatnonzero(block.source == source)
        found = located_documents(view.run, block.only(block.source == source), source)
        some = found.targets > 0
        rows.append(mine[found.row[some]])
        numbers.append(found.document[some])
        targets.append(found.targets[some])
    row, number, count = (np.concatenate(each) for each in (rows, numbers, targets))
    order = np.argsort(row, kind="stable")
    offsets = np.searchsorted(row[order], np.arange(len(block.step) + 1))
    return [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(each[order])) for each in (number, count)]
