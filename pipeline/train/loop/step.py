"""One optimizer step: micro-batches forward and backward, clip, guarded update. Nothing here reads the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Config
from pipeline.data.loading.batch import Batch
from pipeline.train.host.host_copy import HostCopy, to_device
from pipeline.train.host.trace_spans import span
from pipeline.train.loop.balance import Balance, StepRouting
from pipeline.train.model.context import ActivationObserver, Ahead, Context, RoutingObserver
from pipeline.train.model.dropout import Dropout
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.model.mixers.sequence import SequenceCut
from pipeline.train.model.mlps.experts.routing import Routing
from pipeline.train.monitor.layer_stats import Observed, Observer
from pipeline.train.monitor.spikes import SpikeGuard
from pipeline.train.monitor.window_losses import WindowSums
from pipeline.train.optim.ema import Ema
from pipeline.train.optim.gradients import Gradients
from pipeline.train.optim.loss_scale import LossScale
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.context import sequence_shard
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.runner import build_runner
from pipeline.train.parallel.setup import Setup
from pipeline.train.run.stop_requests import StopRequest

_HASH_WORDS = 4
"""A 64-bit hash travels as words of 16 bits, whose sums over ranks fp64 holds exactly."""


def make_context(
    batch: Batch,
    document_attention: bool,
    criterion: Criterion | None = None,
    observer: ActivationObserver | None = None,
    cut: SequenceCut | None = None,
    dropout: Dropout | None = None,
    routing: Routing | None = None,
    on_routed: RoutingObserver | None = None,
    ahead: Ahead | None = None,
    predicted: Tensor | None = None,
) -> Context:
    """The context of a batch: all that the model needs besides the tokens.

    Args:
        batch: With whole sequences, also where the model gets a share of them.
        document_attention: Tokens attend to those of their document alone.
        criterion: Of what the model gets.
        observer: Is shown what the layers compute.
        cut: Which share of the sequences it gets.
        dropout: What a training drops.
        routing: What a training demands of routers.
        on_routed: Is shown what their tokens chose.
        ahead: Targets of multi-token prediction, of what it gets.
        predicted: Positions that the head scores, of what it gets, see `Batch`.
    """
    bounds, starts = (batch.bounds, batch.starts) if document_attention else (None, None)
    length = batch.tokens.shape[1]
    return Context(
        bounds_BS=bounds,
        starts=starts,
        length=length,
        criterion=criterion,
        observer=observer,
        cut=cut,
        dropout=dropout,
        routing=routing,
        on_routed=on_routed,
        ahead=ahead,
        predicted_BK=None if predicted is None else to_device(predicted, batch.tokens.device),
        prefix_BS=batch.prefix,
        encoder=batch.encoder,
    )


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step over all ranks, still on the device."""

    grad_norm: Tensor
    """Global L2 norm before clipping."""
    finite: Tensor
    """Bool scalar: loss and gradient were finite; if not, the update was withheld."""
    nats: Tensor
    """[sources] fp64, summed cross entropy."""
    targets: Tensor
    """[sources] fp64, number of valid targets."""
    hash_words: Tensor
    """[4] fp64, see `data_hash`."""
    spike: Tensor
    """Bool scalar: the step was a spike, and its update was withheld."""
    zscores: Tensor | None
    """[2] fp64, see `spikes.SpikeVerdict`; None where spikes are not looked for."""
    wishes: Tensor
    """[2] fp64, how many ranks asked for a stop and for a save."""
    work: Tensor
    """[ranks] fp64, seconds that each rank had worked in the step before."""
    observed: Observed | None
    """Observations by layer, if this step was observed."""
    loss_scale: Tensor | None
    """fp32 scalar: the factor on the loss, with fp16."""
    routing: StepRouting | None = None
    """Choices of experts, in a model that has some."""
    weighted: Tensor | None = None
    """fp64 scalar: mean cross entropy by loss weights, which is minimized; None where there are none."""
    of_depths: Tensor | None = None
    """[depths] fp64, mean cross entropy of each depth of multi-token prediction."""
    windows: Tensor | None = None
    """[2, samples] fp64 on rank 0, summed cross entropy and number of valid targets of each sample, if asked for."""

    def to_host(self) -> Callable[[], StepResult]:
        """Begin to copy all of it to the host; called, what this gives waits for that and for nothing issued later."""
        within = {name: part for name in ("observed", "routing") if (part := getattr(self, name)) is not None}
        groups = [_tensors(self), *map(_tensors, within.values())]
        copy = HostCopy([tensor for group in groups for tensor in group.values()])

        def wait() -> StepResult:
            values = iter(copy.wait())
            mine, *theirs = [{name: next(values) for name in group} for group in groups]
            copied: dict[str, Any] = {
                name: replace(part, **of) for (name, part), of in zip(within.items(), theirs, strict=True)
            }
            return replace(self, **(mine | copied))

        return wait

    def data_hash(self) -> int:
        """The sum of the hashes of all samples of the step, mod 2**64; reads the device."""
        return sum(int(word) << (16 * place) for place, word in enumerate(self.hash_words.tolist())) % 2**64

    def wish(self) -> StopRequest:
        """The stop requests of all ranks together; reads the device."""
        return StopRequest(*(count > 0 for count in self.wishes.tolist()))


def _tensors(some: Any) -> dict[str, Tensor]:
    return {name: value for name, value in vars(some).items() if isinstance(value, Tensor)}


class Stepper:
    """The arithmetic of a step, for a model, its optimizers and a mesh."""

    def __init__(
        self, config: Config, setup: Setup, model: ParallelModel, optimizers: Optimizers, *, sources: int
    ) -> None:
        train, precision, device = config.train, config.train.precision, setup.device
        self._config = config
        self._mesh = setup.mesh
        self._device = device
        self._model = model
        self._optimizers = optimizers
        self._sources = sources
        self._gradients = Gradients(model, setup.mesh)
        self.runner = build_runner(config, setup, model)
        self.loss_scale = LossScale(precision.loss_scale, device) if precision.compute == "fp16" else None
        self.spikes = SpikeGuard(train.faults, device) if train.faults.on_spike != "ignore" else None
        self.ema = Ema(train.ema, model) if train.ema else None
        every_steps = train.metrics.layers_every_steps
        self._observer = Observer(model, device, every_steps)
        self._balance = None
        if setup.spec.expert_layers:
            self._balance = Balance(train.balance, model, setup.mesh, device, every_steps)

    def step(
        self,
        micro_batches: Sequence[Batch],
        valid_targets: int,
        lr: float,
        *,
        samples: int = 0,
        window_samples: range | None = None,
        valid_ahead: Sequence[int] = (),
        total_weight: float | None = None,
        total_ahead: Sequence[float] = (),
        step: int = 0,
        data_hash: int = 0,
        wish: Callable[[], StopRequest] = lambda: StopRequest(False, False),
        work: float = 0.0,
    ) -> StepResult:
        """Train on a global batch.

        Args:
            micro_batches: this rank's share of it.
            valid_targets: of the global batch over all ranks; the loss is a token sum divided by it.
            lr: learning rate of this step.
            samples: of the global batch over all ranks, without padding; for losses of routers.
            window_samples: their global numbers, where the loss of each is asked for.
            valid_ahead: of the global batch, by depth of multi-token prediction.
            total_weight: sum of the loss weights of the global batch, which divides in place of `valid_targets`; None
                where batches have none.
            total_ahead: the same by depth of multi-token prediction.
            step: its number, from 1; decides whether it is observed.
            data_hash: of this rank's samples.
            wish: what this rank is asked for, looked at when all has been issued; all learn of it from the result.
            work: seconds that this rank worked in the step before.
        """
        with span("prepare"):
            whole = [batch.to(self._device, non_blocking=True) for batch in micro_batches]
            batches = [sequence_shard(batch, self._model.cut) for batch in whole]
            self._observer.begin(step)
            if self._balance is not None:
                self._balance.begin()
            total, totals = (valid_targets, valid_ahead) if total_weight is None else (total_weight, total_ahead)
            contexts = [self._context(*pair, total, totals, samples) for pair in zip(whole, batches, strict=True)]
            weighted = None if total_weight is None else torch.zeros(1, dtype=torch.float64, device=self._device)
            sums = torch.zeros(2, self._sources, dtype=torch.float64, device=self._device)
            of_depths = torch.zeros(len(valid_ahead), dtype=torch.float64, device=self._device)
            windows = None if window_samples is None else WindowSums(window_samples, self._device)
        with span("forward and backward"):
            self._model.prepare_passes()
            objective = self._objective(sums, of_depths, valid_ahead, weighted, windows)
            self.runner.train(batches, contexts, objective)
        with span("reduce"):
            self._gradients.sum_tied()
            self._observer.gradients(self._gradients)
            # One sum over all ranks for everything that they have to agree on.
            parts = [
                self._gradients.sum_of_squares()[None],
                *self._facts(data_hash, wish(), work),
                sums.flatten(),
                of_depths,
                *([] if weighted is None else [weighted]),
            ]
            if self._balance is not None:
                parts += self._balance.told()
            everything = torch.cat(parts)
            dist.all_reduce(everything)
            of_windows = None if windows is None else windows.reduce()
        with span("clip"):
            squares, wishes, words, works, flat, ahead, *chosen = torch.split(
                everything, [part.numel() for part in parts]
            )
            nats, targets = flat.view_as(sums)
            if total_weight is not None:
                weighted = chosen.pop(0).squeeze() / total_weight
            norm, scale = squares[0].sqrt(), self.loss_scale
            if scale is not None:
                norm = norm / scale.scale
            finite = torch.isfinite(norm) & torch.isfinite(nats.sum())
            spike, zscores = torch.zeros_like(finite), None
            if self.spikes is not None:
                spike, zscores = self.spikes.judge(nats.sum() / targets.sum().clamp(min=1), norm, finite)
            updated = finite & ~spike
            if (factor := self._gradient_factor(norm)) is not None:
                self._gradients.scale(factor)
        with span("optimizer"):
            self._optimizers.step(lr, updated)
            if self.ema is not None:
                self.ema.update(updated)
            routing = None if self._balance is None else self._balance.update(step, chosen, updated)
        loss_scale = None if scale is None else scale.scale
        observed = self._observer.finish(loss_scale)
        result = StepResult(
            *(norm, finite, nats, targets, words, spike, zscores, wishes, works, observed, loss_scale),
            weighted=weighted,
            of_depths=ahead if valid_ahead else None,
            routing=routing,
            windows=of_windows,
        )
        if scale is not None:
            scale.update(finite)
        return result

    def _context(self, whole: Batch, batch: Batch, total: float, total_ahead: Sequence[float], samples: int) -> Context:
        """The context of a micro-batch in training, which minimizes cross entropy over the step's valid targets.

        Args:
            whole: With all of its sequences.
            batch: With this rank's share of them.
            total: Valid targets of the global batch; or, where batches have loss weights, the sum of these.
            total_ahead: The same by depth of multi-token prediction.
            samples: Of the global batch.
        """
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
        routing, balance = None, self._balance
        if balance is not None:
            windows, length = whole.tokens.shape
            real, factor = windows if whole.real is None else whole.real, None if scale is None else scale.scale
            routing = balance.routing(real, samples, length, factor)
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

    def _dropout(self, batch: Batch) -> Dropout | None:
        """Dropout of a micro-batch; None: nothing is dropped."""
        rate = self._config.model.dropout
        if not rate:
            return None
        assert batch.samples is not None, "dropout goes by the numbers of the samples"
        return Dropout(rate, self._config.run.seed, batch.samples)

    def _objective(
        self,
        sums: Tensor,
        of_depths: Tensor,
        valid_ahead: Sequence[int],
        weighted: Tensor | None,
        windows: WindowSums | None,
    ) -> Callable[[TokenLosses, Batch], Tensor]:
        """Books the sums by source, sample and loss weights, and the means of the depths of multi-token prediction."""

        def objective(losses: TokenLosses, batch: Batch) -> Tensor:
            if self._mesh.rank("tp") == 0:  # the others have the same sums
                with torch.no_grad():
                    # Padding samples have source -1 and weight 0; they add nothing to the source they are booked under.
                    index = batch.sources.clamp(min=0)
                    sums[0].index_add_(0, index, (losses.loss_BS * batch.weight).sum(dim=1, dtype=torch.float64))
                    sums[1].index_add_(0, index, batch.weight.sum(dim=1, dtype=torch.float64))
                    if weighted is not None and batch.loss_weight is not None:
                        weighted.add_((losses.loss_BS * batch.loss_weight).sum(dtype=torch.float64))
                    if windows is not None:
                        windows.add(losses.loss_BS, batch)
                    if batch.ahead_weight is not None:
                        for depth, (loss_BS, count) in enumerate(zip(losses.of_depths, valid_ahead, strict=True)):
                            nats = (loss_BS * batch.ahead_weight[:, depth]).sum(dtype=torch.float64)
                            of_depths[depth] += nats / max(1, count)
            return losses.total

        return objective

    def _facts(self, data_hash: int, wish: StopRequest, work: float) -> list[Tensor]:
        """Facts for the other ranks, fp64: stop requests, words of the hash of this rank's samples, work by rank."""
        # Ranks with the same samples count once.
        counts = all(self._mesh.rank(axis) == 0 for axis in ("tp", "cp", "pp"))
        words = [(data_hash >> (16 * place)) & 0xFFFF if counts else 0 for place in range(_HASH_WORDS)]
        works = [0.0] * dist.get_world_size()
        works[dist.get_rank()] = work
        facts = to_device(torch.tensor([*map(float, wish), *words, *works], dtype=torch.float64), self._device)
        return list(torch.split(facts, [len(wish), len(words), len(works)]))

    def _gradient_factor(self, norm: Tensor) -> Tensor | None:
        """fp32 scalar that takes gradients to at most the configured norm, and the loss scale out of them; None: 1."""
        clip_norm, scale = self._config.train.optimizer.clip_norm, self.loss_scale
        if clip_norm is None:
            return None if scale is None else (1 / scale.scale).float()
        factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return (factor if scale is None else factor / scale.scale).float()


def agree(wish: StopRequest, device: torch.device) -> StopRequest:
    """The stop requests of all ranks together. Every rank calls this; it reads the device."""
    flags = torch.tensor([float(asked) for asked in wish], device=device)
    dist.all_reduce(flags)
    return StopRequest(*(count > 0 for count in flags.tolist()))
