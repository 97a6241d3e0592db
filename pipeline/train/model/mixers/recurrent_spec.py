"""Recurrent mixers as data: what their specs have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from pipeline.train.model.parameter_spec import Uniform, Vector
from pipeline.train.model.part_spec import CpTransfer, MixerSpec

STEPS = Uniform(math.log(1e-3), math.log(1e-1), "inverse_softplus_of_exp")
"""Initial biases of steps of time, which are between 0.001 and 0.1 then (Gu and Dao 2023)."""
CHUNK = 64
"""Positions of a chunk."""


class RecurrentSpec(MixerSpec):
    """A mixer whose state goes from position to position, with causal convolutions ahead of it."""

    section: ClassVar[str]
    """Of the `model:` section, the one with its sizes."""
    conv_size: int
    """Taps of the convolutions."""

    @property
    def recurrent(self) -> bool:
        """See `MixerSpec`."""
        return True

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        """See `LayerPartSpec`."""
        return ("decay",)

    @staticmethod
    def chunk_keys(*, causal: bool) -> float:
        """Positions of its chunk that FLOPs are counted for, of one position; see `flops_per_token`.

        A scan with chunks computes whole squares of positions, of which the upper half is hidden. A last chunk that is
        filled up costs as much as a whole one, which is not counted.
        """
        return CHUNK / 2 if causal else CHUNK

    @abstractmethod
    def conv_channels(self, tp: int) -> int:
        """Channels of the convolutions on a rank of tp."""

    @abstractmethod
    def piece_numbers(self, tp: int) -> int:
        """Fp32 numbers of a piece of a sequence that the pieces after it need to know, on a rank of tp."""

    @property
    @abstractmethod
    def entering_flops(self) -> float:
        """FLOPs of one token in the forward pass for a state that enters a piece of a sequence."""

    def cp_transfer(self, method: str, tp: int, cp: int) -> CpTransfer:
        """See `MixerSpec`."""
        pieces = cp * (1 if method == "ulysses" else 2)  # collected is what all ranks have together
        tails = pieces * (self.conv_size - 1) * self.conv_channels(tp)
        what = "states of pieces, inputs of convolutions"
        states = pieces * self.piece_numbers(tp)
        return CpTransfer(
            *(what, 2, 0, self.entering_flops),
            of_sample=tails,
            of_sample_fp32=states,
            least_piece=self.conv_size - 1,
            least_key=f"{self.section}.conv_size",
        )


def conv_vectors(
    name: str, channels: int, taps: int, *, bias: bool = False, heads: int | None = None
) -> tuple[Vector, ...]:
    """Parameters of a `Convolution`, with torch's initial values (LeCun et al. 2012)."""
    initial = Uniform(-(taps**-0.5), taps**-0.5)
    weight = Vector(f"{name}.weight", (channels, taps), initial, heads)
    return (weight, Vector(f"{name}.bias", (channels,), initial, heads)) if bias else (weight,)
