"""Exported weights as the model of a run that is evaluated: their tokenizer, and whether they fit the run's model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.common.console import alarm
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.preprocess.run_tokenizer import has_run_tokenizer, run_tokenizer, tokenizer_path
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.dcp_storage import first_misfit
from pipeline.train.checkpoint.exported import WEIGHTS_OPTION, ExportedWeights
from pipeline.train.checkpoint.exported_loading import VerifiedWeights, verified_export
from pipeline.train.checkpoint.fingerprint import computing_differences, differences, layer_plugins, shown
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.weight_source import validated_model
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.model.decoder_spec import DecoderSpec


def open_exported(config: Config, folder: Path) -> tuple[VerifiedWeights, Tokenizer]:
    """Verified weights in a folder and their tokenizer, or the run's where theirs is unknown; every rank calls this.

    Raises:
        UserError: there are no such weights, they are damaged, or there is no tokenizer.
    """
    weights = verified_export(folder, config.eval.weights, WEIGHTS_OPTION, "eval.weights")
    broadcast_from_rank0(lambda: _compare_tokenizers(config, weights.source))
    source, tokenizer = with_tokenizer(config, weights.source)
    assert tokenizer is not None, "rank 0 has found one"
    return replace(weights, source=source), tokenizer


def with_tokenizer(config: Config, source: ExportedWeights) -> tuple[ExportedWeights, Tokenizer | None]:
    """Exported weights and the tokenizer that they are evaluated with, which they name where it is the run's."""
    own = source.tokenizer()
    if own is not None:
        return source, own
    of_run = tokenizer_of_run(config)
    return (source if of_run is None else replace(source, assumed_tokenizer=of_run.fingerprint)), of_run


def _compare_tokenizers(config: Config, source: ExportedWeights) -> None:
    """Warn if the tokenizer of exported weights is unknown, or another than the run's."""
    own, of_run = source.tokenizer(), tokenizer_of_run(config)
    if own is None:
        if of_run is None:
            raise UserError(
                f"{WEIGHTS_OPTION}: {source.unknown_tokenizer}, and this run has none yet; set tokenizer.path to it, "
                "or run `pipeline preprocess` first"
            )
        alarm(
            "warning:",
            f"{source.unknown_tokenizer}; this run's is used ({of_run.vocab_size} entries, fingerprint "
            f"{of_run.fingerprint}): with any other one the results mean nothing",
        )
    elif of_run is not None and own.fingerprint != of_run.fingerprint:
        alarm(
            "warning:",
            f"the weights in {source.path} were trained with another tokenizer ({own.vocab_size} entries, fingerprint "
            f"{own.fingerprint}) than this run's ({of_run.vocab_size} entries, {of_run.fingerprint}); theirs is used",
        )


def tokenizer_of_run(config: Config) -> Tokenizer | None:
    """The tokenizer of a run: of its data, else of its latest checkpoint, else the file it names; None without any."""
    if has_run_tokenizer(config):
        return run_tokenizer(config)
    latest = Checkpoints.of_run(config.run.dir).latest()
    if latest is not None:
        found, saved = Tokenizer.open(latest.path), latest.state()["fingerprints"]["tokenizer"]
        if found.fingerprint != saved:
            raise UserError(
                f"the tokenizer in {latest.path} has changed since the checkpoint was written (fingerprint "
                f"{found.fingerprint} instead of {saved}); name another with tokenizer.path"
            )
        return found
    file = tokenizer_path(config)
    return None if file is None or not file.exists() else Tokenizer.load(file, config.tokenizer)


def check_exported(config: Config, weights: VerifiedWeights, spec: DecoderSpec) -> None:
    """Refuse exported weights that are not those of the run's model; the message names the keys that differ."""
    folder = weights.source.path
    fingerprint = weights.source.about["fingerprints"]["model"]
    of_weights = validated_model(fingerprint, f"{folder} says of its model what cannot be")
    saved, now = of_weights.model_dump(mode="json"), config.model.model_dump(mode="json")
    for values, plugins in ((saved, fingerprint.get("plugins")), (now, layer_plugins(config.model))):
        if plugins:
            values["plugins"] = plugins
    misfit = first_misfit(weights.shapes, spec, folder)
    found = computing_differences(saved, now, spec)
    if misfit:
        found += _differences(saved, now, "vocab_size", "vocab_multiple", "max_positions")
        found = found or _differences(saved, now, "ffn_dim")  # its default is another spelling of a number
    lines = [f"{name}: {shown(old)} -> {shown(new)}" for name, old, new in found]
    if misfit is None and "model" in config.resume.allow:
        for line in lines:
            alarm("warning:", f"allowed: {line} (weights in {folder} -> this run)")
    elif misfit or lines:
        allow = "" if misfit else "; resume.allow=[model] accepts this"
        raise UserError(
            f"the weights in {folder} are of another model than this run's (weights -> run):\n  "
            + "\n  ".join([*lines, *([misfit] if misfit else [])])
            + f"\nset `model` to that of the weights{allow}"
        )


def _differences(saved: dict[str, Any], now: dict[str, Any], *keys: str) -> list[tuple[str, Any, Any]]:
    """`differences` of some keys of two `model:` sections."""
    return differences("model", *({key: values[key] for key in keys} for values in (saved, now)))
