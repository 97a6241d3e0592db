"""Names and shapes of what files have of a model: its parameters, and buffers that belong to its weights."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.train.model.decoder_spec import DecoderSpec

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""
_BIAS, _LOADS = ".router.score_bias", ".router.loads"


class StateShapes(NamedTuple):
    """Shapes of all tensors of a model that a checkpoint has."""

    parameters: Shapes
    buffers: Shapes
    """Biases of the choice of experts, in fp32; choices of the last step."""
    fp32: frozenset[str]
    """Names of the parameters that stay in fp32 where others are in 16 bits."""

    @property
    def weight_buffers(self) -> Shapes:
        """The buffers that what the model computes depends on."""
        return {name: shape for name, shape in self.buffers.items() if not is_count(name)}


def state_shapes(spec: DecoderSpec) -> StateShapes:
    """Shapes of the parameters and buffers of a model."""
    # Here, as commands that only read files import this module, and the model takes seconds.
    from pipeline.train.model.decoder import Decoder
    from pipeline.train.model.meta import on_meta
    from pipeline.train.model.mixers.fp32_vectors import fp32_parameters

    with on_meta():
        model = Decoder(spec)
    return StateShapes(
        {name: tuple(value.shape) for name, value in model.named_parameters()},
        {name: tuple(value.shape) for name, value in model.named_buffers()},
        fp32_parameters(model),
    )


def is_buffer(name: str) -> bool:
    """True of buffers: they are in fp32 always, and an average of the weights lacks them."""
    return name.endswith((_BIAS, _LOADS))


def is_count(name: str) -> bool:
    """True of the choices of the last step: checkpoints have them, but they are none of the weights."""
    return name.endswith(_LOADS)
