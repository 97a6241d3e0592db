"""The batch of a step, as training reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.data.loading.batch import Batch
from pipeline.data.loading.loader import Loader
from pipeline.data.order.windows import Span
from pipeline.data.provenance.run import RunView


@dataclass(frozen=True, eq=False)
class RunBatch:
    """The global batch of a step. B samples, S positions; tensors on the CPU, which may share memory: do not write.

    Rows are in the order of the run. What is not there has None.
    """

    step: int
    """From 1."""
    ids: torch.Tensor
    """[B, S] int64, input of the model. Of an encoder-decoder the first `encoder` positions are the encoder's."""
    targets: torch.Tensor
    """[B, S] int64, what each position is to predict: in causal training what follows its input."""
    weight: torch.Tensor
    """[B, S] float32, 0 where a target does not count, and otherwise 1."""
    loss_weight: torch.Tensor
    """[B, S] float32, `weight` times the loss weights of source and document; `weight` where there are none."""
    positions: torch.Tensor
    """[B, S] int64, position of each token as the model counts it: with `model.document_attention` from the beginning
    of its document in the row, else from that of the row (or of its side of an encoder-decoder)."""
    bounds: torch.Tensor
    """[B, S] int64, for each position the one at which its document begins in the row. `Model` takes it as `bounds`
    where the run has `model.document_attention`."""
    segments: torch.Tensor
    """[B, S] int64, number of its document in the row, from 0; on both sides of an encoder-decoder."""
    samples: torch.Tensor
    """[B] int64, number of each sample in the run, from 0."""
    sources: list[str]
    """[B], name of the source of each sample."""
    documents: list[list[Span]]
    """[B] lists of the pieces of documents that a sample is made of: `document` (its number in the source's dataset),
    `start` (first token of it) and `length`. Of windows they are S + 1 tokens: the last one is a target only."""
    skipped: bool
    """The step is skipped: training does not read it, and B is 0."""
    valid_targets: int
    """Targets that count."""
    total_weight: float
    """Sum of `loss_weight`, by which training divides the sum of the losses."""
    order_hash: str
    """Hash of which samples these are, as in `metrics.jsonl`."""
    data_hash: str
    """Hash of their tokens, as in `metrics.jsonl`."""
    encoder: int = 0
    """Positions of the encoder; 0 without one."""
    prefix: torch.Tensor | None = None
    """[B, S] int64, for each position the one behind the prefix of its document, which is seen in both directions."""
    predicted: torch.Tensor | None = None
    """[B, K] int64, positions whose targets can count, where an objective chooses them; rows with fewer are filled up
    with positions of weight 0."""
    ahead_targets: torch.Tensor | None = None
    """[B, N, S] int64, targets of N depths of multi-token prediction, and with `ahead_weight` which of them count."""
    ahead_weight: torch.Tensor | None = None
    """[B, N, S] float32."""

    def __repr__(self) -> str:
        shape = "skipped" if self.skipped else f"ids {list(self.ids.shape)}"
        return f"RunBatch(step {self.step:,}: {shape}, {self.valid_targets:,} targets that count)"


def read_batch(view: RunView, loader: Loader, step: int) -> RunBatch:
    """The batch of a step, counted from 0, by a loader of whole steps."""
    data = loader.batches(step)
    hashes: dict[str, Any] = {"order_hash": f"{data.order_hash:016x}", "data_hash": f"{data.data_hash:016x}"}
    if data.skipped:
        length = loader.journal.segments[loader.journal.segment_number(step)].sequence_length
        ids, weight = torch.zeros(0, length, dtype=torch.int64), torch.zeros(0, length)
        return RunBatch(
            step + 1, ids, ids, weight, weight, ids, ids, ids, ids[:, 0], [], [], True, 0, 0.0, encoder=0, **hashes
        )
    (batch,) = data.micro_batches
    if batch.real is not None and batch.real < len(batch.tokens):  # the last step of whole epochs
        batch = batch.first(batch.real)
    assert batch.samples is not None
    bounds = batch.bounds
    columns = torch.arange(bounds.shape[1])
    return RunBatch(
        step=step + 1,
        ids=batch.tokens,
        targets=batch.targets,
        weight=batch.weight,
        loss_weight=batch.weight if batch.loss_weight is None else batch.loss_weight,
        positions=_positions(batch, view.config.model.document_attention, columns),
        bounds=bounds,
        segments=_segments(bounds == columns, batch.encoder),
        samples=batch.samples,
        sources=[loader.names[source] for source in batch.sources.tolist()],
        documents=[[Span(**span) for span in each["spans"]] for each in _described(loader, step, batch)],
        skipped=False,
        valid_targets=data.valid_targets,
        total_weight=float(data.valid_targets) if data.total_weight is None else data.total_weight,
        encoder=batch.encoder,
        prefix=batch.prefix,
        predicted=batch.predicted,
        ahead_targets=batch.ahead_targets,
        ahead_weight=batch.ahead_weight,
        **hashes,
    )


def _described(loader: Loader, step: int, batch: Batch) -> list[dict[str, Any]]:
    """The samples of a step in the order of the rows."""
    assert batch.samples is not None
    found = {each["sample"]: each for each in loader.describe(step)}
    return [found[sample] for sample in batch.samples.tolist()]


def _positions(batch: Batch, document_attention: bool, columns: torch.Tensor) -> torch.Tensor:
    if document_attention:
        return batch.positions
    own = torch.where(columns < batch.encoder, columns, columns - batch.encoder)
    return own.expand(batch.tokens.shape)


def _segments(begins: torch.Tensor, encoder: int) -> torch.Tensor:
    """Numbers of documents in rows, of the positions at which they begin."""
    sides = (begins[:, :encoder], begins[:, encoder:]) if encoder else (begins,)
    return torch.cat([side.cumsum(dim=1) - 1 for side in sides], dim=1)
