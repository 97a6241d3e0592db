"""The frozen plan of a source: its files, its units and every setting that decides its tokens.

The plan is written before any work and not changed once a unit was begun. A later run makes its plan anew and compares:
whatever would mix two kinds of output in one dataset is explained and refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.config.root import Config
from pipeline.data.datasets.files import MANIFEST_FILE, PLAN_FILE
from pipeline.data.datasets.manifest import CODE_VERSION, PLAN_KEYS
from pipeline.data.global_shuffle.bucket import UNSHUFFLED
from pipeline.data.preprocess.source_settings import setting_differences, settings_of
from pipeline.data.preprocess.splits import Splits
from pipeline.data.preprocess.tokenize_unit import SourceJob
from pipeline.data.sources.globs import File
from pipeline.data.sources.records import Unit
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.leases import LEASES, read_leases
from pipeline.data.work.units import SourceFiles, cut_units


@dataclass(frozen=True)
class SourcePlan:
    """Plan of a source: its units, splits and settings."""

    found: SourceFiles
    units: list[Unit]
    splits: Splits
    settings: dict[str, Any]

    @property
    def config_hash(self) -> str:
        """Hash of everything that decides the output: the settings and the names and sizes of the files."""
        return value_hash([self.settings, [[file.name, file.size] for file in self.found.files]])

    def freeze(self, folder: Path) -> list[str]:
        """Write the plan, or compare with the one that is there, which gives way if no unit of it was begun.

        Returns:
            what the plan that gave way had else.

        Raises:
            UserError: the folder was begun with another plan; the message lists what differs and the ways out.
        """
        path = folder / PLAN_FILE
        there = path.exists()
        differences = self.differences(folder) if there else []
        if there and not differences:
            return []
        if not there or withdraw(folder):
            folder.mkdir(parents=True, exist_ok=True)
            storage.put_json(path, self._as_json())
            return differences
        finished = all((folder / split / MANIFEST_FILE).is_file() for split in self.splits.names)
        as_it_is = f"; or use the dataset as it is with `dataset: {folder}` in place of `paths`" if finished else ""
        raise UserError(
            f"{folder} was made from other input or settings than source {self.found.source.name!r} has now:\n"
            + "\n".join(f"  {difference}" for difference in differences)
            + f"\nTokens of both must not be mixed. Restore what differs; or remove {folder} to make it again; or set "
            f"data.dir to another folder{as_it_is}."
        )

    def differences(self, folder: Path) -> list[str]:
        """Differences of this plan from the one that the folder was begun with; empty if that is the same.

        Raises:
            UserError: the plan that is there is damaged.
            FileNotFoundError: there is none.
        """
        try:
            old = storage.get_json(folder / PLAN_FILE, *PLAN_KEYS)
        except UserError as error:
            raise UserError(f"{error}; restore it, or remove {folder} to make the dataset again") from None
        if old["config_hash"] == self.config_hash:
            return []
        differences = setting_differences(old["settings"], self.settings)
        differences += _file_differences({name: size for name, _, size in old["files"]}, self.found.files)
        return differences or ["where the splits end"]

    def _as_json(self) -> dict[str, Any]:
        number = {file.name: i for i, file in enumerate(self.found.files)}
        return {
            "config_hash": self.config_hash,
            "settings": self.settings,
            "splits": list(self.splits.names),
            "files": [[file.name, file.path, file.size] for file in self.found.files],
            # A unit is a list of [file, first byte, end byte].
            "units": [[[number[p.file.name], p.start, p.end] for p in unit.pieces] for unit in self.units],
        }


def planned_settings(config: Config, found: SourceFiles) -> dict[str, Any] | None:
    """Settings of the plan that is there; None if there is none that can be read, or it is of other files."""
    plan = storage.find_json(config.data_dir / found.source.name / PLAN_FILE, *PLAN_KEYS)
    if plan is None:
        return None
    same_files = [[name, size] for name, _, size in plan["files"]] == [[f.name, f.size] for f in found.files]
    settings: dict[str, Any] = plan["settings"]
    return settings if same_files else None


def is_planned(config: Config, found: SourceFiles) -> bool:
    """Tell whether there is a plan of the same files and settings, so that somebody has looked at the files before."""
    planned = planned_settings(config, found)
    return planned is not None and planned.items() >= settings_of(found.source, config).items()


def is_begun(folder: Path) -> bool:
    """Tell whether a unit in a source's folder was begun: it has a receipt, a file of a part, or a lease."""
    try:
        below = [path for path in folder.iterdir() if path.is_dir() and path.name != LEASES]
    except FileNotFoundError:
        return False
    written = (path for part in below for path in part.rglob("*") if not path.name.endswith(storage.TEMPORARY_SUFFIX))
    if any(path.is_file() for path in written):
        return True
    return any(isinstance(unit, int) and lease.is_running() is not False for unit, lease, _ in read_leases(folder))


def withdraw(folder: Path) -> bool:
    """Remove the plan in a source's folder if no unit of it was begun; returns whether none was.

    Workers take their lease and then look for the plan. So of a worker and this, one sees what the other did.
    """
    path = folder / PLAN_FILE
    if is_begun(folder):
        return False
    if not path.exists():
        return True
    plan = storage.read_bytes(path)
    path.unlink()
    if is_begun(folder):
        storage.put(path, plan)
        return False
    return True


def make_plan(found: SourceFiles, tokenizer: Tokenizer, config: Config, splits: Splits) -> SourcePlan:
    """Plan a source."""
    settings = settings_of(found.source, config) | {
        "code_version": CODE_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "ends of splits": splits.settings,
        **found.reader.pins(),
    }
    units = cut_units(found, config.data.preprocess.seed, config.data.preprocess.unit_bytes)
    return SourcePlan(found, units, splits, settings)


def source_job(plan: SourcePlan, config: Config, start_over: str) -> SourceJob:
    """Job of a planned source, for workers."""
    return counting_job(plan.found, config, plan.splits, plan.config_hash, start_over)


def counting_job(
    found: SourceFiles, config: Config, splits: Splits, config_hash: str = "", start_over: str = ""
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
    )


def _file_differences(old: dict[str, int], files: list[File]) -> list[str]:
    new = {file.name: file.size for file in files}
    added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    kinds = {"added": added, "gone": removed}
    result = [f"files {kind}: {len(names)}, the first is {names[0]}" for kind, names in kinds.items() if names]
    if changed:
        name = changed[0]
        result.append(f"files changed: {len(changed)}, the first is {name} ({old[name]} bytes then, {new[name]} now)")
    return result
