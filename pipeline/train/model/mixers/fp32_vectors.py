"""Vectors of a mixer or mlp that stay in fp32 where all else is computed in 16 bits."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.train.model.part_spec import LayerPartSpec


class Fp32Vectors(nn.Module):
    """Vectors that a part lists in `vectors` as `NAME.*`, NAME being one of its `fp32_modules`.

    Rates of decay lose too much in bf16. FSDP makes a unit of its own of them, which `Block.forward` gathers by calling
    it; what a layer computes then reads its parameters, which stay gathered until the backward pass has ended.
    """

    def __init__(self, part: LayerPartSpec, name: str) -> None:
        super().__init__()
        for vector in part.vectors:
            module, _, own = vector.name.rpartition(".")
            if module == name:
                self.register_parameter(own, nn.Parameter(torch.empty(vector.shape)))

    def forward(self) -> None:
        """Lets FSDP gather the parameters."""


def fp32_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of a model that stay in fp32."""
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, Fp32Vectors)}
    return frozenset(f"{name}.{own}" for name, unit in units.items() for own, _ in unit.named_parameters())
