"""The frozen plan of a stage for a source: its files, its units and every setting that decides the result.

The plan is written before any work. Once a unit was begun it is not changed; a generation of new files may be appended.
A later run makes its plan anew and compares: whatever would mix two kinds of output in one folder is explained and
refused.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import links, run_identity, storage
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.format import counted, size
from pipeline.common.hashing import put_sealed, value_hash
from pipeline.config import Config
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.sources.globs import File
from pipeline.data.sources.records import Unit
from pipeline.data.work.job_run import FAILURES_FILE
from pipeline.data.work.leases import LEASES, LeaseWatch, read_leases, take_when_free
from pipeline.data.work.units import SourceFiles

OTHER_STAGES = frozenset({"curate"})
"""Folders in that of a source that have plans of their own."""
VERSIONS = "versions"
"""Key of plans with objects: the ETag of each file, empty of those on a disk. Datasets do not depend on it."""
REMOTE = "remote"
"""Key of such plans: `endpoint` and `anonymous` of `data.remote`, where they are set."""
ADDED = "files added"
"""Beginning of the difference of a plan that has more files."""


@dataclass(frozen=True)
class FrozenPlan(ABC):
    """Plan of a stage for a source."""

    found: SourceFiles
    units: list[Unit]
    settings: dict[str, Any]

    @property
    def config_hash(self) -> str:
        """Hash of everything that decides the output: the settings and the names and sizes of the files."""
        return self._hashes[-1]

    @property
    def earlier(self) -> tuple[tuple[str, int], ...]:
        """The `config_hash` of each earlier generation, and the number of units up to its end."""
        generation = {file.name: number for number, files in enumerate(self.found.generations) for file in files}
        counts = Counter(generation[unit.pieces[0].file.name] for unit in self.units)
        ends = itertools.accumulate(counts[number] for number in range(len(self.found.earlier)))
        return tuple(zip(self._hashes[:-1], ends, strict=True))

    @property
    def _hashes(self) -> list[str]:
        """`config_hash` of each generation, which is of those before it, too."""
        hashes: list[str] = []
        for files in self.found.generations:
            before = hashes[-1] if hashes else self.settings
            hashes.append(value_hash([before, [[file.name, file.size] for file in files]]))
        return hashes

    @property
    @abstractmethod
    def splits_in_order(self) -> list[str]:
        """Names of the splits that the stage makes; none if it makes no datasets."""

    @abstractmethod
    def refusal(self, folder: Path, differences: Iterable[str]) -> UserError:
        """Error about a folder that was begun with another plan, with the ways out."""

    @property
    @abstractmethod
    def remade(self) -> str:
        """Purpose of removing a folder whose plan is damaged: `to make the dataset again`."""

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
        if there and self.extends(folder):
            put_sealed(path, self._as_json())
            return []
        if not there or remove_unused_plan(folder):
            put_sealed(path, self._as_json())
            return differences
        raise self.refusal(folder, differences)

    def differences(self, folder: Path) -> list[str]:
        """Differences of this plan from the one that the folder was begun with; empty if that is the same.

        Raises:
            UserError: the plan that is there is damaged.
            FileNotFoundError: there is none.
        """
        try:
            old = storage.get_json(folder / PLAN_FILE, *PLAN_KEYS)
        except UserError as error:
            raise UserError(f"{error}; restore it, or remove {folder} {self.remade}") from None
        if old["config_hash"] == self.config_hash:
            return self._other_versions(old)
        differences = setting_differences(old["settings"], self.settings)
        differences += _file_differences({name: size for name, _, size in old["files"]}, self.found.files)
        differences += self._other_versions(old)
        return differences or ["where the splits end"]

    def _other_versions(self, old: Any) -> list[str]:
        """A line about objects whose versions differ from those of a plan; none for files that may have moved."""
        new = {file.name: file for file in self.found.files}
        versions = zip(old["files"], old.get(VERSIONS, ()), strict=False)
        changed = [(new[name], version) for (name, _, _), version in versions if version and name in new]
        changed = [(file, version) for file, version in changed if file.version not in ("", version)]
        if not changed:
            return []
        file, version = changed[0]
        return [
            f"objects changed: {len(changed)}, the first is {file.path} (ETag {version} then, {file.version} now); "
            "documents of two versions must not be mixed"
        ]

    def extends(self, folder: Path) -> bool:
        """Tell whether this is the plan in the folder with one generation more, which was asked for."""
        if not self.found.grows:
            return False
        old = storage.get_json(folder / PLAN_FILE, *PLAN_KEYS)
        return bool(old["config_hash"] == self._hashes[-2]) and not self._other_versions(old)

    def _remote_json(self, files: list[File]) -> dict[str, Any]:
        """Versions of objects, and where they are asked for; nothing of credentials."""
        if not any(file.is_object for file in files):
            return {}
        access = self.found.reader.remote
        where = {"endpoint": access.endpoint, "anonymous": access.anonymous}
        given = {key: value for key, value in where.items() if value}
        return {VERSIONS: [file.version for file in files], **({REMOTE: given} if given else {})}

    def _as_json(self) -> dict[str, Any]:
        files = list(itertools.chain.from_iterable(self.found.generations))
        number = {file.name: i for i, file in enumerate(files)}
        ends = itertools.accumulate(map(len, self.found.earlier))
        generations = [
            {"config_hash": config_hash, "files": count, "units": units}
            for (config_hash, units), count in zip(self.earlier, ends, strict=True)
        ]
        return {
            "config_hash": self.config_hash,
            "settings": self.settings,
            "splits": self.splits_in_order,
            "files": [[file.name, file.path, file.size] for file in files],
            # A unit is a list of [file, first byte, end byte].
            "units": [[[number[p.file.name], p.start, p.end] for p in unit.pieces] for unit in self.units],
            **({"generations": generations} if generations else {}),
            **self._remote_json(files),
        }


def has_units(folder: Path) -> bool:
    """Tell whether a unit in the folder of a plan was begun: it has a receipt, a file of a part, or a lease."""
    try:
        below = [path for path in folder.iterdir() if path.is_dir() and path.name not in {LEASES, *OTHER_STAGES}]
    except FileNotFoundError:
        return False
    written = (path for part in below for path in part.rglob("*") if not path.name.endswith(storage.TEMPORARY_SUFFIX))
    if any(path.is_file() for path in written):
        return True
    return any(isinstance(unit, int) and lease.is_running() is not False for unit, lease, _ in read_leases(folder))


def remove_unused_plan(folder: Path) -> bool:
    """Remove the plan in a folder if no unit of it was begun; returns whether none was.

    Workers take their lease and then look for the plan. So of a worker and this, one sees what the other did.
    """
    path = folder / PLAN_FILE
    if has_units(folder):
        return False
    if not path.exists():
        return True
    plan = storage.read_bytes(path)
    links.remove(path)
    if has_units(folder):
        storage.put(path, plan)
        return False
    return True


def setting_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each setting that differs."""
    words = {"code_version": "version of the stage", "tokenizer": "tokenizer (fingerprint)", "plugin": "plug-in"}
    # Where the splits end follows from the settings and the files.
    return [
        f"{words.get(name, name)}: {_shown(name, old.get(name))} then, {_shown(name, new.get(name))} now"
        for name in sorted({*old, *new} - {"ends of splits"})
        if old.get(name) != new.get(name)
    ]


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int) and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    if name == "chat_template" and isinstance(value, str):
        return f"one with the hash {value_hash(value)}"
    return repr(value)


def _file_differences(old: dict[str, int], files: list[File]) -> list[str]:
    new = {file.name: file.size for file in files}
    added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    kinds = {ADDED: added, "files gone": removed}
    result = [f"{kind}: {len(names)}, the first is {names[0]}" for kind, names in kinds.items() if names]
    if changed:
        name = changed[0]
        result.append(f"files changed: {len(changed)}, the first is {name} ({old[name]} bytes then, {new[name]} now)")
    return result


def make_data_dir(config: Config, *folders: Path) -> None:
    """Make `data.dir`, and folders below it.

    A job finds the one that its submission has made, or ends: its disk may not be mounted.

    Raises:
        FileNotFoundError: in a job, it is not there.
    """
    if run_identity.expected_id(config.run.dir) is None:
        config.data_dir.mkdir(parents=True, exist_ok=True)
    for folder in (config.data_dir, *folders):
        storage.make_below(config.data_dir, folder)


def freeze_alone(plan: FrozenPlan, config: Config, folder: Path, console: Console) -> None:
    """Freeze a plan; of two commands at a time with other plans, one is refused: here, or by its workers.

    Args:
        plan: of a source.
        config: the run.
        folder: of the plan, below `data.dir`.
        console: for messages.
    """
    make_data_dir(config, folder)
    if (folder / PLAN_FILE).exists() and not plan.differences(folder):
        return
    with take_when_free(folder, "plan", LeaseWatch(), lambda _: None):
        grows = plan.found.grows and plan.extends(folder)
        if differences := plan.freeze(folder):
            links.remove(folder / FAILURES_FILE, missing_ok=True)
            say(
                console,
                f"{plan.found.source.name}: planned again, since no unit was started ({'; '.join(differences)})",
            )
        elif grows:
            new, units = plan.found.generation(-1), len(plan.units) - plan.earlier[-1][1]
            say(
                console,
                f"{plan.found.source.name}: {counted(len(new.files), 'file')} added ({size(new.bytes)}, "
                f"{counted(units, 'unit')}), as generation {len(plan.earlier) + 1}",
            )
