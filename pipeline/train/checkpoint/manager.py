"""Checkpoints as files: which are committed and valid, which one a run resumes from, which ones are removed.

A checkpoint is a folder `step-00001000/` that got its name by one rename, after every file in it was flushed to disk.
`COMMIT` inside has the size and xxh3 of each file; `state.json` names the parent, the checkpoint that it descends from.
All folders beside `latest` are one line of descent: a run that goes back moves the later ones to `abandoned/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.common import links, storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.links import refuse_link_of_others, remove_folder
from pipeline.common.paths import StrPath
from pipeline.common.run_files import CHECKPOINT_STATE, RunFiles
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.train.checkpoint.committed import (
    ABANDONED,
    COMMIT,
    UNREADABLE,
    Checkpoint,
    Files,
    Parent,
    place_in_abandoned,
    record_of,
    step_of,
    validation_losses,
    wait_until_visible,
)
from pipeline.train.checkpoint.policy import best, to_prune

__all__ = ["Checkpoint", "Checkpoints", "Files", "NotRemoved", "Verify", "record_of"]

_LATEST = "latest"
_GOING_BACK = "going-back"
_FOLLOWED = "resumed-from.json"

Verify = Callable[[Checkpoint], list[str]]
"""A checkpoint -> what is wrong with it, as `Checkpoint.problems` has it."""


class NotRemoved(MachineError):
    """Checkpoints that could not be removed; others may have been.

    Args:
        names: reason -> their names.
        gone: those that were removed.
    """

    def __init__(self, names: Mapping[str, Sequence[str]], gone: list[Checkpoint]) -> None:
        super().__init__("; ".join(f"{', '.join(each)} cannot be removed ({why})" for why, each in names.items()))
        self.reasons = frozenset(names)
        self.gone = gone


class Checkpoints:
    """The checkpoints of a run folder. One process at a time, the holder of the run's lock, may change them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_run(cls, run: StrPath) -> Checkpoints:
        """The checkpoints of a run folder."""
        return cls(RunFiles(Path(run)).checkpoints)

    def all(self) -> list[Checkpoint]:
        """Committed checkpoints by step, without looking inside."""
        if not self.folder.is_dir():
            return []
        steps = {path: step_of(path.name) for path in self.folder.iterdir()}
        found = [Checkpoint(path, step) for path, step in steps.items() if step is not None]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """The checkpoint to resume from: the one that `latest` names, or one committed after it that descends from it.

        A kill between a commit and the move of `latest` leaves such ones, and they are as good as any. Without a
        readable `latest` it is the newest committed one.
        """
        everything = self.all()
        by_name = {checkpoint.path.name: checkpoint for checkpoint in everything}
        if back := by_name.get(self._read(_GOING_BACK)):
            return back
        current = by_name.get(self._read(_LATEST))
        if current is None:
            return everything[-1] if everything else None
        for later in everything:
            if later.step > current.step and _descends(later, current):
                current = later
        return current

    def at(self, step: int | None, verify: Verify = Checkpoint.problems) -> Checkpoint:
        """The checkpoint of a step, or the latest one; verified.

        Raises:
            UserError: there is none, or it is damaged.
        """
        found = self.find(step)
        if problems := verify(found):
            raise UserError(
                f"checkpoint {found.path.name} is damaged:\n  "
                + "\n  ".join(problems)
                + "\nname another one with --step; `pipeline train` resumes from the newest valid one"
            )
        return found

    def find(self, step: int | None) -> Checkpoint:
        """The checkpoint of a step, or the latest one, good or bad.

        Raises:
            UserError: there is none.
        """
        found = self.latest() if step is None else self._by_step().get(step)
        if found is None:
            raise self.not_there(step)
        return found

    def preferred(self, step: int | None) -> Checkpoint | None:
        """The checkpoint of a step if it is there, else the latest one; None in a folder without any."""
        return (None if step is None else self._by_step().get(step)) or self.latest()

    def not_there(self, step: int | None) -> UserError:
        """The error where there is no checkpoint of a step, or none at all."""
        everything = self.all()
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        todo = "choose one of them" if everything else "train first"
        message = f"{self.folder} does not have {wanted} (steps there: {_steps(everything)}); {todo}"
        if any(checkpoint.step == step for checkpoint in self.abandoned()):
            message += f"; {self._abandoned} has one that a rewind abandoned"
        return UserError(message)

    def committed(self, step: int) -> Checkpoint:
        """The checkpoint of a step that rank 0 has found, as soon as it is seen from here."""
        found = Checkpoint(self.step_folder(step), step)
        wait_until_visible(found.path / COMMIT)
        return found

    def resumable(self, report: Callable[[str], None], verify: Verify = Checkpoint.problems) -> Checkpoint | None:
        """The latest checkpoint that can be trusted, or None in a folder that never had one.

        Of a damaged one the parents are tried. `resume_from` is what comes next, when nothing else speaks against it.

        Args:
            report: gets a line per checkpoint that is skipped.
            verify: looks for damage.

        Raises:
            UserError: there are checkpoints, or were, but none can be trusted.
        """
        head = self._head(report)
        if head is None:
            if (self.folder / _LATEST).exists():
                raise UserError(
                    f"{self.folder / _LATEST} names {self._read(_LATEST) or 'nothing'}, but no checkpoint is left; "
                    "refusing to restart from random weights. Restore a checkpoint, or set run.dir to a new folder to "
                    "train from scratch"
                )
            return None
        later = [each for each in self.all() if each.step > head.step]
        damaged = [_damaged(each, problems) for each in later if (problems := each.problems(full=False))]
        for checkpoint in self._line(head, damaged.append):
            if not (problems := verify(checkpoint)):
                for line in damaged:
                    report(line)
                return checkpoint
            damaged.append(_damaged(checkpoint, problems))
        raise UserError(
            "no checkpoint is valid; refusing to restart from random weights:\n  "
            + "\n  ".join(damaged)
            + "\nrestore the files, or set run.dir to a new folder to train from scratch"
        )

    def rewind(
        self, before: int, report: Callable[[str], None], verify: Verify = Checkpoint.problems
    ) -> Checkpoint | None:
        """The newest checkpoint of at most `before` steps that can be trusted; all later ones are abandoned.

        Args:
            before: steps.
            report: gets a line per checkpoint that is abandoned or skipped.
            verify: looks for damage.
        """
        head = self._head(report)
        for checkpoint in self._line(head, report) if head else ():
            if checkpoint.step > before:
                continue
            if not (problems := verify(checkpoint)):
                self._abandon_after(checkpoint, report)
                return checkpoint
            report(_damaged(checkpoint, problems))
        return None

    def follow(self, step: int, report: Callable[[str], None], verify: Verify = Checkpoint.problems) -> Checkpoint:
        """The checkpoint of a step that the user has named to resume from; `resume_from` is what comes next.

        Asked for again, as a job does that is started again with the same run file, it stays where the run has come
        since then: the latest one that can be trusted.

        Raises:
            UserError: it is not there, or damaged.
        """
        head = self._head(report)
        # Since it was followed it may be gone, by retention, or another one, after a rewind to before it.
        found, again = self._by_step().get(step), self.was_followed(step)
        if head is None or (found is None and not again):
            raise self.not_there(step)
        if found is None or (again and head.step > step):
            latest = self.resumable(report, verify)
            assert latest is not None, "there was a head"
            before, now = f"resume.from={step} was applied before", f"resuming from step {latest.step}"
            if found is None:
                report(f"{before}, and its checkpoint is gone: {now}")
            elif latest.step > step:
                report(f"{before}: {now}; to rewind to step {step} once more, remove {self.followed_file}")
            return latest
        if problems := verify(found):
            raise UserError(
                f"resume.from is {step}, but checkpoint {found.path.name} is damaged:\n  "
                + "\n  ".join(problems)
                + f"\nname another step ({_steps(self.all())}), or leave resume.from out to resume from the newest "
                "valid one"
            )
        return found

    def resume_from(self, checkpoint: Checkpoint, followed: int | None, report: Callable[[str], None]) -> None:
        """Resume the run from a checkpoint: later ones move to `abandoned/`.

        Args:
            checkpoint: from `resumable` or `follow`.
            followed: the step that `follow` was asked for; None if none was, and any is followed the next time.
            report: gets a line per checkpoint that is abandoned.
        """
        self._abandon_after(checkpoint, report)
        if followed is None:
            links.remove(self.followed_file, missing_ok=True)
        elif self._followed() != {"step": followed}:
            storage.put_json(self.followed_file, {"step": followed})

    def saved_last(self) -> tuple[int, list[str]]:
        """The step that `latest` names, 0 if that cannot be read; and why it cannot be resumed from, if it cannot."""
        path, name = self.folder / _LATEST, self._read(_LATEST)
        if (step := step_of(name)) is not None:
            is_folder = (self.folder / name).is_dir()
            return step, [] if is_folder else [f"{path} names {name}, but {self.folder / name} is not there"]
        if name:
            return 0, [f"{path} is damaged: it says {storage.shown(name)!r}, which is not the name of a checkpoint"]
        return 0, [f"{path} is empty" if path.exists() else f"{path} is missing"]

    @property
    def followed_file(self) -> Path:
        """File with the step of `resume.from` that was followed, so that it is followed once."""
        return self.folder / _FOLLOWED

    def was_followed(self, step: int) -> bool:
        """True if the run went back to this step because `resume.from` named it, and has the same one since."""
        followed = self._followed()
        return isinstance(followed, dict) and followed.get("step") == step

    def begin(self, step: int, attempt: int) -> Path:
        """The empty folder in which a checkpoint is written, under a name that no reader takes for one.

        Args:
            step: steps trained.
            attempt: number of the attempt, part of the name.
        """
        self.folder.mkdir(exist_ok=True)
        refuse_link_of_others(self.folder)
        # Never the folder of another save: DCP writes its files in place, and a process that is killed meanwhile leaves
        # old ones beside new ones, which load without an error.
        tmp = self.folder / f"step-{step:08d}.{attempt}{storage.TEMPORARY_SUFFIX}"
        if tmp.exists():  # of this attempt's own, where a save failed and its files could not be removed
            links.remove_tree(tmp)
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
        final = Checkpoint(self.step_folder(step), step)
        if self._is_of(final, state.get("attempt")):
            # Committed by an earlier try, of which only the flush of the folder after the rename has failed.
            before()
            links.remove_tree(tmp, ignore_errors=True)
        else:
            parent = self.latest()
            origin = Parent(parent.path.name, parent.step, _fingerprint(parent)).to_json() if parent else None
            storage.put_json(tmp / CHECKPOINT_STATE, {**state, "step": step, "parent": origin})
            everything = {**files, CHECKPOINT_STATE: record_of(tmp / CHECKPOINT_STATE)}
            storage.put_json(tmp / COMMIT, {"step": step, "time": time.time(), "files": everything})
            before()
            if final.path.exists():
                links.replace(final.path, place_in_abandoned(final.path))
            storage.commit(tmp, final.path)
        # It is committed, and found as a child of what `latest` names, where a full disk has no room for that one line.
        with suppress(OSError):
            self._point_to(final)
        return final

    def prune(
        self, config: CheckpointConfig, used: Iterable[int] = (), *, full: bool = False, dry_run: bool = False
    ) -> list[Checkpoint]:
        """Remove checkpoints that the policy does not keep; never the one to resume from, nor the last good one.

        Args:
            config: the policy's numbers.
            used: steps of those that are being read, which stay.
            full: trust only what has been read and compared with its hashes. Otherwise sizes are enough.
            dry_run: only tell what would go.

        Raises:
            NotRemoved: as for `remove`.
        """
        everything, latest, last_good = self.all(), self.latest(), self.last_good(full=full)
        steps = to_prune(
            config,
            [checkpoint.step for checkpoint in everything],
            latest.step if latest else None,
            [*used, *([last_good.step] if last_good else []), *best(config, validation_losses(everything, config))],
        )
        gone = [checkpoint for checkpoint in everything if checkpoint.step in steps]
        return gone if dry_run else self.remove(gone)

    def last_good(self, *, full: bool) -> Checkpoint | None:
        """The newest one that can be trusted, by its hashes or by its sizes alone."""
        return next((each for each in reversed(self.all()) if not each.problems(full=full)), None)

    def remove(self, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
        """Remove checkpoints; returns those that are gone. One that another process has removed is skipped.

        Raises:
            NotRemoved: when the others are gone. What cannot be removed stays, or files of it under a temporary name.
            UserError: somebody else has put a link in the place of their folder.
        """
        gone, failed = [], dict[str, list[str]]()
        refuse_link_of_others(self.folder)
        for checkpoint in checkpoints:
            # Under a name that no reader takes for a checkpoint, so that a kill in between leaves no half of one.
            dying = checkpoint.path.with_name(f"{checkpoint.path.name}.pruned{storage.TEMPORARY_SUFFIX}")
            try:
                remove_folder(checkpoint.path, dying.name)
                gone.append(checkpoint)
            except OSError as error:
                if checkpoint.path.exists() or dying.exists():
                    name = str(checkpoint.path.relative_to(self.folder))
                    failed.setdefault(error.strerror or str(error), []).append(name)
        if failed:
            raise NotRemoved(failed, gone)
        return gone

    def clean(self, report: Callable[[str], None]) -> None:
        """Remove what a killed attempt left under temporary names. Only the holder of the run's lock may call this."""
        refuse_link_of_others(self.folder)
        for path in self.unfinished():
            report(f"removing {path.name}, which an earlier attempt did not finish")
            try:
                if path.is_dir():
                    links.remove_tree(path)
                else:
                    links.remove(path)
            except OSError as error:  # it stays, under a name that nobody else uses
                report(f"{path} could not be removed: {error.strerror}")

    def unfinished(self) -> list[Path]:
        """Folders and files that are being written or removed, or were when an attempt was killed."""
        return sorted(self.folder.glob(f"*{storage.TEMPORARY_SUFFIX}"))

    def abandoned(self) -> list[Checkpoint]:
        """Checkpoints that a run has gone back from, by step."""
        steps = {path: step_of(path.name.partition(".")[0]) for path in self._abandoned.glob("step-*")}
        found = [Checkpoint(path, step) for path, step in steps.items() if step is not None]
        return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path.name))

    @property
    def _abandoned(self) -> Path:
        return self.folder / ABANDONED

    def step_folder(self, step: int) -> Path:
        """The folder of the checkpoint of a step, which need not be there."""
        return self.folder / f"step-{step:08d}"

    def _read(self, name: str) -> str:
        try:
            return storage.read_bytes(self.folder / name, storage.SMALL_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _by_step(self) -> dict[int, Checkpoint]:
        return {checkpoint.step: checkpoint for checkpoint in self.all()}

    def _followed(self) -> Any:
        try:
            return storage.get_json(self.followed_file)
        except (FileNotFoundError, UserError):
            return None

    def _head(self, report: Callable[[str], None]) -> Checkpoint | None:
        """`latest`, after finishing what a killed attempt has begun."""
        head = self.latest()
        if back := self._read(_GOING_BACK):
            if head is not None and head.path.name == back:
                self._abandon_after(head, report)
            links.remove(self.folder / _GOING_BACK, missing_ok=True)
        return head

    def _line(self, head: Checkpoint, report: Callable[[str], None]) -> Iterator[Checkpoint]:
        """A checkpoint and what it descends from, newest first.

        Where the parent has been removed, or its name cannot be read, the next older one stands for it, since the
        folder holds one line of descent.
        """
        current: Checkpoint | None = head
        while current is not None:
            yield current
            limit, parent = current.step, None
            with suppress(*UNREADABLE):  # then nothing is known of where it comes from
                parent = current.parent()
                if parent is None:
                    return
            older = [each for each in self.all() if each.step < limit]
            if parent is not None and parent.step is not None:
                older = [each for each in older if each.step <= parent.step]
            below = older[-1] if older else None
            if below is not None and parent is not None and below.path.name == parent.name:
                now = _fingerprint(below)
                if parent.fingerprint is not None and now is not None and now != parent.fingerprint:
                    report(
                        f"{below.path.name} is not the checkpoint that {current.path.name} descends from (fingerprint "
                        f"{now} instead of {parent.fingerprint}); skipped"
                    )
                    below = older[-2] if len(older) > 1 else None
            current = below

    def _is_of(self, checkpoint: Checkpoint, attempt: Any) -> bool:
        """True if a checkpoint is there, whole, and was made by this attempt at the run."""
        if attempt is None or not checkpoint.path.exists() or checkpoint.problems(full=False):
            return False
        return bool(checkpoint.state().get("attempt") == attempt)

    def _point_to(self, checkpoint: Checkpoint) -> None:
        storage.put(self.folder / _LATEST, f"{checkpoint.path.name}\n".encode())

    def _abandon_after(self, checkpoint: Checkpoint, report: Callable[[str], None]) -> None:
        """Move `latest` to a checkpoint, and all later ones away.

        A kill in between must not let them be taken for what was committed after `latest`: `going-back` says so.
        """
        later = [each for each in self.all() if each.step > checkpoint.step]
        if later:
            storage.put(self.folder / _GOING_BACK, f"{checkpoint.path.name}\n".encode())
        if self._read(_LATEST) != checkpoint.path.name:
            self._point_to(checkpoint)
        for each in reversed(later):
            target = place_in_abandoned(each.path)
            report(f"resuming from step {checkpoint.step}; moving {each.path.name} to {target}")
            links.replace(each.path, target)
        if later:
            storage.sync(self.folder)
            links.remove(self.folder / _GOING_BACK, missing_ok=True)


def _descends(child: Checkpoint, parent: Checkpoint) -> bool:
    """True if a checkpoint is whole, by its sizes, and was committed as the child of another one."""
    try:
        origin = child.parent()
    except UNREADABLE:
        return False
    if origin is None or origin.name != parent.path.name or child.problems(full=False):
        return False
    return origin.fingerprint in (None, _fingerprint(parent))


def _damaged(checkpoint: Checkpoint, problems: Sequence[str]) -> str:
    return f"checkpoint {checkpoint.path.name} is damaged: {'; '.join(problems)}"


def _fingerprint(checkpoint: Checkpoint) -> str | None:
    """The fingerprint of a checkpoint that may be damaged; None if it cannot be read."""
    try:
        return checkpoint.fingerprint
    except OSError:
        return None


def _steps(checkpoints: Iterable[Checkpoint]) -> str:
    return ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
