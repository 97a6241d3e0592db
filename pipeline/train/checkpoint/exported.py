"""Weights in a folder outside of a run's checkpoints: exported, averaged or converted. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.run_files import EXPORT_ORIGIN, RunFiles
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.committed import COMMIT, Checkpoint, Files

HF_CONFIG = "config.json"
"""File in the folder of a model in Hugging Face's format."""
WEIGHTS_OPTION = "--weights"
_KEYS = ("files", "weights", "fingerprints", "run", "checkpoints")

Weights = Literal["model", "ema"]
WeightsOf = int | Path | None
"""Weights that a command reads: of a checkpoint of the run, by its step (None: the latest one), or in a folder."""


def choose_weights(step: int | None, folder: Path | None) -> WeightsOf:
    """The weights that `--step` and `--weights` name.

    Raises:
        UserError: both are given.
    """
    if folder is None:
        return step
    if step is not None:
        raise UserError(
            f"--step {step} and --weights {folder} exclude each other: --step names a checkpoint of the run, --weights "
            "a folder with other weights"
        )
    return Path(os.path.abspath(folder))


@dataclass(frozen=True)
class ExportedWeights:
    """Weights in a folder that `pipeline checkpoint export` or `average`, or `pipeline convert from-hf` wrote.

    It has the attributes of a `Checkpoint` that evaluation needs.
    """

    path: Path
    about: Mapping[str, Any]
    """Content of `export.json`."""
    fingerprint: str
    """Hash of what is in `export.json`, and so of all files of weights."""
    assumed_tokenizer: str | None = None
    """Fingerprint of the run's tokenizer, which they are evaluated with where their own is unknown."""
    step: None = None
    """Always None: exported weights are not those of a step of the run."""

    @classmethod
    def open(cls, folder: Path, option: str = WEIGHTS_OPTION) -> ExportedWeights:
        """The record of a folder. Whether the files of weights are as they were written is not checked here.

        Args:
            folder: that was named.
            option: that named it, for messages.

        Raises:
            UserError: it is not such a folder, or its record is damaged.
        """
        if not folder.is_dir():
            raise UserError(f"{option}: there is no folder {folder}")
        file = folder / EXPORT_ORIGIN
        if not file.is_file():
            raise UserError(f"{option}: {_not_exported(folder)}")
        about = storage.get_json(file, *_KEYS)
        if not isinstance(about["fingerprints"], dict) or "model" not in about["fingerprints"]:
            raise UserError(f"{file} is damaged: it does not say of which model the weights are; export them again")
        return cls(folder, about, value_hash(about)[:16])

    def check_section(self, wanted: Weights, key: str) -> None:
        """Refuse weights that were trained where their moving average is wanted.

        Args:
            wanted: `model` stands for whatever is in the folder.
            key: key or option that `wanted` is from, for the message.
        """
        if wanted == "ema" and self.section != "ema":
            raise UserError(
                f"{key} is ema, but {self.path} has the weights that were trained; export the average (`pipeline "
                f"checkpoint export --weights ema`), or set {key}=model"
            )

    @property
    def name(self) -> str:
        """Name of the weights in results; no other weights have it."""
        return f"weights-{self.fingerprint}"

    @property
    def section(self) -> Weights:
        """`model` for weights that were trained, `ema` for their moving average."""
        return "ema" if self.about["weights"] == "ema" else "model"

    @property
    def tokens(self) -> int | None:
        """Tokens that the latest of its checkpoints was trained on; None for a converted model."""
        found = self.about.get("tokens")
        return found if isinstance(found, int) else None

    @cached_property
    def files(self) -> Files:
        """Size and hash of each file of weights; raises as `exported_files`."""
        return exported_files(self.path, self.about)

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer that the weights were trained with; None if it is not known."""
        found = self.about["fingerprints"].get("tokenizer")
        return None if found is None else str(found)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside the weights; None if it is not known with which one they were trained.

        Raises:
            UserError: its files have changed or are missing.
        """
        if self.tokenizer_fingerprint is None:
            return None
        found = Tokenizer.open(self.path)
        if found.fingerprint != self.tokenizer_fingerprint:
            raise UserError(
                f"the tokenizer in {self.path} has changed since the weights were written (fingerprint "
                f"{found.fingerprint} instead of {self.tokenizer_fingerprint}); export them again"
            )
        return found

    @property
    def unknown_tokenizer(self) -> str:
        """Message where `tokenizer` is None."""
        return f"it is not known which tokenizer the weights in {self.path} were trained with (converted without one)"

    def origin(self) -> dict[str, Any]:
        """Origin of the weights, for results."""
        return {
            "path": str(self.path),
            "fingerprint": self.fingerprint,
            **{key: self.about.get(key) for key in ("kind", "run", "checkpoints", "weights", "tokens")},
            "tokenizer": self.tokenizer_fingerprint,
        }


Evaluated = Checkpoint | ExportedWeights
"""Weights that were loaded to be evaluated."""


def section_of(source: Evaluated, wanted: Weights) -> Weights:
    """Section of weights, `model` or `ema`: of a checkpoint the one in `eval.weights`, of a folder the one in it."""
    return source.section if isinstance(source, ExportedWeights) else wanted


def described(source: Evaluated, wanted: Weights) -> str:
    """Weights in words, for titles of results.

    Args:
        source: of the weights.
        wanted: `eval.weights`, which chooses among those of a checkpoint.
    """
    of = " of the moving average" if section_of(source, wanted) == "ema" else ""
    if isinstance(source, ExportedWeights):
        return f"{of} of {source.path.name} ({source.name})"
    return f"{of} at step {source.step}"


def exported_files(folder: Path, about: Mapping[str, Any]) -> Files:
    """The files of weights that an export lists, all of them beside its `export.json`.

    Raises:
        UserError: the list is damaged, or leads elsewhere.
    """
    file = folder / EXPORT_ORIGIN
    try:
        listed = about["files"].items()
        return {storage.plain_name(name, file): (int(size), str(digest)) for name, (size, digest) in listed}
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged: its list of files cannot be read ({error}); export them again") from None


def _not_exported(folder: Path) -> str:
    """Message for a folder without `export.json`."""
    if RunFiles(folder).checkpoints.is_dir():
        return (
            f"{folder} is a run folder; name the run itself, with --step for one of its checkpoints, or a folder that "
            "`pipeline checkpoint export` or `average` wrote"
        )
    if (folder / COMMIT).is_file():
        return f"{folder} is a checkpoint; name its run and --step, or export its weights: `pipeline checkpoint export`"
    if (folder / HF_CONFIG).is_file():
        return (
            f"{folder} is a model in Hugging Face's format; convert it first: `pipeline convert from-hf {folder} OUT`, "
            "and name OUT"
        )
    return (
        f"{folder} has no {EXPORT_ORIGIN}; name a folder that `pipeline checkpoint export` or `average`, or `pipeline "
        "convert from-hf` wrote"
    )
