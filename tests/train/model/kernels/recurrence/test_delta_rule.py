"""Gated delta rules in chunks against the recurrence itself, position by position in fp64."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.train.model.kernels.recurrence import delta_rule as module
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.delta_rule import delta_rule, delta_step

B, K, H, N, P = 2, 2, 4, 6, 5
NAMES = ("q", "k", "v", "g", "beta", "initial")


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rule as it is defined."""
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    state, outs = initial, []
    for position in range(v.shape[1]):
        if bounds is not None:
            state = state * (bounds[:, position] != position)[:, None, None, None]
        state = state * g[:, position].exp()[..., None]
        old = (state * k[:, position][..., None]).sum(-2)
        write = beta[:, position][..., None] * (v[:, position] - old)
        state = state + k[:, position][..., None] * write[..., None, :]
        outs.append((state * q[:, position][..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), state


def draw(
    length: int,
    *,
    by_channel: bool,
    shared: bool = False,
    decay: float = 1.0,
    alike: bool = False,
    seed: int = 0,
) -> list[Tensor]:
    """Inputs in fp64; two value heads share a key head where heads decay at one rate, or are `shared`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(B, length, K, N), normal(B, length, K, N)
    k = k * 1e-3 + 1.0 if alike else k
    heads = K if by_channel and not shared else H
    g = -decay * F.softplus(normal(B, length, heads, *([N] if by_channel else [])))
    beta = (
        torch.full((B, length, heads), 1.99, dtype=torch.float64) if alike else 2 * normal(B, length, heads).sigmoid()
    )
    return [
        F.normalize(q, dim=-1),
        F.normalize(k, dim=-1),
        normal(B, length, heads, P),
        g,
        beta,
        normal(B, heads, N, P),
    ]


def bounds_of(*starts: list[int], length: int) -> Tensor:
    """For each row the first position of each document, from -1 on for one that began before."""
    rows = []
    for row in starts:
        sizes = [end - max(start, 0) for start, end in zip(row, [*row[1:], length], strict=True)]
        rows.append(torch.tensor(row).repeat_interleave(torch.tensor(sizes)))
    return torch.stack(rows)


def close(actual: Tensor, expected: Tensor, name: str, tolerance: float) -> None:
    assert actual.shape == expected.shape, name
    error = ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{name}: {error:.1e}"


def check(inputs: list[Tensor], bounds: Tensor | None, dtype: torch.dtype, tolerance: float) -> None:
    """Results and gradients of all inputs."""
    length = inputs[2].shape[1]
    generator = torch.Generator().manual_seed(5)
    found = []
    for rule, kind in ((recurrence, torch.float64), (None, dtype)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in inputs]
        if rule is None:
            o, last = delta_rule(*leaves[:5], Chunks.of(length, bounds), leaves[5])
        else:
            o, last = rule(*leaves, bounds)
        generator.manual_seed(5)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, last)]
        sum((x.double() * weight).sum() for x, weight in zip((o, last), weights, strict=True)).backward()
        found.append([o.detach(), last.detach(), *(x.grad for x in leaves)])
    for name, expected, actual in zip(("o", "last", *NAMES), *found, strict=True):
        close(actual, expected, name, tolerance)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
@pytest.mark.parametrize("length", [1, 40, 150])
def test_it_is_the_recurrence(length: int, by_channel: bool) -> None:
    check(draw(length, by_channel=by_channel), None, torch.float64, 1e-9)
    check(draw(length, by_channel=by_channel), None, torch.float32, 2e-5)


def test_heads_share_keys_whose_dimensions_decay_apart() -> None:
    bounds = bounds_of([-1, 3, 70, 71, 130], [0, 64, 100], length=150)
    check(draw(150, by_channel=True, shared=True), bounds, torch.float64, 1e-9)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_rows_heads_and_chunks_at_a_time_do_not_matter(monkeypatch: pytest.MonkeyPatch, by_channel: bool) -> None:
    """On a GPU all rows and heads are computed at once."""
    bounds = bounds_of([-1, 3, 70, 71, 130], [0, 64, 100], length=150)
    for sizes in ((B, K, 3), (B, 1, 2), (1, K, 1)):
        monkeypatch.setattr(module, "_at_once", lambda *_, sizes=sizes: sizes)
        check(draw(150, by_channel=by_channel), bounds, torch.float64, 1e-9)
        check(draw(150, by_channel=by_channel), None, torch.float64, 1e-9)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_documents_begin_with_an_empty_state(by_channel: bool) -> None:
    bounds = bounds_of([-1, 3, 70, 71, 130], [0, 64, 100], length=150)
    check(draw(150, by_channel=by_channel), bounds, torch.float64, 1e-9)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_strong_decays_and_similar_keys(by_channel: bool) -> None:
    bounds = bounds_of([-1, 30, 90], [0], length=150)
    check(draw(150, by_channel=by_channel, decay=30.0), bounds, torch.float64, 1e-9)
    check(draw(150, by_channel=by_channel, alike=True, decay=1e-3), bounds, torch.float64, 1e-7)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_a_document_has_the_same_bits_whatever_is_before_it(by_channel: bool) -> None:
    bounds = bounds_of([-1, 30, 90], [0, 75], length=150)
    inputs = [x.float() for x in draw(150, by_channel=by_channel)]
    other = [x.clone() for x in inputs]
    for row, start in enumerate((90, 75)):
        for x, y in zip(other[:5], draw(150, by_channel=by_channel, decay=20.0, seed=1), strict=False):
            x[row, :start] = y[row, :start].float()
    results = []
    for given in (inputs, other):
        leaves = [x.clone().requires_grad_() for x in given]
        o, last = delta_rule(*leaves[:5], Chunks.of(150, bounds), leaves[5])
        weights = torch.arange(o.numel()).view(o.shape).sin()
        (o * weights)[0, 90:].sum().add((o * weights)[1, 75:].sum()).backward()
        results.append([o, last, *(x.grad for x in leaves[:5])])
    for one, two in zip(*results, strict=True):
        assert one is not None and two is not None
        if one.shape[1] == 150:
            assert torch.equal(one[0, 90:], two[0, 90:]) and torch.equal(one[1, 75:], two[1, 75:])
        else:
            assert torch.equal(one, two)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_a_piece_is_a_map_of_the_state_that_enters_it(by_channel: bool) -> None:
    q, k, v, g, beta, initial = draw(100, by_channel=by_channel)
    heads = v.shape[2]
    wide = torch.cat((torch.zeros(B, heads, N, P), torch.eye(N).expand(B, heads, N, N)), dim=-1).double()
    _, both = delta_rule(q, k, F.pad(v, (0, N)), g, beta, Chunks(100), wide)
    _, last = delta_rule(q, k, v, g, beta, Chunks(100), initial)
    close(both[..., P:] @ initial + both[..., :P], last, "last", 1e-10)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_a_step_is_one_position(by_channel: bool) -> None:
    q, k, v, g, beta, state = draw(5, by_channel=by_channel)
    expected, last = recurrence(q, k, v, g, beta, state)
    for position in range(5):
        decay = g[:, position] if by_channel else g[:, position, :, None]
        one = (q[:, position], k[:, position], v[:, position], decay, beta[:, position])
        o, state = delta_step(*one, state)
        close(o, expected[:, position], "o", 1e-12)
    close(state, last, "last", 1e-12)


def test_compiled_layers_call_it_as_it_is() -> None:
    inputs = [x.float() for x in draw(80, by_channel=False)]
    compiled = torch.compile(
        lambda *x: delta_rule(*x[:5], Chunks(80), x[5]), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    results = []
    for rule in (compiled, lambda *x: delta_rule(*x[:5], Chunks(80), x[5])):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, last = rule(*leaves)
        (o.square().sum() + last.square().sum()).backward()
        results.append([o, last, *(x.grad for x in leaves)])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_16_bits_come_back_as_such(by_channel: bool) -> None:
    """Sums, systems and states are in fp32: what is written in 16 bits is the same number in 32."""
    inputs = [x.float() for x in draw(70, by_channel=by_channel)]
    found = []
    for kind in (torch.bfloat16, torch.float32):
        leaves = [x.bfloat16().to(kind) if index < 3 else x.clone() for index, x in enumerate(inputs)]
        leaves = [x.requires_grad_() for x in leaves]
        o, last = delta_rule(*leaves[:5], Chunks(70), leaves[5])
        (o.float().sum() + last.square().sum()).backward()
        found.append([o, last, *(x.grad for x in leaves)])
    short, long = found
    for x, y, name in zip(short, long, ("o", "last", *NAMES), strict=True):
        assert x.dtype == (torch.bfloat16 if name in ("o", "q", "k", "v") else torch.float32), name
        assert torch.equal(x, y.to(x.dtype)), name


def test_slices_of_one_tensor() -> None:
    """As they come out of one product."""
    inputs = [x.float() for x in draw(100, by_channel=False)]
    joint = torch.cat([x.flatten(2) for x in inputs[:5]], 2)
    parts = joint.split([x[0, 0].numel() for x in inputs[:5]], 2)
    slices = [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, inputs, strict=False)]
    assert not any(x.is_contiguous() for x in slices)
    for one, two in zip(*(delta_rule(*x[:5], Chunks(100)) for x in (slices, inputs)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_no_initial_state_is_one_of_zeros(by_channel: bool) -> None:
    inputs = [x.requires_grad_() for x in draw(100, by_channel=by_channel)[:5]]
    results = []
    for initial in (None, torch.zeros(B, inputs[2].shape[2], N, P).double()):
        o, last = delta_rule(*inputs, Chunks(100), initial)
        # Of the last state alone.
        results.append([o, last, *torch.autograd.grad(last.square().sum(), inputs)])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    assert not results[0][2].any(), "queries do not reach the state"


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
def test_only_inputs_are_kept(by_channel: bool) -> None:
    inputs = [x.requires_grad_() for x in draw(300, by_channel=by_channel)]
    kept = set[int]()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        delta_rule(*inputs[:5], Chunks(300), inputs[5])
    assert kept == {x.data_ptr() for x in inputs}


def test_operations_are_counted() -> None:
    inputs = [x.requires_grad_() for x in draw(128, by_channel=False)]
    with FlopCounterMode(display=False) as counter:
        o, _ = delta_rule(*inputs[:5], Chunks(128))
    # By position: a state is written and read twice; keys and queries by keys; what is written, by system and scores.
    state, products, system = 3 * 2 * H * N * P, 2 * 2 * 64 * (K * N + H * P), H * 64**2
    assert counter.get_total_flops() == B * 128 * (state + products + system)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    # The same again but for what is read; of states six products, of keys and queries three, of values four.
    again = state * 2 // 3 + 2 * 64 * (2 * K * N + H * P) + system
    assert counter.get_total_flops() == B * 128 * (again + 12 * H * N * P + 2 * 64 * (3 * K * N + 4 * H * P))


def _repeatedly(queue: multiprocessing.Queue[list[bytes]]) -> None:
    torch.set_num_threads(2)
    inputs = [x.float() for x in draw(300, by_channel=False)]
    found = []
    for _ in range(5):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, last = delta_rule(*leaves[:5], Chunks(300), leaves[5])
        (o.sum() + last.sum()).backward()
        gradients = [x.grad for x in leaves if x.grad is not None]
        found.append(b"".join(x.detach().numpy().tobytes() for x in (o, last, *gradients)))
    queue.put(found)


@pytest.mark.slow
def test_it_has_the_same_bits_each_time_from_the_first_call_on() -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[list[bytes]] = context.Queue()
    process = context.Process(target=_repeatedly, args=(queue,))
    process.start()
    found = queue.get(timeout=120)
    process.join()
    assert len(set(found)) == 1
