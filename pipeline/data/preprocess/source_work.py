"""Work on a source: what a look at its folder shows of units, damage, shuffle, datasets and packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.root import Config
from pipeline.data.datasets.files import MANIFEST_FILE
from pipeline.data.datasets.manifest import are_written
from pipeline.data.packing.pack_pass import PackPass
from pipeline.data.preprocess.finalize import REPORT_FILE
from pipeline.data.preprocess.shuffle_pass import ShufflePass
from pipeline.data.preprocess.source_plan import SourcePlan
from pipeline.data.preprocess.tokenize_unit import SourceJob, UnitJob, receipt_is_valid
from pipeline.data.sources.records import NOT_BAD, Position, Unit
from pipeline.data.tokenization.coverage import coverage_of
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.unit_source import damage_is_known, without_damaged


class SourceWork:
    """Work on a source that is done and missing at one time. Receipts are read once; nothing is written.

    Attributes:
        plan: of the source.
        receipts: of the source.
        job: of the source, without the files that its receipts say are damaged, where those are dropped.

    Args:
        plan: of the source.
        job: of the source.
        shuffle: second pass of the run.
        rejected: engines whose ids are not trusted any more, with the evidence.
        config: the run.
    """

    def __init__(
        self, plan: SourcePlan, job: SourceJob, shuffle: ShufflePass, rejected: dict[str, str], config: Config
    ) -> None:
        self.plan = plan
        self.receipts = Receipts(job.folder)
        self.job = without_damaged(job, plan.units, self.receipts)
        self._shuffle = shuffle
        self._rejected = rejected
        self._max_unknown = config.data.preprocess.max_unknown

    @cached_property
    def is_shuffled(self) -> bool:
        """True if a global shuffle has taken all documents out of the parts of the units."""
        return self._shuffle.is_done(self.plan, self.receipts, self._rejected) and self._is_damage_known

    @property
    def manifests(self) -> list[Path]:
        """Manifests that are there."""
        names = self.plan.splits.names
        return [path for name in names if (path := self.job.folder / name / MANIFEST_FILE).exists()]

    @cached_property
    def is_outdated(self) -> bool:
        """True if parts of its datasets have to be made again: with other bytes, or by a whole first pass."""
        if self._shuffle.is_wanted:
            return not self.is_shuffled
        if not self._is_damage_known:
            return True
        return bool(self._rejected) and any(receipt["engine"] in self._rejected for receipt in self._all_receipts())

    @cached_property
    def missing_units(self) -> list[UnitJob]:
        """Units that have a chunk without a complete receipt, or whose input has another time."""
        source = replace(self.job, has_parts=not self.is_shuffled)
        return [UnitJob(source, unit) for unit in self.plan.units if not self._is_done(source, unit)]

    def is_finished(self, tokenizer: Tokenizer, packs: PackPass) -> bool:
        """Tell whether all units are done, and the datasets and packs finished.

        False also where records are bad, files damaged or much text unknown: finishing tells whether so much may be.

        Args:
            tokenizer: of the run.
            packs: of the run.
        """
        folder, names = self.job.folder, self.plan.splits.names
        has_grown = self.plan.config_hash if self.plan.earlier else None
        if not (folder / REPORT_FILE).is_file() or not are_written(folder, names, has_grown):
            return False
        if not all(tokenizer.is_saved_in(folder / name) for name in names):
            return False
        if self.is_outdated or (self.is_shuffled and self._shuffle.has_left(self.plan)):
            return False
        receipts = list(self._all_receipts())
        if any(receipt.get("damaged") or receipt["rejected"].keys() - NOT_BAD for receipt in receipts):
            return False
        if coverage_of(receipts).unknown_share > self._max_unknown:
            return False
        return not self.missing_units and not packs.missing(self.plan.found.source.name)

    @property
    def _is_damage_known(self) -> bool:
        """True if all chunks were made with the same files dropped as now, and of damaged files that are the same."""
        units = self.plan.units
        return all(
            damage_is_known(self.job, unit, receipt) for unit in units for receipt in self.receipts.of(unit.index)
        )

    def _all_receipts(self) -> Iterator[Any]:
        return (receipt for unit in self.plan.units for receipt in self.receipts.of(unit.index))

    def _is_done(self, source: SourceJob, unit: Unit) -> bool:
        def is_valid(receipt: Any, start: Position) -> bool:
            return receipt_is_valid(source, unit, receipt, start, self._rejected)

        return UnitJob(source, unit).is_done(self.receipts, is_valid)
