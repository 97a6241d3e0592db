"""One variant of `train_gpu.py` in a process of its own: steps through the code that trains, and their costs."""

from __future__ import annotations

import gc
import hashlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.common.versions import versions
from pipeline.config import Config
from pipeline.config.model import InitConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.distributed import process_group
from pipeline.train.loop.step import Stepper
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.model.init import local_range, weight_std
from pipeline.train.monitor.metrics import peak_flops
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.mesh import build_mesh
from pipeline.train.parallel.parallelize import COMPUTE_DTYPE, build_model
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.step_shapes import StepShape, step_shapes
from pipeline.train.rules.layout import check_layout
from pipeline.train.rules.layout_check import planned_spec
from pipeline.train.start.setup import init_rank

DOCUMENT = 1000
"""Tokens of a document on average."""
PRODUCT = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the matrices that are multiplied to know what the device reaches."""
_PRODUCT_S = {"cuda": 1.0, "cpu": 0.2}
_PACKAGES = ("triton", "transformers", "flash-attn", "torchao", "transformer-engine")

Step = Callable[[int], Callable[[], float]]
"""Issues a step, whose number counts from 0; called, what it gives waits for the loss, and for nothing issued later."""


@dataclass(frozen=True)
class Place:
    """Where and what a process trains."""

    config: Config
    setup: Setup
    shape: StepShape


Build = Callable[[Place, list[list[Batch]]], tuple[Step, dict[str, Any]]]
"""Makes model and optimizer; given the micro-batches of all steps. And what the line is to have besides."""


def measure(config: Config, build: Build, steps: int, warmup: int) -> dict[str, Any] | None:
    """Train, and say what it took; None on ranks other than 0.

    Args:
        config: The run file of the variant.
        build: Of this package or the peer.
        steps: That are timed.
        warmup: Before them; layers are compiled in the first.
    """
    place = place_of(config)
    device = place.setup.device
    dtype = COMPUTE_DTYPE[config.train.precision.compute]
    product = [product_rate(device, dtype)]
    step, about = build(place, [micro_batches(place, number) for number in range(warmup + steps)])
    seconds, losses, first = timed(step, device, steps, warmup)
    peaks = peak_memory(device)
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    product.append(product_rate(device, dtype))
    everyone = process_group.gather([peaks, product])
    if everyone is None:
        return None
    return {
        **about,
        **speeds(place, seconds, everyone[0][1]),
        "first_step_s": round(first, 2),
        "product_tflops": [round(rate / 1e12, 3) for rate in everyone[0][1]],
        "peak_gb": max(peak for (peak, _), _ in everyone),
        "reserved_gb": max((reserved for (_, reserved), _ in everyone if reserved is not None), default=None),
        "losses": [round(loss, 6) for loss in losses],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": versions() | _packages(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def place_of(config: Config) -> Place:
    """Join the processes of a run file; afterwards `check_layout` and the mesh are those of training."""
    ranks = process_group.of_environment()
    layout = check_layout(config, ranks.world_size)
    (shape,) = step_shapes(config, layout.dp)
    device = init_rank(config, ranks)
    spec = planned_spec(config)
    mesh = build_mesh(layout, device.type, experts=bool(spec.expert_layers))
    return Place(config, Setup(device, mesh, spec), shape)


def ours(place: Place, steps: list[list[Batch]]) -> tuple[Step, dict[str, Any]]:
    """What `pipeline train` builds, with weights that are drawn faster."""
    config = place.config
    # The weights of a run follow from the seed on any layout, which takes minutes for billions of them on one process.
    with mock.patch("pipeline.train.parallel.parallelize.init_weights", _draw_all):
        model = build_model(config, place.setup)
    stepper = Stepper(config, place.setup, model, Optimizers(config, model), sources=["text"])
    samples = place.shape.batch_size
    targets, lr = samples * place.shape.sequence_length, config.train.optimizer.lr

    def step(number: int) -> Callable[[], float]:
        data = StepData(number, steps[number], targets, samples=range(samples))
        arrived = stepper.step(data, lr).to_host()

        def loss() -> float:
            return float(arrived().columns()["loss"])

        return loss

    kernels = {type(part.kernel).__name__.lower() for part in model.parts.values()}
    return step, {"kernel": "".join(kernels)}


@torch.no_grad()
def draw(local: Tensor, name: str, spec: DecoderSpec, init: InitConfig, first: tuple[int, ...] = (0, 0)) -> None:
    """Fill a parameter, the same for the same name in our model or the peer's.

    Args:
        local: What this process has of it.
        name: In our model.
        spec: The model.
        init: The `model.init:` section.
        first: Its first row and column in the whole; copies on several processes are equal.
    """
    if local.ndim == 1:
        local.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    seed = int.from_bytes(hashlib.blake2b(f"{name}/{first}".encode(), digest_size=7).digest(), "little")
    local.normal_(0.0, weight_std(name, spec, init), generator=torch.Generator(local.device).manual_seed(seed))


def _draw_all(model: nn.Module, spec: DecoderSpec, init: InitConfig, _: int) -> None:
    """In place of `init_weights`."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        first = tuple(local_range(parameter, dim).start for dim in range(parameter.ndim))
        draw(local, name, spec, init, first)


def micro_batches(place: Place, step: int) -> list[Batch]:
    """Tokens as frequent as words are (Zipf), so that the loss falls; documents of log-normal lengths."""
    shape, size = place.shape, place.shape.micro_batch_size
    chance = np.random.default_rng((step, place.setup.mesh.rank("batch")))
    shares = np.cumsum(1.0 / np.arange(3.0, 3.0 + place.setup.spec.vocab_size))
    length = shape.sequence_length
    batches = []
    for _ in range(shape.micro_batches):
        ids = np.searchsorted(shares, chance.random((size, length + 1)) * shares[-1])
        tokens = torch.from_numpy(ids)
        starts = {row * length for row in range(size)}
        if place.config.model.document_attention:
            mean = min(DOCUMENT, length // 4)
            lengths = np.maximum(1, chance.lognormal(math.log(mean) - 0.5, 1.0, 4 * size * length // mean))
            starts |= {int(end) for end in np.cumsum(lengths) if end < size * length}
        batch = Batch(
            tokens[:, :-1].contiguous(),
            tokens[:, 1:].contiguous(),
            torch.ones(size, length),
            torch.tensor(sorted(starts), dtype=torch.int32),
            torch.zeros(size, dtype=torch.int64),
            {},
        )
        batches.append(batch.pin() if place.setup.device.type == "cuda" else batch)
    return batches


def timed(step: Step, device: torch.device, steps: int, warmup: int) -> tuple[list[float], list[float], float]:
    """Seconds of the timed steps, losses of all, seconds of the first step.

    As in training, the numbers of a step are read when the next one has been issued, so that a GPU never idles.
    """
    losses: list[float] = []
    ends: list[float] = []
    pending: list[Callable[[], float]] = []

    def read() -> None:
        losses.append(pending.pop()())
        ends.append(time.perf_counter())

    begin = time.perf_counter()
    for number in range(warmup + steps):
        if number == warmup:
            forget_peak(device)  # the first step may have compiled, which takes memory of its own
        loss = step(number)
        if pending:
            read()
        pending.append(loss)
        if device.type == "cpu" or number == 0:
            read()
    if pending:
        read()
    return list(np.diff(ends[warmup - 1 :])), losses, ends[0] - begin


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product of random matrices, the median of those that about a second holds."""
    size = PRODUCT[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def once() -> float:
        if device.type == "cpu":
            begin = time.perf_counter()
            a @ b
            return time.perf_counter() - begin
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        a @ b
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    guess = min(once() for _ in range(3))
    times = [once() for _ in range(max(5, int(_PRODUCT_S[device.type] / guess)))]
    return 2 * size**3 / statistics.median(times)


def speeds(place: Place, seconds: list[float], product: list[float]) -> dict[str, Any]:
    """Rates of one process, whose FLOPs are those of the model alone, whatever is computed again."""
    spec, length, world = place.setup.spec, place.shape.sequence_length, place.setup.mesh.layout.world_size
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    tokens = place.shape.batch_size * length
    rate = tokens / middle / world
    whole, half = (rate * flops_per_token(spec, length, causal=causal) for causal in (False, True))
    # Against bf16's also with fp8, so that lines can be compared.
    peak, reached = peak_flops(place.setup.device, place.config.train.precision.compute), statistics.mean(product)
    return {
        "layers": len(spec.layers),
        "parameters": num_parameters(spec),
        "processes": world,
        "micro_batch_tokens": place.shape.micro_batch_size * length,
        "step_tokens": tokens,
        "tokens_per_second": round(rate, 1),
        "tokens_per_second_quartiles": [round(tokens / value / world, 1) for value in (high, low)],
        "step_s": round(middle, 5),
        "mfu": None if peak is None else round(whole / peak, 4),
        "mfu_causal": None if peak is None else round(half / peak, 4),
        "product_share": round(whole / reached, 4),
        "product_share_causal": round(half / reached, 4),
    }


def peak_memory(device: torch.device) -> tuple[float, float | None]:
    """GB: the most that tensors took since `forget_peak`, and the most that torch reserved.

    On a CPU the kernel's high-water mark of resident memory, of the whole process.
    """
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return round(most[0] / 1e9, 2), round(most[1] / 1e9, 2)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(round(float(line.split()[1]) / 1e6, 2) for line in lines if line.startswith("VmHWM:")), None


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
