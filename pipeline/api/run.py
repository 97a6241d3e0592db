"""A run: its folder, its plan, its batches."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.api.dataset import DatasetReader
from pipeline.api.metrics import RunMetrics
from pipeline.api.settings import Settings, overrides
from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.format import counted, numbered
from pipeline.common.paths import StrPath
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import load_run
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import open_split
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.run.folder import read_metrics

if TYPE_CHECKING:
    from pipeline.api.batches import RunBatch
    from pipeline.data.loading.loader import Loader
    from pipeline.data.provenance.run import RunView
    from pipeline.eval.reports import Evaluation

WhichStep = int | Literal["latest", "best"] | None
"""A checkpoint: of a step, the latest one (also None), or the one with the lowest validation loss."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint of a run."""

    step: int
    """Steps trained before it was saved."""
    path: Path
    tokens: int | None
    """Targets drawn until then; None where the metrics do not have the step."""
    validation_loss: float | None
    """Loss measured at its step, of the set that `train.checkpoint.best_of` names or else of the validation split."""


class SampleLosses(NamedTuple):
    """Recorded losses of samples, in the order of the run: arrays of one length, an element per sample."""

    step: npt.NDArray[np.int64]
    """Step that had the sample, from 1."""
    sample: npt.NDArray[np.int64]
    """Number of the sample in the run, from 0."""
    source: npt.NDArray[Any]
    """Name of its source."""
    loss: npt.NDArray[np.float32]
    """Mean cross entropy of its targets that count, in nats, as it was in training, rounded to fp16. NaN: no target
    counted, or nothing is recorded. inf: it was not finite."""


class Run:
    """A run, trained, in training or planned.

    Everything is read when it is asked for: of a run in training, asking again gives what is there by then. Nothing is
    written. Steps are numbered from 1, as in `metrics.jsonl`, checkpoints and `pipeline data where --step`.

    Args:
        path: Run folder; or a run file, also of a run that has not begun: then its plan is made of the file.
        settings: Values by key that take the place of those in the file, as `KEY=VALUE` on the command line.

    Attributes:
        path: Run folder; it need not exist where a run file was given.
        config: The resolved run file; its attributes are the keys of `docs/config.md`
            (`run.config.train.sequence_length`).

    Raises:
        UserError: There is no such run or run file, or it has a mistake.
    """

    def __init__(self, path: StrPath, settings: Settings | None = None) -> None:
        self._given, self._settings = Path(path), overrides(settings)
        if self._given.exists():  # else it is the name of one that ships with the package
            self._given = Path(os.path.abspath(path))
        self.config: Config = load_run(self._given, self._settings)
        self.path: Path = self.config.run.dir
        self._opened: tuple[Any, RunView] | None = None
        self._loaders: list[tuple[RunView, Loader]] = []

    @classmethod
    def plan(cls, file: StrPath, settings: Settings | None = None) -> Run:
        """The run that a run file would train: its data has to be preprocessed, and nothing has to be trained.

        Where its run folder has begun already, steps that are trained are those of the run, as `pipeline train` would
        resume it; with `settings={"run.dir": ...}` of a new folder all of them are planned.

        Raises:
            UserError: As for `Run`.
        """
        return cls(file, settings)

    def __repr__(self) -> str:
        checkpoints = self._files.checkpoint_steps()
        state = f"{counted(self.done, 'step')} trained" if self._begun else "not begun"
        saved = f"checkpoints: {', '.join(map(str, checkpoints))}" if checkpoints else "no checkpoints"
        return f"Run({str(self.path)!r}: {state}, {saved})"

    def __getstate__(self) -> dict[str, Any]:
        # Copies, here and in other processes, open the data themselves.
        closed: dict[str, Any] = {"_opened": None, "_loaders": []}
        return {key: value for key, value in vars(self).items() if key != "tokenizer"} | closed

    @property
    def done(self) -> int:
        """Steps that are trained."""
        from pipeline.data.provenance.run import steps_done

        return steps_done(self.path)

    @property
    def steps(self) -> int:
        """Steps of the whole run, by its plan.

        Raises:
            UserError: The data is not there; as for `batch`.
        """
        return self._view().steps

    def metrics(self) -> RunMetrics:
        """Metrics of the steps that are trained; empty before the first one.

        Where a run has gone back to an earlier checkpoint, rows of later steps come back as they are trained again.
        """
        rows = read_metrics(self.path)
        done = self.done
        return RunMetrics([row for row in rows if row["step"] <= done])

    def ledger(self) -> list[dict[str, Any]]:
        """Rows of `ledger.jsonl`: begin and end of each stage and attempt."""
        return self._files.ledger_lines()

    def journal(self) -> dict[str, Any]:
        """Plan of the data as `journal.json` has it.

        Raises:
            UserError: The training has not begun.
        """
        path = self._files.journal
        try:
            return dict(storage.get_json(path))
        except FileNotFoundError:
            raise UserError(
                f"{path} does not exist: the training has not begun; `batch` shows what it will read"
            ) from None

    def losses(self, start: int = 1, stop: int | None = None) -> SampleLosses:
        """Losses of the samples of steps [start, stop), which `train.metrics.windows: true` records.

        Args:
            start: First step; those before the first one that is recorded are left out.
            stop: The one behind the last step; by default the one behind the last one recorded.

        Raises:
            UserError: The run records none.
        """
        from pipeline.data.provenance.loss_file import LossFile
        from pipeline.data.provenance.loss_stream import loss_blocks, recorded_steps

        view = self._view()
        view = view.trained or view
        with LossFile(self._files.losses) as file:
            first, end = recorded_steps(view.sampler, file)
            steps = max(first, start - 1), end if stop is None else min(end, stop - 1)
            blocks = list(loss_blocks(view.sampler, file, steps))
        names = np.array(view.journal.names, object)
        if not blocks:
            nothing = np.zeros(0, np.int64)
            return SampleLosses(nothing, nothing, np.zeros(0, object), np.zeros(0, np.float32))
        step, sample, source = (
            np.concatenate([getattr(block, name) for block in blocks]) for name in ("step", "sample", "source")
        )
        loss = np.concatenate([np.where(block.recorded, block.loss, np.float32(np.nan)) for block in blocks])
        return SampleLosses(step, sample, names[source], loss)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Committed checkpoints, ascending by step; whether they are sound is not looked at."""
        rows = {row["step"]: row for row in read_metrics(self.path)}
        return [
            CheckpointInfo(step, path, rows.get(step, {}).get("tokens"), self._validation_loss(rows.get(step, {})))
            for step, path in self._files.checkpoint_steps().items()
        ]

    def evaluations(self) -> list[Evaluation]:
        """Reports of evaluations of checkpoints in the run folder, ascending by step.

        Each has `step`, `split`, `weights` (`model` or `ema`), `scores` (`loss`, `perplexity` and `bits_per_byte` of
        all sources together), `sources` (the same by source), `sets` (by named set) and `time`. A damaged report is
        left out with a warning.
        """
        from pipeline.eval.reports import read_evaluations

        found, damaged = read_evaluations(self.path)
        for path in damaged:
            warnings.warn(f"{path} is damaged and left out; evaluate again", stacklevel=2)
        return found

    def dataset(self, source: str, split: str = TRAIN) -> DatasetReader:
        """Dataset of a source of the run, as the run reads it.

        Raises:
            UserError: The run has no such source, or it has no such split.
        """
        inputs = {each.name: each for each in self.config.data.inputs.values()}
        if source not in inputs:
            raise UserError(f"{self.path} has no source {source!r}; its sources: {', '.join(inputs)}")
        return DatasetReader(open_split(self.config, inputs[source], split))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the run's data: `encode(text)`, `decode(ids)`, `vocab_size`, `end_of_document` (an id)."""
        return self.dataset(self.config.data.sources[0].name).tokenizer

    def batch(self, step: int) -> RunBatch:
        """The global batch of a step: of one that is trained as it was read, of a later one as it will be.

        Any step, in any order, each at the same cost. The same for any number of processes.

        Args:
            step: From 1 to `steps`.

        Raises:
            UserError: There is no such step; the data is not there or is not the one that the run was begun with.
        """
        view = self._view()
        first = self._checked(step, view)
        return self._batch(view, first)

    def batches(self, start: int = 1, stop: int | None = None) -> Iterator[RunBatch]:
        """The global batches of steps [start, stop), in order.

        Args:
            start: First step, from 1.
            stop: The one behind the last step, at most `steps + 1`, which is the default.

        Raises:
            UserError: As for `batch`.
        """
        view = self._view()
        last = view.steps + 1 if stop is None else operator.index(stop)
        if last > start:
            self._checked(start, view)
            self._checked(last - 1, view)
        return (self._batch(view, step) for step in range(start - 1, last - 1))

    def where(self, step: int, *, ids: bool = False) -> dict[str, Any]:
        """Samples of a step, the documents in them, and where those came from, as `pipeline data where --json` has it.

        Args:
            step: From 1 to `steps`.
            ids: Read ids of documents from the source files where they are not known without.

        Raises:
            UserError: As for `batch`.
        """
        from pipeline.data.provenance.step_to_documents import where

        view = self._view()
        self._checked(step, view)
        return where(view, step, ids=ids, say=lambda line: None).json

    def best_step(self) -> int:
        """Step of the checkpoint with the lowest validation loss.

        Raises:
            UserError: There is no checkpoint, or none whose step was validated.
        """
        from pipeline.train.checkpoint.manager import Checkpoints

        found = self.checkpoints()
        if not found:
            raise Checkpoints.of_run(self.path).not_there(None)
        known = [(each.validation_loss, each.step) for each in found if each.validation_loss is not None]
        if not known:
            raise UserError(
                f"no checkpoint of {self.path} has a validation loss at its step, so none is the best: name a step "
                f"({', '.join(str(each.step) for each in found)}), or let train.validation.every_steps divide "
                "train.checkpoint.every_steps"
            )
        return min(known)[1]

    @property
    def _files(self) -> RunFiles:
        return RunFiles(self.path)

    @property
    def _begun(self) -> bool:
        return self._files.journal.exists() or self._files.checkpoints.exists()

    def _validation_loss(self, row: dict[str, Any]) -> float | None:
        best_of = self.config.train.checkpoint.best_of
        loss = row.get("validation_loss") if best_of is None else row.get("validation", {}).get(best_of, {}).get("loss")
        return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None

    def _view(self) -> RunView:
        """The plan of the run; read again when it may have changed. Training by it changes its `done` alone."""
        from pipeline.data.provenance.run import open_view

        try:
            journal = self._files.journal.stat()
            state: Any = journal.st_mtime_ns, journal.st_size, journal.st_ino
        except FileNotFoundError:
            state = None
        now = state, max(self._files.checkpoint_steps(), default=0), self.done
        if self._opened is not None:
            before, view = self._opened
            if now == before:
                return view
            by_journal = not (view.trained or view.about or view.warnings)
            if by_journal and now[0] == before[0] and now[1] >= before[1] and now[2] >= before[2]:
                view.done = now[2]
                self._opened = now, view
                return view
        view = open_view(self._given, self._settings)
        for warning in view.warnings:
            warnings.warn(warning, stacklevel=3)
        self._opened, self._loaders = (now, view), []
        return view

    def _checked(self, step: int, view: RunView) -> int:
        """A step, counted from 0."""
        number, trained = operator.index(step), view.trained or view
        last = max(trained.done, view.steps)
        if not 1 <= number <= last:
            reason = f" ({view.length.reason} ends it)" if last == view.steps else ""
            raise UserError(f"step {number}: {self.path} has {numbered('step', 1, last)} only{reason}")
        return number - 1

    def _batch(self, view: RunView, step: int) -> RunBatch:
        from pipeline.api.batches import read_batch

        if view.trained is not None and step < view.trained.done:
            view = view.trained
        return read_batch(view, self._loader(view), step)

    def _loader(self, view: RunView) -> Loader:
        from pipeline.data.loading.loader import open_loader

        for known, loader in self._loaders:
            if known is view:
                return loader
        loader = open_loader(view.config, view.datasets, journal=view.journal, whole_steps=True)
        self._loaders.append((view, loader))
        return loader


def checkpoint_step(run: Run, which: WhichStep) -> int | None:
    """Step of a checkpoint that was named; None for the latest one.

    Raises:
        UserError: Nothing can be named like this, or no checkpoint is the best.
    """
    if which is None or which == "latest":
        return None
    if which == "best":
        return run.best_step()
    if isinstance(which, str):
        raise UserError(f"step={which!r}: give a number, 'latest' or 'best'")
    return operator.index(which)


def changed_config(run: Run, settings: Settings | None) -> Config:
    """The run file of a run with further settings."""
    return run.config if not settings else load_run(run._given, [*run._settings, *overrides(settings)])
