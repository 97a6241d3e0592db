"""What metrics.jsonl says of a step."""

from __future__ import annotations

import math
from typing import Any

from pipeline.data.loading.batch import StepData
from pipeline.data.loading.loader import Loader
from pipeline.train.monitor.straggler import summary
from pipeline.train.step import StepResult


def place(loader: Loader, data: StepData) -> dict[str, Any]:
    """Where a step is in the run and its data; also of one that is passed over."""
    step = data.step + 1
    return {
        "tokens": loader.tokens(step),
        "tokens_by_source": loader.tokens_by_source(step),
        "epochs_by_source": loader.epochs_by_source(step),
        "order_hash": f"{data.order_hash:016x}",
    }


def numbers(result: StepResult, names: list[str]) -> dict[str, Any]:
    """What a step computed.

    Args:
        result: of the step, on the host.
        names: of the sources, in the order of its sums.
    """
    nats, targets = result.nats.tolist(), result.targets.tolist()
    spike = bool(result.spike.item())
    values = {
        "loss": sum(nats) / max(1.0, sum(targets)),
        "loss_by_source": {name: nats[k] / targets[k] for k, name in enumerate(names) if targets[k]},
        "grad_norm": result.grad_norm.item(),
        "skipped": spike or not result.finite.item(),
        "data_hash": f"{result.data_hash():016x}",
    }
    if result.zscores is not None:
        values["spike"] = spike
        zscores = zip(("loss_zscore", "grad_norm_zscore"), result.zscores.tolist(), strict=True)
        values |= {name: zscore for name, zscore in zscores if math.isfinite(zscore)}
    if len(works := result.work.tolist()) > 1:
        values["work"] = summary(works)
    if result.observed is not None:
        values |= result.observed()
    if result.loss_scale is not None:
        values["loss_scale"] = result.loss_scale.item()
    return values


def speed(tokens: int, seconds: float, flops: float, causal_flops: float, peak: float | None) -> dict[str, float]:
    """How fast a step was.

    Args:
        tokens: targets of the step, over all ranks.
        seconds: that it lasted.
        flops: of a token, attention counted whole.
        causal_flops: the same, attention counted half.
        peak: FLOP/s of all devices; None where it is not known.
    """
    rate = tokens / seconds
    values = {"tokens_per_second": rate, "step_seconds": seconds, "model_flops_per_second": rate * flops}
    if peak is not None:
        values |= {"mfu": rate * flops / peak, "mfu_causal": rate * causal_flops / peak}
    return values
