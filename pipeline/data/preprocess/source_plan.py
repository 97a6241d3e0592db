"""The frozen plan of a source: its files, its units and every setting that decides its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.root import Config
from pipeline.data.curate.results.apply import AppliedCuration
from pipeline.data.datasets.files import MANIFEST_FILE, PLAN_FILE
from pipeline.data.datasets.manifest import CODE_VERSION, PLAN_KEYS
from pipeline.data.global_shuffle.bucket import UNSHUFFLED
from pipeline.data.preprocess.source_settings import settings_of
from pipeline.data.preprocess.splits import Splits
from pipeline.data.preprocess.tokenize_unit import SourceJob
from pipeline.data.sources.templates.chat_template import ChatTemplate
from pipeline.data.tokenization.chat_encoding import ChatRules
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.frozen_plan import ADDED, FrozenPlan
from pipeline.data.work.units import SourceFiles, cut_units

ADD_APART = "The added files can be used as a source of their own: name them there, and leave them out here (exclude)"


@dataclass(frozen=True)
class SourcePlan(FrozenPlan):
    """Plan of a source: its units, splits and settings."""

    splits: Splits
    curation: AppliedCuration | None = None

    @property
    def splits_in_order(self) -> list[str]:
        return list(self.splits.names)

    @property
    def remade(self) -> str:
        return "to make the dataset again"

    def refusal(self, folder: Path, differences: Iterable[str]) -> UserError:
        finished = all((folder / split / MANIFEST_FILE).is_file() for split in self.splits.names)
        differences = list(differences)
        grow = ""
        if len(differences) == 1 and differences[0].startswith(ADDED):
            grow = f" {ADD_APART}."
            if self.can_grow:
                grow = " To append the added files to the dataset, run `pipeline preprocess RUN.yaml --grow`."
        as_it_is = f"; or use the dataset as it is with `dataset: {folder}` in place of `paths`" if finished else ""
        return UserError(
            f"{folder} was made from other input or settings than source {self.found.source.name!r} has now:\n"
            + "\n".join(f"  {difference}" for difference in differences)
            + f"\nTokens of both must not be mixed. Restore what differs; or remove {folder} to make it again; or set "
            f"data.dir to another folder{as_it_is}.{grow}"
        )

    @property
    def can_grow(self) -> bool:
        """Tell whether files can be added: not where all documents of a source are looked at as a whole."""
        return self.curation is None and self.settings["data.preprocess.shuffle"] != "global"


def planned_settings(config: Config, found: SourceFiles) -> dict[str, Any] | None:
    """Settings of the plan that is there; None if there is none that can be read, or it is of other files.

    Files that the source grows by are not counted.
    """
    plan = storage.find_json(config.data_dir / found.source.name / PLAN_FILE, *PLAN_KEYS)
    if plan is None:
        return None
    generations = found.generations[:-1] if found.grows else found.generations
    files = sorted((file.name, file.size) for files in generations for file in files)
    settings: dict[str, Any] = plan["settings"]
    return settings if sorted((name, size) for name, _, size in plan["files"]) == files else None


def is_planned(config: Config, found: SourceFiles) -> bool:
    """Tell whether there is a plan of the same files and settings, so that somebody has looked at the files before."""
    planned = planned_settings(config, found)
    return planned is not None and planned.items() >= settings_of(found.source, config).items()


def make_plan(
    found: SourceFiles,
    tokenizer: Tokenizer,
    config: Config,
    splits: Splits,
    curation: AppliedCuration | None = None,
) -> SourcePlan:
    """Plan a source.

    Args:
        found: the source.
        tokenizer: of the run.
        config: the run.
        splits: of the source.
        curation: decisions that its documents follow.
    """
    settings = settings_of(found.source, config) | {
        "code_version": CODE_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "ends of splits": splits.settings,
        **({"jinja2": version("jinja2")} if isinstance(found.reader.template, ChatTemplate) else {}),
        **found.reader.plan_pins(),
        **found.reader.plan_partitions(found.files),
    }
    if curation is not None:  # datasets of all documents do not name it
        settings["curation"] = curation.hash
    units = cut_units(found, config.data.preprocess.seed, config.data.preprocess.unit_bytes)
    return SourcePlan(found, units, settings, splits, curation)


def source_job(plan: SourcePlan, config: Config, start_over: str) -> SourceJob:
    """Job of a planned source, for workers."""
    job = counting_job(plan.found, config, plan.splits, plan.config_hash, start_over, plan.curation)
    return replace(job, earlier=plan.earlier)


def counting_job(
    found: SourceFiles,
    config: Config,
    splits: Splits,
    config_hash: str = "",
    start_over: str = "",
    curation: AppliedCuration | None = None,
) -> SourceJob:
    """Job of a source, for workers; without a hash of the config its documents are only counted."""
    settings = config.data.preprocess
    return SourceJob(
        folder=config.data_dir / found.source.name,
        reader=found.reader,
        seed=settings.seed,
        splits=splits,
        unit_bytes=settings.unit_bytes,
        max_document_bytes=settings.max_document_bytes,
        splits_long=settings.on_long_document == "split",
        config_hash=config_hash,
        below=UNSHUFFLED if settings.shuffle == "global" else "",
        has_parts=True,
        fail_on_error=settings.on_error == "fail",
        drops_damaged=settings.on_damaged_file == "drop",
        start_over=start_over,
        curation=curation,
        chat=_chat_rules(found),
    )


def _chat_rules(found: SourceFiles) -> ChatRules | None:
    template = found.reader.template
    if not isinstance(template, ChatTemplate):
        return None
    return ChatRules(template.masks, template.longest, template.cuts, template.pairs)
