"""The teacher of a distillation: its place, whether it fits the run, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.config.weights import WeightsConfig
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.committed import Checkpoint
from pipeline.train.checkpoint.exported import ExportedWeights
from pipeline.train.checkpoint.exported_loading import Shapes
from pipeline.train.checkpoint.weight_source import exported_tensors, validated_model
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.teacher import Teacher, build_teacher, teacher_config
from pipeline.train.rules.layout import check_teacher_layout
from pipeline.train.start.weights_place import (
    WeightsPlace,
    check_fit,
    fill_from_folder,
    folder_hash,
    tokenizer_difference,
)

_KEY = "train.distill.teacher"


@dataclass(frozen=True)
class TeacherWeights:
    """Verified weights of a teacher that fits the run, which have not been read yet."""

    config: Config
    """Config of the teacher, see `teacher_config`."""
    identity: str
    """Hash of its files."""
    line: str
    """The teacher in words."""
    warnings: list[str]
    fill: Callable[[ParallelModel], object]
    """Fills a model with the weights; every rank calls it."""

    def load(self, settings: Config, setup: Setup) -> Teacher:
        """The teacher with its weights on this process's place in the layout; every rank calls this."""
        model = build_teacher(self.config, setup)
        self.fill(model)
        assert settings.train.teacher is not None
        return Teacher(settings.train.teacher, model)


@dataclass(frozen=True)
class _Described:
    """A teacher by what lies beside its weights, none of which is read."""

    where: Path
    model: ModelConfig
    tokenizer: Tokenizer | None
    """None: it is not known."""
    shapes: Shapes
    positions: int | None = None
    """The longest context that its settings speak of."""


def planned_teacher(config: Config, vocab_size: int) -> tuple[Config, DecoderSpec] | None:
    """Config and specification of the teacher, for which no weight is read; None without one.

    Args:
        config: of the run.
        vocab_size: of the run's model, which the teacher has to have.

    Raises:
        UserError: there is no teacher where the run file says.
    """
    settings = config.train.teacher
    if settings is None:
        return None
    model = _model_named(settings.teacher.model_dump_json(), config.model.vocab_multiple)
    model = model.model_copy(update={"vocab_size": None})
    changed = teacher_config(config, model)
    return changed, decoder_spec(changed.model, vocab_size, changed.max_positions)


@lru_cache(maxsize=16)
def _model_named(wanted: str, vocab_multiple: int) -> ModelConfig:
    """The `model:` of a teacher; plans of many layouts ask for the same one.

    Args:
        wanted: the section that names it, as JSON.
        vocab_multiple: of the run's model.
    """
    section = WeightsConfig.model_validate_json(wanted)
    if section.hf is not None:
        return HuggingFaceFolder(section.hf, vocab_multiple=vocab_multiple).model
    place = WeightsPlace(section, _KEY)
    checkpoint = place.checkpoint()
    if checkpoint is None:
        return _model(ExportedWeights.open(place.path, _KEY).about["fingerprints"]["model"], place.path)
    return _model(checkpoint.state()["fingerprints"]["model"], checkpoint.path)


def check_teacher(config: Config, tokenizer: Tokenizer, processes: int) -> list[str]:
    """Check that the teacher is there and fits the run, in one process; hashes are not compared.

    Args:
        config: with a teacher.
        tokenizer: of this run.
        processes: that train.

    Returns:
        warnings.

    Raises:
        UserError: as `open_teacher`.
    """
    found = _described(config)
    where, model = found.where, found.model
    if model.direction == "both" or model.encoder is not None:
        raise UserError(
            f"{_KEY}: the model in {where} sees tokens after a position, which a model that predicts them cannot learn "
            "from; take a causal one"
        )
    changed = teacher_config(config, model)
    spec = _spec(changed, found)
    ours = decoder_spec(config.model, tokenizer.vocab_size, config.max_positions).vocab_size
    if spec.vocab_size != ours:
        raise UserError(
            f"{_KEY}: the model in {where} has {spec.vocab_size} tokens with logits, and this run's {ours}; take a "
            f"teacher with the same vocabulary, or set model.vocab_size={spec.vocab_size} if only padding differs"
        )
    if spec.learned_positions is not None and spec.learned_positions < config.max_positions:
        raise UserError(
            f"{_KEY}: the model in {where} has {spec.learned_positions} positions, but windows have up to "
            f"{config.max_positions} tokens; shorten train.sequence_length"
        )
    check_teacher_layout(changed, processes, f"{_KEY}: {where}")
    check_fit(found.shapes, spec, where, _KEY, "set model.vocab_multiple to the teacher's, or take another teacher")
    if found.tokenizer is None:
        return [f"{_KEY}: the tokenizer of {where} is not known; check that it is this run's"]
    lines = tokenizer_difference(found.tokenizer, config, tokenizer, where, _KEY)
    return [line.removeprefix("warning: ") for line in lines]


def open_teacher(config: Config) -> TeacherWeights | None:
    """The teacher of a run, every file of it read and hashed, or None without one; every rank calls this.

    Raises:
        UserError: there is no teacher where the run file says, its files are damaged, or it does not fit the run: it
            has another vocabulary, or a size that the layout cannot cut.
    """
    settings = config.train.teacher
    if settings is None:
        return None
    processes = dist.get_world_size()
    warnings = broadcast_from_rank0(lambda: check_teacher(config, run_tokenizer(config), processes))
    wanted = settings.teacher
    if wanted.hf is not None:
        folder = HuggingFaceFolder(wanted.hf, vocab_multiple=config.model.vocab_multiple)
        where, model, identity = folder.folder, folder.model, folder_hash(folder)
        fill = _filler(folder)
    else:
        place = WeightsPlace(wanted, _KEY)
        found = place.verified()
        if isinstance(found, Checkpoint):
            checkpoint = found
            where, model = found.path, _model(found.state()["fingerprints"]["model"], found.path)
            identity = f"{found.fingerprint} {wanted.weights}"

            def fill(teacher: ParallelModel) -> object:
                return dcp_storage.read(checkpoint, teacher, weights=wanted.weights)

        else:
            where, identity, fill = found.source.path, found.source.fingerprint, found.load
            model = _model(found.source.about["fingerprints"]["model"], where)
    line = f"teacher: {where} in {settings.dtype}, weight {settings.weight:g}, temperature {settings.temperature:g}"
    return TeacherWeights(teacher_config(config, model), identity, line, warnings, fill)


def _filler(folder: HuggingFaceFolder) -> Callable[[ParallelModel], object]:
    return lambda model: fill_from_folder(model, folder)


def _described(config: Config) -> _Described:
    assert config.train.teacher is not None
    wanted = config.train.teacher.teacher
    if wanted.hf is not None:
        found = HuggingFaceFolder(wanted.hf, vocab_multiple=config.model.vocab_multiple)
        shapes = {name: each.shape for name, each in found.tensors.items()}
        return _Described(wanted.hf, found.model, _own_tokenizer(found, config), shapes, found.positions)
    place = WeightsPlace(wanted, _KEY)
    checkpoint = place.checkpoint()
    if checkpoint is None:
        export = ExportedWeights.open(place.path, _KEY)
        export.check_section(wanted.weights, f"{_KEY}.weights")
        tensors = exported_tensors(place.path, export.files)[1]
        model = _model(export.about["fingerprints"]["model"], place.path)
        return _Described(place.path, model, export.tokenizer(), {name: each.shape for name, each in tensors.items()})
    model = _model(checkpoint.state()["fingerprints"]["model"], checkpoint.path)
    shapes = place.shapes_in(checkpoint)
    return _Described(checkpoint.path, model, Tokenizer.open(checkpoint.path), shapes)


def _own_tokenizer(found: HuggingFaceFolder, config: Config) -> Tokenizer:
    """The tokenizer of a folder; tokens that the run adds to its own are among it only if the folder has them."""
    added = found.tokenizer(config.tokenizer.model_copy(update={"add_tokens": [], "allow_special": []})).added_tokens
    has = [token for token in config.tokenizer.add_tokens if token in added]
    special = [*config.tokenizer.special_tokens, *has]
    allowed = [token for token in config.tokenizer.allow_special if token in special]
    return found.tokenizer(
        config.tokenizer.model_copy(update={"special_tokens": special, "add_tokens": [], "allow_special": allowed})
    )


def _model(values: object, where: Path) -> ModelConfig:
    return validated_model(values, f"{_KEY}: {where} describes a model that cannot be built")


def _spec(changed: Config, found: _Described) -> DecoderSpec:
    """Specification of a teacher with its own vocabulary and positions."""
    size = found.model.vocab_size or (1 if found.tokenizer is None else found.tokenizer.vocab_size)
    return decoder_spec(changed.model, size, changed.model.max_positions or changed.max_positions)
