"""Matrix products by NVIDIA's Transformer Engine.

Written after versions 2.4 to 2.18; what ran on a GPU: docs/gpu-results.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes

from pipeline.train.model.decoder import Decoder

Recipe = Literal["tensorwise", "rowwise", "delayed", "current", "mxfp8"]


class Linear(te.Linear):  # type: ignore[misc]
    """A product in fp8 with a plain weight, which has the name and the format of `nn.Linear`'s.

    Where scales follow from the numbers at hand, each product enters fp8 by itself: a layer that is computed again in
    the backward pass does so too.

    Args:
        linear: On the meta device; its parameters are taken.
        recipe: How scales are found; None: whoever calls the module has entered fp8.
    """

    # What delayed scaling remembers is reset when a run is resumed: it would be an entry of the checkpoint that a model
    # without fp8 does not have, and it belongs to no layout but its own.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, linear: nn.Linear, recipe: Any | None) -> None:
        super().__init__(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=torch.float32,
            device="meta",
        )
        self._recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] -> [..., rows]."""
        if self._recipe is None:
            return cast(Tensor, super().forward(x))
        with _fp8(self._recipe):
            return cast(Tensor, super().forward(x))


def use_transformer_engine(part: Decoder, names: set[str], scaling: Recipe) -> None:
    """Replace the linear modules of a part, which is on the meta device, in place.

    Args:
        part: Of the model.
        names: Of the modules.
        scaling: `delayed`, `current` or `mxfp8`.
    """
    recipe = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }[scaling]()
    delayed = scaling == "delayed"
    for name in sorted(names):
        part.set_submodule(name, Linear(part.get_submodule(name), None if delayed else recipe))  # type: ignore[arg-type]
    if delayed and names:
        _enter_around(part, recipe)


def _fp8(recipe: Any) -> AbstractContextManager[None]:
    """A context in which products are in fp8. The older name of the function warns each time that it is deprecated."""
    if hasattr(te, "autocast"):
        return cast(AbstractContextManager[None], te.autocast(enabled=True, recipe=recipe))
    return cast(AbstractContextManager[None], te.fp8_autocast(enabled=True, fp8_recipe=recipe))


def _enter_around(part: Decoder, recipe: Any) -> None:
    """Enter fp8 around the forward pass of a part: on leaving, scales are made of the largest values seen in it.

    All processes take the maximum over all of them, which have the same modules: there is no pipeline then.
    """
    entered: list[AbstractContextManager[None]] = []

    def enter(*_: Any) -> None:
        entered.append(_fp8(recipe))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave, always_call=True)
