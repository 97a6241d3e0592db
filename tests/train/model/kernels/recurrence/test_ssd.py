"""Mamba-2's scan against its recurrence, position by position in fp64: values, gradients, documents, pieces."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.ssd import ssd, ssd_decay, ssd_entering, ssd_step

TOLERANCE = 5e-5
"""Of an error over the largest value."""
OF_RATES = 2e-4
"""Of the gradient of decay rates: sums over all positions of what nearly cancels."""


class Case(NamedTuple):
    batch: int = 2
    length: int = 150
    heads: int = 4
    size: int = 8
    groups: int = 2
    state: int = 16
    starts: tuple[tuple[int, ...], ...] | None = None
    """First positions of documents, by row; the first may be below 0."""
    strong: bool = False
    """Decays as strong as models have them."""


CASES = {
    "one document": Case(),
    "one group": Case(groups=1),
    "a group a head": Case(batch=1, groups=4),
    "shorter than a chunk": Case(length=37),
    "one position": Case(length=1),
    "whole chunks": Case(batch=1, length=256),
    "documents": Case(starts=((-9, 5, 64, 101), (0, 70, 71, 149))),
    "documents over chunks": Case(length=330, starts=((-1, 200), (10, 20))),
    "strong decays": Case(length=200, starts=((-70, 130), (3, 64)), strong=True),
}


def bounds_of(case: Case) -> Tensor | None:
    if case.starts is None:
        return None
    position = torch.arange(case.length)
    rows = []
    for starts in case.starts:
        bound = torch.full_like(position, -1000)
        for start in starts:
            bound = torch.where(position >= start, start, bound)
        rows.append(bound)
    return torch.stack(rows)


def chunks_of(case: Case) -> Chunks:
    return Chunks.of(case.length, bounds_of(case))


def inputs_of(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, dt, a, b, c and the initial state."""
    B, S, H, P, G, N = case[:6]
    draw = torch.Generator().manual_seed(S)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    dt_BSH = torch.rand((B, S, H), generator=draw, dtype=torch.float64).to(dtype) * (1.0 if case.strong else 0.2)
    a_H = -torch.linspace(0.5, 16.0 if case.strong else 4.0, H, dtype=torch.float64).to(dtype)
    tensors = [normal(B, S, H, P), dt_BSH, a_H, normal(B, S, G, N), normal(B, S, G, N), normal(B, H, P, N)]
    return [tensor.requires_grad_() for tensor in tensors]


def recurrence(inputs: list[Tensor], bounds_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """`ssd` by its definition."""
    x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, state_BHPN = (tensor.double() for tensor in inputs)
    repeats = x_BSHP.shape[2] // b_BSGN.shape[2]
    b_BSHN, c_BSHN = b_BSGN.repeat_interleave(repeats, 2), c_BSGN.repeat_interleave(repeats, 2)
    outputs = []
    for t in range(x_BSHP.shape[1]):
        if bounds_BS is not None:
            state_BHPN = torch.where((bounds_BS[:, t] == t)[:, None, None, None], 0.0, state_BHPN)
        written = torch.einsum("bhp,bhn->bhpn", dt_BSH[:, t, :, None] * x_BSHP[:, t], b_BSHN[:, t])
        state_BHPN = state_BHPN * (dt_BSH[:, t] * a_H).exp()[..., None, None] + written
        outputs.append(torch.einsum("bhpn,bhn->bhp", state_BHPN, c_BSHN[:, t]))
    return torch.stack(outputs, 1), state_BHPN


def results(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of inputs from random gradients of the outputs."""
    draw = torch.Generator().manual_seed(1)
    into = [torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype) for out in outputs]
    gradients = torch.autograd.grad(outputs, inputs, into, allow_unused=True, materialize_grads=True)
    return [*(out.detach() for out in outputs), *gradients]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest, over the largest value."""
    assert found.isfinite().all()
    return float(
        (found - expected).detach().double().abs().max() / expected.detach().double().abs().max().clamp_min(1e-30)
    )


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """All `results`."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert error(ours, theirs) < (OF_RATES if number == 4 else TOLERANCE), number


@pytest.mark.parametrize("name", CASES)
def test_the_recurrence_position_by_position(name: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    found = results(ssd(*inputs[:5], chunks_of(case), inputs[5]), inputs)
    expected = results(recurrence(inputs, bounds_of(case)), inputs)
    assert_close(found, expected)


def test_gradients_are_those_of_the_function() -> None:
    case = Case(1, 67, 2, 2, 1, 2, ((-4, 3, 65),))
    inputs, chunks = inputs_of(case, torch.float64), chunks_of(case)
    assert torch.autograd.gradcheck(lambda *given: ssd(*given[:5], chunks, given[5]), inputs, fast_mode=True)


def test_no_initial_state_is_zeros() -> None:
    case = CASES["documents"]
    inputs, chunks = inputs_of(case), chunks_of(case)
    zeros = [*inputs[:5], torch.zeros_like(inputs[5])]
    found = results(ssd(*inputs[:5], chunks), inputs[:5])
    assert all(map(torch.equal, found, results(ssd(*zeros[:5], chunks, zeros[5]), inputs[:5])))


def test_strongest_decays_for_whole_chunks() -> None:
    case = Case(1, 200, 2, 4, 1, 4, ((0, 90),))
    inputs = inputs_of(case)
    inputs[1] = torch.ones_like(inputs[1]).requires_grad_()
    inputs[2] = torch.full_like(inputs[2], -16.0).requires_grad_()
    found = results(ssd(*inputs[:5], chunks_of(case), inputs[5]), inputs)
    expected = results(recurrence(inputs, bounds_of(case)), inputs)
    # Next to nothing passes a position: the gradient of the rates is 0 beside the others.
    assert float((found[4] - expected[4]).abs().max()) < TOLERANCE
    assert_close(found[:4] + found[5:], expected[:4] + expected[5:])


def test_step_size_of_zero_changes_nothing() -> None:
    """As behind the end of a shorter prompt."""
    case = Case(1, 100)
    inputs = inputs_of(case)
    short = [*(tensor[:, :77] for tensor in inputs[:2]), inputs[2], *(tensor[:, :77] for tensor in inputs[3:5])]
    dt_BSH = torch.cat((inputs[1][:, :77], torch.zeros_like(inputs[1][:, 77:])), 1)
    _, state = ssd(inputs[0], dt_BSH, *inputs[2:5], Chunks.of(100), inputs[5])
    _, expected = ssd(*short, Chunks.of(77), inputs[5])
    assert error(state, expected) < TOLERANCE


def test_documents_are_each_alone() -> None:
    starts, length = (0, 31, 64, 150, 151), 230
    case = Case(1, length, starts=(starts,))
    inputs = inputs_of(case)
    packed, _ = ssd(*inputs[:5], chunks_of(case))
    for begin, end in zip(starts, (*starts[1:], length), strict=True):
        x, dt, a, b, c, _ = (tensor if tensor.ndim == 1 else tensor[:, begin:end] for tensor in inputs)
        alone, _ = ssd(x, dt, a, b, c, Chunks.of(end - begin))
        assert error(packed[:, begin:end], alone) < TOLERANCE


@pytest.mark.parametrize("start", [40, 64, 100, 150])
def test_bits_of_a_document_are_its_own(start: int) -> None:
    """Values and gradients, whatever is before it, and whatever it does to the one before."""
    case = Case(1, 200, starts=((-3, start),))
    inputs, chunks = inputs_of(case), chunks_of(case)
    others = [tensor.detach().clone() for tensor in inputs]
    for tensor in others:
        if tensor.ndim > 1:
            tensor[:, :start] *= 3
    others[5] = others[5] * 5
    for part in (slice(start, None), slice(0, start)):
        changed = [tensor.detach().clone() for tensor in inputs]
        for before, tensor, other in zip(inputs, changed, others, strict=True):
            if tensor.shape[:2] == (1, 200):
                hidden = slice(0, start) if part.start else slice(start, None)
                tensor[:, hidden] = other[:, hidden] if part.start else before.detach()[:, hidden] * 3
        if part.start:
            changed[5] = others[5]
        changed = [tensor.requires_grad_() for tensor in changed]
        outcomes = []
        for given in (inputs, changed):
            y, state = ssd(*given[:5], chunks, given[5])
            outcomes.append((y, state, torch.autograd.grad(y[:, part].sum(), given[:2] + given[3:5])))
        (y, state, gradients), (other_y, other_state, other_gradients) = outcomes
        assert torch.equal(y[:, part], other_y[:, part])
        for ours, theirs in zip(gradients, other_gradients, strict=True):
            assert torch.equal(ours[:, part], theirs[:, part])
        if part.start:
            assert torch.equal(state, other_state)


@pytest.mark.parametrize("name", ["one document", "documents", "documents over chunks", "strong decays"])
def test_pieces_one_after_another_are_the_whole(name: str) -> None:
    """The scan of each from zeros; states are known afterwards, as they are where processes have a piece each."""
    case = CASES[name]
    inputs, bounds = inputs_of(case), bounds_of(case)
    x, dt, a, b, c, initial = inputs

    def in_pieces() -> tuple[Tensor, Tensor]:
        state, outputs = initial, []
        for begin, end in ((0, 50), (50, 131), (131, case.length)):
            chunks = Chunks.of(end - begin, None if bounds is None else bounds[:, begin:end] - begin)
            part = [tensor[:, begin:end] for tensor in (x, dt, b, c)]
            y, end_state = ssd(part[0], part[1], a, part[2], part[3], chunks)
            outputs.append(y + ssd_entering(part[1], a, part[3], chunks, state))
            state = end_state + ssd_decay(part[1], a, chunks)[..., None, None] * state
        return torch.cat(outputs, 1), state

    whole = results(ssd(x, dt, a, b, c, chunks_of(case), initial), inputs)
    assert_close(results(in_pieces(), inputs), whole)


def test_states_enter_and_leave_as_initial_and_last_ones() -> None:
    case = CASES["documents"]
    x, dt, a, b, c, initial = inputs_of(case)
    y, _ = ssd(torch.zeros_like(x), dt, a, b, c, chunks_of(case), initial)
    assert error(ssd_entering(dt, a, c, chunks_of(case), initial), y) < TOLERANCE
    assert torch.equal(ssd_decay(dt, a, chunks_of(case)), torch.zeros(2, 4))


def test_step_by_step() -> None:
    inputs = inputs_of(Case(length=70))
    x, dt, a, b, c, state = inputs
    outputs = []
    for t in range(70):
        y, state = ssd_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state)
        outputs.append(y)
    found = results((torch.stack(outputs, 1), state), inputs)
    expected = results(ssd(x, dt, a, b, c, Chunks.of(70), inputs[5]), inputs)
    assert_close(found, expected)


def test_sixteen_bits_come_and_leave_alone() -> None:
    """Decays, sums and states are in fp32."""
    case = CASES["documents"]
    x, dt, a, b, c, initial = inputs_of(case)
    short = [tensor.bfloat16().detach().requires_grad_() for tensor in (x, b, c)]
    inputs = [short[0], dt, a, *short[1:], initial]
    found = results(ssd(*inputs[:5], chunks_of(case), initial), inputs)
    long = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = results(ssd(*long[:5], chunks_of(case), long[5]), long)
    wanted = [torch.bfloat16, torch.float32, torch.bfloat16, *[torch.float32] * 2, *[torch.bfloat16] * 2, torch.float32]
    assert [tensor.dtype for tensor in found] == wanted
    assert torch.equal(found[1], expected[1]), "the state"
    assert torch.equal(found[0], expected[0].bfloat16())


def test_slices_of_one_tensor() -> None:
    """As they come out of one product."""
    case = Case()
    x, dt, a, b, c, initial = inputs_of(case)
    B, S = x.shape[:2]
    joint = torch.cat([tensor.detach().flatten(2) for tensor in (x, dt, b, c)], 2)
    parts = joint.split([tensor[0, 0].numel() for tensor in (x, dt, b, c)], 2)
    views = [part.view(B, S, *tensor.shape[2:]) for part, tensor in zip(parts, (x, dt, b, c), strict=True)]
    assert not any(view.is_contiguous() for view in views)
    inputs = [views[0], views[1], a, views[2], views[3], initial.transpose(2, 3).contiguous().transpose(2, 3)]
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    found = results(ssd(*inputs[:5], Chunks.of(S), inputs[5]), inputs)
    expected = results(ssd(x, dt, a, b, c, Chunks.of(S), initial), [x, dt, a, b, c, initial])
    assert_close(found, expected)


def test_only_inputs_are_kept() -> None:
    case = Case(1, 256, 16, 64, 1, 128, ((0, 100),))
    x, dt, a, b, c, _ = inputs_of(case)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ssd(x, dt, a, b, c, chunks_of(case))
    assert sum(kept.values()) < 6 * 1024 * 256


def test_operations_are_counted() -> None:
    case = Case(1, 128, 4, 8, 2, 16)
    inputs = inputs_of(case)
    with FlopCounterMode(display=False) as counter:
        y, _ = ssd(*inputs[:5], Chunks.of(128))
    states, scores = 2 * 2 * 4 * 8 * 16, 2 * 64 * (2 * 16 + 4 * 8)
    assert counter.get_total_flops() == 128 * (states + scores)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() > 128 * 2 * (states + scores)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    @pytest.mark.parametrize("name", ["one document", "documents over chunks"])
    def test_as_called_directly(self, name: str) -> None:
        case = CASES[name]
        inputs, bounds = inputs_of(case), bounds_of(case)

        def whole(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor) -> tuple[Tensor, ...]:
            chunks = Chunks.of(case.length, bounds)
            y, state = ssd(x * 2, dt, a, b, c, chunks, initial)
            return y + ssd_entering(dt, a, c, chunks, initial), state, ssd_decay(dt, a, chunks)

        compiled = torch.compile(whole, fullgraph=True, dynamic=False)
        found, expected = results(compiled(*inputs), inputs), results(whole(*inputs), inputs)
        assert all(error(ours, theirs) < 1e-5 for ours, theirs in zip(found, expected, strict=True))


_RERUN = """
import hashlib, torch
torch.set_num_threads(2)
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.ssd import ssd
draw = torch.Generator().manual_seed(0)
shapes = (2, 300, 4, 32), (2, 300, 4), (4,), (2, 300, 2, 64), (2, 300, 2, 64)
x, dt, a, b, c = (torch.rand(shape, generator=draw) - (len(shape) > 3) * 0.5 for shape in shapes)
inputs = [tensor.requires_grad_() for tensor in (x, dt, -a, b, c)]
for _ in range(6):
    y, state = ssd(*inputs, Chunks.of(300))
    tensors = [y, state, *torch.autograd.grad([y, state], inputs, [y.detach(), state.detach()])]
    print(hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest())
"""


@pytest.mark.slow
def test_runs_have_equal_bits_with_two_threads() -> None:
    """The first call of a process, too."""
    lines = [
        subprocess.run([sys.executable, "-c", _RERUN], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(2)
    ]
    assert len(lines[0]) == 6
    assert len({*lines[0], *lines[1]}) == 1
