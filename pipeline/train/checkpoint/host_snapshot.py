"""A copy of a rank's state in the memory of the host, so that training continues while it is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.train.checkpoint.dcp_storage import State
from pipeline.train.torch_compat.core import local_shard, with_local

_ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple."""
_BLOCK = 1 << 30
"""Bytes that are asked for at once. Pinned memory comes in powers of two, and so little of it is left over."""


class Staging:
    """Copies tensors into buffers that the next copy uses again.

    Args:
        pin: the memory is page-locked, and so a device can write to it by itself.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """The state as it is now. It holds until this is called again.

        DTensors stay DTensors of the same mesh and placements, whose local part is on the host: names and places in the
        checkpoint are those of the original.
        """
        values: list[Any] = [value for entries in state.values() for value in entries.values()]
        sources = [(value, local_shard(value)) for value in values if isinstance(value, Tensor)]
        shapes = [(local.shape, local.dtype) for _, local in sources]
        if shapes != self._shapes:
            self._buffers = []  # before there are new ones
            self._buffers = _allocate(shapes, pin=self._pin)
            self._shapes = shapes
        copies = []
        for (tensor, local), buffer in zip(sources, self._buffers, strict=True):
            buffer.copy_(local, non_blocking=True)
            copies.append(with_local(tensor, buffer))
        for device in {local.device for _, local in sources if local.is_cuda}:
            # One wait for all copies, which come after the step that has been issued.
            torch.cuda.current_stream(device).synchronize()
        # Made once more with copies in the place of tensors; what else there is are numbers.
        rest = iter(copies)
        return {
            section: {name: next(rest) if isinstance(value, Tensor) else value for name, value in entries.items()}
            for section, entries in state.items()
        }


def _allocate(shapes: list[tuple[torch.Size, torch.dtype]], *, pin: bool) -> list[Tensor]:
    """A buffer for each shape, out of few large blocks.

    Each has a storage of its own size, as if it had been allocated by itself: torch writes whole storages.
    """
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    for size in sizes:
        if not blocks or blocks[-1] + size > _BLOCK:
            blocks.append(0)
        places.append((len(blocks) - 1, blocks[-1]))
        blocks[-1] += -(-size // _ALIGNMENT) * _ALIGNMENT
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pin).numpy().data for size in blocks]
    buffers = []
    for (shape, dtype), size, (block, offset) in zip(shapes, sizes, places, strict=True):
        if size == 0:  # a rank that has nothing of a tensor
            buffers.append(torch.empty(shape, dtype=dtype))
            continue
        buffers.append(torch.frombuffer(memory[block][offset : offset + size], dtype=dtype).view(shape))
    return buffers
