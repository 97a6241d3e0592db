"""Passes behind `measure` over a scope: comparing its documents, then deciding about them, then finishing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.config.curate import CurateConfig
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import CurationPlan, check_scope
from pipeline.data.curate.decide import Decider, decide_jobs
from pipeline.data.curate.files import CURATE, decisions_folder
from pipeline.data.curate.jobs import Job
from pipeline.data.curate.measurers import compared_rules, local_rules
from pipeline.data.curate.rules.base import Rule
from pipeline.data.curate.scope import Chunk, Scope
from pipeline.data.curate.table import open_table
from pipeline.data.work.receipts import Receipts

DECIDE_VERSION = "1"
"""Raised whenever the passes behind `measure` would decide otherwise for the same measures and settings."""
DECIDE = "decide"


@dataclass(frozen=True)
class TableOpener:
    """Opens tables of measures of a scope.

    Attributes:
        types: of the records of a table, by the number of the source.
    """

    types: tuple[np.dtype[Any], ...]

    def __call__(self, chunk: Chunk) -> npt.NDArray[Any]:
        return open_table(chunk, self.types[chunk.source])


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
        """What is of all sources together."""
        return self.config.data_dir / CURATE / self.name

    @cached_property
    def rules(self) -> tuple[tuple[Rule, ...], ...]:
        """Local rules by the number of the source."""
        return tuple(local_rules(self.curate, plan.name, plan.settings) for plan in self.plans)

    @cached_property
    def compared(self) -> tuple[Rule, ...]:
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
            "data.curate.duplicates": curate.duplicates.model_dump(mode="json"),
            "data.curate.seed": curate.seed,
        }
        if contamination is not None:
            settings["data.curate.decontaminate"] = {
                "action": contamination.action,
                "max_documents": contamination.max_documents,
            }
        if self.compared or curate.duplicates.lines:
            settings["scope"] = {
                "name": self.name,
                "preference": list(self.preference),
                # Which documents lose against equal ones depends on the rules of all sources.
                "rules": [[[rule.name, rule.bound, rule.keeps] for rule in each] for each in self.rules],
                "against": against_hashes(curate),
            }
        return settings

    def decide_hash(self, number: int) -> str:
        """Hash of `decide_settings`, which names the folder of decisions."""
        return value_hash(self.decide_settings(number))

    def decisions(self, number: int) -> Path:
        """Folder of the decisions about a source."""
        return decisions_folder(self.plans[number].folder, self.decide_hash(number))


def against_hashes(curate: CurateConfig) -> dict[str, str]:
    """Hashes of finished curations that `against` names."""
    from pipeline.data.curate.verdicts import read_curation

    return {str(path): value_hash(read_curation(path).about) for path in map(Path, curate.against)}


class ScopePasses:
    """Passes over a scope all of whose chunks are measured.

    Args:
        plan: of the scope.
        receipts: of its sources, by number.
        type_of: type of the records of a source's table.
    """

    def __init__(self, plan: ScopePlan, receipts: Sequence[Receipts], type_of: Callable[[str], np.dtype[Any]]) -> None:
        self.plan = plan
        self.chunks = [
            chunk for number, source in enumerate(plan.plans) for chunk in chunks_of(source, number, receipts[number])
        ]
        self.open_table = TableOpener(tuple(type_of(source.name) for source in plan.plans))

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
    def comparison(self) -> Any:
        """Passes that compare documents; None where nothing is compared."""
        duplicates = self.plan.curate.duplicates
        if not (self.plan.compared or duplicates.lines):
            return None
        from pipeline.data.curate.duplicates.passes import DuplicatePasses

        choices = self.plan.folder / "choices" / value_hash([self.plan.decide_settings(0)["scope"], self._bounds])[:16]
        curate = self.plan.curate
        return DuplicatePasses(
            self.scope, duplicates, self.plan.rules, self.open_table, choices, curate.seed, curate.bucket_bytes
        )

    @property
    def _bounds(self) -> dict[str, Any]:
        settings = self.plan.decide_settings(0)
        names = ("decide_version", "sources", "data.curate.duplicates", "data.curate.seed")
        return {name: settings[name] for name in names}

    @property
    def names(self) -> tuple[str, ...]:
        """Passes in their order."""
        return (*(() if self.comparison is None else self.comparison.names), DECIDE)

    def jobs(self, name: str) -> list[Job]:
        """Jobs of a pass; those of the passes before it must be done."""
        if name != DECIDE:
            jobs: list[Job] = self.comparison.jobs(name)
            return jobs
        return [
            job
            for number in range(len(self.plan.plans))
            for job in decide_jobs(
                self.plan.decisions(number),
                [chunk for chunk in self.chunks if chunk.source == number],
                value_hash([self.plan.decide_hash(number), self.measured]),
            )
        ]

    def shared(self, name: str) -> dict[Path, Any]:
        """What workers of a pass have in common."""
        if name != DECIDE:
            return {}
        return {self.plan.decisions(number): self._decider(number) for number in range(len(self.plan.plans))}

    def _decider(self, number: int) -> Decider:
        labels = self.plan.plans[number].settings.get("data.curate.language", {}).get("labels", [])
        rules = (*self.plan.rules[number], *self.plan.compared)
        seed = self.plan.curate.seed
        return Decider(rules, len(self.plan.compared), self.open_table, self.comparison, tuple(labels), seed)


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
            hashes = {name: about["xxh3"] for name, about in receipt["files"].items()}
            place = receipt["start"][3]
            found.append(Chunk(plan.folder, number, unit.index, receipt["link"], place, receipt["records"], hashes))
    return found


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
