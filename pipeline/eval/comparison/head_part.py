"""Logits of some positions of a text."""

from __future__ import annotations

import torch


class only_positions:
    """Give a head some positions [B, S, ...] of its input alone, so that logits of a long text fit into memory."""

    def __init__(self, head: torch.nn.Module, first: int, last: int, dimension: int = 1) -> None:
        self._head, self._part = head, (slice(None),) * dimension + (slice(first, last),)

    def __enter__(self) -> None:
        self._hook = self._head.register_forward_pre_hook(lambda _, given: (given[0][self._part], *given[1:]))

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
