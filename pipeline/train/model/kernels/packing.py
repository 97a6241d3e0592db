"""Masks as kernels for packed documents are told of them: the places where each begins.

Shapes: N documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pipeline.train.host.host_copy import to_device
from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.torch_compat.compiler import vary_length


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
    window: tuple[int, int]
    """Keys before and after a query that it sees, aligned with the last of the keys; -1: all."""

    @property
    def causal(self) -> bool:
        """True if a query sees no key after itself."""
        return self.window[1] == 0


def lengths(mask: AttentionMask) -> list[tuple[int, int]]:
    """Queries and keys of each document of a batch, together all of them.

    What is before or after a piece has no queries.
    """
    if mask.documents is None:
        return [(mask.queries, mask.keys)] * mask.samples
    spans = [span for row in mask.all_spans() for span in row]
    return [(max(0, span.end - span.first), span.key_end - span.key) for span in spans]


def pack(mask: AttentionMask) -> Packing:
    """A mask as these kernels are told of it; the host waits for nothing."""
    assert not mask.prefixed, "kernels for packed documents have no prefixes"
    back, ahead = mask.reach.back, mask.reach.ahead
    # Distances are counted from the last of the keys, which has to be the last of the queries.
    limited = back is not None or ahead is not None
    assert not limited or mask.end == mask.keys, "windows to both sides need a sequence to its end"
    window = (-1, -1)
    if limited:
        # Not all versions know a window that is open to one side alone, other than causality.
        window = (-1 if back is None and ahead == 0 else _or(back, mask.keys), _or(ahead, mask.keys))
    queries, keys = zip(*lengths(mask), strict=True)
    both = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
    cumulative = [part.clone() for part in to_device(both, mask.device)]  # each with a length of its own
    for each in cumulative:
        vary_length(each)
    # Kernels leave a block beyond the end of its document at once.
    return Packing(cumulative[0], cumulative[1], mask.queries, mask.keys, window)


def _or(distance: int | None, everything: int) -> int:
    return everything if distance is None else distance
