"""Modules without memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def on_meta() -> Generator[None, None, None]:
    """Modules that are built inside are on the meta device, and no initial weights are drawn for them.

    torch draws numbers on meta in Python, and imports its compiler for that.
    """
    with torch.device("meta"), _NoInitialWeights():
        yield


class _NoInitialWeights(TorchFunctionMode):
    """Leaves a tensor as it is in every function of `torch.nn.init` that a mode can see."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
