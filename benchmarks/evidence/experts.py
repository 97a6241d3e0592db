"""Mixtures of experts on one device: grouped products beside a dense one, and what a layer takes besides them.

Times are medians by CUDA events on a GPU, of functions that are called in turn, see `rates`. Routing is that of random
weights on random numbers, so that experts get uneven numbers of rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evidence.item import Result, goal
from evidence.rates import timed
from pipeline.config.model import ModelConfig
from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.grouped import grouped_products
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.mlps.experts.module import Experts
from pipeline.train.model.mlps.experts.routing import Routing
from pipeline.train.model.mlps.experts.spec import ExpertsSpec

_BESIDE, _ROUTER = 0.15, 0.01
"""Shares of a layer, at most: all but the experts, and the product of the router."""
_BACKWARD = 0.9
"""Rate of forward and backward of grouped products over that of forward, at least."""


def measure(
    device: str,
    work: Path,
    *,
    tokens: int,
    mixtures: Mapping[str, Mapping[str, Any]],
    goals: Mapping[str, float],
    square: int,
    seconds: float,
) -> Result:
    """Measure mixtures by name; `mixtures` of the result has a row of each.

    Args:
        device: "cuda" or "cpu".
        work: Not used.
        tokens: Of a micro-batch.
        mixtures: `dim`, and `experts` as in a run file.
        goals: By mixture, rate of the grouped product forward over that of a dense one.
        square: Rows and columns of the dense product.
        seconds: About how long functions that are called in turn are timed.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(square, square, device=device).to(dtype) for _ in range(2))
    dense = 2 * square**3 / statistics.median(timed(device, {"dense": lambda: a @ b}, seconds)["dense"])
    found: Result = {"dense_tflops": round(dense / 1e12, 2), "mixtures": {}, "goals": {}, "checks": {}}
    for name, values in mixtures.items():
        model = ModelConfig.model_validate({"layers": 1, "heads": 8, "mlp": "experts", **values})
        module = _module(ExpertsSpec.of(model, model), device, dtype)
        row = _products(module, tokens, device, dtype, seconds) | _layer(module, tokens, device, dtype, seconds)
        found["mixtures"][name] = row
        found["goals"] |= {
            f"{name}: grouped product forward, of the dense one": goal(row["forward"] / dense, goals[name]),
            f"{name}: forward and backward, of forward's rate": goal(row["both"] / row["forward"], _BACKWARD),
            # A goal is a least value.
            f"{name}: the experts' share of the layer": goal(1 - row["beside"], 1 - _BESIDE),
            f"{name}: the layer without the router's product": goal(1 - row["router"], 1 - _ROUTER),
        }
        if device == "cuda":
            found["checks"][f"{name}: the host waits for nothing"] = _waits_for_nothing(module, tokens, dtype)
        del module
    return found


def _module(spec: ExpertsSpec, device: str, dtype: torch.dtype) -> Experts:
    with torch.device(device):
        module = Experts(spec).to(dtype)
    # Counts and the bias of a choice stay in fp32, as in training.
    module.router.loads = module.router.loads.float()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    return module.train()


def _inputs(module: Experts, tokens: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, LayerContext]:
    x_BSD = torch.randn(1, tokens, module.spec.dim, device=device, dtype=dtype).requires_grad_()
    routing = Routing(1, 1, tokens, 0.01, "sequence", 0.0)
    return x_BSD, LayerContext(None, None, None, None, None, Sdpa(), routing=routing)


def _products(module: Experts, tokens: int, device: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """FLOP/s of a grouped product, with the numbers of rows that the router gives."""
    spec, x_BSD = module.spec, _inputs(module, tokens, device, dtype)[0].detach()
    with torch.no_grad():
        ids_TK = module.router(x_BSD.flatten(0, 1)).ids_TK
    counts_E = torch.bincount(ids_TK.flatten(), minlength=spec.router.count)
    rows = ids_TK.numel()
    rows_ND = torch.randn(rows, spec.dim, device=device, dtype=dtype).requires_grad_()
    gradient_NF = torch.randn(rows, spec.ffn_dim, device=device, dtype=dtype)
    weights_EFD, ends_E = module.experts.get_parameter("w1"), counts_E.cumsum(0).int()
    times = timed(
        device,
        {
            "forward": lambda: grouped_products(rows_ND.detach(), weights_EFD.detach(), ends_E),
            "both": lambda: torch.autograd.grad(
                grouped_products(rows_ND, weights_EFD, ends_E), (rows_ND, weights_EFD), gradient_NF
            ),
        },
        seconds,
    )
    flops = 2 * rows * spec.dim * spec.ffn_dim
    return {
        "rows_max_over_mean": round((counts_E.max() / counts_E.float().mean()).item(), 3),
        "forward": flops / statistics.median(times["forward"]),
        "both": 3 * flops / statistics.median(times["both"]),
    }


def _layer(module: Experts, tokens: int, device: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Shares of a layer's forward and backward: what is beside the experts, and the router's product."""
    x_BSD, context = _inputs(module, tokens, device, dtype)
    spec, experts, router = module.spec, module.experts, module.router
    with torch.no_grad():
        ids_TK = router(x_BSD.flatten(0, 1)).ids_TK
    rows = ids_TK.numel()
    ends_E = torch.bincount(ids_TK.flatten(), minlength=spec.router.count).cumsum(0).int()
    rows_ND = torch.randn(rows, spec.dim, device=device, dtype=dtype).requires_grad_()
    gates_N = torch.rand(rows, device=device).requires_grad_()
    ones_BSD, ones_ND = torch.ones_like(x_BSD), torch.ones_like(rows_ND)
    logits_TE = torch.ones(tokens, spec.router.count, device=device)

    def whole() -> None:
        torch.autograd.grad(module(x_BSD, context), (x_BSD, *module.parameters()), ones_BSD)

    def alone() -> None:
        torch.autograd.grad(experts(rows_ND, gates_N, ends_E), (rows_ND, gates_N, *experts.parameters()), ones_ND)

    def product() -> None:
        out_TE = router._logits(x_BSD.flatten(0, 1))
        torch.autograd.grad(out_TE, (x_BSD, router.weight), logits_TE.to(out_TE.dtype))

    times = timed(device, {"layer": whole, "experts": alone, "router": product}, seconds)
    layer, inner, logits = (statistics.median(times[name]) for name in ("layer", "experts", "router"))
    return {
        "layer_ms": round(1e3 * layer, 3),
        "beside": round(1 - inner / layer, 4),
        "router": round(logits / layer, 4),
    }


def _waits_for_nothing(module: Experts, tokens: int, dtype: torch.dtype) -> bool:
    """True if no operation of a layer's forward and backward makes the host wait."""
    x_BSD, context = _inputs(module, tokens, "cuda", dtype)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x_BSD, context).sum().backward()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True
