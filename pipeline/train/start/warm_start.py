"""Start a new run from the weights of another one: no moments, no steps, no place in the data."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.committed import Checkpoint
from pipeline.train.checkpoint.exported import ExportedWeights
from pipeline.train.checkpoint.exported_loading import VerifiedWeights
from pipeline.train.checkpoint.fingerprint import computing_differences, model_fingerprint, pruned_differences
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import num_parameters
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.start.added_tokens import added_tokens, fill_added_rows
from pipeline.train.start.importance_file import Importance
from pipeline.train.start.optimizer_state import open_optimizer, opened_everywhere
from pipeline.train.start.pruned_source import PrunedSource, of_checkpoint, of_export, of_folder
from pipeline.train.start.pruning import Choice, choose, picks
from pipeline.train.start.weights_place import (
    WeightsPlace,
    base_tokenizer,
    check_fit,
    fill_from_folder,
    tokenizer_difference,
)

_KEY = "train.init_from"


@dataclass
class WeightsOrigin:
    """Origin of a run, for its checkpoints: the weights it began with, or the run that it was forked from."""

    value: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """State for the checkpoint; empty for a run that began with random weights."""
        return self.value

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.value = state


def warm_start(
    config: Config, tokenizer: Tokenizer, model: ParallelModel, optimizers: Optimizers | None
) -> tuple[list[str], WeightsOrigin]:
    """Load weights into a model of any layout, and with `train.init_from.optimizer` moments; every rank calls this.

    Args:
        config: with train.init_from.
        tokenizer: of this run.
        model: gets the weights.
        optimizers: get the moments; None where none are wanted.

    Returns:
        What was loaded, in words, and for the checkpoints.

    Raises:
        UserError: there are no such weights or moments, they are damaged, they do not fit the model, or their
            tokenizer is another one.
    """
    wanted = config.train.init_from
    assert wanted is not None
    if wanted.prunes:
        return _pruned_start(config, tokenizer, model)
    moments = opened_everywhere(config, model.spec) if wanted.optimizer else None
    if wanted.hf is not None:
        return _from_hf(wanted.hf, config, tokenizer, model)
    place = WeightsPlace(wanted, _KEY)
    # The hashes of everything that is read have been compared before it is.
    found = place.verified()
    if isinstance(found, Checkpoint):
        checkpoint, where, weights = found, found.path, wanted.weights
        broadcast_from_rank0(lambda: check_fit(place.shapes_in(checkpoint), model.spec, where, _KEY))
        lines = broadcast_from_rank0(
            lambda: _check_run(checkpoint.state()["fingerprints"]["model"], where, config, tokenizer, model.spec)
        )
        dcp_storage.read(checkpoint, model, weights=wanted.weights)
        _fill_added(Tokenizer.open(where), tokenizer, model)
        known = {"step": checkpoint.step, "fingerprint": checkpoint.fingerprint}
    else:
        export = found
        where, weights, about = export.source.path, export.source.section, export.source.about
        broadcast_from_rank0(lambda: check_fit(export.shapes, model.spec, where, _KEY))
        lines = broadcast_from_rank0(lambda: _check_export(export.source, config, tokenizer, model.spec))
        export.load(model)
        _fill_added(export.source.tokenizer(), tokenizer, model)
        known = {"run": about["run"], "checkpoints": about["checkpoints"]}
    what = "the moving average of the weights" if weights == "ema" else "the weights"
    if moments is None:
        first = (
            f"warm start from {what} in {where} alone: steps, the optimizer's moments, the learning rate schedule and "
            "the order of the data start from scratch"
        )
    else:
        assert optimizers is not None
        moments.load(model, optimizers)
        known["optimizer_step"] = moments.source.step
        first = (
            f"warm start from {what} and the optimizer's moments, of {moments.source.step:,} updates, in {where}: "
            "steps and the order of the data start from scratch"
        )
        lines = [*lines, *moments.lines]
    origin = {"kind": "init_from", "path": str(where), "weights": weights, "time": time.time(), **known}
    return [first, *lines], WeightsOrigin(origin)


def check_init_from(config: Config, tokenizer: Tokenizer, spec: DecoderSpec) -> list[str]:
    """Check that the weights of `train.init_from` are there and fit, in one process; their hashes are not compared.

    Args:
        config: with train.init_from.
        tokenizer: of this run.
        spec: of the model that gets them.

    Returns:
        warnings.

    Raises:
        UserError: as `warm_start`.
    """
    wanted = config.train.init_from
    assert wanted is not None
    if wanted.prunes:
        return _check_pruned(_source(config, spec), config, tokenizer, spec)[0]
    if wanted.hf is not None:
        return _check_hf(wanted.hf, config, tokenizer, spec)
    place = WeightsPlace(wanted, _KEY)
    checkpoint = place.checkpoint()
    moments = open_optimizer(config, spec).lines if wanted.optimizer else []
    if checkpoint is None:
        return [*_check_export(ExportedWeights.open(place.path), config, tokenizer, spec), *moments]
    check_fit(place.shapes_in(checkpoint), spec, checkpoint.path, _KEY)
    return _check_run(checkpoint.state()["fingerprints"]["model"], checkpoint.path, config, tokenizer, spec)


def _check_run(
    saved: dict[str, Any], where: Path, config: Config, tokenizer: Tokenizer, spec: DecoderSpec
) -> list[str]:
    """Check the weights of a run, whose tokenizer lies beside them."""
    return [
        *_check_tokenizer(Tokenizer.open(where), config, tokenizer, where),
        *_check_meaning(saved, config, spec),
    ]


def _check_export(source: ExportedWeights, config: Config, tokenizer: Tokenizer, spec: DecoderSpec) -> list[str]:
    """Check exported weights; the tokenizer lies beside them unless it is unknown."""
    own = source.tokenizer()
    lines = (
        [f"warning: {source.unknown_tokenizer}; check that it is this run's"]
        if own is None
        else _check_tokenizer(own, config, tokenizer, source.path)
    )
    return [*lines, *_check_meaning(source.about["fingerprints"]["model"], config, spec)]


def _check_meaning(saved: dict[str, Any], config: Config, spec: DecoderSpec) -> list[str]:
    """Warnings for keys of the model that were others when the weights were trained, though the weights fit."""
    return _meaning_lines(computing_differences(saved, model_fingerprint(config), spec))


def _meaning_lines(found: Iterable[tuple[str, Any, Any]]) -> list[str]:
    return [
        f"warning: {name}: {old!r} where the weights were trained -> {new!r} here; they fit, but compute something else"
        for name, old, new in found
    ]


def _check_tokenizer(trained_with: Tokenizer, config: Config, tokenizer: Tokenizer, where: Path) -> list[str]:
    """Lines on a tokenizer that adds tokens to that of the weights, or is another one and allowed."""
    if added := added_tokens(trained_with, tokenizer):
        if config.train.init_from is not None and config.train.init_from.optimizer:
            raise UserError(
                f"train.init_from.optimizer: the moments in {where} have no rows for tokens {added.start:,} to "
                f"{added.stop - 1:,}, which the run's tokenizer adds (tokenizer.add_tokens): leave out one of the two"
            )
        return [
            f"tokens {added.start:,} to {added.stop - 1:,} are not known to the weights in {where}: their rows begin "
            "as the mean of all others"
        ]
    return tokenizer_difference(trained_with, config, tokenizer, where, _KEY)


def _fill_added(trained_with: Tokenizer | None, tokenizer: Tokenizer, model: ParallelModel) -> None:
    """Set the rows of tokens that the weights do not know, if there are any."""
    if trained_with is not None and (added := added_tokens(trained_with, tokenizer)):
        fill_added_rows(model, added)


# A model of Hugging Face's


def _check_hf(folder: Path, config: Config, tokenizer: Tokenizer, spec: DecoderSpec) -> list[str]:
    """Check that the model in a folder is this one; warnings."""
    found = HuggingFaceFolder(folder, vocab_multiple=spec.vocab_padded)
    base = base_tokenizer(found, config)
    _check_vocabulary(folder, found.spec, base, tokenizer, spec)
    shapes = {name: each.shape for name, each in found.tensors.items()}
    check_fit(shapes, spec, folder, _KEY, f"`pipeline convert from-hf {folder} --dry-run` prints its `model`")
    lines = _check_tokenizer(base, config, tokenizer, folder)
    return [*lines, *_check_meaning(_hf_values(found, config), config, spec)]


def _check_vocabulary(
    folder: Path, found: DecoderSpec, base: Tokenizer, tokenizer: Tokenizer, spec: DecoderSpec
) -> None:
    """Refuse a model with another number of tokens with logits than a folder's, and those that the run adds."""
    ours, theirs = spec.vocab_size, found.vocab_size
    wanted = theirs if tokenizer.vocab_size <= theirs or not added_tokens(base, tokenizer) else tokenizer.vocab_size
    if ours != wanted:
        raise UserError(
            f"train.init_from.hf: the model in {folder} has {theirs} tokens with logits, and this one {ours}; "
            f"set model.vocab_size={wanted}"
        )


def _hf_values(found: HuggingFaceFolder, config: Config) -> dict[str, Any]:
    """The `model:` section of a folder, with the run's padding of the vocabulary."""
    own = {"vocab_size": config.model.vocab_size, "vocab_multiple": config.model.vocab_multiple}
    return {**found.model.model_dump(mode="json"), **own}


def _from_hf(
    folder: Path, config: Config, tokenizer: Tokenizer, model: ParallelModel
) -> tuple[list[str], WeightsOrigin]:
    """Fill the model from a folder of Hugging Face's: each rank reads the rows and columns that it has."""
    lines = broadcast_from_rank0(lambda: _check_hf(folder, config, tokenizer, model.spec))
    found = HuggingFaceFolder(folder, vocab_multiple=model.spec.vocab_padded)
    fill_from_folder(model, found)
    _fill_added(base_tokenizer(found, config), tokenizer, model)
    first = (
        f"start from the {found.family.architecture} in {folder}: steps, the optimizer's moments, the learning rate "
        "schedule and the order of the data start from scratch"
    )
    return [first, *lines], WeightsOrigin({"kind": "hf", "path": str(folder), "weights": "model", "time": time.time()})


# A part of a larger model


def _source(config: Config, spec: DecoderSpec, *, verify: bool = False) -> PrunedSource:
    """The weights that the run's model is a part of; with `verify` all files are hashed, and every rank calls this."""
    wanted = config.train.init_from
    assert wanted is not None
    if wanted.hf is not None:
        return of_folder(HuggingFaceFolder(wanted.hf, vocab_multiple=spec.vocab_padded), config)
    place = WeightsPlace(wanted, _KEY)
    found = place.verified() if verify else place.checkpoint() or ExportedWeights.open(place.path, _KEY)
    if isinstance(found, Checkpoint):
        place.shapes_in(found)
        return of_checkpoint(found, wanted, _KEY)
    export = found.source if isinstance(found, VerifiedWeights) else found
    export.check_section(wanted.weights, f"{_KEY}.weights")
    return of_export(export, wanted, _KEY)


def _check_pruned(
    source: PrunedSource, config: Config, tokenizer: Tokenizer, spec: DecoderSpec
) -> tuple[list[str], Choice, dict[str, Any]]:
    """Check that the run's model is a part of a source.

    Returns:
        Warnings, what is taken, and what the run's checkpoints say of it.

    Raises:
        UserError: it is none, or the importance of its parts is not known.
    """
    wanted, where = config.train.init_from, f"{source.where}"
    assert wanted is not None
    importance = None if wanted.dims is None else Importance.read(wanted.dims, f"{_KEY}.dims")
    if importance is not None:
        source.check_importance(importance, f"{_KEY}.dims")
    trained_with = source.tokenizer()
    if wanted.hf is not None and trained_with is not None:
        _check_vocabulary(source.where, source.spec, trained_with, tokenizer, spec)
    if spec.dim != source.spec.dim and config.model.init.mup_base_dim is not None:
        raise UserError(
            f"{_KEY}.dims: model.init.mup_base_dim scales logits by model.dim, which pruning changes; prune layers, "
            "heads or mlp channels alone, and leave model.dim"
        )
    choice = choose(wanted, spec, source.spec, importance, where)
    picks(choice, spec, source.spec, source.shapes, where)
    lines = (
        [f"warning: the tokenizer of {where} is not known; check that it is this run's"]
        if trained_with is None
        else _check_tokenizer(trained_with, config, tokenizer, source.where)
    )
    now, specs = model_fingerprint(config), (source.spec, spec)
    lines += _meaning_lines(pruned_differences(dict(source.model), now, specs, choice["layers"]))
    about: dict[str, Any] = {"layers": choice["layers"]}
    if importance is not None:
        about["dims"] = {"path": str(wanted.dims), "hash": importance.digest}
    return lines, choice, about


def _pruned_start(config: Config, tokenizer: Tokenizer, model: ParallelModel) -> tuple[list[str], WeightsOrigin]:
    """Fill the model with a part of a larger one: each rank reads what its shards need; every rank calls this."""
    wanted = config.train.init_from
    assert wanted is not None
    source = _source(config, model.spec, verify=True)
    # One choice for all, made by rank 0: a file of importance may change while ranks start.
    lines, choice, about = broadcast_from_rank0(lambda: _check_pruned(source, config, tokenizer, model.spec))
    source.fill(model, picks(choice, model.spec, source.spec, source.shapes, f"{source.where}"))
    _fill_added(source.tokenizer(), tokenizer, model)
    first = (
        f"start from a part of the weights in {source.where}: layers {', '.join(map(str, choice['layers']))} of "
        f"{len(source.spec.layers)}, {_sizes(model.spec, source.spec)}; steps, the optimizer's moments, the learning "
        "rate schedule and the order of the data start from scratch"
    )
    origin = {
        "kind": "hf" if wanted.hf is not None else "init_from",
        "path": str(source.where),
        "weights": wanted.weights,
        "time": time.time(),
        **source.known,
        **about,
    }
    return [first, *lines], WeightsOrigin(origin)


def _sizes(ours: DecoderSpec, theirs: DecoderSpec) -> str:
    """Sizes of a part of a model in words."""
    our, their = num_parameters(ours), num_parameters(theirs)
    return f"{ours.dim:,} of {theirs.dim:,} channels, {our:,} of {their:,} parameters"
