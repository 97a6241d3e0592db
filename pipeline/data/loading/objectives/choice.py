"""Objectives of a run: by phase and source, made from the run file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.common.errors import UserError
from pipeline.config.plugins import is_plugin
from pipeline.config.root import Config
from pipeline.data.loading.objectives.base import Objective
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.custom import open_custom
from pipeline.data.loading.objectives.fim import FillInTheMiddle
from pipeline.data.loading.objectives.making import Making, Use, how_to_get_sentinels
from pipeline.data.loading.objectives.masked import Masked
from pipeline.data.loading.objectives.prefix import Prefix
from pipeline.data.loading.objectives.spans import SpanCorruption, Tokens
from pipeline.data.loading.objectives.ul2 import MixtureOfDenoisers
from pipeline.data.loading.stream_shape import SpanSizes, mixture_sizes, span_sizes, stream_shape
from pipeline.data.order.journal import Journal
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.phases import segment_phase

if TYPE_CHECKING:
    from pipeline.data.datasets.dataset import Dataset
    from pipeline.data.datasets.manifest import TokenizerInfo


def uses(config: Config, phase: int | None = None) -> list[Use]:
    """Objectives of a phase with the keys that they stand at: that of all sources first, then those of single ones.

    Args:
        config: The run file.
        phase: Its number; None for a run without phases, and for validation.
    """
    key, mixed, length = "train.objective", config.train.objective, config.train.sequence_length
    if phase is not None and config.blend.phases:
        one = config.blend.phases[phase]
        length = one.sequence_length or length
        if one.objective is not None:
            key, mixed = f"blend.phases.{phase}.objective", one.objective
    found = [Use(key, mixed, length)]
    return found + [Use(f"{key}.by_source.{name}", each, length) for name, each in mixed.by_source.items()]


def make_objective(
    config: Config, tokenizer: TokenizerInfo, folder: Path | None = None, use: Use | None = None
) -> Objective:
    """One objective of a run.

    Args:
        config: The run file.
        tokenizer: Of its datasets, from their manifests.
        folder: One of theirs, which has the tokenizer itself.
        use: Which; by default `train.objective`.

    Raises:
        UserError: The tokenizer lacks a token, or windows are too short.
    """
    use = use or uses(config)[0]
    making = Making(config, use, tokenizer, folder)
    if is_plugin(use.objective.type):
        return open_custom(making)
    return OBJECTIVES[use.objective.type](making)


def make_objectives(config: Config, journal: Journal, datasets: Mapping[str, Dataset]) -> list[dict[str, Objective]]:
    """Objectives of a run, for each segment by source.

    Args:
        config: The run file.
        journal: Its plan.
        datasets: The training split of each source.

    Raises:
        UserError: As `make_objective`; or those of a phase do not make windows of one shape.
    """
    one = next(iter(datasets.values()))
    made: dict[int, dict[str, Objective]] = {}
    result = []
    for number, segment in enumerate(journal.segments):
        phase = segment_phase(config, journal, number)
        if phase not in made:
            made[phase] = _of_phase(config, phase, list(datasets), one.manifest.tokenizer, one.folder)
        result.append({name: made[phase][name] for name in segment.sources})
    return result


def check_objectives(config: Config, tokenizer: TokenizerInfo, folder: Path) -> None:
    """Check that the objectives of all phases can be made, and those of validation.

    Raises:
        UserError: As `make_objectives`.
    """
    sources = [source.name for source in config.data.sources]
    for phase in range(max(1, len(config.blend.phases))):
        _of_phase(config, phase, sources, tokenizer, folder)
    if config.train.validation.samples and any(objective.chooses for objective in config.train.objective.all):
        _made(config, uses(config), sources, tokenizer, folder)


def heldout_objectives(config: Config, datasets: Mapping[str, Dataset]) -> dict[str, Objective | None]:
    """Objectives of validation and evaluation by source: those of `train.objective`, or None to score text as it is.

    Args:
        config: The run file.
        datasets: The held-out split of each source.

    Raises:
        UserError: As `make_objective`.
    """
    return _chosen(config, uses(config), datasets)


def set_objectives(config: Config, name: str, datasets: Mapping[str, Dataset]) -> dict[str, Objective | None]:
    """Objectives of a set of `heldout_sets`: its own, or that of the training at the set's length.

    Args:
        config: The run file.
        name: Of the set.
        datasets: Of its sources.

    Raises:
        UserError: As `make_objective`.
    """
    own, length = config.heldout_sets[name].objective, config.set_length(name)
    if own is not None:
        return _chosen(config, [Use(f"heldout_sets.{name}.objective", own, length)], datasets)
    return _chosen(config, [use._replace(length=length) for use in uses(config)], datasets)


def _chosen(config: Config, found: list[Use], datasets: Mapping[str, Dataset]) -> dict[str, Objective | None]:
    if not datasets or not any(use.objective.chooses for use in found):
        return dict.fromkeys(datasets)
    first = next(iter(datasets.values()))
    made = _made(config, found, datasets, first.manifest.tokenizer, first.folder)
    return {name: objective if objective.chooses else None for name, objective in made.items()}


def _of_phase(
    config: Config, phase: int, sources: list[str], tokenizer: TokenizerInfo, folder: Path
) -> dict[str, Objective]:
    found = uses(config, phase)
    shapes = {use.key: stream_shape(use.objective, use.length) for use in found}
    for use in found[1:]:
        if shapes[use.key] != shapes[found[0].key]:
            raise UserError(
                f"{use.key}: makes windows of another shape than {found[0].key}: {_shape_text(use)}, there "
                f"{_shape_text(found[0])}; sources of one phase need the same: give both the same rate and mean_span, "
                "or the sources phases of their own (blend.phases)"
            )
    return _made(config, found, sources, tokenizer, folder)


def _made(
    config: Config, found: list[Use], sources: Iterable[str], tokenizer: TokenizerInfo, folder: Path | None
) -> dict[str, Objective]:
    made = {use.key: make_objective(config, tokenizer, folder, use) for use in found}
    first = found[0].key
    return {name: made.get(f"{first}.by_source.{name}", made[first]) for name in sources}


def _shape_text(use: Use) -> str:
    shape = stream_shape(use.objective, use.length)
    sides = f"{shape.encoder:,} + {shape.decoder:,} positions" if shape.encoder else f"{shape.decoder:,} positions"
    return f"{sides}, {shape.predicted:,} of them predicted"


def _causal(making: Making) -> Causal:
    return Causal(mask_document_start=making.config.train.loss.mask_document_start)


def _fill_in_the_middle(making: Making) -> FillInTheMiddle:
    objective = making.use.objective
    sentinels = objective.sentinel_tokens
    for number, token in enumerate(sentinels):
        if token in sentinels[:number]:
            raise UserError(
                f"{making.use.key}.sentinels.{number}: {token!r} is given twice; prefix, suffix and middle need three "
                "different tokens"
            )
    prefix, suffix, middle = (making.special(f"sentinels.{n}", token, "three") for n, token in enumerate(sentinels))
    return FillInTheMiddle(
        objective.share,
        objective.spm_rate,
        (prefix, suffix, middle),
        making.tokenizer.end_of_document,
        mask_document_start=making.config.train.loss.mask_document_start,
    )


def _masked(making: Making) -> Masked:
    objective = making.use.objective
    result = Masked(
        objective.share,
        making.special("mask_token", objective.mask_token, "one"),
        making.ordinary,
        random_share=objective.random_share,
        keep_share=objective.keep_share,
        words=making.words,
    )
    if not result.takes(making.use.length):
        raise UserError(
            f"{making.use.key}.rate: {objective.share:g} of a window of {making.use.length:,} tokens is less than half "
            "a token, so nothing would be predicted: raise it, or the sequence_length"
        )
    return result


def _prefix(making: Making) -> Prefix:
    return Prefix(mask_document_start=making.config.train.loss.mask_document_start)


def _spans(making: Making) -> SpanCorruption:
    objective, length = making.use.objective, making.use.length
    sizes = span_sizes(objective.share, objective.mean_span, length)
    _check_room(making, "rate", sizes)
    return SpanCorruption(objective.share, objective.mean_span, _tokens(making, sizes.spans))


def _ul2(making: Making) -> MixtureOfDenoisers:
    objective, length = making.use.objective, making.use.length
    sizes = mixture_sizes(objective.mixture, length)
    for number, size in enumerate(sizes):
        _check_room(making, f"denoisers.{number}.rate", size)
    tokens = _tokens(making, max(size.spans for size in sizes))
    modes = [
        None if one.mode is None else _no_sentinel(making, f"denoisers.{number}.mode", one.mode, tokens.sentinels)
        for number, one in enumerate(objective.mixture)
    ]
    return MixtureOfDenoisers(objective, tokens, modes)


def _check_room(making: Making, key: str, sizes: SpanSizes) -> None:
    """Refuse windows that have no room for their noise, even as a single document."""
    length = making.use.length
    if not sizes.fit:
        raise UserError(
            f"{making.use.key}.{key}: a window of {length:,} tokens would have {sizes.noise:,} tokens of noise in "
            f"{sizes.spans:,} spans with as many gaps, and the end of a document: too short; give it another rate or "
            "mean_span, or raise the sequence_length"
        )


def _tokens(making: Making, spans: int) -> Tokens:
    """Tokens of span corruption for documents of up to `spans` spans."""
    objective, tokenizer = making.use.objective, making.tokenizer
    start, sentinels = tokenizer.end_of_document, _sentinels(making, spans)
    if objective.start_token not in (None, tokenizer.end_of_document_token):
        start = _no_sentinel(making, "start_token", objective.start_token, sentinels)
    return Tokens(sentinels, start, tokenizer.end_of_document)


def _no_sentinel(making: Making, key: str, token: str, sentinels: IntArray) -> int:
    """Id of a special token that stands for something else than a span."""
    number = making.special(key, token, "one")
    if number in sentinels:
        raise UserError(
            f"{making.use.key}.{key}: {token!r} is one of the {len(sentinels):,} sentinels that stand for spans, and "
            "would be taken for one: choose another token"
        )
    return number


def _sentinels(making: Making, spans: int) -> IntArray:
    key, named, special = f"{making.use.key}.sentinels", making.use.objective.sentinel_tokens, making.tokenizer
    # Not `format`: all else in a pattern stands for itself, braces too.
    names = [named.replace("{}", str(number)) for number in range(spans)] if isinstance(named, str) else named[:spans]
    have = next((number for number, name in enumerate(names) if name not in special.special_tokens), len(names))
    if isinstance(named, str) and have < spans:
        raise UserError(
            f"{key}: {named!r}: a document that fills a window of {making.use.length:,} tokens has {spans:,} spans, "
            f"and the tokenizer has {have:,} of the {spans:,} special tokens {names[0]} to {names[-1]} for them: "
            f"{how_to_get_sentinels(making.config)}; or lower the rate or the sequence_length, or raise mean_span"
        )
    if len(names) < spans:
        raise UserError(
            f"{key}: a document that fills a window of {making.use.length:,} tokens has {spans:,} spans, and here are "
            f"{len(names):,} sentinels: name {spans:,}; or lower the rate or the sequence_length, or raise mean_span"
        )
    ids = [making.special(f"sentinels.{number}", name, f"{spans:,}") for number, name in enumerate(names)]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(f"{key}.{number}: {name!r} is given twice; each span of a document needs a sentinel")
    return np.array(ids, np.int64)


OBJECTIVES: dict[str, Callable[[Making], Objective]] = {
    "causal": _causal,
    "fim": _fill_in_the_middle,
    "masked": _masked,
    "prefix": _prefix,
    "spans": _spans,
    "ul2": _ul2,
}
"""Constructors by `train.objective.type`. `ObjectiveConfig.type` lists the same names: the config is read without the
data pipeline."""
