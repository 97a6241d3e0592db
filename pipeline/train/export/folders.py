"""The folders in Hugging Face's format that a run has written of its checkpoints: `hf/step-00001000/`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.common import storage
from pipeline.common.paths import StrPath
from pipeline.common.run_files import RunFiles
from pipeline.train.checkpoint.committed import step_of
from pipeline.train.checkpoint.manager import ABANDONED


class ExportFolders:
    """The exports of a run folder. A folder has its name when all of it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_run(cls, run: StrPath) -> ExportFolders:
        """The exports of a run folder."""
        return cls(RunFiles(Path(run)).hf)

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of those that are there, ascending."""
        return sorted(step for path in self.folder.glob("step-*") if (step := step_of(path.name)) is not None)

    def unfinished(self) -> dict[Path, int | None]:
        """Folders that are being written or removed, or were when a process was killed, and the steps of the former."""
        found = self.folder.glob(f".step-*{storage.TEMPORARY_SUFFIX}")
        return {path: step_of(path.name[1:].partition(".")[0]) for path in found}

    def clean(self) -> None:
        """Remove what is unfinished. Only the holder of the run's lock may call this, while it exports nothing."""
        for path in self.unfinished():
            shutil.rmtree(path, ignore_errors=True)

    def remove(self, steps: Iterable[int]) -> None:
        """Remove the folders of some steps, each under another name first."""
        for step in steps:
            with suppress(FileNotFoundError):
                dying = storage.temporary(self.path(step))
                os.replace(self.path(step), dying)
                shutil.rmtree(dying)

    def abandon_after(self, step: int) -> list[Path]:
        """Move the folders of later steps to `abandoned/`, as their checkpoints are; returns where they are now."""
        moved = []
        for later in (each for each in self.steps() if each > step):
            target, number = self.folder / ABANDONED / self.path(later).name, 1
            target.parent.mkdir(exist_ok=True)
            while target.exists():
                number += 1
                target = target.with_name(f"{self.path(later).name}.{number}")
            os.replace(self.path(later), target)
            moved.append(target)
        return moved
