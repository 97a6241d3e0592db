"""Kernels that take the documents of a batch as one sequence of tokens and the places where each begins.

Those are torch's own (`varlen`) and those of the package flash-attn. Each counts distances from the last of
the keys, which a causal piece of a sequence needs. What ran on a GPU: docs/gpu-results.md.

Shapes: B batch, C queries, T keys, H query heads, K key and value heads, E head size, V size of a value head, N
documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask, Terms
from pipeline.train.model.kernels.heads import equal_heads
from pipeline.train.model.kernels.packed_sinks import attend_with_sinks
from pipeline.train.model.kernels.packing import Packing, pack


class PackedKernel:
    """A kernel that takes a mask as a `Packing`."""

    def prepare(self, mask: AttentionMask) -> Packing:
        """See `Kernel`."""
        return pack(mask)


class Varlen(PackedKernel):
    """torch's own; Ampere and newer, bf16 and fp16."""

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend: Callable[..., Any] = varlen_attn
        # 2.11 has no such argument, and says nothing of shared keys.
        self._groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: Packing,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `Kernel`."""
        assert terms.soft_cap is None, "varlen has no soft caps"
        shape, size = q_BCHE.shape, v_BTKV.shape[-1]
        q_BCHE, k_BTKE, v_BTKV = equal_heads(q_BCHE, k_BTKE, v_BTKV)
        copies = shape[2] // k_BTKE.shape[2]
        how: dict[str, Any] = {}
        if copies > 1 and self._groups:
            how["enable_gqa"] = True
        elif copies > 1:
            k_BTKE, v_BTKV = (x.repeat_interleave(copies, dim=2) for x in (k_BTKE, v_BTKV))
        packed = [x.flatten(0, 1) for x in (q_BCHE, k_BTKE, v_BTKV)]
        if sinks_H is not None:
            out: Tensor = attend_with_sinks(packed, sinks_H, prepared, terms, "varlen")
        else:
            out = self._attend(
                *packed,
                prepared.queries_N,
                prepared.keys_N,
                prepared.longest_queries,
                prepared.longest_keys,
                scale=terms.scale,
                window_size=prepared.window,
                **how,
            )
        return out.view(*shape[:3], -1)[..., :size]


class Flash(PackedKernel):
    """The package flash-attn (Dao 2023), of which several versions can be installed side by side.

    Args:
        version: 2 for Ampere and newer, 3 for Hopper, 4 for Hopper and Blackwell.
        deterministic: Whether gradients have the same bits each time.
    """

    def __init__(self, version: int, deterministic: bool) -> None:
        self._version = version
        self._attend = flash_function(version)
        self._deterministic = deterministic

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: Packing,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `Kernel`."""
        shape, size = q_BCHE.shape, v_BTKV.shape[-1]
        if self._version != 3 or (shape[-1], size) != _UNEQUAL_HEADS:
            q_BCHE, k_BTKE, v_BTKV = equal_heads(q_BCHE, k_BTKE, v_BTKV)
        packed = [x.flatten(0, 1) for x in (q_BCHE, k_BTKE, v_BTKV)]
        if sinks_H is not None:
            name = f"flash {self._version}"
            sunk = attend_with_sinks(packed, sinks_H, prepared, terms, name, self._deterministic)
            return sunk.view(*shape[:3], -1)[..., :size]
        window: tuple[int | None, int | None] = prepared.window
        if window == (-1, 0):  # causality says it
            window = (-1, -1)
        if self._version == 4:
            window = (_limit(window[0]), _limit(window[1]))
        how: dict[str, Any] = {} if terms.soft_cap is None else {"softcap": terms.soft_cap}
        found = self._attend(
            *packed,
            cu_seqlens_q=prepared.queries_N,
            cu_seqlens_k=prepared.keys_N,
            max_seqlen_q=prepared.longest_queries,
            max_seqlen_k=prepared.longest_keys,
            softmax_scale=terms.scale,
            causal=prepared.causal,
            window_size=window,
            deterministic=self._deterministic,
            **how,
        )
        # Some versions give the sums of exponentials too.
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.view(*shape[:3], -1)[..., :size]


_UNEQUAL_HEADS = (192, 128)
"""Sizes of key and value heads that version 3 takes as they are, those of DeepSeek-V3."""


def _limit(distance: int | None) -> int | None:
    """A distance as version 4 wants it."""
    return None if distance == -1 else distance


FLASH_MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute"}
"""Module of `flash_attn_varlen_func`, by version."""


def flash_function(version: int) -> Callable[..., Any]:
    """Function for packed documents; what importing it raises is as various as ways to build it."""
    module = __import__(FLASH_MODULES[version], fromlist=["flash_attn_varlen_func"])
    function: Callable[..., Any] = module.flash_attn_varlen_func
    return function


def takes_soft_caps(version: int) -> bool:
    """True if a version of flash-attn, which has been imported, has soft caps."""
    return "softcap" in inspect.signature(flash_function(version)).parameters


_OPERATIONS = (
    ("torch_attn", "_varlen_attn"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "_flash_attn_forward"),
    ("pipeline", "packed_attention_with_sinks"),
)


def operations() -> tuple[Any, ...]:
    """Registered operations of these kernels, whose results selective recomputation keeps."""
    spaces = [(getattr(torch.ops, space), name) for space, name in _OPERATIONS]
    return tuple(getattr(space, name).default for space, name in spaces if hasattr(space, name))


def followed(version: int) -> bool:
    """True if torch.compile can follow a version of flash-attn, which has been imported.

    Version 3 registers its operations with a module `flash_attn_config`; older builds of it do not.
    """
    if version == 3:
        return hasattr(torch.ops.flash_attn_3, "_flash_attn_forward") and find_spec("flash_attn_config") is not None
    return version == 2
