"""Choice of the kernels of recurrences: a function of the device, of installed packages, and of the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pipeline.common.errors import UserError, install_extra
from pipeline.config.train import TrainConfig
from pipeline.train.model.kernels.choice import DeviceCaps
from pipeline.train.model.kernels.recurrence.base import PLAIN, RecurrentKernels


@dataclass(frozen=True)
class RecurrentChoice:
    """A backend, and why it is taken."""

    backend: Literal["plain", "fla"]
    reason: str
    slow: bool = False
    """True where a better one is missing: worth a warning."""

    def build(self) -> RecurrentKernels:
        """The kernels themselves.

        Raises:
            UserError: fla-core cannot be imported.
        """
        if self.backend == "plain":
            return PLAIN
        from pipeline.train.model.kernels.recurrence.fla import load

        return load()

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def choose_recurrent(train: TrainConfig, machine: DeviceCaps) -> RecurrentChoice:
    """The kernels of a training.

    Raises:
        UserError: The backend that is named is not installed, or not for this device or training.
    """
    backend = train.recurrence.backend
    if backend == "plain":
        return RecurrentChoice("plain", "as the run file says")
    obstacle = _obstacle(train, machine)
    if backend == "fla":
        if obstacle is not None:
            raise UserError(f"train.recurrence.backend=fla {obstacle[1]}, or train.recurrence.backend=auto")
        return RecurrentChoice("fla", "as the run file says")
    if obstacle is None:
        return RecurrentChoice("fla", "fla-core is installed, and computes in 16 bits")
    return RecurrentChoice("plain", obstacle[0], slow=machine.device == "cuda" and not machine.fla)


def choose_recurrent_on(train: TrainConfig, device: torch.device) -> RecurrentChoice:
    """The kernels that `choose_recurrent` takes on this machine; with `auto` none of a package that cannot be imported.

    Raises:
        UserError: See `choose_recurrent`.
    """
    choice = choose_recurrent(train, DeviceCaps.of(device))
    if choice.backend == "fla" and train.recurrence.backend == "auto":
        try:
            choice.build()
        except UserError as error:
            return RecurrentChoice("plain", f"fla-core cannot be imported: {error.__cause__}", slow=True)
    return choice


def _obstacle(train: TrainConfig, machine: DeviceCaps) -> tuple[str, str] | None:
    """Why fla is not possible, for logs and with what to set instead; None: it is."""
    if machine.device != "cuda":
        name = machine.device.upper()
        return (
            f"the device is a {name}",
            f"needs a CUDA device, but this run is on a {name}: set train.recurrence.backend=plain",
        )
    if train.precision.compute == "fp32":
        return (
            "fp32 is computed by PyTorch alone",
            "computes in 16 bits only, but train.precision.compute=fp32: set train.precision.compute=bf16",
        )
    if train.deterministic:
        return (
            "train.deterministic asks for equal bits",
            "does not give the same bits each time, but train.deterministic=true: set train.deterministic=false",
        )
    if not machine.fla:
        command = install_extra("linear")
        return (
            f"fla-core is not installed: {command}",
            f"needs the package fla-core: install the extra linear ({command})",
        )
    return None
