"""Conversion of models of other suites to folders that `train.init_from.path` takes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.export import free_folder
from pipeline.train.foreign.megatron import MegatronCheckpoint, find_checkpoint
from pipeline.train.foreign.megatron_arguments import COMMON, read_arguments
from pipeline.train.foreign.megatron_optimizer import MegatronOptimizer
from pipeline.train.huggingface.convert import ConvertedOptimizer, run_file_section, write_converted


def from_megatron(
    folder: Path,
    to: Path,
    *,
    step: int | None = None,
    tokenizer: Path | None = None,
    end_of_document: str | None = None,
    max_shard: int | None = 5 * 10**9,
    ignore: Collection[str] = (),
    optimizer: bool = False,
    console: Console,
) -> str:
    """Convert the weights of a checkpoint of Megatron Core, and perhaps its optimizer; says what it wrote.

    Args:
        folder: of a run, or of one checkpoint.
        to: the folder that is made.
        step: iteration; by default the latest.
        tokenizer: a tokenizer.json or a folder with one; None: it is left out.
        end_of_document: token, of that tokenizer.
        max_shard: bytes of tensors in a file at most.
        ignore: arguments that the user says do not matter.
        optimizer: also the optimizer's moments and count of steps; the weights are then the fp32 ones that it updates.
        console: for the progress bar.

    Raises:
        UserError: it is not a checkpoint that can be converted, or `to` is there already.
        MachineError: `to` cannot be written.
    """
    free_folder(to)
    found = MegatronCheckpoint(folder, step, ignore)
    own = _tokenizer(found, tokenizer, end_of_document)
    states = _optimizer(found) if optimizer else None
    return write_converted(found, own, to, kind="from-megatron", max_shard=max_shard, console=console, optimizer=states)


def consumed_samples(folder: Path) -> int:
    """Samples that a run of Megatron-LM has trained on.

    Args:
        folder: of its checkpoints, or of one of them.

    Raises:
        UserError: it is not a checkpoint, or does not say so.
    """
    path = find_checkpoint(folder, None) / COMMON
    count = read_arguments(path).get("consumed_train_samples")
    if not isinstance(count, int) or count < 0:
        raise UserError(f"{path} (args): consumed_train_samples: {count!r} is not a number of samples; give --consumed")
    return count


def describe_megatron(
    folder: Path,
    step: int | None = None,
    tokenizer: Path | None = None,
    end_of_document: str | None = None,
    ignore: Collection[str] = (),
    *,
    optimizer: bool = False,
) -> str:
    """The part of a run file that goes with a checkpoint, as YAML; every name and shape is checked."""
    found = MegatronCheckpoint(folder, step, ignore)
    _ = found.tensors
    states = _optimizer(found) if optimizer else None
    return run_file_section(found, _tokenizer(found, tokenizer, end_of_document), None, states)


def _optimizer(found: MegatronCheckpoint) -> ConvertedOptimizer:
    """The optimizer of a checkpoint, all but its values checked."""
    optimizer = MegatronOptimizer(found)
    for source in (optimizer.masters, *optimizer.moments.values()):
        _ = source.tensors
    settings = optimizer.settings
    values = {
        "lr": settings.lr,
        "betas": list(settings.betas),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "clip_norm": settings.clip_norm,
    }
    counts = {"step": settings.step, "samples": settings.samples, "tokens": settings.tokens}
    return ConvertedOptimizer(optimizer.masters, optimizer.moments, {"type": "adamw", **counts, **values}, values)


def _tokenizer(found: MegatronCheckpoint, path: Path | None, end_of_document: str | None) -> Tokenizer | None:
    if path is None:
        if end_of_document is not None:
            raise UserError("--end-of-document names a token of the tokenizer: give --tokenizer, too")
        return None
    if end_of_document is None:
        raise UserError("name the token that ends each document with --end-of-document, as --tokenizer is given")
    return found.tokenizer(path, end_of_document)
