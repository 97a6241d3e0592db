"""The data plan of a run: its rows, by slice of a source, segment, objective and sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.data.order.consumption import Documents, SliceAccount


@dataclass(frozen=True)
class SliceRow:
    """A slice of a source in the plan."""

    source: str
    documents: Documents
    """The slice; None for all documents."""
    document_count: int
    """Documents in it."""
    assumed: bool
    """There is no dataset yet."""
    weights: dict[str, float]
    """Share of the samples by phase, where the slice takes part, as the run file asks for it."""
    shares: dict[str, float]
    """Share of the samples that it really has in these phases: others may drop out, or it may itself."""
    share: float
    """Share of the tokens of the whole run."""
    loss_weights: dict[str, float]
    """Weight of its targets in the training loss, by phase."""
    document_weights: bool
    """Those of its documents are factors besides."""
    max_epochs: float | None
    on_exhausted: str
    exhausted_step: int | None
    """Step, from 1, with its last window, if it reaches max_epochs."""
    so_far: SliceAccount | None
    """Consumption of the run until now."""
    end: SliceAccount
    """Consumption of the whole run."""


@dataclass(frozen=True)
class SegmentRow:
    """A stretch of the run in which nothing changes, as far as the run goes. Steps are numbered from 1."""

    phase: str
    first_step: int
    last_step: int
    samples: int
    tokens: int
    batch_size: int
    sequence_length: int
    packing: str
    """`windows` or `best_fit`."""
    micro_batch_size: int
    micro_batches: int
    """Micro-batches of a step on one rank."""
    padding: int
    """Masked samples that fill up a step."""
    trained_per_step: float | None
    """Targets of a step that are trained on, on average; None where no source has a mask of them, and all are."""


@dataclass(frozen=True)
class ObjectiveRow:
    """Objective and shape of the windows of a segment, or of those of a source in it."""

    phase: str
    first_step: int
    last_step: int
    source: str | None
    """None for all that have no row of their own."""
    objective: str
    """`train.objective.type`"""
    sequence_length: int
    encoder: int
    """Positions of the encoder for each window."""
    decoder: int
    """Positions of the decoder, or of the only stack of layers."""
    predicted: int
    """Positions whose targets can count."""
    padding: float
    """Share of the positions that are padding, for windows of one document."""


@dataclass(frozen=True)
class PreviewRow:
    """A window."""

    sample: int
    step: int
    source: str
    lap: int
    position: int
    documents: list[tuple[int, int, int]]
    """(document, first token of it, tokens) of each piece."""
    text: str | None
    """None where the source is assumed."""


@dataclass(frozen=True)
class RemoteRow:
    """Requests of a source whose dataset is in a bucket, without those that are sent again."""

    source: str
    url: str
    parts: int
    bytes: int
    """Size of the tokens of all parts."""
    open_requests: int
    """For what each node fetches before the first step: indices, tokenizer, packs."""
    copy_requests: int
    """For the tokens of all parts, which each node copies with `stage.data: local`."""
    range_requests: int
    """For samples that are read by ranges, if all of the run are: about one for each, over all nodes."""
    ahead: int
    """Steps whose samples are asked for ahead."""


@dataclass(frozen=True)
class DataPlan:
    """The data plan of a run, all that `pipeline data plan` prints."""

    run: Path
    ranks: int
    steps: int
    samples: int
    tokens: int
    ends: str
    """Why it ends there."""
    steps_so_far: int | None
    """Steps of the newest checkpoint; None if the run has not begun."""
    sources: list[SliceRow]
    segments: list[SegmentRow]
    objectives: list[ObjectiveRow]
    skips: list[str]
    warnings: list[str]
    hashed_steps: int
    order_hash: str | None
    """xxh3-64 of the first steps' order hashes, each a little-endian u64; 16 hexadecimal digits. None without any."""
    journal: str
    """Fingerprint of the journal: of all that decides the order of the whole run but the tokens."""
    preview: list[PreviewRow]
    remote: list[RemoteRow] = field(default_factory=list)
    """Sources whose datasets are in a bucket."""

    @property
    def weighs(self) -> bool:
        """True if targets may weigh other than 1 in the training loss."""
        return any(row.document_weights or set(row.loss_weights.values()) - {1.0} for row in self.sources)

    def to_json(self) -> dict[str, Any]:
        """The data plan as JSON types."""
        value = {**asdict(self), "run": str(self.run)}
        for row, json in zip(self.sources, value["sources"], strict=True):
            for name, account in (("so_far", row.so_far), ("end", row.end)):
                if account is not None:
                    json[name]["epochs"] = account.epochs
            if not self.weighs:  # as before there were loss weights
                del json["loss_weights"], json["document_weights"]
        if all(row.trained_per_step is None for row in self.segments):
            for json in value["segments"]:
                del json["trained_per_step"]
        if not self.remote:
            del value["remote"]
        return value
