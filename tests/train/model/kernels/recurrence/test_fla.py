"""Kernels of fla-core: a stand-in with the arguments of its version 0.6 computes position by position.

What the plain kernels compute must come out, documents and states ahead of them included.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.train.model.kernels.recurrence import fla
from pipeline.train.model.kernels.recurrence.base import RecurrentKernels
from pipeline.train.model.kernels.recurrence.causal_conv import causal_conv
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.ssd import ssd

S, TOLERANCE = 40, 2e-5
BOUNDS = torch.tensor([[-2] * 13 + [13] * 20 + [33] * 7, [0] * 40])
BOUND_KINDS = pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["one document", "documents"])


def sequences(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> list[tuple[int, slice]]:
    """Row and positions of each sequence."""
    if cu_seqlens is None:
        return [(row, slice(0, x.shape[1])) for row in range(x.shape[0])]
    assert x.shape[0] == 1
    assert cu_seqlens_cpu is not None
    assert cu_seqlens_cpu.device.type == "cpu"
    ends = cu_seqlens_cpu.tolist()
    return [(0, slice(begin, end)) for begin, end in pairwise(ends)]


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    beta = torch.ones_like(v[..., 0])
    return recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, erase=False)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, erase=True)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    *,
    erase: bool,
) -> tuple[Tensor, Tensor]:
    assert g is not None
    assert initial_state is not None
    assert scale is not None
    repeats = v.shape[2] // q.shape[2]
    q, k = (m.repeat_interleave(repeats, 2) for m in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    parts, states, rows = [], [], []
    for number, (row, positions) in enumerate(sequences(q, cu_seqlens, cu_seqlens_cpu)):
        state = initial_state[number]
        outputs = []
        for t in range(positions.start, positions.stop):
            state = state * g[row, t, :, :, None].exp()
            old = torch.einsum("hnp,hn->hp", state, k[row, t]) if erase else 0.0
            state = state + torch.einsum("hn,hp->hnp", k[row, t], (v[row, t] - old) * beta[row, t, :, None])
            outputs.append(torch.einsum("hnp,hn->hp", state, q[row, t]) * scale)
        parts.append(torch.stack(outputs))
        states.append(state)
        rows.append(row)
    out = torch.cat(parts)[None] if cu_seqlens is not None else torch.stack(parts)
    return out, torch.stack(states)


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert weight is not None
    assert initial_state is not None
    parts = []
    for number, (row, positions) in enumerate(sequences(x, cu_seqlens, cu_seqlens_cpu)):
        inputs = torch.cat((initial_state[number][:, 1:], x[row, positions].T), 1)
        parts.append(F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0].T)
    out = torch.cat(parts)[None] if cu_seqlens is not None else torch.stack(parts)
    return F.silu(out) if activation == "silu" else out, initial_state.clone()


@pytest.fixture
def kernels(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> RecurrentKernels:
    functions: dict[str, Any] = {
        "fla.ops.simple_gla": chunk_simple_gla,
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
        "fla.modules.causal_conv1d": causal_conv1d,
    }
    for name in ("fla", "fla.ops", "fla.modules", *functions, "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        setattr(sys.modules[name], function.__name__, function)
    sys.modules["fla.ops.kda"].chunk_kda = chunk_gated_delta_rule  # type: ignore[attr-defined]
    return fla.load()


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def ssd_inputs() -> list[Tensor]:
    x, dt, a, b, c, initial = random((2, S, 4, 3), (2, S, 4), (4,), (2, S, 2, 5), (2, S, 2, 5), (2, 4, 3, 5))
    return [tensor.requires_grad_() for tensor in (x, dt.abs() * 0.3, -a.abs(), b, c, initial)]


def conv_inputs() -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in random((2, S, 6), (6, 4), (6,), (2, 3, 6))]


def assert_same(found: Any, expected: Any, inputs: list[Tensor]) -> None:
    """Values, and gradients of inputs."""
    into = [torch.randn_like(out) for out in expected]
    gradients = (torch.autograd.grad(side, inputs, into, allow_unused=True) for side in (found, expected))
    for ours, theirs in zip([*found, *next(gradients)], [*expected, *next(gradients)], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max().clamp_min(1.0)


@BOUND_KINDS
def test_scan(kernels: RecurrentKernels, bounds: Tensor | None) -> None:
    inputs, chunks = ssd_inputs(), Chunks.of(S, bounds)
    found = kernels.ssd(*inputs[:5], chunks, inputs[5])
    assert_same(found, ssd(*inputs[:5], chunks, inputs[5]), inputs)
    assert_same(kernels.ssd(*inputs[:5], chunks), ssd(*inputs[:5], chunks), inputs[:5])


@BOUND_KINDS
def test_convolution(kernels: RecurrentKernels, bounds: Tensor | None) -> None:
    inputs, chunks = conv_inputs(), Chunks.of(S, bounds)
    for activation in (True, False):
        found = kernels.causal_conv(*inputs, chunks, activation)
        assert_same([found], [causal_conv(*inputs, chunks, activation)], inputs)
    x, weight = inputs[:2]
    bare = [side(x, weight, None, None, chunks) for side in (kernels.causal_conv, causal_conv)]
    assert_same(bare[:1], bare[1:], [x, weight])


@pytest.mark.parametrize("by_channel", [False, True])
@BOUND_KINDS
def test_delta_rule(kernels: RecurrentKernels, bounds: Tensor | None, by_channel: bool) -> None:
    """Each row alone, begun anew where a document begins."""
    q, k, v, g, beta, initial = random(
        (2, S, 2, 5), (2, S, 2, 5), (2, S, 4, 3), (2, S, 4, *([5] if by_channel else [])), (2, S, 4), (2, 4, 5, 3)
    )
    k, g, beta = F.normalize(k, dim=-1), -g.abs(), beta.sigmoid()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, g, beta, initial)]
    found = kernels.delta_rule(*inputs[:5], Chunks.of(S, bounds), initial)
    outputs, states = [], []
    for row, starts in enumerate([(0, 13, 33), (0,)] if bounds is not None else [(0,), (0,)]):
        enters = bounds is None or bool(bounds[row, 0] < 0)
        state = initial[row : row + 1] * float(enters)
        for begin, end in zip(starts, (*starts[1:], S), strict=True):
            part = [tensor[row : row + 1, begin:end] for tensor in inputs[:5]]
            state = state if begin == 0 else torch.zeros_like(state)
            out, state = chunk_gated_delta_rule(*part, scale=5**-0.5, initial_state=state)
            outputs.append(out[0])
        states.append(state[0])
    assert_same(found, (torch.cat(outputs).view(2, S, 4, 3), torch.stack(states)), inputs)


@pytest.mark.slow
def test_a_compiler_sees_one_operation(kernels: RecurrentKernels) -> None:
    inputs, bounds = ssd_inputs(), BOUNDS

    def whole(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = kernels.ssd(x * 2, dt, a, b, c, Chunks.of(S, bounds), initial)
        return out

    assert_same(torch.compile(whole, fullgraph=True, dynamic=False)(*inputs), whole(*inputs), inputs)


def test_the_host_asks_for_bounds_once(kernels: RecurrentKernels) -> None:
    bounds, other = BOUNDS.clone(), BOUNDS.clone()
    assert fla._documents(bounds) is fla._documents(bounds)
    assert fla._documents(other) is not fla._documents(bounds)


def test_missing_package_is_named() -> None:
    with pytest.raises(UserError, match=r"needs the package fla-core, .*install the extra linear \(pip install"):
        fla.load()
