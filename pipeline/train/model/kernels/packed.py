"""Kernels that take the documents of a batch as one sequence of tokens and the places where each begins.

Those are torch's own (`varlen`) and those of the package flash-attn. Each aligns causality with the last of the keys,
which a piece of a sequence needs. What ran on a GPU: docs/gpu-results.md.

Shapes: B batch, C queries, T keys, H query heads, K key and value heads, E head size, N documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.monitor.host_copy import to_device
from pipeline.train.parallel.torch_compat.compiler import vary_length


@dataclass(frozen=True)
class Packing:
    """Arguments of these kernels for a mask."""

    queries_N: Tensor
    """[N + 1] int32, on the device: how many queries come before each document, and at last all."""
    keys_N: Tensor
    """[N + 1] int32: the same of keys."""
    longest_queries: int
    """No document has more; the same for all batches, since compiled code is made for each value."""
    longest_keys: int
    window: int | None


def lengths(sight: AttentionMask) -> list[tuple[int, int]]:
    """Queries and keys of each document of a batch, together all of them; what is before a piece has no queries."""
    if sight.documents is None:
        return [(sight.queries, sight.end)] * sight.samples
    found = []
    for row in sight.documents.by_row:
        inside = [start for start in row if start < sight.end]
        for begin, behind in pairwise([*inside, sight.end]):
            found.append((max(0, behind - max(begin, sight.start)), behind - begin))
    return found


def pack(sight: AttentionMask) -> Packing:
    """Tell a sight; the host waits for nothing."""
    queries, keys = zip(*lengths(sight), strict=True)
    both = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
    cumulative = [part.clone() for part in to_device(both, sight.device)]  # each with a length of its own
    for each in cumulative:
        vary_length(each)
    # Kernels leave a block beyond the end of its document at once.
    return Packing(cumulative[0], cumulative[1], sight.queries, sight.end, sight.window)


class PackedKernel:
    """A kernel that takes a sight as a `Packing`."""

    def prepare(self, sight: AttentionMask) -> Packing:
        """See `Kernel`."""
        return pack(sight)


class Varlen(PackedKernel):
    """torch's own; Ampere and newer, bf16 and fp16."""

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend: Callable[..., Any] = varlen_attn
        # 2.11 has no such argument, and says nothing of shared keys.
        self._groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def __call__(self, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, prepared: Packing, scale: float) -> Tensor:
        """See `Kernel`."""
        copies = q_BCHE.shape[2] // k_BTKE.shape[2]
        how: dict[str, Any] = {}
        if copies > 1 and self._groups:
            how["enable_gqa"] = True
        elif copies > 1:
            k_BTKE, v_BTKE = (x.repeat_interleave(copies, dim=2) for x in (k_BTKE, v_BTKE))
        window = -1 if prepared.window is None else prepared.window - 1
        out: Tensor = self._attend(
            *(x.flatten(0, 1) for x in (q_BCHE, k_BTKE, v_BTKE)),
            prepared.queries_N,
            prepared.keys_N,
            prepared.longest_queries,
            prepared.longest_keys,
            scale=scale,
            window_size=(window, 0),
            **how,
        )
        return out.view(q_BCHE.shape)


class Flash(PackedKernel):
    """The package flash-attn (Dao 2023), of which several versions can be installed side by side.

    Args:
        version: 2 for Ampere and newer, 3 for Hopper, 4 for Hopper and Blackwell.
        deterministic: Whether gradients have the same bits each time.
    """

    def __init__(self, version: int, deterministic: bool) -> None:
        self._attend = flash_function(version)
        self._deterministic = deterministic
        self._open = None if version == 4 else -1
        """Value that says that there is no window."""

    def __call__(self, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, prepared: Packing, scale: float) -> Tensor:
        """See `Kernel`."""
        window = (self._open, self._open) if prepared.window is None else (prepared.window - 1, 0)
        found = self._attend(
            *(x.flatten(0, 1) for x in (q_BCHE, k_BTKE, v_BTKE)),
            cu_seqlens_q=prepared.queries_N,
            cu_seqlens_k=prepared.keys_N,
            max_seqlen_q=prepared.longest_queries,
            max_seqlen_k=prepared.longest_keys,
            softmax_scale=scale,
            causal=True,
            window_size=window,
            deterministic=self._deterministic,
        )
        # Some versions give the sums of exponentials too.
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.view(q_BCHE.shape)


FLASH_MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute"}
"""By version, where its `flash_attn_varlen_func` is."""


def flash_function(version: int) -> Callable[..., Any]:
    """That for packed documents; what importing it raises is as various as ways to build it."""
    module = __import__(FLASH_MODULES[version], fromlist=["flash_attn_varlen_func"])
    function: Callable[..., Any] = module.flash_attn_varlen_func
    return function


_OPERATIONS = (
    ("torch_attn", "_varlen_attn"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "_flash_attn_forward"),
)


def operations() -> tuple[Any, ...]:
    """Those of these kernels that are registered, whose results selective recomputation keeps."""
    spaces = [(getattr(torch.ops, space), name) for space, name in _OPERATIONS]
    return tuple(getattr(space, name).default for space, name in spaces if hasattr(space, name))


def followed(version: int) -> bool:
    """True if torch.compile can follow a version of flash-attn, which has been imported.

    Version 3 registers its operations with a module `flash_attn_config`; older builds of it do not.
    """
    if version == 3:
        return hasattr(torch.ops.flash_attn_3, "_flash_attn_forward") and find_spec("flash_attn_config") is not None
    return version == 2
