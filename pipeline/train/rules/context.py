"""Rules for sequences that are cut over processes, see `rules/layout.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pipeline.common.format import counted
from pipeline.config import Config
from pipeline.config.parallel import ZERO_BUBBLE
from pipeline.data.loading.stream_shape import StreamShape, stream_shape
from pipeline.train.distributed.layout import Layout, sequence_multiple, sequence_pieces
from pipeline.train.model.part_spec import MixerSpec
from pipeline.train.parallel.step_shapes import run_stream, step_shapes
from pipeline.train.rules.base import Rule, key_of, nearest_multiples, parts_of, spec_of


def _lengths(config: Config, layout: Layout) -> dict[str, int]:
    """Lengths of sequences of models without sides, by key."""
    return {key: stream.decoder for key, stream in _streams(config, layout).items() if not stream.encoder}


def _streams(config: Config, layout: Layout) -> dict[str, StreamShape]:
    """Positions that objectives make of windows, by key of the sequence length."""
    streams = {"train.sequence_length": run_stream(config)}  # of validation too, whatever the phases have
    for shape in step_shapes(config, layout.dp):
        streams[shape.length_key] = shape.stream
    for name, each in config.heldout_sets.items():
        if each.sequence_length is not None or each.objective is not None:
            objective = each.objective or config.train.objective
            streams[f"heldout_sets.{name}.sequence_length"] = stream_shape(objective, config.set_length(name))
    return streams


def _sequence(config: Config, layout: Layout) -> Iterator[str]:
    for key, length in _lengths(config, layout).items():
        yield from _cut(config, layout, key, length)


def _sides(config: Config, layout: Layout) -> Iterator[str]:
    tp = layout.tp if config.parallel.sequence_parallel else 1
    for key, stream in _streams(config, layout).items():
        sides = {"encoder": stream.encoder, "decoder": stream.decoder}
        uneven = [f"{size:,} of the {side}" for side, size in sides.items() if size % tp]
        if stream.encoder and uneven:
            yield (
                f"{key}={stream.raw} makes positions that parallel.tp={tp} cannot cut ({', '.join(uneven)}): set "
                f"parallel.sequence_parallel=false, or a {key} of which objective.rate makes multiples of {tp}"
            )


def _with_encoder(config: Config, layout: Layout) -> Iterator[str]:
    if config.model.encoder is None:
        return
    if layout.cp > 1:
        yield (
            f"parallel.cp={layout.cp} does not cut the two sides of a model with an encoder: set parallel.cp=1, and "
            "parallel.tp or dp_shard for the processes"
        )
    if config.train.precision.fp8 is not None:
        yield "train.precision.fp8 is not tested with model.encoder, so it is refused: leave train.precision.fp8 out"
    schedule = config.parallel.pipeline.schedule
    if layout.pp > 1 and config.model.positions == "relative" and schedule in ZERO_BUBBLE:
        yield (
            f"parallel.pipeline.schedule={schedule} splits backward passes, which cannot sum the gradient of a table "
            "of relative positions over layers: set a schedule with whole backward passes, like 1f1b or "
            "interleaved_1f1b, or model.positions=rope"
        )


def _short_pieces(config: Config, layout: Layout) -> Iterator[str]:
    for key, length in _lengths(config, layout).items():
        yield from _too_short(config, layout, key, length)


def _evaluated_length(config: Config, layout: Layout) -> Iterator[str]:
    if config.eval.max_length is not None:
        yield from _cut(config, layout, "eval.max_length", config.eval.max_length)
        yield from _too_short(config, layout, "eval.max_length", config.eval.max_length)


def _cut(config: Config, layout: Layout, key: str, length: int) -> Iterator[str]:
    """Problems of cutting sequences of a length."""
    parallel, experts = config.parallel, bool(spec_of(config).expert_layers)
    multiple = sequence_multiple(parallel, layout, experts=experts)
    if length % multiple == 0:
        return
    axes = {"cp": layout.cp > 1, "tp": layout.tp > 1 and (parallel.sequence_parallel or experts)}
    over = " x ".join(f"parallel.{axis}={layout.degrees[axis]}" for axis, cuts in axes.items() if cuts)
    pieces = " in two pieces each" if layout.cp > 1 and parallel.cp_method == "all_gather" else ""
    other = ", or parallel.sequence_parallel=false" if axes["tp"] and not (axes["cp"] or experts) else ""
    yield f"{key}={length} cannot be cut over {over}{pieces}: set {key}={nearest_multiples(length, multiple)}{other}"


def _too_short(config: Config, layout: Layout, key: str, length: int) -> Iterator[str]:
    """Pieces of sequences that are shorter than what a convolution sees before them."""
    parallel, pieces = config.parallel, sequence_pieces(config.parallel, layout)
    multiple = sequence_multiple(parallel, layout, experts=bool(spec_of(config).expert_layers))
    if layout.cp == 1 or length % multiple:  # which has a rule of its own
        return
    for mixer in _mixers(config):
        sent = mixer.cp_transfer(parallel.cp_method, layout.tp, layout.cp)
        if sent is None or length // pieces >= sent.least_piece:
            continue
        size = key_of(config, mixer, sent.least_key)
        enough = -(-pieces * sent.least_piece // multiple) * multiple
        most = length // sent.least_piece // (pieces // layout.cp)
        fewer = next((cp for cp in range(most, 1, -1) if length % (pieces // layout.cp * cp) == 0), 1)
        yield (
            f"{key}={length} over parallel.cp={layout.cp} with cp_method={parallel.cp_method} is cut into pieces of "
            f"{counted(length // pieces, 'position')}, but {mixer.label} sees the {sent.least_piece} before a piece "
            f"({size}={sent.least_piece + 1}), which must all be in the one before: set {key}={enough} or more, or "
            f"parallel.cp={fewer}"
        )


def _whole_sequences(config: Config, layout: Layout) -> Iterator[str]:
    cp, method = layout.cp, config.parallel.cp_method
    for mixer in _mixers(config):
        if cp > 1 and mixer.cp_transfer(method, layout.tp, cp) is None:
            yield (
                f"parallel.cp={cp} with cp_method={method}: {mixer.label} cannot compute on shards of sequences: set "
                "parallel.cp=1"
            )


def _mixers(config: Config) -> list[MixerSpec]:
    return [part for part in parts_of(config) if isinstance(part, MixerSpec)]


def _exchanged_heads(config: Config, layout: Layout) -> Iterator[str]:
    if layout.cp > 1 and config.parallel.cp_method == "ulysses":
        fitting = (mixer for mixer in _mixers(config) if mixer.fits(layout.tp))  # which has a rule of its own
        fitting = (mixer for mixer in fitting if not _gathers(mixer, config, layout))
        first = (itertools.islice(_not_exchanged(config, mixer, layout.tp, layout.cp), 1) for mixer in fitting)
        yield from dict.fromkeys(itertools.chain.from_iterable(first))


def _gathers(mixer: MixerSpec, config: Config, layout: Layout) -> bool:
    """True if no heads are exchanged whatever the method: only states are sent."""
    sent = mixer.cp_transfer(config.parallel.cp_method, layout.tp, layout.cp)
    return sent is not None and sent.gathers


def _not_exchanged(config: Config, mixer: MixerSpec, tp: int, cp: int) -> Iterator[str]:
    over = f"parallel.tp={tp} x parallel.cp={cp} with cp_method=ulysses"
    for division in mixer.divisions or ():
        key, size = key_of(config, mixer, division.key), division.size
        own = max(1, size // tp)
        instead = f"set {key}={nearest_multiples(size, tp * cp)}, or parallel.cp_method=all_gather"
        if division.shared_by is None and size % (tp * cp):
            yield f"{key}={size} cannot be cut over {over}: {instead}"
        elif own % cp and cp % own:
            yield f"{key}={size} can neither be cut nor copied evenly over {over}: {instead}"


CONTEXT_RULES: Sequence[Rule] = (
    Rule(
        (
            "train.sequence_length",
            "blend.phases.N.sequence_length",
            "heldout_sets.NAME.sequence_length",
            "parallel.cp",
            "parallel.sequence_parallel",
        ),
        "The sequence length of the run, of each phase and of each held-out set is a multiple of `tp` with "
        "`sequence_parallel`, of `cp` with `ulysses`, of 2 x `cp` with `all_gather`, and of `cp` x `tp` too where both "
        "cut it.",
        _sequence,
    ),
    Rule(
        ("train.sequence_length", "train.objective", "parallel.tp", "parallel.sequence_parallel"),
        "With an encoder, `sequence_parallel` cuts each side by itself: the positions of both that the objective makes "
        "of a window are multiples of `tp`.",
        _sides,
    ),
    Rule(
        ("model.encoder", "model.positions", "parallel.cp", "parallel.pipeline.schedule"),
        "With an encoder, `cp` is 1 and there is no `fp8`. With `positions: relative`, schedules do "
        "not split the backward pass.",
        _with_encoder,
    ),
    Rule(
        ("model.heads", "model.kv_heads", "parallel.cp", "parallel.cp_method"),
        "With `ulysses`, query heads are a multiple of `tp` x `cp`. Key and value heads on a rank of `tp` are a "
        "multiple of `cp`, or `cp` is a multiple of them: then they are sent to several ranks. Layers with a "
        "recurrence exchange no heads.",
        _exchanged_heads,
    ),
    Rule(
        ("parallel.cp",),
        "Every mixer can compute on shards of sequences. Attention, latent attention and recurrences can.",
        _whole_sequences,
    ),
    Rule(
        ("train.sequence_length", "blend.phases.N.sequence_length", "parallel.cp", "model.mamba2", "model.delta"),
        "Pieces of a sequence, of which a rank of `cp` has one with `ulysses` and two with `all_gather`, are as long "
        "as what the convolution of a layer with a recurrence sees before them: `conv_size` - 1 positions.",
        _short_pieces,
    ),
)
"""Rules in the order in which messages list them."""

EVALUATED_LENGTH = Rule(
    ("eval.max_length", "parallel.cp", "parallel.sequence_parallel"),
    "The input of tasks is a multiple of what sequences are cut into, as above.",
    _evaluated_length,
)
"""Rule of an evaluation alone."""
