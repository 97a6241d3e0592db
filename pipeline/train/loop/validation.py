"""Loss on held-out windows. The same code validates while training and evaluates afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.heldout import HeldOutTexts, sample
from pipeline.train.model.context import Context, make_context
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.parallel.context import sequence_shard
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import Runner
from pipeline.train.parallel.setup import Setup

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


class Validator:
    """Validation of a run while it trains: the split of `train.validation`, and the sets of `heldout_sets`.

    Each has its cadence, in steps of the run: a run that is resumed validates at the same steps.

    Args:
        config: resolved config.
        setup: mesh and device of the model.
        texts: windows.
    """

    def __init__(self, config: Config, setup: Setup, texts: HeldOutTexts) -> None:
        self._config, self._setup = config, setup
        self._sampled = {"": (texts.split, config.train.validation.samples)} if texts.split else {}
        self._sampled |= {name: (splits, config.heldout_sets[name].samples) for name, splits in texts.sets.items()}
        self._found: tuple[int, dict[str, HeldOutLoss]] = (0, {})
        """Step of the last validation, and the loss of each set; that of `train.validation` is named ""."""

    def due(self, step: int, total: int) -> list[str]:
        """Sets that are scored after `step` of `total` steps, in the order of the run file."""
        every = {
            name: self._config.set_every(name) if name else self._config.train.validation.every_steps
            for name in self._sampled
        }
        return [name for name in self._sampled if step % every[name] == 0 or step == total]

    def validate(
        self,
        step: int,
        due: Sequence[str],
        model: ParallelModel,
        runner: Runner,
        *,
        tokens: int,
        advance: Callable[[], None],
    ) -> dict[str, Any]:
        """Score sets, one after the other, and return their losses as a row of metrics has them; every rank calls this.

        Args:
            step: steps done.
            due: which sets.
            model: what is validated.
            runner: of the model.
            tokens: tokens at once on a rank, or one window where it is longer.
            advance: called after each batch.
        """
        losses = {name: self._losses(name, model, runner, tokens, advance) for name in due}
        together = {name: sum(each.values(), HeldOutLoss(0.0, 0)) for name, each in losses.items() if each}
        self._found = (step, together)
        values: dict[str, Any] = {}
        for name, whole in together.items():
            by_source = {source: loss.mean for source, loss in losses[name].items()}
            if name:
                values.setdefault("validation", {})[name] = {"loss": whole.mean, "loss_by_source": by_source}
            else:
                values |= {"validation_loss": whole.mean, "validation_loss_by_source": by_source}
        return values

    def _losses(
        self, name: str, model: ParallelModel, runner: Runner, tokens: int, advance: Callable[[], None]
    ) -> dict[str, HeldOutLoss]:
        """Loss by source on the sample of a set; empty where nothing is held out."""
        splits, samples = self._sampled[name]
        length = self._config.set_length(name) if name else self._config.train.sequence_length
        splits = {source: split for source, split in splits.items() if len(split)}
        return {
            source: heldout_loss(
                self._config,
                self._setup,
                model,
                runner,
                splits[source],
                windows,
                batch_size=max(1, tokens // length),
                advance=lambda windows: advance(),
            )
            for source, windows in sample(splits, samples).items()
        }

    def losses_at(self, step: int) -> dict[str, float]:
        """Loss of each set that was scored after a step."""
        return {name: loss.mean for name, loss in self._found[1].items()} if self._found[0] == step else {}

    def forget(self) -> None:
        """Forget what was found, since the run goes back."""
        self._found = (0, {})


def validation_line(losses: Mapping[str, float]) -> str:
    """Losses of a validation in words."""
    named = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name)
    if "" not in losses:
        return f"validation loss of {named}"
    return f"validation loss {losses['']:.4f}" + (f"; of {named}" if named else "")


class HeldOutRows(Protocol):
    """Rows of tokens with targets, by number: a `HeldOut`, or what stands in for one."""

    def longest_first(self, windows: Sequence[int]) -> Sequence[int]:
        """See `HeldOut`, as for the others."""

    def length_of(self, windows: Sequence[int], multiple: int) -> int:
        """Positions of a batch of them."""

    def batch(self, windows: Sequence[int], length: int | None = None) -> Batch:
        """Some of them."""


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
    before: Callable[[Batch], None] = lambda batch: None,
) -> HeldOutLoss:
    """Cross entropy of what counts in `windows` of a split, dealt to all data-parallel ranks; sums are taken in fp64.

    Every rank calls this, and gets the same sums.

    Args:
        batch_size: windows of one forward pass on one rank.
        advance: called with the number of windows done after each pass.
        before: called with what this rank has of each batch before its pass; without a pipeline, just before it.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=setup.device)

    def measure(losses: TokenLosses, batch: Batch) -> None:
        sums[0] += (losses.loss_BS * batch.weight).sum(dtype=torch.float64)
        sums[1] += batch.weight.sum(dtype=torch.float64)

    measure_rows(
        *(config, setup, model, runner, split, windows, measure), batch_size=batch_size, advance=advance, before=before
    )
    dist.all_reduce(sums)
    return HeldOutLoss(sums[0].item(), int(sums[1].item()))


@torch.no_grad()
def measure_rows(
    config: Config,
    setup: Setup,
    model: ParallelModel,
    runner: Runner,
    split: HeldOutRows,
    windows: Sequence[int],
    measure: Callable[[TokenLosses, Batch], None],
    *,
    batch_size: int,
    advance: Callable[[int], None] = lambda windows: None,
    before: Callable[[Batch], None] = lambda batch: None,
) -> None:
    """Forward passes of `windows` of some rows, dealt to all data-parallel ranks; every rank calls this.

    Args:
        measure: gets the losses of a batch, and this rank's share of it. Ranks that have the same are asked once.
        batch_size: windows of one forward pass on one rank.
        advance: called with the number of windows done after each pass.
        before: called with what this rank has of each batch before its pass; without a pipeline, just before it.
    """
    chunk_tokens = config.train.loss.tokens_at_once(model.vocab_columns)

    def context(whole: Batch, batch: Batch) -> Context:
        criterion = Criterion(batch.targets, batch.weight, shard=model.vocab_shard, chunk_tokens=chunk_tokens)
        return make_context(whole, config.model.document_attention, criterion, cut=model.cut, predicted=batch.predicted)

    def counted(losses: TokenLosses, batch: Batch) -> None:
        if setup.mesh.counts_losses:
            measure(losses, batch)

    was_training = next(iter(model.parts.values())).training
    model.train(False)
    model.prepare_passes()
    for batches, count in _passes(split, split.longest_first(windows), batch_size, setup.mesh, model):
        on_device = [batch.to(setup.device) for batch in batches]
        shards = [sequence_shard(batch, model.cut) for batch in on_device]
        for shard in shards:
            before(shard)
        runner.evaluate(shards, [context(*pair) for pair in zip(on_device, shards, strict=True)], counted)
        advance(count)
    model.train(was_training)


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
