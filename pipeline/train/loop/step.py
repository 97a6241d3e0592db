"""One optimizer step: micro-batches forward and backward, clip, guarded update. Nothing here reads the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Config
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.host.host_copy import HostCopy, to_device
from pipeline.train.host.trace_spans import span
from pipeline.train.loop.quantities.layers import Observer
from pipeline.train.loop.quantities.losses import DepthLosses, SourceLosses, TeacherLosses, WeightedLoss
from pipeline.train.loop.quantities.preferences import PreferenceLosses
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.loop.quantities.routing import Balance
from pipeline.train.model.context import Ahead, Context, make_context
from pipeline.train.model.dropout import Dropout
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.model.preference import Preference
from pipeline.train.monitor.spikes import SpikeGuard
from pipeline.train.optim.ema import Ema
from pipeline.train.optim.gradients import Gradients
from pipeline.train.optim.loss_scale import LossScale
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.context import sequence_shard
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import build_runner
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.teacher import Teacher


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step over all ranks, on the device or on the host."""

    readings: Sequence[QuantityNumbers]

    def to_host(self) -> Callable[[], StepResult]:
        """Begin to copy all of it to the host; called, what this gives waits for that and for nothing issued later."""
        copy = HostCopy([tensor for reading in self.readings for tensor in reading.tensors.values()])

        def wait() -> StepResult:
            values = iter(copy.wait())
            return StepResult(
                [
                    replace(reading, tensors={name: next(values) for name in reading.tensors})
                    for reading in self.readings
                ]
            )

        return wait

    def columns(self) -> dict[str, Any]:
        """Columns of metrics.jsonl. This reads the tensors, and quantities that keep something take it from here."""
        found: dict[str, Any] = {}
        for reading in self.readings:
            columns = reading.read(**reading.tensors)
            assert found.keys().isdisjoint(columns), f"two quantities write one of {sorted(columns)}"
            found |= columns
        return found


class Stepper:
    """The arithmetic of a step, for a model, its optimizers and a mesh.

    Args:
        config: resolved config.
        setup: of the run.
        model: with which to step.
        optimizers: of its parameters.
        sources: names of the loader's sources.
        quantities: what is measured besides losses, routing and statistics of layers, in the same order on all ranks.
        teacher: of a distillation.
    """

    def __init__(
        self,
        config: Config,
        setup: Setup,
        model: ParallelModel,
        optimizers: Optimizers,
        *,
        sources: Sequence[str],
        quantities: Sequence[Quantity] = (),
        teacher: Teacher | None = None,
    ) -> None:
        train, precision, device = config.train, config.train.precision, setup.device
        self._config = config
        self._mesh = setup.mesh
        self._device = device
        self._model = model
        self._optimizers = optimizers
        self._gradients = Gradients(model, setup.mesh)
        self.runner = build_runner(config, setup, model, teacher)
        self.loss_scale = LossScale(precision.loss_scale, device) if precision.compute == "fp16" else None
        self.spikes = SpikeGuard(train.faults, device) if train.faults.on_spike != "ignore" else None
        self.ema = Ema(train.ema, model) if train.ema else None
        every_steps = train.metrics.layers_every_steps
        self._losses = SourceLosses(sources, device)
        self._observer = Observer(model, device, every_steps)
        self._balance = None
        if setup.spec.expert_layers:
            self._balance = Balance(train.balance, model, setup.mesh, device, every_steps)
        # In this order they stand in the one sum over ranks. Where a number stands may decide in which order a
        # collective adds it up, so another order may change the last bit of a loss.
        self.quantities: list[Quantity] = [*quantities, self._losses, DepthLosses(device), WeightedLoss(device)]
        self.quantities += [] if self._balance is None else [self._balance]
        self.quantities.append(self._observer)
        self.quantities += [] if teacher is None else [TeacherLosses(device)]
        self._pairs = None if train.preference is None else PreferenceLosses(train.preference, setup.mesh, device)
        self.quantities += [] if self._pairs is None else [self._pairs]

    def step(self, data: StepData, lr: float) -> StepResult:
        """Train on a global batch.

        Args:
            data: this rank's share of it. The loss is a sum over tokens divided by its `valid_targets`, or a weighted
                sum divided by its `total_weight`.
            lr: learning rate.
        """
        with span("prepare"):
            whole = [batch.to(self._device, non_blocking=True) for batch in data.micro_batches]
            batches = [sequence_shard(batch, self._model.cut) for batch in whole]
            for quantity in self.quantities:
                quantity.begin(data)
            contexts = [self._context(*pair, data) for pair in zip(whole, batches, strict=True)]
        with span("forward and backward"):
            self._model.prepare_passes()
            self.runner.train(batches, contexts, self._book)
        with span("reduce"):
            self._gradients.sum_tied()
            for quantity in self.quantities:
                quantity.gradients(self._gradients)
            squares, sums = self._sum_over_ranks()
        with span("clip"):
            minimized = self._losses if self._pairs is None else self._pairs
            update = self._judge(squares, *minimized.totals(sums[minimized]))
            if (factor := self._gradient_factor(update.norm)) is not None:
                self._gradients.scale(factor)
        with span("optimizer"):
            self._optimizers.step(lr, update.is_made)
            if self.ema is not None:
                self.ema.update(update.is_made)
            found = [quantity.finish(sums[quantity], update) for quantity in self.quantities]
        if self.loss_scale is not None:
            self.loss_scale.update(update.finite)
        return StepResult([_update_reading(update), *(reading for reading in found if reading is not None)])

    def _book(self, losses: TokenLosses, batch: Batch) -> Tensor:
        """Book the losses of a micro-batch; returns the one to differentiate."""
        if self._mesh.counts_losses:  # the others have the same losses
            with torch.no_grad():
                for quantity in self.quantities:
                    quantity.book(losses, batch)
        return losses.total

    def _sum_over_ranks(self) -> tuple[Tensor, dict[Quantity, Sequence[Tensor]]]:
        """The squared norm of the gradient, and the parts of each quantity, over all ranks: one collective for all."""
        squares = self._gradients.sum_of_squares()[None]
        parts = {quantity: quantity.parts() for quantity in self.quantities}
        flat = [squares, *(part for own in parts.values() for part in own)]
        everything = torch.cat(self._on_device(flat))
        dist.all_reduce(everything)
        summed = iter(torch.split(everything, [part.numel() for part in flat]))
        return next(summed)[0], {quantity: [next(summed) for _ in own] for quantity, own in parts.items()}

    def _on_device(self, parts: list[Tensor]) -> list[Tensor]:
        """The parts in their order, those of the host sent to the device in one copy."""
        is_sent = [part.device.type != self._device.type for part in parts]
        host = list(compress(parts, is_sent))
        if not host:
            return parts
        sent = iter(torch.split(to_device(torch.cat(host), self._device), [part.numel() for part in host]))
        return [next(sent) if moves else part for part, moves in zip(parts, is_sent, strict=True)]

    def _judge(self, squares: Tensor, nats: Tensor, targets: Tensor) -> Update:
        """The verdict on the update: made if all is finite, and no spike."""
        norm, scale = squares.sqrt(), None if self.loss_scale is None else self.loss_scale.scale
        if scale is not None:
            norm = norm / scale
        finite = torch.isfinite(norm) & torch.isfinite(nats)
        if self.spikes is None:
            return Update(norm, finite, finite, None, scale)
        spike, zscores = self.spikes.judge(nats / targets.clamp(min=1), norm, finite)
        return Update(norm, finite, finite & ~spike, zscores, scale)

    def _context(self, whole: Batch, batch: Batch, data: StepData) -> Context:
        """The context of a micro-batch in training, which minimizes cross entropy over the step's valid targets.

        Args:
            whole: with all of its sequences.
            batch: with this rank's share of them.
            data: of the step.
        """
        total, total_ahead = float(data.valid_targets), tuple(map(float, data.valid_ahead))
        if data.total_weight is not None:
            total, total_ahead = data.total_weight, data.total_ahead
        loss, scale = self._config.train.loss, self.loss_scale
        weight_BS, weight_ahead = batch.weight, batch.ahead_weight
        if batch.loss_weight is not None:
            weight_BS, weight_ahead = batch.loss_weight, batch.ahead_loss_weight
        weight, ahead = weight_BS / (total or 1), None
        if scale is not None:
            weight = weight * scale.scale
        if batch.ahead_targets is not None and weight_ahead is not None:
            factors = [loss.mtp_weight / len(total_ahead) / (count or 1) for count in total_ahead]
            pairs = zip(weight_ahead.unbind(1), factors, strict=True)
            weight_BNS = torch.stack([weight_BS * factor for weight_BS, factor in pairs], dim=1)
            ahead = Ahead(batch.ahead_targets, weight_BNS if scale is None else weight_BNS * scale.scale)
        shard = self._model.vocab_shard
        criterion = Criterion(batch.targets, weight, loss.z_loss, shard, loss.tokens_at_once(self._model.vocab_columns))
        if batch.conversation is not None:
            of_pair = torch.full_like(weight, 1 / (data.pairs or 1))
            of_pair = of_pair if scale is None else of_pair * scale.scale
            criterion = replace(criterion, weight_BS=of_pair, preference=self._preference(batch))
        routing, balance = None, self._balance
        if balance is not None:
            windows, length = whole.tokens.shape
            real, factor = windows if whole.real is None else whole.real, None if scale is None else scale.scale
            routing = balance.routing(real, len(data.samples), length, factor)
        return make_context(
            whole,
            self._config.model.document_attention,
            criterion,
            self._observer.watch(batch),
            self._model.cut,
            self._dropout(whole),
            routing,
            None if balance is None else balance.routed,
            ahead,
            batch.predicted,
        )

    def _preference(self, batch: Batch) -> Preference:
        """The pairs of a micro-batch, of which this rank has a share."""
        settings, mesh = self._config.train.preference, self._mesh
        assert settings is not None and batch.conversation is not None and batch.reference is not None
        group = mesh.role("cp").get_group() if mesh.size("cp") > 1 else None
        return Preference(
            batch.conversation, batch.weight, batch.reference, settings.beta, settings.label_smoothing, group
        )

    def _dropout(self, batch: Batch) -> Dropout | None:
        """Dropout of a micro-batch; None: nothing is dropped."""
        rate = self._config.model.dropout
        if not rate:
            return None
        assert batch.samples is not None, "dropout goes by the numbers of the samples"
        return Dropout(rate, self._config.run.seed, batch.samples)

    def _gradient_factor(self, norm: Tensor) -> Tensor | None:
        """fp32 scalar that takes gradients to at most the configured norm, and the loss scale out of them; None: 1."""
        clip_norm, scale = self._config.train.optimizer.clip_norm, self.loss_scale
        if clip_norm is None:
            return None if scale is None else (1 / scale.scale).float()
        factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return (factor if scale is None else factor / scale.scale).float()


def _update_reading(update: Update) -> QuantityNumbers:
    """The verdict on an update, for metrics.jsonl."""
    tensors = {"norm": update.norm, "finite": update.finite, "is_made": update.is_made}
    more = {"zscores": update.zscores, "loss_scale": update.loss_scale}
    return QuantityNumbers(
        tensors | {name: tensor for name, tensor in more.items() if tensor is not None}, _update_columns
    )


def _update_columns(
    norm: Tensor, finite: Tensor, is_made: Tensor, zscores: Tensor | None = None, loss_scale: Tensor | None = None
) -> dict[str, Any]:
    columns: dict[str, Any] = {"grad_norm": norm.item(), "skipped": not is_made.item()}
    if zscores is not None:
        columns["spike"] = bool(finite.item()) and not is_made.item()
        named = zip(("loss_zscore", "grad_norm_zscore"), zscores.tolist(), strict=True)
        columns |= {name: zscore for name, zscore in named if math.isfinite(zscore)}
    if loss_scale is not None:
        columns["loss_scale"] = loss_scale.item()
    return columns
