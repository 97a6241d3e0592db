"""The short convolution against torch's, by document: values, gradients, bits, pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.kernels.recurrence.causal_conv import _plain, causal_conv
from pipeline.train.model.kernels.recurrence.chunks import Chunks

TOLERANCE = 1e-5
"""Of an error over the largest value."""
C, K = 6, 4
STARTS: dict[str, tuple[tuple[int, ...], ...] | None] = {
    "one document": None,
    "documents": ((-5, 3, 64, 66, 67), (0, 50, 127, 128)),
    "began just before": ((-1, 20), (-2, 90)),
}


def inputs_of(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weights, biases and the inputs before."""
    draw = torch.Generator().manual_seed(length)
    shapes = (2, length, C), (C, K), (C,), (2, K - 1, C)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def bounds_of(name: str, length: int) -> Tensor | None:
    starts = STARTS[name]
    if starts is None:
        return None
    position = torch.arange(length)
    return torch.stack([torch.tensor(row)[(position[:, None] >= torch.tensor(row)).sum(1) - 1] for row in starts])


def by_torch(inputs: list[Tensor], bounds_BS: Tensor | None, activation: bool = True) -> Tensor:
    """Each position by torch's own convolution of the inputs of its document."""
    x_BSC, weight_CK, bias_C, before_BKC = (tensor.double() for tensor in inputs)
    all_BTC = torch.cat((before_BKC, x_BSC), 1)
    rows = []
    for row in range(len(x_BSC)):
        outputs = []
        for t in range(x_BSC.shape[1]):
            window_KC = all_BTC[row, t : t + K]
            if bounds_BS is not None:
                places_K = torch.arange(t - K + 1, t + 1)
                window_KC = torch.where((places_K >= bounds_BS[row, t])[:, None], window_KC, 0.0)
            outputs.append(F.conv1d(window_KC.T[None], weight_CK[:, None], bias_C, groups=C)[0, :, 0])
        rows.append(torch.stack(outputs))
    z_BSC = torch.stack(rows)
    return F.silu(z_BSC) if activation else z_BSC


def results(y_BSC: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """y, and gradients of inputs from a random gradient of it."""
    into_BSC = torch.randn(y_BSC.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y_BSC.detach(), *torch.autograd.grad(y_BSC, inputs, into_BSC.to(y_BSC.dtype))]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max(), number


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 150])
@pytest.mark.parametrize("name", STARTS)
def test_torchs_own_by_document(name: str, length: int, activation: bool) -> None:
    inputs, bounds = inputs_of(length), bounds_of(name, length)
    found = causal_conv(*inputs, Chunks.of(length, bounds), activation)
    expected = results(by_torch(inputs, bounds, activation), inputs)
    assert_close(results(found, inputs), expected)
    # What a compiler for a GPU gets.
    x, weight, bias, before = inputs
    ages = None if bounds is None else torch.arange(length) - bounds
    assert_close(results(_plain(x, weight, bias, before, ages, activation), inputs), expected)


def test_no_bias_and_no_inputs_before() -> None:
    x, weight, bias, before = inputs_of(70)
    found = results(causal_conv(x, weight, None, None, Chunks.of(70)), [x, weight])
    zeros = [x, weight, torch.zeros_like(bias), torch.zeros_like(before)]
    assert_close(found, results(by_torch(zeros, None), [x, weight]))


def test_gradients_are_those_of_the_function() -> None:
    inputs, chunks = inputs_of(67, torch.float64), Chunks.of(67, bounds_of("documents", 67))
    assert torch.autograd.gradcheck(lambda *given: causal_conv(*given, chunks), inputs, fast_mode=True)


@pytest.mark.parametrize("start", [1, 30, 63, 64, 66])
def test_bits_of_a_document_are_its_own(start: int) -> None:
    inputs = inputs_of(100)
    bounds = torch.where(torch.arange(100) < start, -7, start).expand(2, -1)
    changed = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with torch.no_grad():
        changed[0][:, :start] *= 3
        changed[3].mul_(5)
    outcomes = []
    for given in (inputs, changed):
        y = causal_conv(*given, Chunks.of(100, bounds))[:, start:]
        outcomes.append((y, *torch.autograd.grad(y.sum(), given)))
    for ours, theirs in zip(*outcomes, strict=True):
        part = (slice(None), slice(start, None)) if ours.ndim == 3 and ours.shape[1] == 100 else ...
        assert torch.equal(ours[part], theirs[part])


@pytest.mark.parametrize("name", STARTS)
def test_pieces_with_the_inputs_before_them_are_the_whole(name: str) -> None:
    inputs, bounds = inputs_of(150), bounds_of(name, 150)
    x, weight, bias, before = inputs
    whole, outputs = causal_conv(*inputs, Chunks.of(150, bounds)), []
    for begin, end in ((0, 50), (50, 53), (53, 150)):
        chunks = Chunks.of(end - begin, None if bounds is None else bounds[:, begin:end] - begin)
        outputs.append(causal_conv(x[:, begin:end], weight, bias, before, chunks))
        before = torch.cat((before, x[:, begin:end]), 1)[:, 1 - K :]
    assert_close(results(torch.cat(outputs, 1), inputs), results(whole, inputs))


def test_sixteen_bits_are_summed_in_fp32() -> None:
    short = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs_of(100)]
    chunks = Chunks.of(100, bounds_of("documents", 100))
    found, long = causal_conv(*short, chunks), causal_conv(*(tensor.float() for tensor in short), chunks)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, long.bfloat16())
    assert [tensor.dtype for tensor in results(found, short)] == [torch.bfloat16] * 5


def test_a_slice_of_a_wider_tensor() -> None:
    inputs = inputs_of(70)
    wide = torch.cat((inputs[0], inputs[0]), 2).detach()
    part = wide[..., C:].requires_grad_()
    assert not part.is_contiguous()
    found = results(causal_conv(part, *inputs[1:], Chunks.of(70)), [part, *inputs[1:]])
    assert_close(found, results(causal_conv(*inputs, Chunks.of(70)), inputs))


def test_only_inputs_are_kept() -> None:
    inputs, kept = inputs_of(150), list[int]()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        causal_conv(*inputs, Chunks.of(150))
    assert sum(kept) == sum(tensor.nbytes for tensor in inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    @pytest.mark.parametrize("name", ["one document", "documents"])
    def test_as_called_directly(self, name: str) -> None:
        inputs, bounds = inputs_of(150), bounds_of(name, 150)

        def whole(*given: Tensor) -> Tensor:
            return causal_conv(*given, Chunks.of(150, bounds))

        compiled = torch.compile(whole, fullgraph=True, dynamic=False)
        assert_close(results(compiled(*inputs), inputs), results(whole(*inputs), inputs))
