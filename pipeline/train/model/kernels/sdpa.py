"""torch's own attention (`scaled_dot_product_attention`), on any device.

`torch.nn.attention.bias` is imported only where there is such a mask, on a GPU: it imports the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask, Terms
from pipeline.train.model.kernels.heads import equal_heads
from pipeline.train.model.kernels.tiles import Tiles, tile, tiled_attention, whole

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias


@dataclass(frozen=True)
class Unmasked:
    """Says that every query sees all keys."""


Mask = Tensor | Unmasked | None
"""What is seen: bool, true where it is; see `lower_right`; or None, causality of as many queries as keys, or of one."""

_FLASH_HEAD = 256
"""Head size that torch's flash kernels take at most."""
_MULTIPLE = 8
"""Head sizes that they take are its multiples."""
_QUERIES_AT_ONCE = 256
"""Queries whose scores are computed at a time where there is no kernel for soft caps."""


class Sdpa:
    """Without documents and windows the kernel that torch takes; with them tiles on a CPU, and a mask on a GPU.

    Sinks are computed by tiles on a CPU, and as one more key on a GPU; soft caps by tiles on a CPU, and on a GPU with
    all scores in memory.

    Args:
        on_gpu: Whether a GPU's kernels are to be fed; None: where the tensors are on one. For estimates of memory.
    """

    def __init__(self, on_gpu: bool | None = None) -> None:
        self._on_gpu = on_gpu
        self._flash = False
        """See `has_flash`."""

    def prepare(self, mask: AttentionMask) -> Mask | Tiles:
        """See `Kernel`."""
        self._flash = has_flash(mask.device)
        if mask.causal and mask.queries in (1, mask.keys):
            return None
        if mask.full:
            return Unmasked()
        on_gpu = mask.device.type == "cuda" if self._on_gpu is None else self._on_gpu
        if not on_gpu:
            return tile(mask)
        if mask.causal:
            # Causality of the last queries: what flash kernels of GPUs do without a mask in memory.
            return lower_right(mask.queries, mask.keys)
        return mask.mask()

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: Mask | Tiles,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `Kernel`."""
        on_gpu = q_BCHE.device.type == "cuda" if self._on_gpu is None else self._on_gpu
        by_tiles = not on_gpu and (terms.soft_cap is not None or sinks_H is not None)
        if by_tiles and (prepared is None or isinstance(prepared, Unmasked)):
            samples, queries, keys = len(q_BCHE), q_BCHE.shape[1], k_BTKE.shape[1]
            prepared = whole(samples, queries, keys, prepared is None and queries == keys)
        if isinstance(prepared, Tiles):
            return tiled_attention(q_BCHE, k_BTKE, v_BTKV, prepared, terms, sinks_H)
        return masked_attention(q_BCHE, k_BTKE, v_BTKV, prepared, terms, sinks_H, on_gpu, self._flash)


def has_flash(device: torch.device) -> bool:
    """True for a GPU that torch has flash kernels for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def lower_right(queries: int, keys: int) -> CausalBias:
    """A `causal_lower_right` without its memory: that makes an fp32 tensor [2, C, T], which nobody reads."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    bias = torch.empty(0).as_subclass(CausalBias)
    bias.variant, bias.seq_len_q, bias.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
    return bias


def is_causality(mask: Tensor) -> bool:
    """True for what `lower_right` gives, false for a mask in memory."""
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def masked_attention(
    q_BCHE: Tensor,
    k_BTKE: Tensor,
    v_BTKV: Tensor,
    mask: Mask,
    terms: Terms,
    sinks_H: Tensor | None = None,
    on_gpu: bool | None = None,
    flash: bool | None = None,
) -> Tensor:
    """Attention with a mask in memory, see `Mask`, [B, C, H, V]. Soft caps need all scores of some queries in memory.

    Args:
        q_BCHE: Queries.
        k_BTKE: Keys.
        v_BTKV: Values.
        mask: Keys that are seen.
        terms: See `Terms`.
        sinks_H: See `Kernel`.
        on_gpu: See `Sdpa`.
        flash: See `has_flash`; None: ask it, which compiled code should not.
    """
    if terms.soft_cap is not None:
        return capped_attention(q_BCHE, k_BTKE, v_BTKV, _in_memory(mask, q_BCHE, k_BTKE), terms, sinks_H)
    if sinks_H is not None:
        mask = _with_sinks(mask, q_BCHE, k_BTKE)
        q_BCHE, k_BTKE, v_BTKV = add_sink_key(q_BCHE, k_BTKE, v_BTKV, sinks_H, terms.scale)
    on_gpu = q_BCHE.device.type == "cuda" if on_gpu is None else on_gpu
    flash = has_flash(q_BCHE.device) if flash is None else flash
    copies = q_BCHE.shape[2] // k_BTKE.shape[2]
    # Of torch's kernels for GPUs flash ones take shared heads, but no mask, and no fp32; and cuDNN's, which some have,
    # takes both. Without a kernel that does, all scores would be in memory.
    fits = flash and q_BCHE.dtype != torch.float32 and q_BCHE.shape[-1] <= _FLASH_HEAD
    takes = fits and (not isinstance(mask, Tensor) or is_causality(mask))
    if copies > 1 and on_gpu and not takes:
        k_BTKE, v_BTKV = (x.repeat_interleave(copies, dim=2) for x in (k_BTKE, v_BTKV))
        copies = 1
    size = v_BTKV.shape[-1]
    if takes or not on_gpu:
        # Kernels for a GPU that are not flash take values of another size.
        q_BCHE, k_BTKE, v_BTKV = equal_heads(q_BCHE, k_BTKE, v_BTKV)
    out_BHCV = F.scaled_dot_product_attention(
        q_BCHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKV.transpose(1, 2),
        attn_mask=mask if isinstance(mask, Tensor) else None,
        # One query of several keys is the last, and sees them all; torch's causality would show it the first.
        is_causal=mask is None and q_BCHE.shape[1] == k_BTKE.shape[1],
        scale=terms.scale,
        enable_gqa=copies > 1,
    )
    return out_BHCV.transpose(1, 2)[..., :size]


def attend_once(
    q_B1HE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, mask: Tensor | None, terms: Terms, sinks_H: Tensor | None = None
) -> Tensor:
    """Attention of one query a row, at its last position: no mask means that it sees every key. [B, 1, H, V]."""
    if terms.soft_cap is not None or sinks_H is not None:
        return masked_attention(q_B1HE, k_BTKE, v_BTKV, mask, terms, sinks_H)
    # The heads that share keys go in as queries of one head, so that no kernel has to repeat the keys.
    q_BKGE = q_B1HE.reshape(len(q_B1HE), k_BTKE.shape[2], -1, q_B1HE.shape[-1])
    k_BKTE, v_BKTV = k_BTKE.transpose(1, 2), v_BTKV.transpose(1, 2)
    out_BKGV = F.scaled_dot_product_attention(q_BKGE, k_BKTE, v_BKTV, attn_mask=mask, scale=terms.scale)
    return out_BKGV.flatten(1, 2)[:, None]


def add_sink_key(
    q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, sinks_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with one more key, the first: its scores are the sinks, and its value is zero.

    Each head that shares the key has an element of it, which is 1 in its queries and 0 in those of the others.
    """
    heads, groups, size = q_BCHE.shape[2], k_BTKE.shape[2], q_BCHE.shape[3]
    more = -(size + heads // groups) % _MULTIPLE + heads // groups
    of_group = torch.arange(heads, device=q_BCHE.device) % (heads // groups)
    chosen_HE = F.one_hot(of_group, more).to(q_BCHE.dtype)
    q_BCHE = torch.cat((q_BCHE, chosen_HE.expand(*q_BCHE.shape[:2], -1, -1)), dim=-1)
    own_KE = (sinks_H / scale).view(groups, -1).to(k_BTKE.dtype)
    sink_KE = F.pad(own_KE, (size, more - heads // groups))
    k_BTKE = torch.cat((sink_KE.expand(len(k_BTKE), 1, -1, -1), F.pad(k_BTKE, (0, more))), dim=1)
    return q_BCHE, k_BTKE, F.pad(v_BTKV, (0, 0, 0, 0, 1, 0))


def _with_sinks(mask: Mask, q_BCHE: Tensor, k_BTKE: Tensor) -> Mask:
    """The mask of `add_sink_key`: every query sees the first key."""
    queries, keys = q_BCHE.shape[1], k_BTKE.shape[1]
    if mask is None and queries == 1:
        return Unmasked()
    if mask is None or (isinstance(mask, Tensor) and is_causality(mask)):
        return lower_right(queries, keys + 1)
    return F.pad(mask, (1, 0), value=True) if isinstance(mask, Tensor) else mask


def _in_memory(mask: Mask, q_BCHE: Tensor, k_BTKE: Tensor) -> Tensor | None:
    """The mask as one in memory, bool [B or 1, 1, C, T]; None: all keys are seen."""
    queries, keys = q_BCHE.shape[1], k_BTKE.shape[1]
    if isinstance(mask, Unmasked) or (mask is None and queries == 1):
        return None
    if mask is None or is_causality(mask):
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q_BCHE.device)
        return ones.tril(keys - queries)[None, None]
    return mask


def capped_attention(
    q_BCHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, mask: Tensor | None, terms: Terms, sinks_H: Tensor | None
) -> Tensor:
    """Attention with soft caps, of some queries after the other; autograd keeps the scores of all."""
    assert terms.soft_cap is not None
    wide = torch.promote_types(q_BCHE.dtype, torch.float32)
    heads = q_BCHE.shape[2]
    k_BHTE, v_BHTV = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).to(wide) for x in (k_BTKE, v_BTKV))
    outs = []
    for begin in range(0, q_BCHE.shape[1], _QUERIES_AT_ONCE):
        queries = slice(begin, begin + _QUERIES_AT_ONCE)
        q_BHRE = q_BCHE[:, queries].transpose(1, 2).to(wide)
        scores = terms.soft_cap * torch.tanh(q_BHRE @ k_BHTE.transpose(2, 3) * (terms.scale / terms.soft_cap))
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, queries], -torch.inf)
        if sinks_H is not None:
            sinks = sinks_H.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : k_BHTE.shape[2]]
        outs.append((weights @ v_BHTV).transpose(1, 2).to(q_BCHE.dtype))
    return torch.cat(outs, dim=1)
