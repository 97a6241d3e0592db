"""The folders in Hugging Face's format that a run has written of its checkpoints: `hf/step-00001000/`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.links import remove_folder
from pipeline.common.paths import StrPath
from pipeline.common.run_files import RunFiles
from pipeline.train.checkpoint.committed import place_in_abandoned, step_of


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
            self._remove(path, path.name)

    def remove(self, steps: Iterable[int]) -> None:
        """Remove the folders of some steps, each under another name first; what cannot be removed stays."""
        for step in steps:
            self._remove(self.path(step), storage.temporary(self.path(step)).name)

    def abandon_after(self, step: int) -> list[Path]:
        """Move the folders of later steps to `abandoned/`, as their checkpoints are; returns where they are now."""
        moved = []
        for later in (each for each in self.steps() if each > step):
            target = place_in_abandoned(self.path(later))
            links.replace(self.path(later), target)
            moved.append(target)
        return moved

    @staticmethod
    def _remove(path: Path, dying: str) -> None:
        with suppress(OSError, UserError):  # a link of somebody else in the place of the folder is left alone
            remove_folder(path, dying)
