"""Checkpoint policy: what is committed, what is valid, which one a run goes on from, and which ones go.

A checkpoint is a folder `step-00001000/` that got its name by one rename, after every file in it was flushed to disk.
`COMMIT` inside has the size and xxh3 of each file. All folders beside `latest` are one line of descent: a run that
goes back moves the later ones to `abandoned/`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data import store
from pipeline.data.hashing import file_hash
from pipeline.errors import UserError

_COMMIT = "COMMIT"
_STATE = "state.json"

Files = dict[str, tuple[int, str]]
"""File name -> (bytes, xxh3 in hexadecimal)."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Step, journal, fingerprints, config, versions, layout, parent and attempt."""
        return dict(store.get_json(self.path / _STATE))

    @property
    def fingerprint(self) -> str:
        """Hash of `COMMIT`, and so of everything in the checkpoint."""
        return f"{file_hash(self.path / _COMMIT):016x}"

    def _commit(self) -> Any:
        return store.get_json(self.path / _COMMIT)

    def problems(self, *, full: bool = True) -> list[str]:
        """What is wrong with it, each with the file's name; empty if it can be trusted.

        Args:
            full: read every file and compare its hash; otherwise only existence and size.
        """
        try:
            files = {name: (int(size), str(digest)) for name, (size, digest) in self._commit()["files"].items()}
        except FileNotFoundError:
            return [f"{self.path / _COMMIT} is missing"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{self.path / _COMMIT} is damaged: {error}"]
        found = []
        for name, (size, digest) in files.items():
            path = self.path / name
            if not path.is_file():
                found.append(f"{path} is missing")
            elif path.stat().st_size != size:
                found.append(f"{path} has {path.stat().st_size:,} bytes instead of {size:,}")
            elif full and record_of(path) != (size, digest):
                found.append(f"{path} has changed since it was written (xxh3 differs)")
        return found


def record_of(path: Path) -> tuple[int, str]:
    """Size and hash of a file as it is on disk, for `Files`."""
    return path.stat().st_size, f"{file_hash(path):016x}"


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_run(cls, run: Path) -> Checkpoints:
        """Those of a run folder."""
        return cls(run / "checkpoints")

    def all(self) -> list[Checkpoint]:
        """Committed checkpoints by step, without looking inside."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            number = path.name.removeprefix("step-")
            if path.name.startswith("step-") and number.isdigit():
                found.append(Checkpoint(path, int(number)))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """The one `latest` names; without a readable `latest`, the newest committed one."""
        everything = self.all()
        pointer = self.folder / "latest"
        name = pointer.read_text(errors="replace").strip() if pointer.exists() else ""
        named = [checkpoint for checkpoint in everything if checkpoint.path.name == name]
        return named[0] if named else (everything[-1] if everything else None)

    def at(self, step: int | None) -> Checkpoint:
        """The checkpoint of a step, or the latest one; verified.

        Raises:
            UserError: there is none, or it is damaged.
        """
        everything = self.all()
        found = self.latest() if step is None else next((c for c in everything if c.step == step), None)
        if found is None:
            have = ", ".join(str(c.step) for c in everything) or "none"
            wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
            todo = "choose one of them" if everything else "train first"
            raise UserError(f"{self.folder} does not have {wanted} (steps there: {have}); {todo}")
        if problems := found.problems():
            raise UserError(
                f"checkpoint {found.path.name} is damaged:\n  "
                + "\n  ".join(problems)
                + "\nname another one with --step; `pipeline train` goes on from the newest one that can be trusted"
            )
        return found

    def committed(self, step: int) -> Checkpoint:
        """The checkpoint of a step that another process has found; nothing is looked at."""
        return Checkpoint(self._path(step), step)

    def resumable(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The latest checkpoint that can be trusted, or None in a folder that never had one.

        Later ones, which are damaged or were never pointed to, are moved to `abandoned/` and reported.

        Raises:
            UserError: there are checkpoints, but each is damaged.
        """
        latest = self.latest()
        if latest is None:
            return None
        candidates = [checkpoint for checkpoint in self.all() if checkpoint.step <= latest.step]
        damaged: list[str] = []
        for checkpoint in reversed(candidates):
            problems = checkpoint.problems()
            if not problems:
                for line in damaged:
                    report(line)
                self._abandon_after(checkpoint.step, report)
                return checkpoint
            damaged.append(f"checkpoint {checkpoint.path.name} is damaged: " + "; ".join(problems))
        raise UserError(
            "no checkpoint can be trusted, and starting again from random weights would not be what you asked for:\n  "
            + "\n  ".join(damaged)
            + f"\nrestore the files, or move {self.folder} away to train from the start"
        )

    def begin(self, step: int, attempt: int) -> Path:
        """The empty folder in which a checkpoint is written, under a name that no reader takes for one.

        Args:
            step: steps trained.
            attempt: number of the attempt, part of the name.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        tmp = self.folder / f"step-{step:08d}.{attempt}.tmp"
        tmp.mkdir()
        return tmp

    def commit(
        self, tmp: Path, step: int, files: Files, state: dict[str, Any], before: Callable[[], None] = lambda: None
    ) -> Checkpoint:
        """Make what was written the checkpoint of a step, and point `latest` to it.

        Args:
            tmp: from `begin`.
            step: steps trained.
            files: all that was written there.
            state: goes to state.json, with the step and the parent.
            before: may refuse by raising; called when all is written and nothing is visible yet.
        """
        parent = self.latest()
        final = self._path(step)
        full_state = {**state, "step": step, "parent": parent.path.name if parent else None}
        store.put_json(tmp / _STATE, full_state)
        store.put_json(tmp / _COMMIT, {"step": step, "files": {**files, _STATE: record_of(tmp / _STATE)}})
        before()
        store.commit(tmp, final)
        store.put(self.folder / "latest", f"{final.name}\n".encode())
        return Checkpoint(final, step)

    def prune(self, keep: int) -> list[Checkpoint]:
        """Remove all but the newest `keep`; never the one `latest` names."""
        latest = self.latest()
        gone = [checkpoint for checkpoint in self.all()[:-keep] if latest is None or checkpoint.step != latest.step]
        for checkpoint in gone:
            # Under a name that no reader takes for a checkpoint, so that a kill in between leaves no half of one.
            dying = checkpoint.path.with_name(f"{checkpoint.path.name}.pruned.tmp")
            os.replace(checkpoint.path, dying)
            shutil.rmtree(dying, ignore_errors=True)
        return gone

    def clean(self, report: Callable[[str], None]) -> None:
        """Remove what a killed attempt left under temporary names. Only the holder of the run's lock may call this."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.glob(f"*{store.TEMPORARY_SUFFIX}")):
            report(f"removing {path.name}, which an earlier attempt did not finish")
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _abandon_after(self, step: int, report: Callable[[str], None]) -> None:
        for checkpoint in self.all():
            if checkpoint.step > step:
                folder = self.folder / "abandoned"
                folder.mkdir(exist_ok=True)
                target = folder / checkpoint.path.name
                number = 1
                while target.exists():
                    number += 1
                    target = folder / f"{checkpoint.path.name}.{number}"
                report(f"going on from step {step}; {checkpoint.path.name} moves to {target}")
                os.replace(checkpoint.path, target)
        if any(self.folder.glob("step-*")):
            store.put(self.folder / "latest", f"step-{step:08d}\n".encode())
