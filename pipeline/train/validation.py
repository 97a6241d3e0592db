"""Loss on held-out windows. The same code validates while training and evaluates afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Config
from pipeline.data.batch import Batch
from pipeline.data.heldout import HeldOut
from pipeline.train.loss import token_loss
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import Runner
from pipeline.train.step import make_context


@dataclass(frozen=True)
class HeldOutLoss:
    """A sum of cross entropy in nats over `targets` tokens."""

    nats: float
    targets: int

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.nats / max(1, self.targets)

    def __add__(self, other: HeldOutLoss) -> HeldOutLoss:
        return HeldOutLoss(self.nats + other.nats, self.targets + other.targets)


def validation_losses(
    config: Config,
    heldout: Mapping[str, HeldOut],
    model: ParallelModel,
    runner: Runner,
    mesh: Mesh,
    device: torch.device,
    *,
    batch_size: int,
    advance: Callable[[], None],
) -> dict[str, HeldOutLoss]:
    """Loss by source on the sample of `train.validation`; empty where there is none. Every rank calls this.

    Args:
        config: resolved config.
        heldout: windows by source.
        model: what is validated.
        runner: of the model.
        mesh: of the model.
        device: where it computes.
        batch_size: windows at once.
        advance: called after each batch.
    """
    samples = config.train.validation.samples
    splits = {name: split for name, split in heldout.items() if samples and len(split)}
    everything = sum(len(split) for split in splits.values())
    return {
        name: heldout_loss(
            model,
            runner,
            mesh,
            split,
            # Each source has its share of the sample, and at least one window.
            split.spread(max(1, samples * len(split) // everything)),
            batch_size=batch_size,
            document_attention=config.model.document_attention,
            device=device,
            advance=lambda windows: advance(),
        )
        for name, split in splits.items()
    }


@torch.no_grad()
def heldout_loss(
    model: ParallelModel,
    runner: Runner,
    mesh: Mesh,
    split: HeldOut,
    windows: Sequence[int],
    *,
    batch_size: int,
    document_attention: bool,
    device: torch.device,
    advance: Callable[[int], None] = lambda windows: None,
) -> HeldOutLoss:
    """Cross entropy of `windows` of a split, dealt to all data-parallel ranks; sums are taken in fp64.

    Args:
        batch_size: windows of one forward pass on one rank.
        advance: called with the number of windows done after each pass.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)

    def measure(logits: Tensor, batch: Batch) -> None:
        loss, _ = token_loss(logits, batch.targets, shard=model.vocab_shard)
        if mesh.rank("tp") == 0:  # the others have the same sums
            sums[0] += (loss * batch.weight).sum(dtype=torch.float64)
            sums[1] += batch.weight.sum(dtype=torch.float64)

    model.train(False)
    for batches, count in _passes(split, windows, batch_size, mesh, together=len(model.stages)):
        on_device = [batch.to(device) for batch in batches]
        runner.evaluate(on_device, [make_context(batch, document_attention) for batch in on_device], measure)
        advance(count)
    model.train()
    dist.all_reduce(sums)
    return HeldOutLoss(sums[0].item(), int(sums[1].item()))


def _passes(
    split: HeldOut, windows: Sequence[int], batch_size: int, mesh: Mesh, together: int
) -> Iterator[tuple[list[Batch], int]]:
    """This rank's batches of one shape, up to `together` at once, and how many windows all ranks have in them."""
    ranks = mesh.size("batch")
    everyone = batch_size * ranks
    whole = len(windows) // everyone
    for first in range(0, whole, together):
        groups = [windows[group * everyone : (group + 1) * everyone] for group in range(first, whole)[:together]]
        yield [_share(split, group, batch_size, mesh) for group in groups], everyone * len(groups)
    if rest := windows[whole * everyone :]:
        yield [_share(split, rest, -(-len(rest) // ranks), mesh)], len(rest)


def _share(split: HeldOut, windows: Sequence[int], size: int, mesh: Mesh) -> Batch:
    """This rank's `size` of some windows. All ranks have as many, so what is missing is filled up with weight 0."""
    first = mesh.rank("batch") * size
    chosen = list(windows[first : first + size])
    missing = size - len(chosen)
    batch = split.batch(chosen + [windows[0]] * missing)
    if missing:
        weight = batch.weight.clone()
        weight[len(chosen) :] = 0
        batch = replace(batch, weight=weight)
    return batch
