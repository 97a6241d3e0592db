"""Decisions applied to the documents of a source, by whoever reads the same units again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.config.curation.curate import CleanConfig, CurateConfig
from pipeline.config.root import Config
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.curation_plan import CurationPlan
from pipeline.data.curate.duplicates.line_text import remove_lines
from pipeline.data.curate.files import CURATION_FILE, curate_folder, decisions_folder
from pipeline.data.curate.passes.scope_passes import make_scopes
from pipeline.data.curate.verdicts import Curation, UnitVerdicts, find_curation, read_decisions
from pipeline.data.datasets.files import receipt_path
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Document, Unit
from pipeline.data.work.frozen_plan import setting_differences
from pipeline.data.work.receipts import read_receipt
from pipeline.data.work.units import SourceFiles


@dataclass(frozen=True)
class AppliedCuration:
    """Decisions about a source that its documents are to follow. Small, and pickled.

    Attributes:
        folder: of the curation of the source.
        decide_hash: of the decisions.
        hash: of all that they do to the documents.
        clean: edits of the text.
        seed: of masks.
    """

    folder: Path
    decide_hash: str
    hash: str
    clean: CleanConfig
    seed: int

    def open(self, unit: int) -> UnitCuration:
        """Decisions about a unit.

        Raises:
            UserError: a file of them is missing or damaged.
        """
        curation = _read(self.folder, self.decide_hash)
        if content_hash(curation) != self.hash:
            raise UserError(
                f"{curation.decisions / CURATION_FILE} was written again since this command began; start it again"
            )
        cleaner = _open_cleaner(self.clean.model_dump_json(), self.seed)
        return UnitCuration(curation.read(unit), cleaner, partial(self._receipt, unit))

    def _receipt(self, unit: int, chunk: int) -> Any:
        receipt = read_receipt(self.folder, unit, chunk)
        if receipt is None:
            path = receipt_path(self.folder, unit, chunk)
            raise UserError(f"{path} is missing or damaged; run `pipeline curate RUN.yaml`, which makes it again")
        return receipt


class UnitCuration:
    """Decisions about a unit.

    Args:
        verdicts: of its rows.
        cleaner: edits of the text.
        receipt: finds the receipt of a chunk that was measured.
    """

    def __init__(self, verdicts: UnitVerdicts, cleaner: Cleaner, receipt: Callable[[int], Any]) -> None:
        self._verdicts = verdicts
        self._cleaner = cleaner
        self._receipt = receipt

    def check_chunk(self, unit: Unit, chunk: Mapping[str, Any]) -> None:
        """Compare the input of a chunk with what was measured: a file of the same size may have other documents.

        Args:
            unit: whose chunk it is.
            chunk: its receipt in another stage, which cuts units in the same way.

        Raises:
            UserError: it is another one.
        """
        measured = self._receipt(chunk["link"])
        if measured.get("dropped", []) != chunk["dropped"]:
            return  # it is read again without damaged files
        _check_input(unit, measured, chunk["input"]["hash"])

    def checked(self, unit: Unit, reader: UnitReader) -> Iterator[Document]:
        """Documents of a unit; at the end of each chunk its input is compared with what was measured.

        Raises:
            UserError: it is another one.
        """
        chunk, measured = 0, self._receipt(0)
        for document in reader:
            yield document
            if not measured["last"] and reader.position == tuple(measured["next"]):
                _check_input(unit, measured, reader.input_hash)
                reader.count_anew()
                chunk, measured = chunk + 1, self._receipt(chunk + 1)
        _check_input(unit, measured, reader.input_hash)

    def apply(self, document: Document) -> str | None:
        """The rule that removed a document; else it is edited if it is to be, and None.

        Raises:
            UserError: the row was no document when it was decided about.
        """
        found = self._verdicts.verdict(document.row)
        if found.is_rejected:
            raise UserError(
                f"document {document.id!r} (row {document.row} of its unit) was a rejected record when `pipeline "
                "curate` measured it; the source has changed. Run `pipeline curate` again"
            )
        if found.rule is None and found.is_edited:
            text = self._cleaner.clean(document.text)
            if lines := self._verdicts.lines(document.row):
                text = remove_lines(text, lines)
            document.text, document.edited = text, True
        return found.rule


def _check_input(unit: Unit, measured: Mapping[str, Any], input_hash: str) -> None:
    if measured["input"]["hash"] != input_hash:
        raise UserError(
            f"the input of {unit} changed since `pipeline curate` measured it, so the decisions are not about these "
            "documents; restore the files, or remove the folder `curate` of the source and run `pipeline curate` again"
        )


@lru_cache(maxsize=8)
def _read(folder: Path, decide_hash: str) -> Curation:
    return read_decisions(decisions_folder(folder, decide_hash))


@lru_cache(maxsize=2)
def _open_cleaner(clean: str, seed: int) -> Cleaner:
    return Cleaner(CleanConfig.model_validate_json(clean), seed)


def content_hash(curation: Curation) -> str:
    """Hash of all that decisions do to the documents."""
    about = curation.about
    return value_hash([about["measure_hash"], about["decide_hash"], about["verdicts"]])


def applied_curations(config: Config, sources: list[SourceFiles]) -> dict[str, AppliedCuration]:
    """Decisions that preprocess follows, by source; none unless `data.curate.mode` is `apply`.

    Args:
        config: the run.
        sources: all that have files; those that are never trained on are not curated.

    Raises:
        UserError: the active decisions are not those of the run file.
    """
    if config.data.curate is None or config.data.curate.mode != "apply":
        return {}
    from pipeline.data.curate.curation_plan import plan_sources

    sources = [found for found in sources if not found.held_out]
    # Before plans are made: these open models, and the items of evaluations that the command `curate` writes.
    folders = [curate_folder(config.data_dir / found.source.name) for found in sources]
    if missing := [folder for folder in folders if not (folder / CURATION_FILE).exists()]:
        raise UserError(
            f"data.curate.mode: apply, and there are no decisions in {', '.join(map(str, missing))}: run `pipeline "
            "curate RUN.yaml` first; or set data.curate.mode: observe, with which preprocess keeps all documents"
        )
    return decisions_of_run(config, plan_sources(config, sources))


def decisions_of_run(config: Config, plans: Sequence[CurationPlan]) -> dict[str, AppliedCuration]:
    """Active decisions, by source.

    Raises:
        UserError: they are not those of the run file.
    """
    curate = config.data.curate
    assert curate is not None, "there are plans"
    found: dict[str, AppliedCuration] = {}
    wrong: list[str] = []
    for scope in make_scopes(config, plans):
        for number, plan in enumerate(scope.plans):
            active = find_curation(plan.folder)
            if differences := _differences(plan, scope.decide_settings(number), active):
                wrong += [f"  {plan.name}: {difference}" for difference in differences]
            elif active is not None:
                found[plan.name] = _applied(active, curate)
    if wrong:
        raise UserError(
            "the decisions about which documents are kept (data.curate) are not those of the run file:\n"
            + "\n".join(wrong)
            + "\nRun `pipeline curate RUN.yaml` with this run file first; or set data.curate.mode: observe, with which "
            "preprocess keeps all documents"
        )
    return found


def active_curation(config: Config, found: SourceFiles) -> AppliedCuration | None:
    """Active decisions about a source that preprocess would follow, be they of the run file or not."""
    curate = config.data.curate
    if curate is None or curate.mode != "apply" or found.held_out:
        return None
    return applied_from(curate_folder(config.data_dir / found.source.name), curate)


def applied_from(folder: Path, curate: CurateConfig) -> AppliedCuration | None:
    """Active decisions of the curation in a folder, if there are any, with the edits that `data.curate` names."""
    active = find_curation(folder)
    return None if active is None else _applied(active, curate)


def _applied(active: Curation, curate: CurateConfig) -> AppliedCuration:
    return AppliedCuration(active.folder, active.about["decide_hash"], content_hash(active), curate.clean, curate.seed)


def _differences(plan: CurationPlan, settings: Mapping[str, object], active: Curation | None) -> list[str]:
    if active is None:
        return [f"there are no decisions in {plan.folder}"]
    if active.about["measure_hash"] != plan.config_hash:
        try:
            return plan.differences(plan.folder) or ["the measures are of other settings"]
        except FileNotFoundError:
            return [f"there is no plan in {plan.folder}"]
    if active.about["decide_hash"] == value_hash(settings):
        return []
    return setting_differences(_by_rule(active.about["settings"]), _by_rule(settings)) or ["other settings"]


def _by_rule(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of decisions with a key for each rule, so that a message names those alone that differ."""
    found = {name: value for name, value in settings.items() if name not in ("rules", "scope")}
    found |= {f"rule {name}": bound for name, bound, _ in settings["rules"]}
    scope = settings.get("scope", {})
    found |= {f"scope {name}": value for name, value in scope.items() if name != "rules"}
    for place, rules in enumerate(scope.get("rules", ())):
        others = [rule for rule in rules if rule not in settings["rules"]]
        found |= {f"rule {name} of source {place + 1} in the scope": bound for name, bound, _ in others}
    return found
