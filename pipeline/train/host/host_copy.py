"""Small tensors between host and device: the host does not wait for what the device has to do besides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, sent without waiting.

    To a GPU it goes from page-locked memory: from other memory, a copy may wait for what the device has been given.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """A copy of a few small tensors, issued after what the device has been given so far.

    `Tensor.item` and `Tensor.tolist` wait for all that the device has been given, also for what came after the tensor
    was computed. This waits for the copy alone. All tensors go as one vector of fp64, which holds the numbers that a
    step gives exactly.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
        self._arrived: torch.cuda.Event | None = None
        if self._flat.device.type == "cuda":
            on_device = self._flat
            self._flat = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._flat.copy_(on_device, non_blocking=True)
            # Who waits for a blocking event sleeps, and leaves the core to the thread that reads ahead.
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, as they were when this object was made."""
        if self._arrived is not None:
            self._arrived.synchronize()
        pieces = torch.split(self._flat, [shape.numel() for shape, _ in self._like])
        return [piece.view(shape).to(dtype) for piece, (shape, dtype) in zip(pieces, self._like, strict=True)]
