"""Start a new run from the weights of another one: no moments, no steps, no place in the data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import EXPORT_ORIGIN, RunFiles
from pipeline.config import Config
from pipeline.config.train import InitFromConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.committed import COMMIT, Checkpoint, changed
from pipeline.train.checkpoint.fingerprint import differences, model_fingerprint
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.resume_point import files_by_rank, source_point
from pipeline.train.checkpoint.tensors import stored
from pipeline.train.checkpoint.weight_source import exported_files, exported_tensors
from pipeline.train.distributed.process_group import broadcast_from_rank0, gather
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.init import local_range
from pipeline.train.parallel.parallelize import ParallelModel

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by parameter name."""


@dataclass
class WeightsOrigin:
    """Origin of a run, for its checkpoints: the weights it began with, or the run that it was forked from."""

    value: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """For the checkpoint; empty for a run that began with random weights."""
        return self.value

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.value = state


def warm_start(config: Config, tokenizer: Tokenizer, model: ParallelModel) -> tuple[list[str], WeightsOrigin]:
    """Load weights alone into a model of any layout; every rank calls this.

    Args:
        config: with train.init_from.
        tokenizer: of this run.
        model: gets the weights.

    Returns:
        What was loaded, in words, and for the checkpoints.

    Raises:
        UserError: there are no such weights, they are damaged, they do not fit the model, or their tokenizer is
            another one.
    """
    wanted = config.train.init_from
    assert wanted is not None
    if wanted.hf is not None:
        return _from_hf(wanted.hf, config, tokenizer, model)
    checkpoint = _checkpoint(wanted)
    # The hashes of everything that is read have been compared before it is.
    if checkpoint is not None:
        where, weights = checkpoint.path, wanted.weights
        broadcast_from_rank0(lambda: _check_fit(_shapes_in(checkpoint, wanted.weights), model.spec, where))
        lines = broadcast_from_rank0(
            lambda: _check_run(checkpoint.state()["fingerprints"]["model"], where, config, tokenizer, model.spec)
        )
        dcp_storage.read(checkpoint, model, weights=wanted.weights)
        known = {"step": checkpoint.step, "fingerprint": checkpoint.fingerprint}
    else:
        where = _folder(wanted)
        export = _verified_export(wanted)
        (files, tensors), weights = exported_tensors(where, export["files"]), export["weights"]
        broadcast_from_rank0(
            lambda: _check_fit({name: each.shape for name, each in tensors.items()}, model.spec, where)
        )
        saved = export["fingerprints"]["model"]
        lines = broadcast_from_rank0(lambda: _check_run(saved, where, config, tokenizer, model.spec))
        _read_exported(where, files, model)
        known = {"run": export["run"], "checkpoints": export["checkpoints"]}
    what = "the moving average of the weights" if weights == "ema" else "the weights"
    first = (
        f"warm start from {what} in {where} alone: steps, the optimizer's moments, the learning rate schedule and the "
        "order of the data start from scratch"
    )
    origin = {"kind": "init_from", "path": str(where), "weights": weights, "time": time.time(), **known}
    return [first, *lines], WeightsOrigin(origin)


def _checkpoint(wanted: InitFromConfig) -> Checkpoint | None:
    """The checkpoint that is meant, verified; None where the folder has weights that were exported."""
    path = _folder(wanted)
    kind = broadcast_from_rank0(lambda: _kind(wanted))
    if kind == "exported":
        return None
    if kind == "checkpoint":
        return source_point(Checkpoints(path.parent), int(path.name.removeprefix("step-")))
    return source_point(Checkpoints.of_run(path), wanted.step)


def _folder(wanted: InitFromConfig) -> Path:
    assert wanted.path is not None, "the section sees to it"
    return wanted.path


def _kind(wanted: InitFromConfig) -> str:
    path = _folder(wanted)
    if not path.is_dir():
        raise UserError(
            f"train.init_from.path: there is no folder {path}; name a run folder, a checkpoint in it, or a folder with "
            "exported weights"
        )
    if RunFiles(path).checkpoints.is_dir():
        return "run"
    number = path.name.removeprefix("step-")
    is_checkpoint = (path / COMMIT).exists() and path.name.startswith("step-") and number.isdigit()
    if not is_checkpoint and not (path / EXPORT_ORIGIN).is_file():
        raise UserError(
            f"train.init_from.path: {path} has no weights: it has neither `checkpoints`, as a run folder has, nor "
            f"{COMMIT}, as checkpoints/step-... in it has, nor {EXPORT_ORIGIN}, as an export has; name one of these"
        )
    if wanted.step is not None and (not is_checkpoint or wanted.step != int(number)):
        raise UserError(
            f"train.init_from.step: {wanted.step} needs a run folder, but {path} is not one; leave `step` out"
        )
    return "checkpoint" if is_checkpoint else "exported"


def _check_fit(
    found: Mapping[str, Sequence[int]],
    spec: DecoderSpec,
    where: Path,
    advice: str = "set `model` to that of the run that the weights are from",
) -> None:
    """A `UserError` that names the first tensor that the model does not have as it is."""
    if problem := dcp_storage.first_misfit(found, spec, where):
        raise UserError(f"train.init_from: {problem}; {advice}")


def _shapes_in(checkpoint: Checkpoint, weights: str) -> Shapes:
    found = stored(checkpoint).get(weights)
    if not found:
        raise UserError(
            f"train.init_from.weights: {weights} is not in {checkpoint.path}, whose run had no train.ema then; use "
            "weights: model, or another checkpoint"
        )
    return {name: tensor.shape for name, tensor in found.items()}


def _check_run(
    saved: dict[str, Any], where: Path, config: Config, tokenizer: Tokenizer, spec: DecoderSpec
) -> list[str]:
    """Weights of a run, whose tokenizer lies beside them."""
    return [*_check_tokenizer(Tokenizer.open(where), config, tokenizer, where), *_check_meaning(saved, config, spec)]


def _check_meaning(saved: dict[str, Any], config: Config, spec: DecoderSpec) -> list[str]:
    """Warnings for keys of the model that were others when the weights were trained, though the weights fit."""
    saved, now = (_what_computes(values, spec) for values in (saved, model_fingerprint(config)))
    return [
        f"warning: {name}: {old!r} where the weights were trained -> {new!r} here; they fit, but compute something else"
        for name, old, new in differences("model", saved, now)
    ]


def _what_computes(model: dict[str, Any], spec: DecoderSpec) -> dict[str, Any]:
    """The keys of `model` that decide what weights of the shapes of `spec` compute."""
    # The tensors have shown what the vocabulary is.
    keys = {key: value for key, value in model.items() if key not in ("max_positions", "vocab_size", "vocab_multiple")}
    for layer in spec.different_layers:
        for part in layer.parts.values():
            keys |= part.same_meaning(model)
    # Of how the weights were drawn, the base width of muP alone matters later: it scales attention and logits.
    return {**keys, "init": {"mup_base_dim": model["init"].get("mup_base_dim")}}


def _check_tokenizer(there: Tokenizer, config: Config, tokenizer: Tokenizer, where: Path) -> list[str]:
    if there.fingerprint == tokenizer.fingerprint:
        return []
    difference = (
        f"the weights in {where} were trained with another tokenizer ({there.vocab_size} entries, fingerprint "
        f"{there.fingerprint}) than this run's ({tokenizer.vocab_size} entries, {tokenizer.fingerprint})"
    )
    if "tokenizer" not in config.resume.allow:
        raise UserError(
            f"train.init_from: {difference}: the same ids stand for other tokens. Set tokenizer.path to {where}, or "
            "accept it with resume.allow=[tokenizer]"
        )
    return [f"warning: allowed: {difference}"]


# A model of Hugging Face's


def _from_hf(
    folder: Path, config: Config, tokenizer: Tokenizer, model: ParallelModel
) -> tuple[list[str], WeightsOrigin]:
    """Each rank reads the rows and columns that it has, wherever in their tensors they are."""

    def opened() -> HuggingFaceFolder:
        return HuggingFaceFolder(folder, vocab_multiple=config.model.vocab_multiple)

    def check() -> list[str]:
        found = opened()
        ours, theirs = model.spec.vocab_size, found.spec.vocab_size
        if ours != theirs:
            raise UserError(
                f"train.init_from.hf: the model in {folder} has {theirs} tokens with logits, and this one {ours}; set "
                f"model.vocab_size={theirs}"
            )
        shapes = {name: each.shape for name, each in found.tensors.items()}
        _check_fit(shapes, model.spec, folder, f"`pipeline convert from-hf {folder} --dry-run` prints its `model`")
        lines = _check_tokenizer(found.tokenizer(config.tokenizer), config, tokenizer, folder)
        return [*lines, *_check_meaning(found.model.model_dump(mode="json"), config, model.spec)]

    lines = broadcast_from_rank0(check)
    found = opened()
    with torch.no_grad():
        for name, rows, others, local in _local_shards(model):
            local.zero_()
            piece = found.read_piece(name, rows, *others)
            if piece is not None:
                local[: len(piece)].copy_(piece)
    first = (
        f"start from the {found.family.architecture} in {folder}: steps, the optimizer's moments, the learning rate "
        "schedule and the order of the data start from scratch"
    )
    return [first, *lines], WeightsOrigin({"kind": "hf", "path": str(folder), "weights": "model", "time": time.time()})


def _local_shards(model: ParallelModel) -> Iterator[tuple[str, slice, list[slice], torch.Tensor]]:
    """Shards of this rank: name, rows and columns of each parameter, and the tensor that holds them."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        ranges = (local_range(parameter, dim) for dim in range(parameter.ndim))
        rows, *others = (slice(each.start, each.stop) for each in ranges)
        local = parameter.to_local()
        if local.numel():
            yield name, rows, others, local


# Exported weights


def _verified_export(wanted: InitFromConfig) -> dict[str, Any]:
    """The record of weights that were exported to a folder. Each rank reads and hashes some of the files."""
    folder = _folder(wanted)

    def read_origin() -> dict[str, Any]:
        keys = ("files", "weights", "fingerprints", "run", "checkpoints")
        about: dict[str, Any] = storage.get_json(folder / EXPORT_ORIGIN, *keys)
        if wanted.weights == "ema" and about["weights"] != "ema":
            raise UserError(
                f"train.init_from.weights: ema, but {folder} has the trained weights; export the "
                "average (`pipeline checkpoint export --weights ema`), or leave `weights` out"
            )
        about["files"] = exported_files(folder, about)
        return about

    about = broadcast_from_rank0(read_origin)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    problems: list[str] = []
    for name in files_by_rank(about["files"], ranks)[rank]:
        try:
            problem = changed(folder / name, about["files"][name][1], symlinks=True)
        except OSError as error:
            problem = f"{folder / name} cannot be read: {error.strerror}"
        problems += [problem] if problem else []
    found = gather(problems)

    def verdict() -> None:
        assert found is not None, "this is rank 0"
        if everything := [problem for those in found for problem in those]:
            raise UserError("train.init_from: " + "; ".join(everything) + "; export them again")

    broadcast_from_rank0(verdict)
    return about


@torch.no_grad()
def _read_exported(folder: Path, files: Mapping[str, str], model: ParallelModel) -> None:
    """Each rank reads the rows and columns that it has."""
    for name, rows, others, local in _local_shards(model):
        with safe_open(folder / files[name], framework="pt") as tensors:
            local.copy_(tensors.get_slice(name)[(rows, *others)])
