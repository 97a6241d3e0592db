"""Objectives of a run: by phase and source, made from the run file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.common.errors import UserError
from pipeline.config.plugins import is_plugin
from pipeline.config.root import Config
from pipeline.data.loading.objectives.base import Objective
from pipeline.data.loading.objectives.causal import make_causal
from pipeline.data.loading.objectives.custom import open_custom
from pipeline.data.loading.objectives.fim import make_fill_in_the_middle
from pipeline.data.loading.objectives.making import Making, Use
from pipeline.data.loading.objectives.masked import make_masked
from pipeline.data.loading.objectives.prefix import make_prefix
from pipeline.data.loading.objectives.spans import make_spans
from pipeline.data.loading.objectives.ul2 import make_ul2
from pipeline.data.loading.stream_shape import stream_shape
from pipeline.data.order.journal import Journal
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


OBJECTIVES: dict[str, Callable[[Making], Objective]] = {
    "causal": make_causal,
    "fim": make_fill_in_the_middle,
    "masked": make_masked,
    "prefix": make_prefix,
    "spans": make_spans,
    "ul2": make_ul2,
}
"""Constructors by `train.objective.type`. `KINDS` in the config describes the types: it imports nothing of the data."""
