"""Loss on held-out windows. The same code validates while training and evaluates afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.heldout import HeldOut, sample
from pipeline.train.model.context import Context
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.parallel.context import sequence_shard
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import Runner
from pipeline.train.parallel.setup import Setup
from pipeline.train.step import make_context

_MULTIPLE = 64
"""Tokens of which the length of a batch is a multiple, if it is shorter than a window may be."""


@dataclass(frozen=True)
class HeldOutLoss:
    """A sum of cross entropy in nats over `targets` tokens."""

    nats: float
    targets: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nats / max(1, self.targets)

    def __add__(self, other: HeldOutLoss) -> HeldOutLoss:
        return HeldOutLoss(self.nats + other.nats, self.targets + other.targets)


def validation_losses(
    config: Config,
    setup: Setup,
    heldout: Mapping[str, HeldOut],
    model: ParallelModel,
    runner: Runner,
    *,
    batch_size: int,
    advance: Callable[[], None],
) -> dict[str, HeldOutLoss]:
    """Loss by source on the sample of `train.validation`; empty where there is none. Every rank calls this.

    Args:
        config: resolved config.
        setup: mesh and device of the model.
        heldout: windows by source.
        model: what is validated.
        runner: of the model.
        batch_size: windows at once.
        advance: called after each batch.
    """
    samples = config.train.validation.samples
    splits = {name: split for name, split in heldout.items() if samples and len(split)}
    return {
        name: heldout_loss(
            config,
            setup,
            model,
            runner,
            splits[name],
            windows,
            batch_size=batch_size,
            advance=lambda windows: advance(),
        )
        for name, windows in sample(splits, samples).items()
    }


class HeldOutRows(Protocol):
    """Rows of tokens with targets, by number: a `HeldOut`, or what stands in for one."""

    def longest_first(self, windows: Sequence[int]) -> Sequence[int]:
        """See `HeldOut`, as for the others."""

    def length_of(self, windows: Sequence[int], multiple: int) -> int:
        """Positions of a batch of them."""

    def batch(self, windows: Sequence[int], length: int | None = None) -> Batch:
        """Some of them."""


@torch.no_grad()
def heldout_loss(
    config: Config,
    setup: Setup,
    model: ParallelModel,
    runner: Runner,
    split: HeldOutRows,
    windows: Sequence[int],
    *,
    batch_size: int,
    advance: Callable[[int], None] = lambda windows: None,
) -> HeldOutLoss:
    """Cross entropy of what counts in `windows` of a split, dealt to all data-parallel ranks; sums are taken in fp64.

    Every rank calls this, and gets the same sums.

    Args:
        batch_size: windows of one forward pass on one rank.
        advance: called with the number of windows done after each pass.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=setup.device)
    chunk_tokens = config.train.loss.tokens_at_once(model.vocab_columns)

    def context(whole: Batch, batch: Batch) -> Context:
        criterion = Criterion(batch.targets, batch.weight, shard=model.vocab_shard, chunk_tokens=chunk_tokens)
        return make_context(whole, config.model.document_attention, criterion, cut=model.cut, predicted=batch.predicted)

    def measure(losses: TokenLosses, batch: Batch) -> None:
        if setup.mesh.rank("tp") == 0:  # the others have the same sums
            sums[0] += (losses.loss_BS * batch.weight).sum(dtype=torch.float64)
            sums[1] += batch.weight.sum(dtype=torch.float64)

    was_training = next(iter(model.parts.values())).training
    model.train(False)
    model.prepare_passes()
    for batches, count in _passes(split, split.longest_first(windows), batch_size, setup.mesh, model):
        on_device = [batch.to(setup.device) for batch in batches]
        shards = [sequence_shard(batch, model.cut) for batch in on_device]
        runner.evaluate(shards, [context(*pair) for pair in zip(on_device, shards, strict=True)], measure)
        advance(count)
    model.train(was_training)
    dist.all_reduce(sums)
    return HeldOutLoss(sums[0].item(), int(sums[1].item()))


def _passes(
    split: HeldOutRows, windows: Sequence[int], batch_size: int, mesh: Mesh, model: ParallelModel
) -> Iterator[tuple[list[Batch], int]]:
    """This rank's batches, up to one a stage of one shape at once, and how many windows all ranks have in them."""
    ranks, together, multiple = mesh.size("batch"), len(model.stages), math.lcm(_MULTIPLE, model.sequence_multiple)
    everyone = batch_size * ranks
    whole = len(windows) // everyone
    for first in range(0, whole, together):
        groups = [windows[group * everyone : (group + 1) * everyone] for group in range(first, whole)[:together]]
        yield _own_batches(split, groups, batch_size, mesh, multiple), everyone * len(groups)
    if rest := windows[whole * everyone :]:
        yield _own_batches(split, [rest], -(-len(rest) // ranks), mesh, multiple), len(rest)


def _own_batches(
    split: HeldOutRows, groups: Sequence[Sequence[int]], size: int, mesh: Mesh, multiple: int
) -> list[Batch]:
    """This rank's `size` windows of each group, in batches as long as the longest window needs, or a bit longer.

    All ranks have as many, so what is missing is filled up with weight 0.
    """
    mine = [group[mesh.rank("batch") * size :][:size] for group in groups]
    full = [[*chosen, *[groups[0][0]] * (size - len(chosen))] for chosen in mine]
    # Lengths may differ between data-parallel ranks, not between the processes that share a batch.
    length = split.length_of([window for group in full for window in group], multiple)
    batches = [split.batch(windows, length) for windows in full]
    for number, chosen in enumerate(mine):
        if len(chosen) < size:
            weight = batches[number].weight.clone()
            weight[len(chosen) :] = 0
            batches[number] = replace(batches[number], weight=weight)
    return batches
