"""Products by group: the bits of a loop of products, what is said of them without data, and what is kept of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.block import Block
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels import grouped
from pipeline.train.model.kernels.grouped import grouped_products, rows_of_groups
from pipeline.train.model.mlps.experts.module import ExpertStacks
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.recompute import Recompute

D, F = 16, 24
SIZES = {
    "some": [5, 1, 9, 3],
    "empty": [0, 7, 0, 0, 4, 0],
    "one": [0, 0, 6],
    "a row": [0, 1],
    "no rows": [0, 0, 0],
    "many": [3, 0, 2, 1, 0, 0, 11, 4, 2, 2, 0, 1],
}
pytestmark = pytest.mark.usefixtures("fresh_compiler")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def arguments(sizes: list[int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    rows, weights = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in ((sum(sizes), D), (len(sizes), F, D))
    )
    return rows, weights, torch.tensor(sizes).cumsum(0).int().to(device)


def looped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    pieces = rows.split(torch.diff(ends, prepend=ends.new_zeros(1)).tolist())
    return torch.cat([piece @ weight.T for piece, weight in zip(pieces, weights, strict=True)])


Products = Callable[[Tensor, Tensor, Tensor], Tensor]


def results(products: Products, sizes: list[int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """Products, and the gradients of both factors."""
    rows, weights, ends = arguments(sizes, dtype, device)
    out = products(rows, weights, ends)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(device, dtype)
    out.backward(gradient)
    assert rows.grad is not None and weights.grad is not None
    return out.detach(), rows.grad, weights.grad


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_and_gradients_are_those_of_a_loop(sizes: list[int], dtype: torch.dtype) -> None:
    for found, expected in zip(results(grouped_products, sizes, dtype), results(looped, sizes, dtype), strict=True):
        assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.first(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_products_have_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    compiled = torch.compile(grouped_products, fullgraph=True, dynamic=True, backend=backend)
    for sizes in SIZES.values():
        expected = results(grouped_products, sizes, dtype)
        assert all(map(torch.equal, results(compiled, sizes, dtype), expected))


def test_a_gradient_may_be_expanded() -> None:
    for dtype in DTYPES:
        for products in (grouped_products, torch.compile(grouped_products, fullgraph=True, backend="aot_eager")):
            rows, weights, ends = arguments(SIZES["some"], dtype)
            products(rows, weights, ends).sum().backward()
            others = arguments(SIZES["some"], dtype)
            looped(*others).sum().backward()
            assert torch.equal(rows.grad, others[0].grad) and torch.equal(weights.grad, others[1].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", ["fake", "meta"])
def test_without_data_there_are_shapes_and_flops(place: str, dtype: torch.dtype) -> None:
    sizes = SIZES["some"]
    with FakeTensorMode() if place == "fake" else torch.device("meta"):
        rows, weights = (torch.empty(shape, dtype=dtype).requires_grad_() for shape in ((18, D), (len(sizes), F, D)))
        ends = torch.empty(len(sizes), dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            out = grouped_products(rows, weights, ends)
            forward = counter.get_total_flops()
            out.sum().backward()
    real = results(grouped_products, sizes, dtype)
    assert rows.grad is not None and weights.grad is not None
    for found, expected in zip((out, rows.grad, weights.grad), real, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), dtype)
    assert forward == 2 * 18 * D * F
    assert counter.get_total_flops() == 3 * forward


def test_flops_of_a_pass_with_data_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        results(grouped_products, SIZES["empty"], torch.bfloat16)
    assert counter.get_total_flops() == 3 * 2 * 11 * D * F


def test_the_operation_is_registered_rightly() -> None:
    rows, weights, ends = arguments(SIZES["empty"], torch.float32)
    torch.library.opcheck(grouped._multiply, (rows, weights.transpose(-2, -1), ends))


def products_of(profile: torch.profiler.profile) -> int:
    """Grouped products that ran, which make a tensor, and not those that a dispatch mode had or an end came before."""
    found = [event for event in profile.events() if event.name == "aten::_grouped_mm"]
    return sum(any(child.name.startswith("aten::empty") for child in event.cpu_children) for event in found)


def profiled() -> torch.profiler.profile:
    return torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU])


def test_a_split_backward_pass_computes_each_gradient_once() -> None:
    rows, weights, ends = arguments(SIZES["some"], torch.float32)
    out = grouped_products(rows, weights, ends)
    gradient = torch.ones_like(out)
    for factor in (rows, weights):
        with profiled() as profile:
            torch.autograd.grad(out, factor, gradient, retain_graph=True)
        assert products_of(profile) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_biases_are_summed_in_fp32_and_in_one_order(dtype: torch.dtype, compiled: bool) -> None:
    sizes = [5000, 0, 3000, 1]
    vectors, ends = torch.randn(4, F).to(dtype).requires_grad_(), torch.tensor(sizes).cumsum(0).int()
    gradient = (torch.randn(sum(sizes), F) + 0.3).to(dtype)
    function = torch.compile(rows_of_groups, fullgraph=True, backend="aot_eager") if compiled else rows_of_groups
    with profiled() as profile:
        out = function(vectors, ends, sum(sizes))
        out.backward(gradient)
    assert torch.equal(out, torch.cat([each.expand(size, F) for each, size in zip(vectors, sizes, strict=True)]))
    exact = torch.stack([each.double().sum(0) for each in gradient.split(sizes)])
    torch.testing.assert_close(vectors.grad, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    # Which on a GPU add up 16 bits one by one, in an order of chance.
    assert not {event.name for event in profile.events()} & {
        "aten::index_add_",
        "aten::scatter_add_",
        "aten::index_add",
    }


EXPERTS = {"count": 4, "top_k": 2, "ffn_dim": F}
CLAMPED = EXPERTS | {"activation": "clamped_swiglu", "bias": True}


def model_config(**keys: Any) -> ModelConfig:
    shape = {"layers": 2, "dim": D, "heads": 2, "mlp": "experts", "experts": EXPERTS, "vocab_multiple": 8}
    return ModelConfig.model_validate(shape | keys)


def stacks(experts: dict[str, Any], recompute: dict[str, Any] | None) -> ExpertStacks:
    layer = decoder_spec(model_config(experts=experts), 61, 16).layers[0]
    assert isinstance(layer.mlp, ExpertsSpec)
    module = ExpertStacks(layer.mlp)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
    if recompute is not None:
        module.recompute = Recompute.of_experts(RecomputeConfig.model_validate(recompute), 0, layer)
        assert module.recompute is not None
    return module


class Numbers(NamedTuple):
    """Grouped products of both passes, and bytes that the first one keeps."""

    forward: int
    backward: int
    kept: int


def trained(module: ExpertStacks, sizes: list[int]) -> tuple[list[Tensor], Numbers]:
    """Results and gradients of a training pass."""
    rows, _, ends = arguments(sizes, torch.float32)
    gates = torch.rand(len(rows), generator=torch.Generator().manual_seed(5)).requires_grad_()
    module(rows, gates, ends)  # what is made once
    with profiled() as forward:
        out = module(rows, gates, ends)
    gradient = torch.ones_like(out)
    with profiled() as backward:
        out.backward(gradient)
    kept = sum(event.self_cpu_memory_usage for event in forward.events())
    numbers = Numbers(products_of(forward), products_of(backward), kept)
    assert rows.grad is not None and gates.grad is not None
    return [
        out.detach(),
        rows.grad,
        gates.grad,
        *(each.grad for each in module.parameters() if each.grad is not None),
    ], numbers


@pytest.mark.parametrize("experts", [EXPERTS, CLAMPED], ids=["swiglu", "clamped"])
@pytest.mark.parametrize("sizes", [SIZES["some"], [0, 7, 0, 0], [0, 0, 0, 0]], ids=str)
def test_recomputed_experts_have_the_same_bits(experts: dict[str, Any], sizes: list[int]) -> None:
    expected, plain = trained(stacks(experts, None), sizes)
    backward = 6 + (3 if experts is CLAMPED else 0)  # gradients of biases are products, too
    assert plain.forward == 3 and plain.backward == backward
    kept = {}
    for keep, again in ((("attention", "matmul"), 0), (("attention",), 2)):
        module = stacks(experts, {"mode": "selective", "keep": list(keep)})
        found, numbers = trained(module, sizes)
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
        # What the last product gives is needed by no gradient, so that it is neither kept nor computed again.
        assert numbers.forward == 3 and numbers.backward == backward + again
        kept[keep] = numbers.kept
    out, results_kept = 4 * sum(sizes) * D, 2 * 4 * sum(sizes) * F
    # The profile books the scalars of a clamped activation and forgets to take them off.
    scalars = 8 if experts is CLAMPED else 0
    assert kept["attention",] == out + scalars
    assert kept["attention", "matmul"] == out + results_kept + scalars
    assert plain.kept > out + results_kept or not sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [["attention", "matmul"], ["attention"]], ids=str)
def test_recomputed_experts_are_compiled(keep: list[str]) -> None:
    expected, _ = trained(stacks(CLAMPED, None), SIZES["some"])
    module = stacks(CLAMPED, {"mode": "selective", "keep": keep})
    # Cut in two as inductor does, which follows what is to be kept.
    backend = "aot_eager_decomp_partition"
    module.compiled = torch.compile(module.compute, fullgraph=True, dynamic=True, backend=backend)
    found, numbers = trained(module, SIZES["some"])
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    assert numbers.forward == 3 and numbers.backward == (9 if "matmul" in keep else 11)


def test_experts_are_recomputed_where_their_layer_is() -> None:
    configs = (model_config(), model_config(mlp="swiglu", experts=None))
    sparse, dense = (decoder_spec(config, 61, 16).layers[0] for config in configs)

    def of_experts(index: int = 0, **keys: Any) -> Recompute | None:
        return Recompute.of_experts(RecomputeConfig.model_validate(keys), index, sparse)

    # A layer that is repeated whole repeats its experts with it.
    assert of_experts() is of_experts(mode="full") is of_experts(1, mode="selective", every=2) is None
    assert Recompute.of_experts(RecomputeConfig(mode="selective"), 0, dense) is None
    selective = of_experts(2, mode="selective", every=2)
    assert selective is not None and selective.keep == frozenset(grouped.OPERATIONS)
    assert selective.needless == {2} and selective.last_sum is None


@pytest.mark.parametrize("experts", [EXPERTS, CLAMPED], ids=["swiglu", "clamped"])
def test_layers_in_pieces_have_the_same_bits(experts: dict[str, Any]) -> None:
    torch.manual_seed(2)
    model = Decoder(decoder_spec(model_config(experts=experts), 61, 16)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    tokens = torch.randint(61, (3, 16))

    def gradients(**keys: Any) -> list[Tensor]:
        config = RecomputeConfig.model_validate(keys)
        for index, block in enumerate(model.layers.values()):
            assert isinstance(block, Block)
            layer = model.spec.layers[index]
            block.recompute = Recompute.of_layer(config, index, layer)
            block.get_submodule("mlp.experts").recompute = Recompute.of_experts(config, index, layer)
        model.zero_grad()
        model(tokens, Context())[..., :61].sin().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    assert len(expected) == len(list(model.parameters()))
    for keys in ({"mode": "full"}, {"mode": "selective"}, {"mode": "selective", "every": 2, "keep": ["attention"]}):
        assert all(map(torch.equal, gradients(**keys), expected))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"experts": EXPERTS | {"ffn_dim": 20}}, r"experts\.ffn_dim\n.* 20 is not a multiple of 8"),
        ({"dim": 20}, "dim 20 is not a multiple of 8, which mlp: experts needs"),
        (
            {"dim": 20, "mlp": "swiglu", "kinds": {"a": {"mlp": "experts"}}, "pattern": ["a", "a"]},
            "kinds.a: dim 20 is not a multiple of 8",
        ),
    ],
)
def test_sizes_that_kernels_cannot_read_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.compile(message)):
        model_config(**keys)
    assert model_config(dim=20, heads=2, mlp="swiglu", experts=None).dim == 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_gpu_computes_what_a_loop_does(sizes: list[int], dtype: torch.dtype) -> None:
    found, expected = (results(each, sizes, dtype, "cuda") for each in (grouped_products, looped))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
