"""Products of rows with the matrix of their group, for experts.

Torch's own operation computes them. Its backward pass computes each gradient once, also where the passes for inputs and
for weights are apart. A compiler, and tensors without data in fp32, get an operation of ours around it: torch's says
what it returns in bf16 alone (2.11, 2.13).

Shapes: N rows, ascending by group, E groups, F outputs, D inputs; rows begin at multiples of 16 bytes, which
`EXPERT_MULTIPLE` of the model section sees to.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

_ROW_MULTIPLE = 8
"""Numbers of 2 bytes in 16 bytes."""


def grouped_products(rows_ND: Tensor, weights_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Each row with the matrix of its group, [N, F].

    Args:
        rows_ND: Rows of one group follow each other.
        weights_EFD: Matrices of the groups.
        ends_E: int32, number of rows up to the end of each group; the last is N. On a CPU, backward refuses rows after
            it.
    """
    weights_EDF = weights_EFD.transpose(-2, -1)
    if rows_ND.dtype == torch.float64:  # which torch's operation does not have
        groups = torch.split(rows_ND, _counts(ends_E).tolist())
        return torch.cat([rows @ matrix for rows, matrix in zip(groups, weights_EDF, strict=True)])
    if torch.compiler.is_compiling() or (rows_ND.dtype != torch.bfloat16 and _without_data(rows_ND)):
        return cast(Tensor, _multiply(rows_ND, weights_EDF, ends_E))
    out_NF = F.grouped_mm(rows_ND, weights_EDF, offs=ends_E)
    if out_NF.requires_grad:
        # The kernels cannot read a gradient that is one number, expanded, as that of a plain sum is.
        out_NF.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return out_NF


def _counts(ends_E: Tensor) -> Tensor:
    """Rows of each group."""
    return torch.diff(ends_E, prepend=ends_E.new_zeros(1))


def _without_data(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


@torch.library.custom_op("pipeline::grouped_products", mutates_args=())
def _multiply(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Rows [N, D] with matrices [E, D, F]; or columns [F, N] with rows [N, D], a matrix [F, D] for each group."""
    return F.grouped_mm(left, right, offs=ends_E)


@_multiply.register_fake
def _(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    groups = ends_E.shape if right.ndim == 2 else ()
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows_ND, weights_EDF, ends_E = ctx.saved_tensors
    gradient_NF = gradient_NF.contiguous()
    to_rows = to_weights = None
    if ctx.needs_input_grad[0]:
        to_rows = _multiply(gradient_NF, weights_EDF.transpose(-2, -1), ends_E)
    if ctx.needs_input_grad[1]:
        to_weights = _multiply(gradient_NF.T, rows_ND, ends_E).transpose(-2, -1)
    return to_rows, to_weights, None


_multiply.register_autograd(_differentiate, setup_context=_keep)


def rows_of_groups(vectors_EF: Tensor, ends_E: Tensor, rows: int) -> Tensor:
    """For each row the vector of its group, [N, F]. Gradients are summed in fp32, in an order that is always the same.

    Args:
        vectors_EF: Vectors of the groups.
        ends_E: See `grouped_products`.
        rows: N.
    """
    if vectors_EF.dtype == torch.float64:
        return vectors_EF.repeat_interleave(_counts(ends_E), dim=0, output_size=rows)
    return cast(Tensor, _RowsOfGroups.apply(vectors_EF, ends_E, rows))  # type: ignore[no-untyped-call]


class _RowsOfGroups(torch.autograd.Function):
    """Torch's own gradient adds rows one by one in their type, on a GPU in any order: of 16 bits little is left."""

    @staticmethod
    def forward(ctx: Any, vectors_EF: Tensor, ends_E: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(ends_E)
        return vectors_EF.repeat_interleave(_counts(ends_E), dim=0, output_size=rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (ends_E,) = ctx.saved_tensors
        gradient_NF = gradients[0].contiguous()
        ones_NM = gradient_NF.new_ones(gradient_NF.shape[0], _ROW_MULTIPLE)
        return cast(Tensor, _multiply(ones_NM.T, gradient_NF, ends_E))[:, 0], None, None


_packets = (torch.ops.aten._grouped_mm, torch.ops.pipeline.grouped_products)
OPERATIONS = tuple(packet.default for packet in _packets)
"""Whose results selective recomputation keeps."""


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of all groups together, from the shapes of both factors; one at most has a dimension of groups."""
    return 2 * prod(left[-2:]) * right[-1]


for _packet in _packets:
    if _packet not in flop_registry:  # a later torch may count its own
        register_flop_formula(_packet)(_flops)
