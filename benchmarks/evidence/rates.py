"""Rates that a device reaches: matrix products, attention, passes over memory, launches, copies to and from the host.

`pipeline plan` rests on them, see `calibrate`. Data are random: with zeros a GPU draws less power and runs faster.
Times are medians with quartiles, by CUDA events on a GPU, and of functions that are called in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evidence import calibrate
from evidence.item import Result, goal
from pipeline.config.train import AttentionConfig
from pipeline.train.host.devices import Device, device_of_driver
from pipeline.train.host.shares import UPDATE_BYTES
from pipeline.train.model.kernels.attention_mask import AttentionMask, Terms
from pipeline.train.model.kernels.choice import KernelRequirements, choose_on
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.part_spec import Reach
from pipeline.train.torch_compat.core import guard_optimizer_step, scale_tensors

Row = dict[str, Any]
"""`rate`, `unit`, `median`, and the quartiles `low` and `high`."""
Parts = Mapping[str, Callable[[], object]]
_ROUNDS = (5, 1000)
"""Calls of a function that are timed: at least, at most."""
_UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9}


def measure(
    device: str,
    work: Path,
    *,
    tokens: int,
    layers: int,
    layer: Mapping[str, Sequence[int]],
    head: Sequence[int],
    square: int,
    attention: Mapping[str, Any],
    elements: int,
    update_layers: int,
    launches: int,
    copy_bytes: int,
    seconds: float,
) -> Result:
    """Measure all rates: `rates` has them one by one, other keys the means that plans rest on.

    Args:
        device: "cuda" or "cpu".
        work: Not used.
        tokens: Of a micro-batch.
        layers: Of the model whose products are weighted.
        layer: Matrices of a layer by name: rows, columns, how many there are.
        head: Rows and columns of the head.
        square: Rows and columns of one more product, in bf16.
        attention: `lengths`, `heads`, `kv_heads`, `head_dim`.
        elements: Numbers of a tensor in the passes over memory, in bf16.
        update_layers: Layers whose matrices are updated, in fp32.
        launches: Operations that are issued without a wait.
        copy_bytes: Bytes of a copy between host and device.
        seconds: About how long functions that are called in turn are timed: long enough for clocks to settle.
    """
    torch.manual_seed(0)
    sizes = {name: (rows, columns, count * layers) for name, (rows, columns, count) in layer.items()}
    matrices = sizes | {"head": (head[0], head[1], 1)}
    updated = [sizes[name][:2] for name in sizes for _ in range(layer[name][2])] * update_layers
    rows: list[Row] = []
    # First, and for longer than the others: clocks are then those of a device at work.
    _products(rows, device, "square", square, {f"{square}": (square, square, 1)}, _bf16, 3 * seconds)
    found: Result = {"products_tflops": _products(rows, device, "bf16", tokens, matrices, _bf16, seconds)}
    found |= {"fp8_tflops": {}, "left_out": {}}
    for recipe in ("tensorwise", "rowwise"):
        try:
            # The head is never in fp8.
            mean = _products(rows, device, f"fp8 {recipe}", tokens, sizes, _fp8(recipe), seconds)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:  # the device has no such products
            found["left_out"][f"fp8 {recipe}"] = " ".join(str(error).split())[:200]
        else:
            found["fp8_tflops"][recipe] = mean
    found |= _attention(rows, device, tokens, **attention, seconds=seconds)
    found["memory_gb_per_s"] = _passes(rows, device, elements, seconds)
    found["update_gb_per_s"] = _update(rows, device, updated, seconds)
    found |= _launch(device, launches)
    _copies(rows, device, copy_bytes, seconds)
    found["rates"] = rows
    known = device_of_driver(torch.cuda.get_device_name()) if device == "cuda" else None
    return found if known is None else found | judged(found, known)


def judged(found: Result, device: Device) -> Result:
    """Checks, and goals: the shares that plans assume where nothing was measured."""
    shares, assumed = calibrate.shares(found, device), calibrate.assumed(device)
    return {
        "shares": asdict(shares),
        "checks": {"rates are above 0 and not above their stated peaks": calibrate.sound(shares)},
        "goals": {
            f"{name}, as plans assume": goal(getattr(shares, name), getattr(assumed, name))
            for name in ("products", "attention", "memory", "update")
        },
    }


def timed(device: str, parts: Parts, seconds: float) -> dict[str, list[float]]:
    """Seconds of each of the functions, by name; they are called in turn for about `seconds`, after a first round."""
    mark = _event if device == "cuda" else time.perf_counter

    def once() -> list[Any]:
        marks = [mark()]
        for part in parts.values():
            part()
            marks.append(mark())
        return marks

    def read(rounds: list[list[Any]]) -> list[list[float]]:
        if device == "cuda":
            torch.cuda.synchronize()
            return [[begun.elapsed_time(ended) / 1e3 for begun, ended in pairwise(marks)] for marks in rounds]
        return [[ended - begun for begun, ended in pairwise(marks)] for marks in rounds]

    once()
    (guess,) = read([once()])
    count = min(max(int(seconds / sum(guess)), _ROUNDS[0]), _ROUNDS[1])
    found = read([once() for _ in range(count)])
    return {name: list(values) for name, values in zip(parts, zip(*found, strict=True), strict=True)}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _rate(name: str, unit: str, amount: float, times: Sequence[float]) -> Row:
    """`amount` (FLOPs or bytes) per second, in units of `TFLOP/s` or `GB/s`."""
    low, middle, high = (
        _short(amount / value / _UNITS[unit]) for value in statistics.quantiles(times, n=4, method="inclusive")[::-1]
    )
    return {"rate": name, "unit": unit, "median": middle, "low": low, "high": high}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _random(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _bf16(tokens: int, rows: int, columns: int, device: str) -> Parts:
    """Products of a linear layer: y = x w', and the gradients of both."""
    x, w = _random(tokens, columns, device=device), _random(rows, columns, device=device)
    dy = _random(tokens, rows, device=device)
    return {"forward": lambda: x @ w.T, "gradient of input": lambda: dy @ w, "gradient of weight": lambda: dy.T @ x}


def _fp8(recipe: str) -> Callable[[int, int, int, str], Parts]:
    """The same in e4m3, with factors that are rounded already.

    As torchao has it: both factors have the sums' dimension contiguous, and the forward pass alone accumulates fast.
    """

    def product(m: int, n: int, k: int, device: str, fast: bool) -> Callable[[], object]:
        a, b = (_random(size, k, device=device).to(torch.float8_e4m3fn) for size in (m, n))
        shapes: tuple[tuple[int, ...], ...] = ((m, 1), (1, n)) if recipe == "rowwise" else ((), ())
        scale_a, scale_b = (torch.ones(shape, device=device) for shape in shapes)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def parts(tokens: int, rows: int, columns: int, device: str) -> Parts:
        return {
            "forward": product(tokens, rows, columns, device, True),
            "gradient of input": product(tokens, columns, rows, device, False),
            "gradient of weight": product(rows, columns, tokens, device, False),
        }

    return parts


def _products(
    rows: list[Row],
    device: str,
    name: str,
    tokens: int,
    matrices: Mapping[str, tuple[int, int, int]],
    make: Callable[[int, int, int, str], Parts],
    seconds: float,
) -> float:
    """Add the rates of all products of a model; returns all of its FLOPs over all of their time, in TFLOP/s."""
    flops = total = 0.0
    for matrix, (height, width, count) in matrices.items():
        times = timed(device, make(tokens, height, width, device), seconds)
        each = 2.0 * tokens * height * width
        rows += [_rate(f"{name}: {matrix}: {part}", "TFLOP/s", each, values) for part, values in times.items()]
        flops += count * each * len(times)
        total += count * sum(map(statistics.median, times.values()))
    return _short(flops / total / 1e12)


def _attention(
    rows: list[Row],
    device: str,
    tokens: int,
    *,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    seconds: float,
) -> dict[str, Any]:
    """Causal attention in bf16 by the kernel that a training takes: forward's rate, and backward's time over forward's.

    FLOPs are those of the triangle; backward's count twice.
    """
    there = torch.device(device)
    choice = choose_on(AttentionConfig(), KernelRequirements(False, False, head_dim, "bf16"), there)
    kernel, terms = choice.build(deterministic=False), Terms(head_dim**-0.5)
    spec = AttentionSpec(heads * head_dim, heads, kv_heads, head_dim, False, False, None, Reach(), terms.scale)
    flops = forward = backward = 0.0
    for length in lengths:
        samples = max(1, tokens // length)
        qkv = [
            _random(samples, length, count, head_dim, device=device).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        gradient = _random(samples, length, heads, head_dim, device=device)
        prepared = kernel.prepare(AttentionMask.of(samples, (0, length), Reach(), there))
        out: list[torch.Tensor] = []
        times = timed(
            device,
            {
                "forward": lambda: out.append(kernel(*qkv, prepared, terms)),  # noqa: B023
                "backward": lambda: torch.autograd.grad(out.pop(), qkv, gradient),  # noqa: B023
            },
            seconds,
        )
        each = samples * length * spec.extra_flops(length, causal=True)
        for part, share in (("forward", 1), ("backward", 2)):
            rows.append(_rate(f"attention: {length}: {part}", "TFLOP/s", share * each, times[part]))
        flops += each
        forward += statistics.median(times["forward"])
        backward += statistics.median(times["backward"])
    return {
        "attention_kernel": str(choice),
        "attention_tflops": _short(flops / forward / 1e12),
        "attention_backward": _short(backward / forward),
    }


def _passes(rows: list[Row], device: str, elements: int, seconds: float) -> float:
    """GB/s of a copy and a sum together, all that is read and written counted."""
    a, b, c = (_random(elements, device=device) for _ in range(3))
    times = timed(device, {"copy": lambda: c.copy_(a), "add": lambda: torch.add(a, b, out=c)}, seconds)
    amounts = {name: tensors * elements * a.element_size() for name, tensors in (("copy", 2), ("add", 3))}
    total = sum(map(statistics.median, times.values()))
    rows += [_rate(f"memory: {name}", "GB/s", amounts[name], values) for name, values in times.items()]
    return _short(sum(amounts.values()) / total / 1e9)


def _update(rows: list[Row], device: str, shapes: Sequence[tuple[int, int]], seconds: float) -> float:
    """GB/s of norm, clipping and fused AdamW in fp32 together, bytes counted as plans count them."""
    weights = [nn.Parameter(_random(*shape, device=device, dtype=torch.float32)) for shape in shapes]
    gradients = [_random(*shape, device=device, dtype=torch.float32) for shape in shapes]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    factor, found_inf = torch.ones((), device=device), torch.zeros((), device=device)

    def update() -> None:
        guard_optimizer_step(optimizer, found_inf)
        optimizer.step()

    parts: Parts = {
        "norm": lambda: nn.utils.get_total_norm(gradients, foreach=True).double().square(),
        "clip": lambda: scale_tensors(gradients, factor),
        "adamw": update,
    }
    times = timed(device, parts, seconds)
    count = sum(weight.numel() for weight in weights)
    total = sum(map(statistics.median, times.values()))
    # 4 bytes per number: gradients once, twice; four tensors read and three written.
    amounts = {"norm": 4 * count, "clip": 8 * count, "adamw": 28 * count}
    rows += [_rate(f"update: {name}", "GB/s", amounts[name], values) for name, values in times.items()]
    return _short(UPDATE_BYTES["fp32"] * count / total / 1e9)


def _launch(device: str, count: int) -> dict[str, Any]:
    """Microseconds per tiny operation: of the host to issue it, and until the device has done them all."""
    x = torch.zeros(8, device=device)
    issued, done = [], []
    for number in range(_ROUNDS[0] + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            x.add_(1.0)
        ended = time.perf_counter()
        if device == "cuda":
            torch.cuda.synchronize()
        if number:  # the first is to warm up
            issued.append((ended - begun) / count * 1e6)
            done.append((time.perf_counter() - begun) / count * 1e6)
    low, middle, high = statistics.quantiles(issued, n=4, method="inclusive")
    return {
        "launch_us": _short(middle),
        "launch_us_quartiles": [_short(low), _short(high)],
        "launch_done_us": _short(statistics.median(done)),
    }


def _copies(rows: list[Row], device: str, size: int, seconds: float) -> None:
    """Add the rates of copies between page-locked memory of the host and the device; on a CPU within its memory."""
    here = torch.randint(256, (size,), dtype=torch.uint8)
    here = here.pin_memory() if device == "cuda" else here
    there = torch.empty(size, dtype=torch.uint8, device=device)
    parts: Parts = {
        "host to device": lambda: there.copy_(here, non_blocking=True),
        "device to host": lambda: here.copy_(there, non_blocking=True),
    }
    rows += [_rate(f"copy: {name}", "GB/s", size, times) for name, times in timed(device, parts, seconds).items()]
