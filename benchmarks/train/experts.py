"""What a mixture of experts costs beside dense mlps of equal active FLOPs, as JSON lines.

    OMP_NUM_THREADS=1 python benchmarks/train/experts.py [--rounds 15] [--only grouped function layer step exchanges]

    grouped    the grouped product forward and backward beside a loop over experts, which gives the same bits:
               `loop` takes the matrix of each by its index, `unbound` all of them at once, which few would write
    function   the experts alone, on rows that are sorted, beside an mlp of their active size
    layer      router, sort, experts, sum and balance loss, beside the same mlp
    step       a training step of a model of 14 million parameters beside its dense twin
    exchanges  collectives that send tokens, of a layer and micro-batch, on two processes with ep 2 (gloo)

Every expert has 512 rows of fp32. Both sides are called in turn; `ratio` is that of the medians. Seconds are the
processor's, of all threads, so that other programs do not count; of a GPU the device's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from checkpoint import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.one_process import stepper_of
from pipeline.config.model import ModelConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.distributed.rank import of_environment
from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.grouped import grouped_products
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.mlps.dense.module import Mlp
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.dispatch import DispatchOrder
from pipeline.train.model.mlps.experts.module import Experts
from pipeline.train.model.mlps.experts.routing import Routing
from pipeline.train.model.mlps.experts.spec import ExpertsSpec

DIM, ACTIVE, LAYERS, SAMPLES, LENGTH, VOCABULARY = 256, 1024, 4, 8, 256, 1024
MIXTURES: dict[str, dict[str, int]] = {
    "8 of 512, top 2": {"count": 8, "top_k": 2, "ffn_dim": 512},
    "32 of 128, top 8": {"count": 32, "top_k": 8, "ffn_dim": 128},
}
"""Of equal active size; a micro-batch gives each expert 512 rows."""
GOALS = {
    "grouped": {"8 of 512, top 2": 0.8, "32 of 128, top 8": 0.8},
    "function": {"8 of 512, top 2": 1.15, "32 of 128, top 8": 1.15},
    "layer": {"8 of 512, top 2": 1.35, "32 of 128, top 8": 1.35},
    "step": {"8 of 512, top 2": 1.45, "32 of 128, top 8": 1.7},
}
"""Ratios at most."""
EXCHANGES = {"none": 5, "full": 7}
"""By recomputation: sizes, there, back, and two in the backward pass; the repetition sends there and back again."""

Call = Callable[[], object]


def medians(sides: dict[str, Call], rounds: int, device: torch.device) -> dict[str, float]:
    """Seconds of each side, called in turn after a first round."""
    clock: Callable[[], float] = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, call in sides.items():
            _wait(device)
            begin = clock()
            call()
            _wait(device)
            times[name] += [clock() - begin] * (number > 0)
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(what: str, mixture: str, ours: str, other: str, found: dict[str, float]) -> dict[str, Any]:
    """A line of the result."""
    ratio, wanted = found[ours] / found[other], GOALS[what][mixture]
    seconds = {f"{name}_ms": round(1e3 * value, 2) for name, value in found.items()}
    return {
        "what": what,
        "mixture": mixture,
        **seconds,
        "ratio": round(ratio, 3),
        "goal": wanted,
        "met": ratio <= wanted,
    }


def spec_of(mixture: dict[str, int]) -> ExpertsSpec:
    model = ModelConfig.model_validate({"layers": 1, "dim": DIM, "heads": 4, "mlp": "experts", "experts": mixture})
    return ExpertsSpec.of(model, model)


def built(module: nn.Module, device: torch.device) -> Any:
    """A module with random weights, which trains."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02, generator=draw)
    return module.to(device).train()


def passes(module: nn.Module, compute: Callable[[], Tensor], *inputs: Tensor) -> Call:
    """Forward and backward, with gradients of weights and inputs."""

    def call() -> None:
        out = compute()
        out.backward(torch.ones_like(out))
        for tensor in (*module.parameters(), *inputs):
            tensor.grad = None

    return call


def looped(rows_ND: Tensor, weights_EFD: Tensor, sizes: list[int], *, unbound: bool) -> Tensor:
    """The products of each expert by itself."""
    matrices = weights_EFD.unbind() if unbound else [weights_EFD[expert] for expert in range(len(sizes))]
    parts = torch.split(rows_ND, sizes)
    return torch.cat([part @ matrix_FD.T for part, matrix_FD in zip(parts, matrices, strict=True)])


def grouped(name: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Products with uneven groups, one of which is empty."""
    count, ffn_dim = MIXTURES[name]["count"], MIXTURES[name]["ffn_dim"]
    sizes = [0, *(512 for _ in range(count - 2)), 1024]
    draw = torch.Generator().manual_seed(0)
    rows_ND = torch.randn(sum(sizes), DIM, generator=draw).to(device).requires_grad_()
    weights_EFD = torch.randn(count, ffn_dim, DIM, generator=draw).to(device).requires_grad_()
    ends_E = torch.tensor(sizes, device=device).cumsum(0).int()
    gradient_NF = torch.randn(sum(sizes), ffn_dim, generator=draw).to(device)
    ways: dict[str, Callable[[], Tensor]] = {
        "grouped": lambda: grouped_products(rows_ND, weights_EFD, ends_E),
        "loop": lambda: looped(rows_ND, weights_EFD, sizes, unbound=False),
        "unbound": lambda: looped(rows_ND, weights_EFD, sizes, unbound=True),
    }
    sides: dict[str, Call] = {
        side: lambda way=way: torch.autograd.grad(way(), (rows_ND, weights_EFD), gradient_NF)  # type: ignore[misc]
        for side, way in ways.items()
    }
    results: dict[str, Any] = {side: (ways[side](), *sides[side]()) for side in ways}  # type: ignore[misc]
    equal = all(map(torch.equal, results["grouped"], results["loop"]))
    found = medians(sides, rounds, device)
    more = {"ratio_to_unbound": round(found["grouped"] / found["unbound"], 3), "equal_bits": equal}
    return row("grouped", name, "grouped", "loop", found) | more


def function(name: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """The experts on sorted rows with weights."""
    mixture, dense = built(Experts(spec_of(MIXTURES[name])), device), dense_mlp(device)
    count, rows = MIXTURES[name]["count"], MIXTURES[name]["count"] * 512
    rows_ND = torch.randn(rows, DIM, device=device).requires_grad_()
    gates_N = torch.rand(rows, device=device).requires_grad_()
    x_TD = torch.randn(SAMPLES * LENGTH, DIM, device=device).requires_grad_()
    ends_E = (torch.arange(count, device=device) + 1).int() * 512
    experts = mixture.experts
    sides = {
        "experts": passes(experts, lambda: experts(rows_ND, gates_N, ends_E), rows_ND, gates_N),
        "dense": passes(dense, lambda: dense(x_TD), x_TD),
    }
    return row("function", name, "experts", "dense", medians(sides, rounds, device))


def dense_mlp(device: torch.device) -> Any:
    return built(Mlp(MlpSpec("swiglu", DIM, ACTIVE, bias=False)), device)


def layer(name: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """All of the layer, with what the default of `train.balance` adds to its loss."""
    mixture, dense = built(Experts(spec_of(MIXTURES[name])), device), dense_mlp(device)
    x_BSD = torch.randn(SAMPLES, LENGTH, DIM, device=device).requires_grad_()
    routing = Routing(SAMPLES, SAMPLES, LENGTH, 0.01, "sequence", 0.0)
    context = LayerContext(None, None, None, None, None, Sdpa(), routing=routing)
    sides = {
        "experts": passes(mixture, lambda: mixture(x_BSD, context), x_BSD),
        "dense": passes(dense, lambda: dense(x_BSD), x_BSD),
    }
    found = row("layer", name, "experts", "dense", medians(sides, rounds, device))
    return found | {"sort_ms": round(1e3 * _order_seconds(MIXTURES[name], rounds, device), 2)}


def _order_seconds(mixture: dict[str, int], rounds: int, device: torch.device) -> float:
    """Of the order of rows alone."""
    count, top_k = mixture["count"], mixture["top_k"]
    ids_TK = torch.rand(SAMPLES * LENGTH, count, device=device).topk(top_k).indices
    return medians({"order": lambda: DispatchOrder.of(ids_TK, SAMPLES, count)}, rounds, device)["order"]


def model_of(mixture: dict[str, int] | None) -> dict[str, Any]:
    """A `model:` section."""
    keys: dict[str, Any] = {"layers": LAYERS, "dim": DIM, "heads": 4, "ffn_dim": ACTIVE}
    return keys if mixture is None else keys | {"mlp": "experts", "experts": mixture}


def train_of(**keys: Any) -> dict[str, Any]:
    """A `train:` section."""
    return {"sequence_length": LENGTH, "precision": {"compute": "fp32"}, "compile": False, **keys}


def batch_of(device: torch.device, samples: int = SAMPLES) -> Batch:
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.ones(samples, LENGTH),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(samples, dtype=torch.int64),
        {},
    )
    return batch.to(device)


def step(name: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """A step, from the batch on the device to the weights."""
    batch = batch_of(device)
    sides: dict[str, Call] = {}
    for side, mixture in (("experts", MIXTURES[name]), ("dense", None)):
        stepper = stepper_of(device, VOCABULARY, model=model_of(mixture), train=train_of())
        data = StepData(0, [batch], SAMPLES * LENGTH, samples=range(SAMPLES))
        sides[side] = lambda stepper=stepper, data=data: stepper.step(data, 1e-4)
    return row("step", name, "experts", "dense", medians(sides, rounds, device))


class _Counted(TorchDispatchMode):
    """Counts collectives of both passes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def count_exchanges(number: int, world: int, port: int, recompute: str) -> None:
    """On one of two processes; the first prints the line."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device, micro_batches = torch.device("cpu"), 2
    stepper = stepper_of(
        device,
        VOCABULARY,
        model=model_of(MIXTURES["8 of 512, top 2"]),
        train=train_of(recompute={"mode": recompute}),
        parallel={"dp_shard": world, "ep": world},
        ranks=of_environment(),
    )
    batches = [batch_of(device, 2)] * micro_batches
    with _Counted() as counted:
        samples = 2 * 2 * micro_batches
        stepper.step(StepData(0, batches, samples * LENGTH, samples=range(samples)), 1e-4)
    exchanges = counted.calls["all_to_all_single"] / (LAYERS * micro_batches)
    if number == 0:
        wanted = EXCHANGES[recompute]
        found = {"what": "exchanges", "recompute": recompute, "per_layer_and_micro_batch": exchanges}
        print(json.dumps(found | {"goal": wanted, "met": exchanges == wanted}), flush=True)
    torch.distributed.barrier()
    os._exit(0)


PARTS: dict[str, Callable[[str, int, torch.device], dict[str, Any]]] = {
    "grouped": grouped,
    "function": function,
    "layer": layer,
    "step": step,
}


def lines(parts: list[str], rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    for part in parts:
        for name in MIXTURES:
            yield PARTS[part](name, rounds, device) | {"device": device.type, "threads": torch.get_num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "exchanges"], default=[*PARTS, "exchanges"])
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in lines([part for part in PARTS if part in given.only], given.rounds, device):
        print(json.dumps(line), flush=True)
    if "exchanges" in given.only:
        for recompute in EXCHANGES:
            run_ranks(count_exchanges, 2, recompute)


if __name__ == "__main__":
    main()
