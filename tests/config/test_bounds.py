from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from annotated_types import Le, Lt
from pydantic.fields import FieldInfo

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.base import Section
from pipeline.config.load import load
from tests.config.runfile import write

UNBOUNDED = {
    "steps and tokens are compared with, or counted up to; the run file says how long it runs": (
        *("base.Duration.count", "train.BatchRampConfig.tokens", "train.LossScaleConfig.growth_steps"),
        *("train.ValidationConfig.every_steps", "checkpoint.CheckpointConfig.every_steps"),
        *("checkpoint.CheckpointConfig.keep_every", "checkpoint.ExportConfig.every_steps"),
        *("checkpoint.MirrorConfig.every_steps", "checkpoint.MirrorConfig.keep_every"),
        *("train.FaultsConfig.rewind_steps", "train.MetricsConfig.log_every_steps"),
        *(
            "train.MetricsConfig.layers_every_steps",
            "train.ProfileConfig.steps",
            "heldout.HeldOutSetConfig.every_steps",
        ),
        *("blend.SkipConfig.from_step", "weights.InitFromConfig.step", "run.ResumeConfig.from_"),
        *("weights.WeightsConfig.step", "weights.InitFromConfig.tokens"),
    ),
    "a set of ranges keeps their ends": ("blend.Range.first", "blend.Range.last"),
    "more than there are means all": (
        *("blend.Bound.documents", "base.Share.documents", "checkpoint.CheckpointConfig.keep"),
        *("checkpoint.CheckpointConfig.keep_best", "checkpoint.ExportConfig.keep", "eval.HarnessConfig.limit"),
        "checkpoint.MirrorConfig.keep",
        *("curation.curate.LanguageConfig.characters", "curation.curate.ClassifierConfig.characters"),
        *("train.LossConfig.chunk_tokens", "train.RecomputeConfig.every", "data.PreprocessConfig.unit_bytes"),
        *("curation.curate.DecontaminateConfig.max_documents",),
    ),
    "it is a limit itself: how much of others is taken, or how often something is tried": (
        *("run.LaunchConfig.crash_loop", "train.FaultsConfig.max_in_a_row", "train.FaultsConfig.max_rewinds"),
        *("slurm.SlurmConfig.max_restarts", "data.PreprocessConfig.max_expansion", "data.WarcConfig.max_tags"),
        *("data.WarcConfig.max_attributes", "data.WarcConfig.max_paragraph_work"),
        *("curation.curate.DecontaminateConfig.max_ngrams", "checkpoint.MirrorConfig.max_bytes_per_second"),
    ),
    "what a text or a tensor has is compared with it": (
        *("curation.rules.GopherQualityConfig.min_words", "curation.rules.GopherQualityConfig.max_words"),
        *("curation.rules.C4Config.min_sentences", "curation.rules.C4Config.max_curly_brackets"),
        *("curation.rules.C4Config.max_lorem_ipsum", "curation.curate.LinesConfig.min_bytes"),
        *("curation.curate.LinesConfig.min_count", "curation.curate.ParagraphsConfig.min_bytes"),
        *("curation.curate.ParagraphsConfig.min_words", "curation.curate.ParagraphsConfig.min_count"),
        *("tokenizer.TokenizerTrainConfig.min_frequency", "train.Fp8Config.min_size"),
    ),
    "root has it at most the window": ("eval.EvalConfig.stride", "eval.TaskConfig.stride"),
    "SLURM refuses what its partitions do not have": ("slurm.ResourcesConfig.time",),
}
"""By reason the whole numbers of a run file that need no bound below that of all, 64 bits."""


def sections(annotation: Any, found: dict[type[Section], None]) -> dict[type[Section], None]:
    if isinstance(annotation, type) and issubclass(annotation, Section) and annotation not in found:
        found[annotation] = None
        for field in annotation.model_fields.values():
            sections(field.annotation, found)
    for part in get_args(annotation):
        sections(part, found)
    return found


def whole_numbers(annotation: Any, marks: list[Any]) -> Iterator[list[Any]]:
    """What is said of each `int` of an annotation."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        marks = [*marks, *more]
    if annotation is int:
        yield [each for mark in marks for each in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    for part in get_args(annotation):
        yield from whole_numbers(part, marks)


def test_each_whole_number_has_a_bound_or_a_reason() -> None:
    without = {
        f"{section.__module__.removeprefix('pipeline.config.')}.{section.__name__}.{name}"
        for section in sections(Config, {})
        for name, field in section.model_fields.items()
        for marks in whole_numbers(field.annotation, field.metadata)
        if not any(isinstance(mark, Le | Lt) for mark in marks)
    }
    assert without == {name for names in UNBOUNDED.values() for name in names}


@pytest.mark.parametrize(
    "key",
    [
        *("train.duration=1000000000000000000000000000000 steps", "train.checkpoint.every_steps=99999999999999999999"),
        *("data.preprocess.workers=100000", "launch.processes=10000000", "generate.max_tokens=1e18"),
        *("slurm.nodes=1000000000", "parallel.tp=1000000000", "data.loader.prefetch=1000000000"),
    ],
)
def test_beyond_it_the_key_is_named(tmp_path: Path, key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(UserError, match=name):
        load(write(tmp_path), [key])
