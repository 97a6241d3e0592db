"""Rules for the backends of attention, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.kernels.choice import (
    FUSED,
    MOST,
    MULTIPLE,
    KernelRequirements,
    spec_uses,
    unknown_term,
    windows_to_both,
)
from pipeline.train.rules.base import Rule, spec_of


def _device(config: Config, _: Layout) -> Iterator[str]:
    backend = config.train.attention.backend
    if backend not in ("auto", "sdpa") and config.launch.device == "cpu":
        yield (
            f"train.attention.backend={backend} needs a CUDA device, but launch.device=cpu: set "
            "train.attention.backend=sdpa, or launch.device=auto"
        )


def _sixteen_bits(config: Config, _: Layout) -> Iterator[str]:
    backend = config.train.attention.backend
    if backend in FUSED and config.train.precision.compute == "fp32":
        yield (
            f"train.attention.backend={backend} computes in 16 bits only, but train.precision.compute=fp32: set "
            "train.precision.compute=bf16, or train.attention.backend=auto"
        )


def _head_size(config: Config, _: Layout) -> Iterator[str]:
    backend = config.train.attention.backend
    if backend not in FUSED:
        return
    uses = spec_uses(spec_of(config))
    for size, key in dict.fromkeys((max(use.head_dim, use.value_dim), use.size_key) for use in uses):
        if size % MULTIPLE or size > MOST:
            near = max(MULTIPLE, min(MOST, size // MULTIPLE * MULTIPLE))
            instead = f"set {key}={near}" if key == "model.head_dim" else f"change the sizes in {key}"
            yield (
                f"train.attention.backend={backend} takes head sizes that are multiples of {MULTIPLE} up to {MOST}, "
                f"but this model's is {size}: {instead}, or train.attention.backend=auto"
            )


def _terms(config: Config, _: Layout) -> Iterator[str]:
    backend = config.train.attention.backend
    if config.launch.device == "cpu" or (backend == "sdpa" and config.launch.device != "cuda"):
        return
    need = KernelRequirements.of(config.model, spec_of(config), config.train, compiled=False)
    if term := unknown_term(backend, need):
        yield (
            f"train.attention.backend={backend} has no {term} on a GPU, which this model has: set "
            "train.attention.backend=flex, or train.attention.backend=auto"
        )


def _pieces(config: Config, layout: Layout) -> Iterator[str]:
    backend = config.train.attention.backend
    if backend not in FUSED or layout.cp == 1 or config.parallel.cp_method != "all_gather":
        return
    if any(windows_to_both(use.reach) for use in spec_uses(spec_of(config))):
        yield (
            f"train.attention.backend={backend} takes windows to both sides of whole sequences alone, but "
            f"parallel.cp={layout.cp} with parallel.cp_method=all_gather cuts them: set parallel.cp_method=ulysses, "
            "or train.attention.backend=auto"
        )


def _compiled(config: Config, _: Layout) -> Iterator[str]:
    train = config.train
    if train.attention.backend == "te" and train.compile is not False:
        shown = "null, which compiles on a GPU" if train.compile is None else "true"
        yield (
            f"train.attention.backend=te with train.compile={shown}: torch.compile cannot follow Transformer Engine: "
            "set train.compile=false, or train.attention.backend=auto"
        )


def _kept(config: Config, _: Layout) -> Iterator[str]:
    mode = config.train.recompute.mode
    if config.train.attention.backend == "te" and mode in ("selective", "budget"):
        yield (
            f"train.attention.backend=te with train.recompute.mode={mode}: results within Transformer Engine cannot be "
            "kept one by one: set train.recompute.mode=full or none, or train.attention.backend=auto"
        )


def attention_again(config: Config, _: Layout) -> Iterator[str]:
    """A warning for results that `keep` names and that cannot be kept."""
    train, recompute = config.train, config.train.recompute
    keeps = recompute.mode == "selective" and "attention" in recompute.keep
    if keeps and train.attention.backend == "flex" and train.compile is False:
        yield (
            "train.recompute.keep names attention, but with train.attention.backend=flex and train.compile=false it is "
            "computed again: leave train.compile out, or set train.attention.backend=auto"
        )


ATTENTION_RULES: Sequence[Rule] = (
    Rule(
        ("train.attention.backend", "launch.device"),
        "Backends of attention other than `sdpa` need a GPU.",
        _device,
        of_training=True,
    ),
    Rule(
        ("train.attention.backend", "train.precision.compute"),
        "`varlen`, `flash` and `te` compute in bf16 or fp16.",
        _sixteen_bits,
        of_training=True,
    ),
    Rule(
        ("train.attention.backend", "model.head_dim", "model.mla"),
        f"`varlen`, `flash` and `te` take head sizes that are multiples of {MULTIPLE} up to {MOST}.",
        _head_size,
        of_training=True,
    ),
    Rule(
        ("train.attention.backend", "model.attention_soft_cap", "model.sinks"),
        "Soft caps in attention need `flex` or `flash` on a GPU; sinks go with all backends but `te`.",
        _terms,
        of_training=True,
    ),
    Rule(
        ("train.attention.backend", "parallel.cp", "parallel.cp_method"),
        "Windows to both sides go with `cp` by `ulysses`, or with `sdpa` or `flex`.",
        _pieces,
        of_training=True,
    ),
    Rule(
        ("train.attention.backend", "train.compile"),
        "`te` needs `compile: false`.",
        _compiled,
        of_training=True,
    ),
    Rule(
        ("train.attention.backend", "train.recompute.mode"),
        "`te` works with recomputation of `mode: full`.",
        _kept,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
