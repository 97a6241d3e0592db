"""The source of a pruned model: a checkpoint, exported weights, or a Hugging Face folder, read in pieces.

A rank reads, for each of its shards, the box of the source's tensor that has all entries it needs, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.weights import InitFromConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import tensors
from pipeline.train.checkpoint.committed import Checkpoint
from pipeline.train.checkpoint.exported import ExportedWeights, section_of
from pipeline.train.checkpoint.exported_loading import Shapes, local_shards, named_weights
from pipeline.train.checkpoint.weight_source import exported_tensors, validated_model
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.start.importance_file import Importance
from pipeline.train.start.pruning import Pick
from pipeline.train.start.weights_place import base_tokenizer

Box = tuple[slice, ...]
AT_ONCE = 2**24
"""Elements that are read at a time beside the shard that they are for; one row at least."""


@dataclass(frozen=True)
class PrunedSource:
    """Weights that a smaller model takes a part of."""

    where: Path
    model: Mapping[str, Any]
    """Its `model:` section, or the fingerprint of one."""
    spec: DecoderSpec
    shapes: Shapes
    read: Callable[[str, Box], Tensor]
    """Reads a box of a tensor."""
    tokenizer: Callable[[], Tokenizer | None]
    """Opens the tokenizer that they were trained with; None: it is not known."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Facts about them for the checkpoints of a run that begins with them."""
    hashes: Sequence[Mapping[str, str]] = ()
    """Names of these weights in results of evaluations, by key; several where they were copied."""

    def check_importance(self, importance: Importance, key: str) -> None:
        """Refuse importance that was measured on other weights.

        Args:
            importance: from a file.
            key: that names the file, for messages.

        Raises:
            UserError: the weights were others.
        """
        about = importance.about
        if not any(all(about.get(name) == value for name, value in each.items()) for each in self.hashes):
            measured = ", ".join(
                f"{name} {about[name]}" for name in ("checkpoint", "export", "weights") if name in about
            )
            own = " or ".join(", ".join(f"{name} {value}" for name, value in each.items()) for each in self.hashes)
            raise UserError(
                f"{key}: {importance.path} was measured on other weights ({measured}) than those in {self.where} "
                f"({own}); run `pipeline eval --importance` on these"
            )

    @torch.no_grad()
    def fill(self, model: ParallelModel, picks: Mapping[str, Pick]) -> None:
        """Fill a model of any layout, each rank its own shards, in its own types.

        Args:
            model: gets the weights.
            picks: of its tensors.
        """
        for name, rows, others, local in local_shards(named_weights(model)):
            for place, entries in _pieces(picks[name], (rows, *others)):
                box = tuple(each if isinstance(each, slice) else _span(each) for each in entries)
                value = self.read(picks[name].name, box)
                for dim, each in enumerate(entries):
                    if isinstance(each, Tensor):
                        value = value.index_select(dim, each - each[0])
                local[place].copy_(value)


def _pieces(pick: Pick, own: Sequence[slice]) -> Iterator[tuple[slice, list[slice | Tensor]]]:
    """Rows of a shard, and which entries of the source's dimensions they are: a range, or some in a range.

    Args:
        pick: of the tensor.
        own: ranges of our dimensions that the shard has.
    """
    entries: list[slice | Tensor] = [
        mine if every is None else every[mine] for mine, every in zip(own, pick.entries, strict=True)
    ]
    spans = [each if isinstance(each, slice) else _span(each) for each in entries]
    most = max(1, AT_ONCE // prod(each.stop - each.start for each in spans[1:]))
    first = entries[0]
    rows = torch.arange(first.start, first.stop) if isinstance(first, slice) else first
    start = 0
    while start < len(rows):
        stop = int(torch.searchsorted(rows, rows[start] + most))
        yield slice(start, stop), [rows[start:stop], *entries[1:]]
        start = stop


def _span(entries: Tensor) -> slice:
    """The range from the first to the last of ascending entries."""
    return slice(int(entries[0]), int(entries[-1]) + 1)


def of_checkpoint(checkpoint: Checkpoint, wanted: InitFromConfig, key: str) -> PrunedSource:
    """The weights of a checkpoint.

    Args:
        checkpoint: of a run.
        wanted: section that names it.
        key: of the section, for messages.

    Raises:
        UserError: it does not have the weights that are wanted, or is damaged.
    """
    stored = tensors.stored_weights(checkpoint, wanted.weights)
    shapes = {name: each.shape for name, each in stored.items()}

    def read(name: str, box: Box) -> Tensor:
        return tensors.read_box(checkpoint, wanted.weights, name, stored[name].dtype, box)

    model = checkpoint.state()["fingerprints"]["model"]
    hashes = [{"checkpoint": checkpoint.fingerprint, "weights": wanted.weights}]
    known = {"step": checkpoint.step, "fingerprint": checkpoint.fingerprint}
    where = checkpoint.path
    return PrunedSource(
        *(where, model, _spec(model, shapes, where, key), shapes, read, lambda: Tokenizer.open(where), known, hashes)
    )


def of_export(source: ExportedWeights, wanted: InitFromConfig, key: str) -> PrunedSource:
    """Exported weights; arguments and errors as those of `of_checkpoint`."""
    files, found = exported_tensors(source.path, source.files)
    shapes = {name: each.shape for name, each in found.items()}

    def read(name: str, box: Box) -> Tensor:
        with safe_open(source.path / files[name], framework="pt") as opened:
            value: Tensor = opened.get_slice(name)[box]
        return value

    model, weights = source.about["fingerprints"]["model"], section_of(source, wanted.weights)
    hashes = [{"export": source.fingerprint, "weights": weights}]
    checkpoints = source.about["checkpoints"] or []
    if len(checkpoints) == 1:  # an average of several has none of their importances
        hashes.append({"checkpoint": str(checkpoints[0].get("fingerprint")), "weights": weights})
    known = {"run": source.about["run"], "checkpoints": source.about["checkpoints"]}
    spec = _spec(model, shapes, source.path, key)
    return PrunedSource(source.path, model, spec, shapes, read, source.tokenizer, known, hashes)


def of_folder(found: HuggingFaceFolder, config: Config) -> PrunedSource:
    """A model of Hugging Face's.

    Args:
        found: the folder.
        config: of the run, which may add tokens to the folder's.

    Raises:
        UserError: its files are damaged.
    """
    shapes = {name: each.shape for name, each in found.tensors.items()}

    def read(name: str, box: Box) -> Tensor:
        target = torch.empty([each.stop - each.start for each in box], dtype=found.tensors[name].dtype)
        found.read_into(target, name, *box)
        return target

    values = found.model.model_dump(mode="json")
    return PrunedSource(found.folder, values, found.spec, shapes, read, lambda: base_tokenizer(found, config))


def _spec(model: Mapping[str, Any], shapes: Shapes, where: Path, key: str) -> DecoderSpec:
    """Specification of a source, whose vocabulary and positions are those of its tables."""
    config = validated_model(dict(model), f"{key}: {where} describes a model that cannot be built")
    if "embedding.weight" not in shapes:
        raise UserError(f"{key}: {where} has no embedding.weight; name weights of a whole model")
    positions = shapes.get("position_embedding.weight", (1,))[0]
    return decoder_spec(config.model_copy(update={"vocab_size": None}), shapes["embedding.weight"][0], positions)
