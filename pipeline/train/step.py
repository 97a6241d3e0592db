"""One optimizer step: micro-batches forward and backward, clip, guarded update. Nothing here reads the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.parallel import ParallelConfig
from pipeline.config.train import TrainConfig
from pipeline.data.batch import Batch
from pipeline.train.loss import token_loss
from pipeline.train.model.attention import Context
from pipeline.train.optim import Gradients, Optimizers
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import COMPUTE_DTYPE, ParallelModel
from pipeline.train.parallel.runner import build_runner
from pipeline.train.precision import LossScale

_HASH_WORDS = 4
"""A 64-bit hash travels as words of 16 bits, whose sums over ranks fp64 holds exactly."""


def make_context(batch: Batch, document_attention: bool) -> Context:
    """What the blocks need besides the activations."""
    return Context(bounds_BS=batch.bounds if document_attention else None, length=batch.tokens.shape[1])


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step over all ranks, still on the device."""

    grad_norm: Tensor
    """Global L2 norm before clipping."""
    finite: Tensor
    """Bool scalar: loss and gradient were finite, so the weights were updated."""
    nats: Tensor
    """[sources] fp64, summed cross entropy."""
    targets: Tensor
    """[sources] fp64, number of valid targets."""
    hash_words: Tensor
    """[4] fp64, see `data_hash`."""
    stops: Tensor
    """fp64 scalar, how many ranks asked for a stop."""
    loss_scale: Tensor | None
    """fp32 scalar: the factor on the loss, with fp16."""

    def data_hash(self) -> int:
        """The sum of the hashes of all samples of the step, mod 2**64; reads the device."""
        return sum(int(word) << (16 * place) for place, word in enumerate(self.hash_words.tolist())) % 2**64


class Stepper:
    """The arithmetic of a step, for a model, its optimizers and a mesh."""

    def __init__(
        self,
        model: ParallelModel,
        optimizers: Optimizers,
        mesh: Mesh,
        device: torch.device,
        *,
        train: TrainConfig,
        parallel: ParallelConfig,
        sources: int,
        document_attention: bool,
    ) -> None:
        compute = train.precision.compute
        self._model = model
        self._optimizers = optimizers
        self._mesh = mesh
        self._device = device
        self._train = train
        self._sources = sources
        self._document_attention = document_attention
        self._gradients = Gradients(model, mesh)
        self.runner = build_runner(model, mesh, parallel, device, COMPUTE_DTYPE[compute])
        self.loss_scale = LossScale(train.precision.loss_scale, device) if compute == "fp16" else None

    def step(
        self,
        micro_batches: Sequence[Batch],
        valid_targets: int,
        lr: float,
        *,
        data_hash: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Train on a global batch.

        Args:
            micro_batches: this rank's share of it.
            valid_targets: of the global batch over all ranks; the loss is a token sum divided by it.
            lr: learning rate of this step.
            data_hash: of this rank's samples.
            stop: whether this rank was asked to stop, looked at when all is computed; all learn of it from the result.
        """
        batches = [batch.to(self._device, non_blocking=True) for batch in micro_batches]
        contexts = [make_context(batch, self._document_attention) for batch in batches]
        sums = torch.zeros(2, self._sources, dtype=torch.float64, device=self._device)
        self.runner.train(batches, contexts, self._objective(valid_targets, sums))
        self._gradients.share_tied()
        # One sum over all ranks for everything that they have to agree on.
        facts = self._facts(data_hash, stop())
        everything = torch.cat([self._gradients.sum_of_squares()[None], facts, sums.flatten()])
        dist.all_reduce(everything)
        squares, stops, words = everything[0], everything[1], everything[2 : 2 + _HASH_WORDS]
        nats, targets = everything[2 + _HASH_WORDS :].view_as(sums)
        norm, scale = squares.sqrt(), self.loss_scale
        if scale is not None:
            norm = norm / scale.scale
        finite = torch.isfinite(norm) & torch.isfinite(nats.sum())
        self._gradients.scale(self._clip_factor(norm))
        self._optimizers.step(lr, finite)
        result = StepResult(norm, finite, nats, targets, words, stops, None if scale is None else scale.scale)
        if scale is not None:
            scale.update(finite)
        return result

    def _objective(self, valid_targets: int, sums: Tensor) -> Callable[[Tensor, Batch], Tensor]:
        """What is minimized: cross entropy over the valid targets of the global batch. Books the sums by source."""

        def objective(logits: Tensor, batch: Batch) -> Tensor:
            loss, objective = token_loss(logits, batch.targets, self._train.loss.z_loss, self._model.vocab_shard)
            if self._mesh.rank("tp") == 0:  # the others have the same sums
                with torch.no_grad():
                    # Padding samples have source -1 and weight 0; they add nothing to the source they are booked under.
                    index = batch.sources.clamp(min=0)
                    sums[0].index_add_(0, index, (loss.detach() * batch.weight).sum(dim=1, dtype=torch.float64))
                    sums[1].index_add_(0, index, batch.weight.sum(dim=1, dtype=torch.float64))
            total = (objective * batch.weight).sum() / max(1, valid_targets)
            return total if self.loss_scale is None else total * self.loss_scale.scale

        return objective

    def _facts(self, data_hash: int, stop: bool) -> Tensor:
        """What this rank tells the others: [stop flag, words of the hash of its samples], fp64."""
        # Ranks with the same samples count once.
        counts = self._mesh.rank("tp") == 0 and self._mesh.rank("pp") == 0
        words = [(data_hash >> (16 * place)) & 0xFFFF if counts else 0 for place in range(_HASH_WORDS)]
        return torch.tensor([float(stop), *words], dtype=torch.float64).to(self._device, non_blocking=True)

    def _clip_factor(self, norm: Tensor) -> Tensor:
        """fp32 scalar that takes gradients to at most the configured norm, and the loss scale out of them."""
        factor = (self._train.optimizer.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return (factor if self.loss_scale is None else factor / self.loss_scale.scale).float()


def agree(stop: bool, device: torch.device) -> bool:
    """Whether any rank was asked to stop. Every rank calls this; it reads the device."""
    flag = torch.tensor([float(stop)], device=device)
    dist.all_reduce(flag)
    return bool(flag.item())
