"""Batches and steps of training data, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch


@dataclass(slots=True)
class Batch:
    """Samples of one micro-batch on one rank. B samples, S positions. Not frozen: that would take longer to make.

    Tensors may share memory with others, so nobody writes to them.
    """

    tokens: torch.Tensor
    """[B, S] int64, inputs."""
    targets: torch.Tensor
    """[B, S] int64, what each position is to predict: most often what follows its input."""
    weight: torch.Tensor
    """[B, S] float32, 0 where a target does not count."""
    starts: torch.Tensor
    """[n] int32, ascending: the flat positions, row * S + column, at which a document begins, or a row. Always on the
    host: some kernels take what they say as numbers of Python."""
    sources: torch.Tensor
    """[B] int64, index in the loader's `names`; -1 for padding samples."""
    extras: dict[str, torch.Tensor]
    """[B, ...], what an objective adds."""
    samples: torch.Tensor | None = None
    """[B] int64, number of each sample in the run, -1 for padding samples; None where they are not of a training."""
    real: int | None = None
    """Samples that are no padding, which are the first ones; None: all. The host knows it, wherever the tensors are."""
    ahead_targets: torch.Tensor | None = None
    """[B, N, S] int64, at d - 1 what follows d places behind each target, for N depths of multi-token prediction."""
    ahead_weight: torch.Tensor | None = None
    """[B, N, S] float32, 0 where one of them does not count."""
    loss_weight: torch.Tensor | None = None
    """[B, S] float32, `weight` times the loss weights of source and document; None: these are 1."""
    ahead_loss_weight: torch.Tensor | None = None
    """[B, N, S] float32, the same of `ahead_weight`."""
    predicted: torch.Tensor | None = None
    """[B, K] int64, ascending: the positions whose targets can count, for a head that leaves the others out; None: all.
    Rows with fewer of them are filled up with positions of weight 0."""
    prefix: torch.Tensor | None = None
    """[B, S] int64, for each position the one behind the prefix of its document, which is seen in both directions;
    None: there are no prefixes."""
    encoder: int = 0
    """Positions of the encoder, which are the first ones of S; the others are the decoder's. In both, document i of a
    row is the same one."""
    conversation: torch.Tensor | None = None
    """[B, S] int64, for P pairs of conversations: which one each target is of, see `PairRows`; None: there are none."""
    reference: torch.Tensor | None = None
    """[P, 2] float64, log-probabilities that the reference model gives to both conversations of each pair."""

    @property
    def bounds(self) -> torch.Tensor:
        """[B, S] int64, for each position the one at which its document begins in this sample.

        Query q sees keys k with bounds[q] <= k <= q if attention stays within documents. Made where the tokens are;
        nobody waits for a GPU.
        """
        size, length = self.tokens.numel(), self.tokens.shape[1]
        # First moved and then widened, so that what moves is the memory that `pin` made.
        begins = self.starts.to(self.tokens.device, non_blocking=True).to(torch.int64)
        lengths = torch.diff(begins, append=begins.new_full((1,), size))
        return torch.repeat_interleave(begins % length, lengths, output_size=size).view(self.tokens.shape)

    @property
    def positions(self) -> torch.Tensor:
        """[B, S] int64, counted from the beginning of each position's document in the sample."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) - self.bounds

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Copies on another device, but for `starts` and `predicted`, which stay on the host.

        Args:
            device: Where to.
            non_blocking: Do not wait for the copies to a GPU, which read what `pin` made.
        """
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking), but=_ON_HOST)

    def pin(self) -> Batch:
        """Copies in page-locked memory, from which a GPU copies without help of the CPU."""
        return self._with(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor))

    def used_by(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory on a GPU until a stream has done what it is given up to the end of this object."""
        self._with(lambda tensor: _used_by(tensor, stream), but=_ON_HOST)

    def first(self, count: int) -> Batch:
        """The first samples alone.

        Args:
            count: How many.
        """
        starts = self.starts[self.starts < count * self.tokens.shape[1]]
        changed = self._with(lambda tensor: tensor[:count], but=("starts", "reference"))
        return replace(changed, starts=starts, real=None)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor], but: Sequence[str] = ()) -> Batch:
        """With all tensors changed, but for those of some fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in but}
        changed: dict[str, Any] = {
            name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **changed, extras={name: change(value) for name, value in self.extras.items()})


_ON_HOST = ("starts", "predicted")
"""Fields that the host reads while a GPU computes."""


def _used_by(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor


@dataclass(slots=True)
class StepData:
    """Training data of a step."""

    step: int
    """Counted from 0."""
    micro_batches: list[Batch]
    """This rank's share."""
    valid_targets: int
    """Targets with weight in the global batch."""
    tokens_by_source: dict[str, int] = field(default_factory=dict)
    """Targets that the global batch draws from each source, masked ones included."""
    order_hash: int = 0
    """xxh3-64 over (global index, xxh3-64 of the source's name, epoch, position) of the global batch's samples, each a
    little-endian u64; equal on all ranks."""
    data_hash: int = 0
    """Sum mod 2**64 of xxh3-64 over (global index, tokens as little-endian int64) of this rank's samples; the sum over
    ranks does not depend on how the step is split."""
    valid_ahead: tuple[int, ...] = ()
    """By depth of multi-token prediction, targets with weight in the global batch."""
    total_weight: float | None = None
    """Sum of the loss weights of the global batch's targets, by which the weighted loss is divided; None: there are
    none, and `valid_targets` stands for it."""
    total_ahead: tuple[float, ...] = ()
    """The same by depth of multi-token prediction."""
    samples: range = range(0)
    """Global numbers of the samples of the global batch, without padding."""
    pairs: int = 0
    """Pairs of conversations of the global batch that count."""
    skipped: bool = False
    """The step is skipped: nothing of it was read, and the weights stay as they are."""

    def pin(self) -> StepData:
        """Copies in page-locked memory."""
        return replace(self, micro_batches=[batch.pin() for batch in self.micro_batches])
