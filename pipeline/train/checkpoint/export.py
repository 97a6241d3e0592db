"""Weights of checkpoints as safetensors, consolidated: one checkpoint's, or the mean of several.

The folder has the weights under the model's own parameter names, the tokenizer's files, `config.yaml` as resolved when
the checkpoint was written, and `export.json`: where they come from, and the size and hash of each file of weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from pipeline.common import links, storage
from pipeline.common.console import progress
from pipeline.common.errors import UserError
from pipeline.common.run_files import EXPORT_ORIGIN
from pipeline.config.load import RUN_FILE, dump_values
from pipeline.data.chat.kept_template import find_template, keep_template
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.exported import Weights
from pipeline.train.checkpoint.fingerprint import differences
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.tensors import Stored, groups, read, row_ranges, stored_weights
from pipeline.train.checkpoint.weight_files import split_into_files, write_weight_files


def export(
    checkpoints: Checkpoints,
    to: Path,
    *,
    step: int | None,
    weights: Weights,
    max_shard: int | None,
    console: Console,
) -> str:
    """Write the weights of a checkpoint, verified; returns what was written, in words.

    Args:
        checkpoints: of a run.
        to: the folder that is made.
        step: of the checkpoint; by default the latest.
        weights: those that were trained, or their moving average.
        max_shard: bytes of tensors in a file at most.
        console: for the progress bar.

    Raises:
        UserError: there is no such checkpoint, it is damaged or has no such weights, or `to` is there already.
        MachineError: `to` cannot be written.
    """
    free_folder(to)
    return _write([checkpoints.at(step)], to, "export", weights, max_shard, console)


def average(
    checkpoints: Checkpoints,
    to: Path,
    *,
    others: Sequence[Checkpoints] = (),
    steps: Sequence[int] | None,
    last: int | None,
    weights: Weights,
    max_shard: int | None,
    console: Console,
) -> str:
    """`export` of the mean of several checkpoints' weights, each counted once.

    Args:
        checkpoints: of a run.
        to: as for `export`.
        others: of further runs, from each of which as many are taken.
        steps: of the checkpoints of each run; or
        last: number of latest checkpoints of each run.
        weights: as for `export`.
        max_shard: as for `export`.
        console: as for `export`.

    Raises:
        UserError: as for `export`; or they are of different models or tokenizers, or `last` is more than there are.
        MachineError: as for `export`.
    """
    free_folder(to)
    if (steps is None) == (last is None):
        raise UserError("name the checkpoints to average, with either --steps 1000,2000 or --last 5")
    chosen = [each for run in (*others, checkpoints) for each in _chosen(run, steps, last)]
    if len({each.path.resolve() for each in chosen}) < max(2, len(chosen)):
        raise UserError(f"an average needs at least two different checkpoints, got {', '.join(_labels(chosen))}")
    return _write(chosen, to, "average", weights, max_shard, console)


def _chosen(run: Checkpoints, steps: Sequence[int] | None, last: int | None) -> list[Checkpoint]:
    """The checkpoints of a run that an average is of, in order of their steps."""
    if last is not None:
        existing = run.all()
        if last > len(existing):
            have = ", ".join(str(each.step) for each in existing) or "none"
            raise UserError(f"--last is {last}, but {run.folder} has {len(existing)} checkpoints (steps there: {have})")
        steps = [each.step for each in existing[-last:]]
    assert steps is not None, "one of them is given"
    return [run.at(step) for step in sorted(steps)]


def _runs(checkpoints: Sequence[Checkpoint]) -> list[Path]:
    """Folders of the runs that checkpoints are of, in order; none where there is one run."""
    runs = dict.fromkeys(each.path.parent.parent for each in checkpoints)
    return list(runs) if len(runs) > 1 else []


def _labels(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Steps of checkpoints, with their runs where these are several."""
    several = _runs(checkpoints)
    return [f"{each.path.parent.parent} {each.step}" if several else str(each.step) for each in checkpoints]


START_TOKEN = "start_token"
"""Key of an export's record with the id that the decoder of an encoder-decoder begins with, where it is known."""


def start_token_of(config: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    """Id of `train.objective.start_token` of a run file's values; None where it is the end of a document."""
    objective = config.get("train", {}).get("objective") or {}
    return tokenizer.special_tokens.get(objective.get("start_token") or "")


def longest_windows(config: Mapping[str, Any]) -> int:
    """Tokens of the longest windows that a resolved run file trains with."""
    phases = (config.get("blend") or {}).get("phases") or []
    return max([int(config["train"]["sequence_length"]), *(phase.get("sequence_length") or 0 for phase in phases)])


def free_folder(to: Path) -> None:
    """A `UserError` where a folder that is to be made has something in it."""
    with storage.writing(f"--to {to}"):
        taken = to.is_file() or (to.is_dir() and any(to.iterdir()))
    if taken:
        raise UserError(f"{to} exists already; name a new or empty folder")


def _write(
    checkpoints: Sequence[Checkpoint], to: Path, kind: str, weights: Weights, max_shard: int | None, console: Console
) -> str:
    newest = checkpoints[-1]
    states = [checkpoint.state() for checkpoint in checkpoints]
    tensors = _same_model(checkpoints, states, weights)
    total = sum(each.bytes for each in tensors.values())
    shards = split_into_files(tensors, max_shard)
    with storage.writing(f"--to {to}"), made_folder(Path(os.path.abspath(to))) as tmp:
        with progress(console, f"{kind} (bytes)", total) as advance:
            files = write_weight_files(tmp, shards, lambda wanted: _mean(checkpoints, weights, wanted), advance)
        tokenizer = Tokenizer.open(newest.path)
        tokenizer.save(tmp)
        keep_template(tmp, find_template(newest.path))
        start = start_token_of(states[-1]["config"], tokenizer)
        storage.put(tmp / RUN_FILE, dump_values(states[-1]["config"]).encode())
        storage.put_json(
            tmp / EXPORT_ORIGIN,
            {
                "kind": kind,
                "run": str(newest.path.parent.parent),
                "checkpoints": [
                    {"step": each.step, "fingerprint": each.fingerprint}
                    | ({"run": str(each.path.parent.parent)} if _runs(checkpoints) else {})
                    for each in checkpoints
                ],
                "weights": weights,
                "tokens": states[-1]["tokens"],
                "positions": longest_windows(states[-1]["config"]),
                "fingerprints": {name: states[-1]["fingerprints"][name] for name in ("model", "tokenizer")},
                "versions": states[-1]["versions"],
                "files": files,
                **({} if start is None else {START_TOKEN: start}),
            },
        )
    steps = ", ".join(_labels(checkpoints))
    what = "the moving average of the weights" if weights == "ema" else "the weights"
    mean = f"the mean of {what}" if len(checkpoints) > 1 else what
    return (
        f"{to}: {mean} of step{'s' if len(checkpoints) > 1 else ''} {steps}, {len(tensors)} tensors, "
        f"{sum(each.numel for each in tensors.values()):,} parameters, {total:,} bytes in {len(shards)} "
        f"file{'s' if len(shards) > 1 else ''}"
    )


@contextmanager
def made_folder(to: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `to` when all is written."""
    to.parent.mkdir(parents=True, exist_ok=True)
    for old in to.parent.glob(f".{to.name}.*{storage.TEMPORARY_SUFFIX}"):
        if storage.is_stale(old):
            links.remove_tree(old, ignore_errors=True)
    tmp = storage.temporary(to)
    tmp.mkdir()
    try:
        yield tmp
        storage.commit(tmp, to)
    except BaseException:
        links.remove_tree(tmp, ignore_errors=True)
        raise


def _same_model(
    checkpoints: Sequence[Checkpoint], states: Sequence[dict[str, Any]], weights: Weights
) -> dict[str, Stored]:
    """The tensors that all of the checkpoints have."""
    tensors: dict[str, Stored] = {}
    names = [each.path if _runs(checkpoints) else each.path.name for each in checkpoints]
    for name, checkpoint, state in zip(names, checkpoints, states, strict=True):
        found = stored_weights(checkpoint, weights)
        if not found:
            raise UserError(f"{name} has no moving average of the weights (train.ema was not set); use --weights model")
        for aspect in ("model", "tokenizer"):
            first, other = states[0]["fingerprints"][aspect], state["fingerprints"][aspect]
            if first != other:
                key, old, new = differences(aspect, first, other)[0]
                raise UserError(
                    f"{names[0]} and {name} cannot be averaged: {key} is {old!r} in the one and {new!r} in the other"
                )
        if tensors and found != tensors:
            raise UserError(f"{names[0]} and {name} cannot be averaged: their tensors differ")
        tensors = found
    return tensors


def _mean(
    checkpoints: Sequence[Checkpoint], weights: Weights, wanted: Mapping[str, Stored]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors in order, averaged in fp64; a group of them at a time is in memory, or some rows of a large one."""
    for group in groups(wanted):
        for rows in row_ranges(group):
            if len(checkpoints) == 1:
                yield from read(checkpoints[0], weights, group, rows).items()
                continue
            sums: dict[str, Tensor] = {}
            for checkpoint in checkpoints:
                for name, value in read(checkpoint, weights, group, rows).items():
                    sums[name] = value.double() if name not in sums else sums[name].add_(value)
            for name, each in group.items():
                yield name, (sums[name] / len(checkpoints)).to(each.dtype)
