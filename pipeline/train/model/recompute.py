"""Activations that backward computes again, or fetches from the memory of the host, instead of keeping them.

Full recomputation is that of Chen et al. 2016; to keep what is expensive and compute the rest again, that of
Korthikanti et al. 2022, here by operation. Both give the bits that keeping everything gives: the same operations run on
the same inputs, and what a layer drops is a function of the sample and the place.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline.common.errors import UserError
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.kernels import grouped, packed, tiles
from pipeline.train.model.part_spec import LayerSpec

Result = TypeVar("Result")

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional

OPERATIONS: dict[str, tuple[Any, ...]] = {
    "attention": (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._efficient_attention_forward.default,  # of queries that are the last of the keys
        tiles.OPERATION,
    ),
    # Projections alone: where attention has no kernel of its own, it is made of batched products (bmm), whose results
    # are as large as sequence x sequence.
    "matmul": (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.linear.default,
        _aten._scaled_mm.default,
        *grouped.OPERATIONS,
    ),
    # Not what is gathered, which is larger than what it is gathered from.
    "communication": (
        _collectives.reduce_scatter_tensor.default,
        _collectives.all_reduce.default,
        _collectives.all_to_all_single.default,
    ),
}
"""Operations whose results are kept, by name in `train.recompute.keep`: kernels of CPU and GPU, beneath autograd."""
_PRODUCTS = frozenset(OPERATIONS["matmul"])
_SUMS = frozenset((_collectives.reduce_scatter_tensor.default, _collectives.all_reduce.default))


@dataclass(frozen=True)
class Recompute:
    """Way to run a layer so that backward computes it again.

    Attributes:
        keep: Operations whose results are kept all the same; None: only the layer's input is.
        needless: Of its matrix products, counted from 0, those whose results nobody needs again: of the last one if
            nothing but a sum follows, and of those whose sums over tp are kept.
        last_sum: Of its sums over tp, counted from 0, the last one if nobody needs its result again.
        offload: What is kept is in the memory of the host meanwhile; with `keep` None.
    """

    keep: frozenset[Any] | None
    needless: frozenset[int] = frozenset()
    last_sum: int | None = None
    offload: bool = False

    @classmethod
    def of_layer(cls, config: RecomputeConfig, index: int, spec: LayerSpec, tp: int = 1) -> Recompute | None:
        """Recomputation of a layer; None: it keeps everything.

        Args:
            config: The `train.recompute:` section.
            index: Of the layer, in the whole model.
            spec: Its parts.
            tp: Processes that its matrices are cut over.
        """
        if config.mode not in ("full", "selective") or index % config.every:
            return None
        if config.mode == "full":
            return cls(None, offload=config.offload)
        needless = {len(spec.matrices) - 1} if spec.ends_in_sum else set()
        if tp > 1 and "communication" in config.keep:
            needless |= {number for number, matrix in enumerate(spec.matrices.values()) if matrix.to_residual}
        sums = sum(1 + len(part.tp_sums(tp)) for part in spec.parts.values())
        keep = {operation for name in config.keep for operation in OPERATIONS[name]}
        if "attention" in config.keep:
            keep.update(packed.operations())
            if "pipeline.train.model.kernels.flex" in sys.modules:  # which takes long to import
                from pipeline.train.model.kernels.flex import OPERATION

                keep.add(OPERATION)
        return cls(_interned(frozenset(keep)), _interned(frozenset(needless)), sums - 1 if spec.ends_in_sum else None)

    @classmethod
    def of_experts(cls, config: RecomputeConfig, index: int, spec: LayerSpec) -> Recompute | None:
        """Recomputation of the products of a layer's experts, which are a piece of their own; None: all is kept.

        Args:
            config: The `train.recompute:` section.
            index: Of the layer, in the whole model.
            spec: Its parts.
        """
        # A layer that is repeated whole repeats its experts, too.
        if config.mode != "selective" or index % config.every or not spec.stacks:
            return None
        if "matmul" not in config.keep:
            return cls(None)
        # What follows the last product is added up, after a bias perhaps.
        return cls(_interned(frozenset(grouped.OPERATIONS)), _interned(frozenset((len(spec.stacks) - 1,))))

    def __call__(self, compute: Callable[[Tensor], Result], x: Tensor) -> Result:
        """Call `compute(x)`, which must do the same each time it is called and change nothing outside."""
        how: dict[str, Any] = {}
        if self.keep is not None:
            how["context_fn"] = partial(_contexts, self.keep, self.needless, self.last_sum)
        if self.offload:
            # Around the checkpoint, which hides from these hooks all that it does not keep.
            with save_on_cpu(pin_memory=True):
                return self._checkpoint(compute, x, how)
        return self._checkpoint(compute, x, how)

    @staticmethod
    def _checkpoint(compute: Callable[[Tensor], Result], x: Tensor, how: dict[str, Any]) -> Result:
        # torch need not restore the state of its generators: nothing draws from them, see above. The reentrant way has
        # no `context_fn`.
        result: Result = checkpoint(compute, x, use_reentrant=False, preserve_rng_state=False, **how)
        return result


@cache
def _interned(of: frozenset[Any]) -> frozenset[Any]:
    """One object for equal sets: code is compiled for the object itself, and equal layers are to share it."""
    return of


def _contexts(keep: frozenset[Any], needless: frozenset[int], last_sum: int | None) -> Any:
    """Contexts of a pass and its repetition. Not a method, as a compiler follows into functions of a module alone."""
    return create_selective_checkpoint_contexts(_Policy(keep, needless, last_sum))  # type: ignore[no-untyped-call]


class _Policy:
    """Policy for the results of one forward pass of a layer, asked in that pass and again in its repetition."""

    def __init__(self, keep: frozenset[Any], needless: frozenset[int], last_sum: int | None) -> None:
        self._keep = keep
        self._needless = needless
        self._last_sum = last_sum
        self._counts: Counter[tuple[bool, str]] = Counter()

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = operation in self._keep
        if operation in _PRODUCTS:
            kept = kept and self._count(context, "product") not in self._needless
        elif operation in _SUMS:  # as of the outputs of mixer and mlp
            kept = kept and self._count(context, "sum") != self._last_sum
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def _count(self, context: Any, kind: str) -> int:
        """Number of operations of a kind before in this pass."""
        self._counts[context.is_recompute, kind] += 1
        return self._counts[context.is_recompute, kind] - 1


def check_offload(config: RecomputeConfig, device: torch.device) -> None:
    """Refuse to move activations from the memory of the host to the memory of the host.

    Raises:
        UserError: The device is a CPU.
    """
    if config.offload and device.type == "cpu":
        raise UserError(
            "train.recompute.offload=true moves activations from a GPU to the memory of the host, but this run is on a "
            "CPU: set train.recompute.offload=false"
        )
