"""Rules for products in fp8, see `rules/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import Config
from pipeline.config.train import Fp8Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.fp8.matrices import fp8_matrices, matrices_of, uneven_shards
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.parallel.pipeline_schedules import WHOLE_BACKWARD
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.rules.base import Rule, spec_of

_KEY = "train.precision.fp8"


def _spec(config: Config, layout: Layout) -> DecoderSpec | None:
    """Spec of the model; None where tp cannot cut it, which has rules of its own."""
    spec = spec_of(config)
    return spec if all(layer.fits(layout.tp) for layer in spec.different_layers) else None


def _some_matrices(config: Config, layout: Layout) -> Iterator[str]:
    fp8, spec = config.train.precision.fp8, _spec(config, layout)
    if fp8 is None or spec is None:
        return
    layers = len(spec.layers)
    if fp8.first_layers + fp8.last_layers >= layers:
        yield (
            f"{_KEY}.first_layers={fp8.first_layers} and last_layers={fp8.last_layers} are all of the {layers} layers, "
            f"so that nothing is in fp8: lower them to less than {layers} together, or leave {_KEY} out"
        )
    elif not fp8_matrices(fp8, spec, layout.tp):
        yield (
            f"{_KEY}.min_size={fp8.min_size}: no matrix of the model has at least that many rows and columns, "
            f"both multiples of {fp8.multiple}, on one process ({_sizes(spec, layout.tp)}): "
            f"{_smaller(fp8, spec, layout)}"
        )


def _sizes(spec: DecoderSpec, tp: int) -> str:
    matrices = [each for layer in spec.different_layers for each in matrices_of(layer, tp)]
    sizes = dict.fromkeys(f"{each.rows} x {each.columns}" for each in matrices)
    return f"{', '.join(sizes)} with parallel.tp={tp}" if tp > 1 else ", ".join(sizes)


def _smaller(fp8: Fp8Config, spec: DecoderSpec, layout: Layout) -> str:
    sides = [
        min(each.rows, each.columns)
        for layer in spec.different_layers
        for each in matrices_of(layer, layout.tp)
        if each.eligible and not (each.rows % fp8.multiple or each.columns % fp8.multiple)
    ]
    if sides:
        return f"set {_KEY}.min_size={max(sides)} or less, or leave {_KEY} out, which is faster for small matrices"
    return f"leave {_KEY} out" + (", or set parallel.tp=1" if layout.tp > 1 else "")


def _even_shards(config: Config, layout: Layout) -> Iterator[str]:
    fp8, spec = config.train.precision.fp8, _spec(config, layout)
    if fp8 is None or spec is None or not fp8.all_gather:
        return
    if uneven := uneven_shards(fp8, spec, layout):
        names = ", ".join(f"{matrix.name} ({matrix.rows} rows)" for matrix in uneven)
        yield (
            f"{_KEY}.all_gather=true: the rows of {names} cannot be dealt evenly to the {layout.shards} processes that "
            f"share weights (parallel.dp_shard x cp): set {_KEY}.all_gather=false, or a parallel.dp_shard that divides "
            "them"
        )


def _tokens(config: Config, layout: Layout) -> Iterator[str]:
    fp8 = config.train.precision.fp8
    if fp8 is None:
        return
    multiple = fp8.multiple * layout.cp
    # Validation has batches of any number of windows, so that each window has to be one.
    lengths = dict.fromkeys((shape.length_key, shape.sequence_length) for shape in step_shapes(config, layout.dp))
    lengths |= {(f"heldout_sets.{name}.sequence_length", config.set_length(name)): None for name in config.heldout_sets}
    for key, length in lengths:
        if length % multiple:
            cut = f" over parallel.cp={layout.cp}" if layout.cp > 1 else ""
            below = length // multiple * multiple
            near = f"{below} or {below + multiple}" if below else f"{multiple}"
            yield (
                f"{key}={length}{cut} is not a multiple of {fp8.multiple} tokens, over which gradients of weights are "
                f"summed in fp8: set {key}={near}"
            )


def _split_backward(config: Config, layout: Layout) -> Iterator[str]:
    if config.train.precision.fp8 is not None and config.parallel.splits_backward:
        yield (
            f"{_KEY} with schedule={config.parallel.pipeline.schedule}: a product in fp8 has one backward pass, for "
            f"inputs and weights: take one of {', '.join(WHOLE_BACKWARD)} as parallel.pipeline.schedule, or leave "
            f"{_KEY} out"
        )


def _async_tp(config: Config, layout: Layout) -> Iterator[str]:
    if config.train.precision.fp8 is not None and layout.tp > 1 and config.parallel.overlap.async_tp:
        yield (
            f"{_KEY} with parallel.overlap.async_tp=true is not tested, so it is refused: set "
            f"parallel.overlap.async_tp=false, or leave {_KEY} out"
        )


def _transformer_engine(config: Config, layout: Layout) -> Iterator[str]:
    fp8, train = config.train.precision.fp8, config.train
    if fp8 is None or fp8.backend != "te":
        return
    for axis in ("tp", "pp", "cp"):
        if layout.degrees[axis] > 1:
            yield (
                f"{_KEY}.backend=te with parallel.{axis}={layout.degrees[axis]} is not tested, so it is refused: set "
                f"{_KEY}.backend=torchao, or parallel.{axis}=1"
            )
    if train.compile:
        yield (
            f"{_KEY}.backend=te with train.compile=true: compiled layers cannot go through Transformer Engine: set "
            f"train.compile=false, or {_KEY}.backend=torchao"
        )
    mode = train.recompute.mode
    if mode in ("selective", "budget"):
        yield (
            f"{_KEY}.backend=te with train.recompute.mode={mode}: results within Transformer Engine cannot be kept one "
            f"by one: set train.recompute.mode=full or none, or {_KEY}.backend=torchao"
        )
    if fp8.scaling == "delayed" and mode == "full":
        yield (
            f"{_KEY}.recipe=delayed with train.recompute.mode=full: the largest values of a pass would be recorded "
            f"twice: set {_KEY}.recipe=current, or train.recompute.mode=none"
        )
    if fp8.scaling == "delayed" and train.deterministic:
        yield (
            f"{_KEY}.recipe=delayed with train.deterministic=true: scales start from scratch when a run is resumed, "
            f"which changes bits: set {_KEY}.recipe=current, or train.deterministic=false"
        )


def slow_without_compiler(config: Config, layout: Layout) -> Iterator[str]:
    """Warn of rounding to fp8 that no compiler fuses."""
    fp8 = config.train.precision.fp8
    if fp8 is not None and fp8.backend == "torchao" and config.train.compile is False:
        yield (
            f"{_KEY}.backend=torchao with train.compile=false: finding scales and rounding reads and writes memory "
            "separately, which may cost more time than fp8 saves: leave train.compile out, or set it to true"
        )


FP8_RULES: Sequence[Rule] = (
    Rule(
        (f"{_KEY}.first_layers", f"{_KEY}.last_layers", f"{_KEY}.min_size", "parallel.tp"),
        "With `fp8`, some matrix of the model is in fp8: in a layer that is not spared, with `min_size` rows and "
        "columns on one process after the cut by `tp`, both multiples of 16 (32 for `mxfp8`).",
        _some_matrices,
        of_training=True,
    ),
    Rule(
        (f"{_KEY}.all_gather", "parallel.dp_shard", "parallel.cp"),
        "`fp8.all_gather: true` needs matrices whose rows can be dealt evenly to the processes that share weights.",
        _even_shards,
        of_training=True,
    ),
    Rule(
        ("train.sequence_length", _KEY, "parallel.cp"),
        "With `fp8`, the tokens of a window on a process (`sequence_length` / `cp`) are a multiple of 16 (32 for "
        "`mxfp8`), in each phase.",
        _tokens,
        of_training=True,
    ),
    Rule(
        (_KEY, "parallel.pipeline.schedule"),
        "`fp8` works with the schedules that do not split the backward pass.",
        _split_backward,
        of_training=True,
    ),
    Rule((_KEY, "parallel.overlap.async_tp"), "`fp8` excludes `async_tp`.", _async_tp, of_training=True),
    Rule(
        (f"{_KEY}.backend", "parallel", "train.compile", "train.recompute.mode", "train.deterministic"),
        "`fp8.backend: te` works with data parallelism alone, without `compile`, and with recomputation of `mode: "
        "full`; its recipe `delayed` without recomputation and `deterministic`.",
        _transformer_engine,
        of_training=True,
    ),
)
"""Rules in the order in which messages list them."""
