"""The optimizer's states beside exported weights: the moments of AdamW and its count of steps. Needs no torch.

`export.json` has them under `optimizer`, with size and hash of each file. The moments lie in
`optimizer/exp_avg` and `optimizer/exp_avg_sq` of the folder, as safetensors in fp32 under the names of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import EXPORT_ORIGIN
from pipeline.train.checkpoint.committed import Files

OPTIMIZER = "optimizer"
"""Key in `export.json`, and folder."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""First and second moments; the names of torch's states, and of the folders."""
_OPTION = "train.init_from.optimizer"
_MOST = 2**53


@dataclass(frozen=True)
class ExportedOptimizer:
    """States of an optimizer in a folder of exported weights."""

    path: Path
    """Folder of the export."""
    step: int
    """Updates that it made."""
    tokens: int
    """Tokens that its run has trained on."""
    settings: Mapping[str, float | list[float]]
    """Values of `train.optimizer` that it was used with, by key."""
    files: Mapping[str, Files]
    """Moments -> size and hash of each file."""

    @classmethod
    def open(cls, folder: Path) -> ExportedOptimizer:
        """The states that a folder has. Whether its files are as they were written is not checked here.

        Raises:
            UserError: it has none, is not an export, or its record is damaged.
        """
        file = folder / EXPORT_ORIGIN
        if not file.is_file():
            raise UserError(
                f"{_OPTION}: {folder} is not a folder that `pipeline convert from-megatron --optimizer` wrote: it has "
                f"no {EXPORT_ORIGIN}. `pipeline fork` continues a run of this program with its optimizer"
            )
        about = storage.get_json(file).get(OPTIMIZER)
        if about is None:
            raise UserError(
                f"{_OPTION}: {folder} has weights alone; convert them again with `pipeline convert from-megatron "
                f"--optimizer`, or set {_OPTION}=false"
            )
        try:
            return cls._checked(folder, file, about)
        except UserError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is damaged: {OPTIMIZER} cannot be read ({error}); convert it again") from None

    @classmethod
    def _checked(cls, folder: Path, file: Path, about: Any) -> ExportedOptimizer:
        if about["type"] != "adamw":
            raise UserError(f"{_OPTION}: {file}: type {storage.shown(str(about['type']))} is not adamw")
        counts = {key: about[key] for key in ("step", "tokens")}
        if any(type(value) is not int or not 0 <= value < _MOST for value in counts.values()):
            raise ValueError(f"{counts} are not counts")
        settings = {key: about[key] for key in ("lr", "betas", "eps", "weight_decay")}
        numbers = [settings["lr"], *settings["betas"], settings["eps"], settings["weight_decay"]]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
            raise ValueError(f"{settings} are not numbers")
        files = {
            moment: {
                storage.plain_name(name, file): (int(size), str(digest))
                for name, (size, digest) in about["files"][moment].items()
            }
            for moment in MOMENTS
        }
        return cls(folder, counts["step"], counts["tokens"], settings, files)

    def folder_of(self, moment: str) -> Path:
        """Folder with the files of some moments."""
        return self.path / OPTIMIZER / moment

    @property
    def all_files(self) -> Files:
        """Size and hash of each file, by its path in the folder."""
        return {
            f"{OPTIMIZER}/{moment}/{name}": record
            for moment, files in self.files.items()
            for name, record in files.items()
        }
