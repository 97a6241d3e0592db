"""`pipeline convert check`: two models side by side, by their logits and losses on a text.

Shapes: S positions of a window, C of a chunk of them, V ids that both models have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pipeline.common import storage
from pipeline.common.console import print_table, progress, say, warn
from pipeline.common.errors import UserError, install_extra
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.comparison.sides import ComparedSide, ComputedModel, ReadRows, find_tokenizer, open_side
from pipeline.train.checkpoint.tensors import Stored

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}
"""Default of `tolerance`, by what is computed in."""
_LENGTH = 1024
_CHUNK_BYTES = 2**26
"""Bytes of the logits of a chunk of positions."""
_BYTES_PER_TOKEN = 16
_ROWS_BYTES = 2**26
_SUM_TOLERANCE = 1e-6


@dataclass
class SideBySide:
    """Sums over all positions that were compared.

    Attributes:
        length: tokens of a window.
        longest: tokens of the longest window of both models.
        tolerance: see `CheckOptions`.
        positions: number of them.
        targets: of these with a next token.
        agreeing: positions with the same most likely id.
        largest: largest difference of two logits.
        relative: largest difference of a position over its largest logit.
        losses: sums of the losses of A and B, each over all ids that its model has.
        common: the same over the ids that both have.
        first: the first position beyond the tolerance, in words.
        beyond: number of such positions.
    """

    length: int
    longest: int
    tolerance: float
    positions: int = 0
    targets: int = 0
    agreeing: int = 0
    largest: float = 0.0
    relative: float = 0.0
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])
    common: list[float] = field(default_factory=lambda: [0.0, 0.0])
    first: str = ""
    beyond: int = 0

    def mean(self, sums: list[float]) -> tuple[float, float]:
        """Losses per token."""
        return sums[0] / max(1, self.targets), sums[1] / max(1, self.targets)


@dataclass(frozen=True)
class CheckOptions:
    """Options of a comparison.

    Attributes:
        text: file of text in UTF-8.
        tokenizer: file or folder of a tokenizer; None: that of one of the models.
        tokens: tokens of the text that are compared at most.
        length: tokens of a window; None: `_LENGTH`, or fewer if a model has fewer positions.
        tolerance: largest difference of two logits, over 1 + the size of the first; None: by `dtype`.
        dtype: key of `DTYPES`.
        device: name of a device of torch.
    """

    text: Path
    tokenizer: Path | None = None
    tokens: int = 2048
    length: int | None = None
    tolerance: float | None = None
    dtype: str = "fp32"
    device: str = "cpu"


def check(a: Path, b: Path, options: CheckOptions, console: Console) -> bool | None:
    """Compare two models and print the result.

    Args:
        a: folder of a model.
        b: folder of the other.
        options: how.
        console: where to print.

    Returns:
        Whether they are the same within the tolerance; None if only sums were compared, and they are the same.

    Raises:
        UserError: a folder has no model, the text does not fit, or the models have no logits of a next token.
    """
    sides = [open_side(a), open_side(b)]
    if missing := [side for side in sides if not side.is_installed]:
        return _check_sums(sides, missing, console)
    ids, tokenizer = _ids(sides, options, console)
    longest = min(side.positions for side in sides)
    length = options.length or min(longest, _LENGTH)
    if length > longest:
        shorter = min(sides, key=lambda side: side.positions)
        raise UserError(f"--length {length:,}: {shorter.folder} has {longest:,} positions; give at most as many")
    with ExitStack() as stack:
        device = _device(options.device)
        models = [stack.enter_context(side.opened(DTYPES[options.dtype], device)) for side in sides]
        for side, model in zip(sides, models, strict=True):
            if max(ids) >= model.vocab_size:
                raise UserError(
                    f"the text has the id {max(ids):,}, and {side.folder} has {model.vocab_size:,} rows of logits; "
                    "is --tokenizer that of both models?"
                )
        tolerance = TOLERANCE[options.dtype] if options.tolerance is None else options.tolerance
        found = SideBySide(length, longest, tolerance)
        _compare(found, models, ids, tokenizer, console)
    _print(sides, models, found, options, console)
    return not found.beyond


def _ids(sides: list[ComparedSide], options: CheckOptions, console: Console) -> tuple[list[int], Tokenizer]:
    """The first tokens of the text, and the tokenizer."""
    if options.tokenizer is not None:
        own = [find_tokenizer(options.tokenizer)]
    else:
        own = [found for side in sides if (found := side.tokenizer()) is not None]
    if not own:
        raise UserError(f"neither {sides[0].folder} nor {sides[1].folder} has a tokenizer; give --tokenizer")
    with storage.open_regular(options.text) as file:
        data = file.read(options.tokens * _BYTES_PER_TOKEN)
    # A character that the reading cut goes with the last, incomplete token.
    text = data.decode(errors="ignore")
    ids, *others = (each.encode(text)[: options.tokens] for each in own)
    if others and others[0] != ids:
        warn(
            console,
            f"the tokenizer of {sides[1].folder} gives this text other ids; those of {sides[0].folder} are used",
        )
    if len(ids) < 2:
        raise UserError(f"{options.text} has {len(ids)} tokens; a loss needs two")
    return ids, own[0]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise UserError(f"--device {name} has no numbers to compare; give cpu or cuda")
    return device


def _compare(
    found: SideBySide, models: list[ComputedModel], ids: list[int], tokenizer: Tokenizer, console: Console
) -> None:
    """Add all windows of a text."""
    common = min(model.vocab_size for model in models)
    chunk = max(1, _CHUNK_BYTES // (4 * max(model.vocab_size for model in models)))
    with progress(console, "comparing tokens", len(ids)) as advance:
        for begin in range(0, len(ids), found.length):
            window = torch.tensor(ids[begin : begin + found.length])
            for first in range(0, len(window), chunk):
                last = min(first + chunk, len(window))
                logits = [model.logits(window, first, last) for model in models]
                _add_losses(found, logits, window[first + 1 : last + 1], common)
                a_CV, b_CV = (each[:, :common] for each in logits)
                place = _add_differences(found, a_CV, b_CV)
                if place is not None and not found.first:
                    found.first = _named(ids, begin + first + place, a_CV[place], b_CV[place], tokenizer)
                advance(last - first)


def _add_losses(found: SideBySide, logits: list[Tensor], targets_C: Tensor, common: int) -> None:
    found.targets += len(targets_C)
    for side, each in enumerate(logits):
        for sums, count in ((found.losses, each.shape[1]), (found.common, common)):
            scored_CV = each[: len(targets_C), :count].double()  # rounding of sums would hide small differences
            sums[side] += float(torch.nn.functional.cross_entropy(scored_CV, targets_C, reduction="sum"))


def _add_differences(found: SideBySide, a_CV: Tensor, b_CV: Tensor) -> int | None:
    """Add a chunk; returns its first place beyond the tolerance. What is not a number is beyond each tolerance."""
    apart_CV = (a_CV - b_CV).abs()
    beyond_C = ~(apart_CV <= found.tolerance * (1 + a_CV.abs())).all(dim=1)
    largest_C = apart_CV.nan_to_num(math.inf).amax(dim=1)
    found.largest = max(found.largest, float(largest_C.max()))
    found.relative = max(found.relative, float((largest_C / a_CV.abs().amax(dim=1).clamp(min=1e-30)).max()))
    found.positions += len(a_CV)
    found.agreeing += int((a_CV.argmax(dim=1) == b_CV.argmax(dim=1)).sum())
    found.beyond += int(beyond_C.sum())
    return int(beyond_C.int().argmax()) if bool(beyond_C.any()) else None


def _named(ids: list[int], place: int, a_V: Tensor, b_V: Tensor, tokenizer: Tokenizer) -> str:
    """A position in words: the text up to it, and its logits that differ most."""
    worst = int((a_V - b_V).abs().nan_to_num(math.inf).argmax())
    before = tokenizer.decode(ids[max(0, place - 24) : place + 1])
    return (
        f"token {place:,} of the text (behind '{storage.shown(before[-60:])}'), most for the id {worst}: "
        f"{float(a_V[worst]):.6g} and {float(b_V[worst]):.6g}"
    )


def _print(
    sides: list[ComparedSide],
    models: list[ComputedModel],
    found: SideBySide,
    options: CheckOptions,
    console: Console,
) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("", "A", "B", "difference"):
        table.add_column(head, overflow="fold", justify="left" if not head else "right")
    table.add_row("folder", *(str(side.folder) for side in sides), "")
    table.add_row("computed by", *(side.computed_by for side in sides), "")
    table.add_row("rows of logits", *(f"{model.vocab_size:,}" for model in models), "")
    pairs = {"mean loss": found.losses}
    if models[0].vocab_size != models[1].vocab_size:
        pairs["mean loss over common ids"] = found.common
    for name, sums in pairs.items():
        a, b = found.mean(sums)
        table.add_row(name, f"{a:.6f}", f"{b:.6f}", f"{b - a:+.2e}")
    table.add_row("logits, largest difference", "", "", f"{found.largest:.2e}")
    table.add_row("the same, over the position's largest", "", "", f"{found.relative:.2e}")
    table.add_row("positions with the same likeliest id", "", "", f"{found.agreeing:,} of {found.positions:,}")
    table.add_row("positions beyond the tolerance", "", "", f"{found.beyond:,} of {found.positions:,}")
    print_table(console, table)
    say(console, f"{found.positions:,} tokens of {options.text} in windows of {found.length:,}, in {options.dtype}.")
    if (seen := min(found.length, found.positions)) < found.longest:
        say(
            console,
            f"Positions beyond {seen:,} of a context were not compared, nor windows of attention that begin there.",
        )
    if models[0].vocab_size != models[1].vocab_size:
        common = min(model.vocab_size for model in models)
        say(
            console,
            f"The logits are those of the first {common:,} ids. Each loss is over all rows of its model: padding of a "
            "vocabulary that a model computes makes its loss higher.",
        )
    if sides[0].package == sides[1].package:
        say(console, f"Both are computed by {sides[0].package}: that its code is right is not shown.")
    if found.beyond:
        say(console, f"DIFFERENT beyond --tolerance {found.tolerance:g}, first at {found.first}.")
    else:
        say(console, f"Equal within --tolerance {found.tolerance:g}.")


def _check_sums(sides: list[ComparedSide], missing: list[ComparedSide], console: Console) -> bool | None:
    """Names, shapes and sums of tensors, by our names."""
    (a, read_a), (b, read_b) = (side.stored() for side in sides)
    problems = [f"{sides[0].folder} alone has {name}" for name in sorted(a.keys() - b.keys())]
    problems += [f"{sides[1].folder} alone has {name}" for name in sorted(b.keys() - a.keys())]
    shared = sorted(a.keys() & b.keys())
    with progress(console, "summing tensors", len(shared)) as advance:
        for name in shared:
            shapes = a[name].shape, b[name].shape
            if shapes[0] != shapes[1]:
                problems.append(f"{name} has the shapes {list(shapes[0])} and {list(shapes[1])}")
            else:
                sums = [_sums({name: each[name]}, read) for each, read in ((a, read_a), (b, read_b))]
                if not all(abs(x - y) <= _SUM_TOLERANCE * max(sums[0][1], 1e-30) for x, y in zip(*sums, strict=True)):
                    problems.append(f"{name} has the sums {sums[0][0]:.6g} and {sums[1][0]:.6g}")
            advance(1)
    packages = " and ".join(sorted({side.package for side in missing}))
    ways = [install_extra(side.extra) if side.extra else f"pip install {side.package}" for side in missing]
    say(console, f"{packages} is not installed ({ways[0]}), so no logits were compared.")
    for problem in problems[:20]:
        say(console, problem)
    if problems:
        say(console, f"DIFFERENT: {len(problems):,} differences, of names, shapes or sums of tensors.")
        return False
    say(
        console,
        f"Names, shapes and sums of {len(shared):,} tensors are equal. This is NO PROOF that the models compute the "
        "same: both were read by this package, and the order of rows does not change a sum.",
    )
    return None


def _sums(tensor: Mapping[str, Stored], read: ReadRows) -> tuple[float, float]:
    """Sum of a tensor, and of its absolute values, read by rows."""
    ((name, stored),) = tensor.items()
    count, *others = stored.shape
    rows = max(1, _ROWS_BYTES // (4 * max(1, math.prod(others))))
    total = size = 0.0
    for first in range(0, count, rows):
        part = read(tensor, slice(first, min(first + rows, count)))[name].double()
        total, size = total + float(part.sum()), size + float(part.abs().sum())
    return total, size
