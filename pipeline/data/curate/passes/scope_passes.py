"""Passes behind `measure` over a scope: comparing its documents, then deciding about them, then finishing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.config.curation.curate import CurateConfig
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import CurationPlan, check_scope
from pipeline.data.curate.decontamination.index import INDEX_FILE
from pipeline.data.curate.duplicates import against
from pipeline.data.curate.duplicates.files import finished
from pipeline.data.curate.duplicates.kinds import COUNTED, NEAR_SIMILARITY
from pipeline.data.curate.duplicates.measure import duplicate_settings
from pipeline.data.curate.duplicates.passes import DuplicatePasses
from pipeline.data.curate.files import CURATE, IDS, decisions_folder, portable
from pipeline.data.curate.measurers import LANGUAGE, Measuring, items_folder
from pipeline.data.curate.passes.contamination import (
    ContaminationJob,
    TableOpener,
    contamination_job,
)
from pipeline.data.curate.passes.decide import DecideJob, Decider, decide_jobs
from pipeline.data.curate.passes.excerpts import (
    ExcerptJob,
    ExcerptSource,
    ReadTexts,
    StoredExcerpts,
    excerpt_jobs,
    stored_excerpts,
)
from pipeline.data.curate.passes.names import CONTAMINATION_PASS, DECIDE, EXCERPTS_PASS
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.rules.of_run import compared_rules, local_rules
from pipeline.data.curate.scope import Chunk, Scope
from pipeline.data.curate.verdicts import Curation, find_curation, read_curation
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.work.passes import Pass
from pipeline.data.work.receipts import Receipts, read_receipts

DECIDE_VERSION = "1"
"""Raised whenever the passes behind `measure` would decide otherwise for the same measures and settings."""


@dataclass(frozen=True)
class ScopePlan:
    """Sources that are compared with each other, and what decides about them.

    Attributes:
        name: of the scope.
        plans: of the sources, by number: sorted by name.
        preference: their names in the order of the run file.
        config: the run.
    """

    name: str
    plans: tuple[CurationPlan, ...]
    preference: tuple[str, ...]
    config: Config

    @property
    def curate(self) -> CurateConfig:
        """`data.curate`."""
        assert self.config.data.curate is not None, "the stage runs with it alone"
        return self.config.data.curate

    @property
    def folder(self) -> Path:
        """Folder of results that are of all sources together."""
        return self.config.data_dir / CURATE / self.name

    @cached_property
    def rules(self) -> tuple[tuple[DocumentRule, ...], ...]:
        """Local rules by the number of the source."""
        return tuple(local_rules(self.curate, plan.name, plan.settings) for plan in self.plans)

    @cached_property
    def compared(self) -> tuple[DocumentRule, ...]:
        """Rules of duplicates."""
        return compared_rules(self.curate.duplicates)

    def decide_settings(self, number: int) -> dict[str, Any]:
        """Everything that decides about the documents of a source, as JSON."""
        curate = self.curate
        contamination = curate.decontaminate
        rules = [*self.rules[number], *self.compared]
        settings: dict[str, Any] = {
            "decide_version": DECIDE_VERSION,
            "rules": [[rule.name, rule.bound, rule.keeps] for rule in rules],
            "languages": [] if curate.language is None else sorted(curate.language.keep),
            "sources": {plan.name: plan.config_hash for plan in self.plans},
            "data.curate.duplicates": _without_unset(curate.duplicates.model_dump(mode="json"), "paragraphs"),
            "duplicates": duplicate_settings(curate.duplicates),
            "data.curate.seed": curate.seed,
        }
        if curate.duplicates.near is not None:
            settings[NEAR_SIMILARITY] = COUNTED
        if contamination is not None:
            settings["data.curate.decontaminate"] = {
                "action": contamination.action,
                "max_documents": contamination.max_documents,
            }
        if self.compared:
            settings["scope"] = {
                "name": self.name,
                "preference": list(self.preference),
                # Which documents lose against equal ones depends on the rules of all sources.
                "rules": [[[rule.name, rule.bound, rule.keeps] for rule in each] for each in self.rules],
                "against": against_hashes(curate, self.config.data_dir),
            }
        return settings

    def decide_hash(self, number: int) -> str:
        """Hash of `decide_settings`, which names the folder of decisions."""
        return value_hash(self.decide_settings(number))

    def active(self, number: int) -> Curation | None:
        """The active decisions about a source, if they are by these settings."""
        found = find_curation(self.plans[number].folder)
        return found if found is not None and found.about["decide_hash"] == self.decide_hash(number) else None

    def decisions(self, number: int) -> Path:
        """Folder of the decisions about a source."""
        return decisions_folder(self.plans[number].folder, self.decide_hash(number))


def _without_unset(values: dict[str, Any], *later: str) -> dict[str, Any]:
    """Values without keys that earlier versions did not have, where they are not set: decisions stay the same."""
    return {key: value for key, value in values.items() if key not in later or value is not None}


def against_hashes(curate: CurateConfig, data_dir: Path) -> dict[str, str]:
    """Hashes of finished curations that `against` names."""
    return {portable(path, data_dir): value_hash(read_curation(path).about) for path in map(Path, curate.against)}


def check_against(curate: CurateConfig) -> None:
    """Refuse entries of `against` that cannot be compared with, before hours of measuring.

    Raises:
        UserError: a folder is not a finished curation, or was measured in another way.
    """
    for path in curate.against:
        against.read_curation(Path(path), curate.duplicates, finished_chunks)


class ScopePasses:
    """Passes over a scope all of whose chunks are measured.

    Args:
        plan: of the scope.
        receipts: of its sources, by number.
        measuring: has the types of the tables, and the engine.
        read_texts: reads texts for reports; None if these are to have none.
    """

    def __init__(
        self,
        plan: ScopePlan,
        receipts: Sequence[Receipts],
        measuring: Measuring,
        read_texts: ReadTexts | None,
    ) -> None:
        self.plan = plan
        self._read_texts = read_texts
        self.chunks = [
            chunk for number, source in enumerate(plan.plans) for chunk in chunks_of(source, number, receipts[number])
        ]
        self._measuring = measuring

    @cached_property
    def scope(self) -> Scope:
        """The scope with its chunks."""
        names = tuple(plan.name for plan in self.plan.plans)
        return Scope(self.plan.name, self.plan.folder, names, self.plan.preference, tuple(self.chunks))

    @cached_property
    def measured(self) -> str:
        """Hash of all measures of the scope."""
        return value_hash([[c.source, c.unit, c.chunk, c.first, c.records, c.hashes] for c in self.chunks])

    @cached_property
    def contamination(self) -> ContaminationJob | None:
        """The job of the pass `contamination`; None where it is not looked for."""
        settings = self.plan.curate.decontaminate
        if settings is None:
            return None
        index = items_folder(self.plan.config) / INDEX_FILE
        return contamination_job(self.plan.folder, self.chunks, index, settings.max_documents)

    @cached_property
    def open_table(self) -> TableOpener:
        """Opens the tables; the pass `contamination` must be done."""
        types = tuple(self._measuring.table_type(plan.name) for plan in self.plan.plans)
        if self.contamination is None:
            return TableOpener(types)
        job = self.contamination
        (receipt,) = finished([job], CONTAMINATION_PASS)
        return TableOpener(types, (job.counts, receipt["files"][job.counts.name]["xxh3"], job.max_documents))

    @cached_property
    def comparison(self) -> DuplicatePasses | None:
        """Passes that compare documents; None where nothing is compared."""
        curate = self.plan.curate
        if not self.plan.compared:
            return None
        settings = self.plan.decide_settings(0)
        bounds = [{name: settings[name] for name in sorted(settings.keys() - {"rules"})}, self.measured]
        return DuplicatePasses(
            self.scope,
            curate.duplicates,
            self.plan.rules,
            self.open_table,
            self.plan.folder / "choices" / value_hash(bounds)[:16],
            curate.seed,
            curate.bucket_bytes,
            self._measuring.engine,
            tuple(against.read_curation(Path(path), curate.duplicates, finished_chunks) for path in curate.against),
        )

    def passes(self) -> Iterator[Pass]:
        """Passes in their order. Those before one must be done when it is asked for."""
        numbers = range(len(self.plan.plans))
        if (job := self.contamination) is not None:
            yield Pass(CONTAMINATION_PASS, lambda: [job], lambda: {job.folder: tuple(self.chunks)})
        if self.comparison is not None:
            for name in self.comparison.names:
                yield Pass(name, partial(self.comparison.jobs, name))
        if self._read_texts is not None:
            source = partial(self._excerpt_source, self._read_texts)
            yield Pass(
                EXCERPTS_PASS,
                lambda: [job for number in numbers for job in self._excerpt_jobs(number)],
                lambda: dict(map(source, self.plan.plans)),
            )
        yield Pass(
            DECIDE,
            lambda: [job for number in numbers for job in self.decide_jobs(number)],
            lambda: {self.plan.decisions(number): self._decider(number) for number in numbers},
        )

    def decide_jobs(self, number: int) -> list[DecideJob]:
        """Jobs of the pass `decide` for a source."""
        chunks = [chunk for chunk in self.chunks if chunk.source == number]
        inputs = value_hash([self.plan.decide_hash(number), self.measured])
        return decide_jobs(self.plan.decisions(number), chunks, inputs, self.excerpts(number))

    def _excerpt_jobs(self, number: int) -> list[ExcerptJob]:
        chunks = [chunk for chunk in self.chunks if chunk.source == number]
        return excerpt_jobs(self.plan.plans[number].folder, chunks, self.plan.curate.seed)

    def excerpts(self, number: int) -> StoredExcerpts | None:
        """Beginnings of documents of a source, after the pass `excerpts`; None if none are kept."""
        if self._read_texts is None:
            return None
        jobs = self._excerpt_jobs(number)
        return stored_excerpts(jobs, finished(list(jobs), EXCERPTS_PASS))

    def _excerpt_source(self, read_texts: ReadTexts, plan: CurationPlan) -> tuple[Path, ExcerptSource]:
        kind = self._measuring.table_type(plan.name)
        return plan.folder / EXCERPTS_PASS, ExcerptSource(plan.folder, kind, read_texts)

    def _decider(self, number: int) -> Decider:
        labels = self.plan.plans[number].settings.get(LANGUAGE, {}).get("labels", [])
        paragraphs = self.plan.curate.duplicates.paragraphs
        return Decider(
            self.plan.rules[number],
            self.plan.compared,
            self.open_table,
            self.comparison,
            tuple(labels),
            self.plan.curate.seed,
            sum(chunk.source == number for chunk in self.chunks),
            self.excerpts(number),
            edits_paragraphs=paragraphs is None or paragraphs.edit,
        )


def chunks_of(plan: CurationPlan, number: int, receipts: Receipts) -> list[Chunk]:
    """Chunks of a source whose units are all measured.

    Args:
        plan: of the source.
        number: of the source in its scope.
        receipts: of the source.
    """
    found = []
    for unit in plan.units:
        for receipt in receipts.of(unit.index):
            found.append(_chunk(plan.folder, number, receipt))
    return found


def finished_chunks(curation: Path) -> list[Chunk]:
    """Chunks of a finished curation, by its folder."""
    units = storage.get_json(curation / PLAN_FILE, *PLAN_KEYS)["units"]
    return [_chunk(curation, 0, receipt) for unit in range(len(units)) for receipt in read_receipts(curation, unit)]


def _chunk(curation: Path, number: int, receipt: Mapping[str, Any]) -> Chunk:
    # Ids decide nothing, and measures of earlier versions do not have them.
    files = {name: about for name, about in receipt["files"].items() if name != IDS}
    return Chunk(
        curation,
        number,
        receipt["unit"],
        receipt["link"],
        receipt["start"][3],
        receipt["records"],
        {name: about["xxh3"] for name, about in files.items()},
        {name: about["size"] for name, about in files.items()},
    )


def make_scopes(config: Config, plans: Sequence[CurationPlan]) -> list[ScopePlan]:
    """Scopes of a run: those of the run file, and one for each other source.

    Args:
        config: the run.
        plans: of all sources.

    Raises:
        UserError: a scope has the name of a source that is not in it.
    """
    assert config.data.curate is not None, "the stage runs with it alone"
    by_name = {plan.name: plan for plan in plans}
    scopes = {name: tuple(sources) for name, sources in config.data.curate.scopes.items()}
    named = {source for sources in scopes.values() for source in sources}
    for plan in plans:
        if plan.name in scopes and plan.name not in named:
            raise UserError(
                f"data.curate.scopes.{plan.name}: source {plan.name!r} is not in it, and is a scope of its own; give "
                "the scope another name"
            )
    scopes |= {plan.name: (plan.name,) for plan in plans if plan.name not in named}
    found = []
    for name, preference in scopes.items():
        check_scope(name, preference)
        found.append(ScopePlan(name, tuple(by_name[source] for source in sorted(preference)), preference, config))
    return found
