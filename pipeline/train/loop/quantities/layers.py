"""Statistics by layer, every N steps: norms of gradients, sizes of activations, largest attention logits.

Shapes: B samples of a micro-batch, S positions, T keys, D width, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.model.context import ActivationObserver
from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.optim.gradients import Gradients
from pipeline.train.parallel.parallelize import ParallelModel

_LOGITS_AT_ONCE = 2**24
"""Attention logits that are computed at a time, in fp32: 64 MiB."""


class Observer(Quantity):
    """Statistics by layer of one step in `every_steps`, which cost nothing in the others.

    Every rank has one, and observes the same steps. What it computes is beside the training, whose bits stay the same.
    """

    def __init__(self, model: ParallelModel, device: torch.device, every_steps: int | None) -> None:
        spec = model.spec
        self._every_steps = every_steps
        self._device = device
        self._layers = len(spec.layers)
        ends = ["embedding", *["position_embedding"] * (spec.learned_positions is not None)]
        ends += ["type_embedding"] * (spec.token_types is not None) + ["embedding_norm"] * spec.embedding_norm
        ends += ["relative"] * bool(spec.relatives)
        own_head = not spec.tie_embeddings or spec.head_transform is not None or spec.head_bias
        ends += ["norm"] * spec.final_norm + ["head"] * own_head + ["mtp"] * bool(spec.mtp)
        self._groups = [*map(str, range(self._layers)), *ends]
        # By module, which a forward pass shows together with what it computes.
        self._places: dict[nn.Module, int] = {}
        for part in model.parts.values():
            for index, block in part.layers.items():
                self._places[block] = int(index)
                if spec.layers[int(index)].mixer is not None:
                    self._places[block.get_submodule("mixer")] = int(index)
        self._seen: _StepSums | None = None

    def begin(self, data: StepData) -> None:
        """Decide whether the step is observed."""
        observes = self._every_steps is not None and (data.step + 1) % self._every_steps == 0
        self._seen = _StepSums(self._places, self._layers, self._device) if observes else None

    def watch(self, batch: Batch) -> ActivationObserver | None:
        """The observer of the forward pass of a micro-batch; None if nothing is observed."""
        # Padding fills up the micro-batches of some layouts, and is none of the step's samples.
        return None if self._seen is None else _MicroBatchObserver(self._seen, batch.sources >= 0)

    def gradients(self, gradients: Gradients) -> None:
        """Take in the norms of the gradients."""
        if self._seen is not None:
            by_group = gradients.squares_by(_group)
            self._seen.gradients = torch.stack([by_group.get(name, self._seen.zero) for name in self._groups])

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers | None:
        """The statistics over all ranks. Some are maxima, so they have collectives of their own."""
        seen, self._seen = self._seen, None
        if seen is None:
            return None
        added = torch.cat([seen.squares, seen.counts, seen.gradients])
        dist.all_reduce(added)
        # What a maximum of NaN and numbers is depends on their order.
        peaks = seen.peaks.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        squares, counts, gradients = torch.split(added, [self._layers, self._layers, len(self._groups)])
        # Processes of a tp axis that have the same activations count them alike in both sums.
        sizes = (squares / counts).sqrt()
        norms = gradients.sqrt() if update.loss_scale is None else gradients.sqrt() / update.loss_scale
        return QuantityNumbers({"norms": norms, "sizes": sizes, "peaks": peaks}, partial(_columns, self._groups))


def _columns(groups: list[str], norms: Tensor, sizes: Tensor, peaks: Tensor) -> dict[str, Any]:
    """Columns by layer, and norms of gradients also by module at the ends of the model.

    Args:
        groups: layers, then the modules at the ends.
        norms: [groups], norm of the gradient.
        sizes: [layers], root mean square of the residual stream behind a layer.
        peaks: [layers], largest attention logit.
    """
    layers = groups[: len(sizes)]
    return {
        "grad_norm_by_layer": dict(zip(groups, norms.tolist(), strict=True)),
        "activation_rms_by_layer": dict(zip(layers, sizes.tolist(), strict=True)),
        "attention_logit_max_by_layer": dict(zip(layers, peaks.tolist(), strict=True)),
    }


class _StepSums:
    """Sums and maxima of this process over the micro-batches of a step, by layer of the whole model, fp64."""

    def __init__(self, places: dict[nn.Module, int], layers: int, device: torch.device) -> None:
        self.places = places
        self.squares = torch.zeros(layers, dtype=torch.float64, device=device)
        self.counts = torch.zeros_like(self.squares)
        self.peaks = torch.full_like(self.squares, -torch.inf)
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        self.gradients = self.squares  # until they are there


class _MicroBatchObserver:
    """Takes in the forward pass of a micro-batch, see `ActivationObserver`."""

    def __init__(self, seen: _StepSums, counts_B: Tensor) -> None:
        self._seen = seen
        self._counts_B = counts_B

    @torch.no_grad()
    def output(self, block: nn.Module, x_BSD: Tensor) -> None:
        """The residual stream behind a block, or this rank's piece of it."""
        place, seen = self._seen.places[block], self._seen
        squares_B = torch.linalg.vector_norm(x_BSD, dim=(1, 2), dtype=torch.float32).double().square()
        seen.squares[place] += squares_B.masked_fill(~self._counts_B, 0).sum()
        seen.counts[place] += self._counts_B.sum() * (x_BSD.numel() // x_BSD.shape[0])

    @torch.no_grad()
    def attention(self, mixer: nn.Module, q_BSHE: Tensor, k_BTKE: Tensor, mask: AttentionMask, scale: float) -> None:
        """Queries and keys of an attention, as they are multiplied.

        A logit is their product times the scale: before a soft cap, so that it shows what the cap cuts off; without the
        bias of relative positions; and sinks, which are parameters, are none of them.
        """
        place, seen = self._seen.places[mixer], self._seen
        peaks_B = largest_logits(q_BSHE, k_BTKE, mask.mask(), mask.sees_ahead).double() * scale
        seen.peaks[place] = torch.maximum(seen.peaks[place], peaks_B.masked_fill(~self._counts_B, -torch.inf).amax())


def largest_logits(
    q_BSHE: Tensor, k_BTKE: Tensor, mask: Tensor | None, ahead: bool = False, at_once: int = _LOGITS_AT_ONCE
) -> Tensor:
    """The largest product of a query with a key that it sees, over positions and heads: [B], fp32, without scale.

    Args:
        q_BSHE: Queries; the last of the positions, if they see no keys behind themselves.
        k_BTKE: Keys; consecutive query heads share one.
        mask: See `AttentionMask.mask`. None: causality alone.
        ahead: Queries may see keys behind themselves.
        at_once: Products in memory at a time; those of one query position at least.
    """
    samples, queries, heads, _ = q_BSHE.shape
    keys, kv_heads = k_BTKE.shape[1:3]
    past = keys - queries
    q_BKGSE = q_BSHE.view(samples, queries, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
    k_BKET = k_BTKE.permute(0, 2, 3, 1).float()
    k_T = torch.arange(keys, device=k_BTKE.device)
    peaks_B = torch.full((samples,), -torch.inf, device=q_BSHE.device)
    rows = max(1, at_once // (samples * heads * keys))
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        seen = keys if ahead else past + end  # then no query of these rows sees a key behind
        some_BKGRE = q_BKGSE[:, :, :, start:end].float()
        logits_BKGRT = (some_BKGRE.flatten(2, 3) @ k_BKET[..., :seen]).view(*some_BKGRE.shape[:4], seen)
        hidden = k_T[:seen] > k_T[past + start : seen, None] if mask is None else ~mask[:, :, None, start:end, :seen]
        peaks_B = torch.maximum(peaks_B, logits_BKGRT.masked_fill_(hidden, -torch.inf).amax(dim=(1, 2, 3, 4)))
    return peaks_B


def _group(name: str) -> str:
    """The group of a parameter: the number of its layer, or the module at an end of the model."""
    first, second = name.split(".")[:2]
    return second if first == "layers" else first
