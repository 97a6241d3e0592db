"""Rules and warnings for experts, see `rules/layout.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.config.train import BalanceConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.parallel.pipeline_schedules import WHOLE_BACKWARD
from pipeline.train.rules.base import Rule, nearest_degrees, spec_of


def balance_without_effect(config: Config) -> Iterator[str]:
    """Keys that are set and not looked at."""
    balance, default = config.train.balance, BalanceConfig()
    routers = [layer.router for layer in spec_of(config).expert_layers.values()]
    if not routers:
        if balance != default:
            yield "train.balance has no effect: no layer of the model has experts (model.mlp=experts)"
        return
    if balance.bias_rate != default.bias_rate and not any(router.score_bias for router in routers):
        yield (
            f"train.balance.bias_rate={balance.bias_rate:g} has no effect: no layer has a bias that it could move; set "
            "model.experts.score_bias=true"
        )
    if balance.over != default.over and not balance.loss:
        yield f"train.balance.over={balance.over} has no effect with train.balance.loss=0"


def unbalanced_experts(config: Config, _: Layout) -> Iterator[str]:
    """Experts that nothing balances, or that are dealt in turn."""
    balance = config.train.balance
    routers = [layer.router for layer in spec_of(config).expert_layers.values()]
    if not routers:
        return
    if balance.force:
        yield (
            "train.balance.force=true deals tokens to experts in turn: for measurements of speed alone, as the model "
            "learns nothing of use"
        )
        return
    biased = [router.score_bias for router in routers]
    if any(biased) and not balance.bias_rate:
        yield (
            "model.experts.score_bias=true with train.balance.bias_rate=0: the bias stays as it is, and balances "
            "nothing; set train.balance.bias_rate=0.001"
        )
    elif not all(biased) and not balance.loss:
        yield (
            "train.balance.loss=0: nothing balances the experts, and a few of them may get all tokens; set "
            "train.balance.loss=0.01, or model.experts.score_bias=true"
        )


def _dealt(config: Config, layout: Layout) -> Iterator[str]:
    ep, counts = layout.ep, spec_of(config).expert_counts
    if ep > 1 and not counts:
        yield f"parallel.ep={ep}: no layer of the model has experts: set parallel.ep=1, or model.mlp=experts"
    for count in counts:
        if count % ep:
            both = math.gcd(count, layout.places)
            near = nearest_degrees(ep, lambda degree, both=both: both % degree == 0, both)  # type: ignore[misc]
            yield f"model.experts.count={count} cannot be dealt to parallel.ep={ep}: set parallel.ep={near}"


def _repeated(config: Config, _: Layout) -> Iterator[str]:
    parallel = config.parallel
    if parallel.splits_backward and config.train.recompute.mode == "full" and spec_of(config).expert_layers:
        yield (
            f"train.recompute.mode=full with schedule={parallel.pipeline.schedule} would send the tokens of experts "
            "anew in both halves of a backward pass: set train.recompute.mode=none, or take one of "
            f"{', '.join(WHOLE_BACKWARD)} as parallel.pipeline.schedule"
        )


EXPERT_RULES: Sequence[Rule] = (
    Rule(
        ("model.experts", "parallel.ep"),
        "`ep` divides `dp_shard` x `cp` x `tp`, and the number of experts.",
        _dealt,
    ),
    Rule(
        ("model.experts", "train.recompute.mode", "parallel.pipeline.schedule"),
        "With experts, `mode: full` works with the schedules that do not split the backward pass.",
        _repeated,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
