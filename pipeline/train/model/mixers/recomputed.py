"""Generation with mixers that have no state of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.train.model.context import LayerContext
from pipeline.train.model.states import KVCache


class InputCache(KVCache):
    """All inputs of a causal mixer, [rows, T, D], which computes all positions again for each new one."""

    def recompute(
        self, compute: Callable[[Tensor, LayerContext], Tensor], x_BSD: Tensor, context: LayerContext
    ) -> Tensor:
        """The outputs of new positions, [B, S, D].

        Args:
            compute: The mixer on whole texts.
            x_BSD: Its inputs at the new positions.
            context: Of the pass that continues texts.
        """
        places = context.places
        assert places is not None
        # Behind a row's own positions is what other rows are filled up with, which its own do not see.
        x_BTD, _ = self.append(x_BSD, x_BSD[..., :0], places)
        out_BTD = compute(x_BTD, replace(context, states=None, counts=None, places=None))
        if places.past is not None:
            return out_BTD[:, places.past :]
        rows_B1 = torch.arange(len(x_BSD), device=x_BSD.device)[:, None]
        return out_BTD[rows_B1, places.positions_BS]
