"""Rules for optimizers, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.config.train import MuonConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.optim.parameter_groups import empty_groups, unmatched_patterns
from pipeline.train.rules.base import Rule, spec_of


def _muon(config: Config, _: Layout) -> Iterator[str]:
    if config.train.optimizer.type == "muon" and config.model.init.scheme == "mup":
        yield (
            "train.optimizer.type=muon with model.init.scheme=mup: muP's factors are derived for Adam; Muon's updates "
            "grow otherwise with the width: set model.init.scheme=depth_scaled, or train.optimizer.type=adamw"
        )


def _mup(config: Config, _: Layout) -> Iterator[str]:
    init, spec = config.model.init, spec_of(config)
    if init.mup_base_dim is None:
        return
    layers = spec.different_layers
    sizes = {each.input_key: each.columns for layer in layers for each in layer.matrices.values() if each.input_key}
    sizes |= {each.input_key: each.columns for layer in layers for each in layer.stacks.values() if each.input_key}
    if unknown := [key for key in init.mup_fixed or () if key not in sizes]:
        known = f"of which it has {', '.join(sizes)}" if sizes else "of which it has none"
        yield f"model.init.mup_fixed={unknown[0]}: the model has no such rank or hidden size, {known}; leave it out"
    if init.mup_fixed is None and sizes and init.mup_base_dim != spec.dim:
        given = ", ".join(f"{key}={size}" for key, size in sizes.items())
        yield (
            f"model.init.scheme=mup with model.dim={spec.dim} and mup_base_dim={init.mup_base_dim}: muP needs to know "
            f"which sizes grow with dim: set model.init.mup_fixed to those of {given} that the model of width "
            f"{init.mup_base_dim} has, too, or to [] if all of them grow"
        )


def _groups(config: Config, _: Layout) -> Iterator[str]:
    if groups := config.train.optimizer.groups:
        yield from unmatched_patterns(groups, spec_of(config))


def optimizer_without_effect(config: Config) -> Iterator[str]:
    """Keys that are set and not looked at."""
    optimizer = config.train.optimizer
    if optimizer.type != "muon" and optimizer.muon != MuonConfig():
        yield f"train.optimizer.muon has no effect with train.optimizer.type={optimizer.type}"
    if optimizer.groups:
        for place in empty_groups(optimizer.groups, spec_of(config)):
            yield f"train.optimizer.groups.{place} has no effect: all its parameters are in earlier groups"


OPTIMIZER_RULES: Sequence[Rule] = (
    Rule(
        ("train.optimizer.type", "model.init.scheme"),
        "`type: muon` works with all layouts, and with all schemes of initial weights except `mup`.",
        _muon,
        of_training=True,
    ),
    Rule(
        ("model.init.mup_fixed",),
        "With `init.scheme: mup`, a model that has ranks or experts and another width than `mup_base_dim` says which "
        "of their sizes grow with the width.",
        _mup,
        of_training=True,
    ),
    Rule(
        ("train.optimizer.groups",),
        "Every pattern of `groups` matches a parameter of the model.",
        _groups,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
