"""One optimizer step: micro-batches forward and backward, clip, guarded update. Nothing here reads the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.config.train import TrainConfig
from pipeline.data.batch import Batch
from pipeline.train.loss import token_loss
from pipeline.train.model.attention import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.optim import clip, guarded_step, set_learning_rate
from pipeline.train.parallel.mesh import Mesh


def make_context(batch: Batch, document_attention: bool) -> Context:
    """What the blocks need besides the activations."""
    return Context(bounds_BS=batch.bounds if document_attention else None)


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, still on the device."""

    grad_norm: torch.Tensor
    """Global L2 norm before clipping."""
    finite: torch.Tensor
    """Bool scalar: loss and gradient were finite, so the weights were updated."""
    nats: torch.Tensor
    """[sources] fp64, summed cross entropy."""
    targets: torch.Tensor
    """[sources] fp64, number of valid targets."""


class Stepper:
    """The arithmetic of a step, for a model, its optimizer and a mesh."""

    def __init__(
        self,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        device: torch.device,
        *,
        train: TrainConfig,
        sources: int,
        document_attention: bool,
    ) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._mesh = mesh
        self._device = device
        self._train = train
        self._sources = sources
        self._document_attention = document_attention

    def step(self, micro_batches: Sequence[Batch], valid_targets: int, lr: float) -> StepResult:
        """Train on a global batch.

        Args:
            micro_batches: this rank's share.
            valid_targets: of the global batch over all ranks; the loss is a token sum divided by it.
            lr: learning rate of this step.
        """
        sums = torch.zeros(2, self._sources, dtype=torch.float64, device=self._device)
        for micro_batch in micro_batches:
            batch = micro_batch.to(self._device, non_blocking=True)
            logits = self._model(batch.tokens, make_context(batch, self._document_attention))
            loss, objective = token_loss(logits, batch.targets, self._train.loss.z_loss)
            ((objective * batch.weight).sum() / max(1, valid_targets)).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                # Padding samples have source -1 and weight 0; they add nothing to the source they are booked under.
                index = batch.sources.clamp(min=0)
                sums[0].index_add_(0, index, (loss.detach() * batch.weight).sum(dim=1, dtype=torch.float64))
                sums[1].index_add_(0, index, batch.weight.sum(dim=1, dtype=torch.float64))
        dist.all_reduce(sums, group=self._mesh.role("loss").get_group())
        norm = clip(self._parameters, self._train.optimizer.clip_norm)
        finite = torch.isfinite(norm) & torch.isfinite(sums[0].sum())
        set_learning_rate(self._optimizer, lr)
        guarded_step(self._optimizer, finite)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, finite, sums[0], sums[1])
