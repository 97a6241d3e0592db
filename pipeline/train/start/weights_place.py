"""Weights outside of the run that its file names: a run, a checkpoint, or a folder that weights were exported to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash, value_hash
from pipeline.common.run_files import EXPORT_ORIGIN, RunFiles
from pipeline.config import Config
from pipeline.config.weights import WeightsConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.committed import COMMIT, Checkpoint
from pipeline.train.checkpoint.exported import ExportedWeights
from pipeline.train.checkpoint.exported_loading import (
    Shapes,
    VerifiedWeights,
    local_shards,
    named_weights,
    verified_export,
)
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.resume_point import files_by_rank, source_point
from pipeline.train.checkpoint.tensors import stored_weights
from pipeline.train.distributed.process_group import broadcast_from_rank0, gather
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.parallel.parallelize import ParallelModel

PlaceKind = Literal["run", "checkpoint", "exported"]


@dataclass(frozen=True)
class WeightsPlace:
    """The place of weights that a section of the run file names by `path`."""

    wanted: WeightsConfig
    key: str
    """Key of the section, for messages."""

    @property
    def path(self) -> Path:
        """The folder that is named."""
        assert self.wanted.path is not None, "the section sees to it"
        return self.wanted.path

    def kind(self) -> PlaceKind:
        """Kind of the folder; a `UserError` where it has no weights."""
        path, key, step = self.path, self.key, self.wanted.step
        if not path.is_dir():
            raise UserError(
                f"{key}.path: there is no folder {path}; name a run folder, a checkpoint in it, or a folder with "
                "exported weights"
            )
        if RunFiles(path).checkpoints.is_dir():
            return "run"
        number = path.name.removeprefix("step-")
        is_checkpoint = (path / COMMIT).exists() and path.name.startswith("step-") and number.isdigit()
        if not is_checkpoint and not (path / EXPORT_ORIGIN).is_file():
            raise UserError(
                f"{key}.path: {path} has no weights: it has neither `checkpoints`, as a run folder has, nor "
                f"{COMMIT}, as checkpoints/step-... in it has, nor {EXPORT_ORIGIN}, as an export has; name one of these"
            )
        if step is not None and (not is_checkpoint or step != int(number)):
            raise UserError(f"{key}.step: {step} needs a run folder, but {path} is not one; leave `step` out")
        return "checkpoint" if is_checkpoint else "exported"

    def verified(self) -> Checkpoint | VerifiedWeights:
        """The checkpoint or the exported weights, every file of them read and hashed; every rank calls this."""
        kind, path = broadcast_from_rank0(self.kind), self.path
        if kind == "exported":
            return verified_export(path, self.wanted.weights, self.key, f"{self.key}.weights")
        if kind == "checkpoint":
            return source_point(Checkpoints(path.parent), int(path.name.removeprefix("step-")))
        return source_point(Checkpoints.of_run(path), self.wanted.step)

    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, by the names and sizes of its files, in one process; None for exported weights."""
        kind, path = self.kind(), self.path
        if kind == "exported":
            return None
        if kind == "checkpoint":
            return Checkpoints(path.parent).at(int(path.name.removeprefix("step-")), _sizes)
        return Checkpoints.of_run(path).at(self.wanted.step, _sizes)

    def shapes_in(self, checkpoint: Checkpoint) -> Shapes:
        """Shapes of the weights that are wanted of a checkpoint; a `UserError` where it has no such weights."""
        found = stored_weights(checkpoint, self.wanted.weights)
        if not found:
            raise UserError(
                f"{self.key}.weights: {self.wanted.weights} is not in {checkpoint.path}, whose run had no train.ema "
                "then; use weights: model, or another checkpoint"
            )
        return {name: tensor.shape for name, tensor in found.items()}


def check_fit(
    found: Mapping[str, Sequence[int]],
    spec: DecoderSpec,
    where: Path,
    key: str,
    advice: str = "set `model` to that of the run that the weights are from",
) -> None:
    """A `UserError` that names the first tensor that the model does not have as it is."""
    if problem := dcp_storage.first_misfit(found, spec, where):
        raise UserError(f"{key}: {problem}; {advice}")


def base_tokenizer(found: HuggingFaceFolder, config: Config) -> Tokenizer:
    """The tokenizer of a folder, without the tokens that the run adds to it."""
    added = config.tokenizer.add_tokens
    allowed = [each for each in config.tokenizer.allow_special if each not in added]
    return found.tokenizer(config.tokenizer.model_copy(update={"add_tokens": [], "allow_special": allowed}))


def tokenizer_difference(
    trained_with: Tokenizer, config: Config, tokenizer: Tokenizer, where: Path, key: str
) -> list[str]:
    """Warning of another tokenizer that is allowed; a `UserError` where `resume.allow` does not name it."""
    if trained_with.fingerprint == tokenizer.fingerprint:
        return []
    difference = (
        f"the weights in {where} were trained with another tokenizer ({trained_with.vocab_size} entries, fingerprint "
        f"{trained_with.fingerprint}) than this run's ({tokenizer.vocab_size} entries, {tokenizer.fingerprint})"
    )
    if "tokenizer" not in config.resume.allow:
        raise UserError(
            f"{key}: {difference}: the same ids stand for other tokens. Set tokenizer.path to {where}, or "
            "accept it with resume.allow=[tokenizer]"
        )
    return [f"warning: allowed: {difference}"]


def weights_identity(wanted: WeightsConfig, key: str, vocab_multiple: int) -> str:
    """Hash of the weights that a section names; every rank calls this.

    A Hugging Face folder is read for it. Others have the hashes of their files, which are compared when these are
    loaded.

    Args:
        wanted: the section.
        key: of it.
        vocab_multiple: of the run's model.
    """
    if wanted.hf is not None:
        return folder_hash(HuggingFaceFolder(wanted.hf, vocab_multiple=vocab_multiple))

    def recorded() -> str:
        place = WeightsPlace(wanted, key)
        checkpoint = place.checkpoint()
        if checkpoint is None:
            return ExportedWeights.open(place.path, key).fingerprint
        return f"{checkpoint.fingerprint} {wanted.weights}"

    return broadcast_from_rank0(recorded)


@torch.no_grad()
def fill_from_folder(model: ParallelModel, folder: HuggingFaceFolder) -> None:
    """Fill a model of any layout from a folder of Hugging Face's: each rank reads the rows and columns that it has."""
    for name, rows, others, local in local_shards(named_weights(model)):
        folder.read_into(local, name, rows, *others)


def folder_hash(folder: HuggingFaceFolder) -> str:
    """Hash of the files that decide what a Hugging Face model computes; each rank reads some of them."""
    sizes = broadcast_from_rank0(lambda: {name: ((folder.folder / name).stat().st_size, "") for name in folder.files})
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mine = {name: f"{file_hash(folder.folder / name):016x}" for name in files_by_rank(sizes, ranks)[rank]}
    found = gather(mine)
    return broadcast_from_rank0(lambda: value_hash({name: each for some in found or () for name, each in some.items()}))


def _sizes(checkpoint: Checkpoint) -> list[str]:
    """Damage that the sizes of its files show."""
    return checkpoint.problems(full=False)
