"""Weights by name, wherever they are: in a run's checkpoint, or in a folder that they were exported to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.paths import StrPath
from pipeline.common.run_files import EXPORT_ORIGIN, RunFiles
from pipeline.config.load import RUN_FILE, written_values
from pipeline.config.model import ModelConfig
from pipeline.data.chat.kept_template import find_template
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.committed import COMMIT, changed, step_of
from pipeline.train.checkpoint.export import START_TOKEN, longest_windows, start_token_of
from pipeline.train.checkpoint.exported import WEIGHTS_OPTION, ExportedWeights, Weights
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.tensors import Stored, read, stored_weights
from pipeline.train.checkpoint.weight_files import DTYPES

_IMPOSSIBLE = "describes a model that cannot be built"


class WeightSource(Protocol):
    """Tensors that were verified, read some at a time, and what they are."""

    name: str
    """Place of the tensors."""
    model: ModelConfig
    """Model that they belong to."""
    positions: int
    """The longest context of their training, in tokens."""
    tokenizer: Tokenizer
    chat_template: str | None
    """Template of the conversations that it was trained on; None: of none."""
    start_token: int | None
    """Id that the decoder of an encoder-decoder begins with; None: the end of a document, or it is not known."""
    origin: Mapping[str, Any]
    """Run, checkpoints and tokens that they are of, by the keys of `export.json`."""
    config: Mapping[str, Any] | None
    """Values of the run file of their training; None for a converted model."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Stored tensors by parameter name."""

    def read(self, tensors: Mapping[str, Stored], rows: slice | None = None) -> dict[str, Tensor]:
        """Values of some tensors, on the CPU; with `rows` these rows of each."""


def open_weights(path: StrPath, step: int | None, weights: Weights, *, full: bool = True) -> WeightSource:
    """The weights in a run folder, in a checkpoint's folder, or in one that `pipeline checkpoint export` has written.

    Args:
        path: one of these.
        step: of a run folder; by default its latest.
        weights: those that were trained, or their moving average.
        full: compare the hashes of a checkpoint's files, all of which are read for that; otherwise their sizes.

    Raises:
        UserError: there are none, or they are damaged.
    """
    path, verify = Path(path), partial(Checkpoint.problems, full=full)
    if (path / EXPORT_ORIGIN).is_file():
        return _Exported(path, weights)
    if RunFiles(path).checkpoints.is_dir() or RunFiles(path).config.is_file():
        return _InCheckpoint(Checkpoints.of_run(path).at(step, verify), weights)
    named_step = step_of(path.name)
    if (path / COMMIT).is_file() and named_step is not None:
        return _InCheckpoint(Checkpoints(path.parent).at(named_step, verify), weights)
    raise UserError(
        f"{path} has no weights: name a run folder (with `checkpoints`), a checkpoint in it (with {COMMIT}), or a "
        f"folder that was exported (with {EXPORT_ORIGIN})"
    )


@dataclass
class _InCheckpoint:
    checkpoint: Checkpoint
    weights: Weights

    def __post_init__(self) -> None:
        state = self.checkpoint.state()
        self.name = str(self.checkpoint.path)
        self.model = validated_model(state["fingerprints"]["model"], f"{self.name} {_IMPOSSIBLE}")
        self.positions = longest_windows(state["config"])
        self.tokenizer = Tokenizer.open(self.checkpoint.path)
        self.chat_template = find_template(self.checkpoint.path)
        self.start_token = start_token_of(state["config"], self.tokenizer)
        self.config: Mapping[str, Any] | None = state["config"]
        self.origin: Mapping[str, Any] = {
            "run": str(self.checkpoint.path.absolute().parents[1]),
            "checkpoints": [{"step": self.checkpoint.step, "fingerprint": self.checkpoint.fingerprint}],
            "weights": self.weights,
            "journal": state["journal"],
            **{key: state[key] for key in ("tokens", "fingerprints", "versions")},
        }
        found = stored_weights(self.checkpoint, self.weights)
        if not found:
            raise UserError(f"{self.name} has no moving average of the weights (train.ema was not set)")
        self.tensors = found

    def read(self, tensors: Mapping[str, Stored], rows: slice | None = None) -> dict[str, Tensor]:
        return read(self.checkpoint, self.weights, tensors, rows)


@dataclass
class _Exported:
    folder: Path
    weights: Weights

    def __post_init__(self) -> None:
        source = ExportedWeights.open(self.folder)
        source.check_section(self.weights, WEIGHTS_OPTION)
        for name, (size, digest) in source.files.items():
            if problem := changed(self.folder / name, digest, size=size, symlinks=True):
                raise UserError(f"{problem}; export them again")
        self.name = str(self.folder)
        self.model = validated_model(source.about["fingerprints"]["model"], f"{self.name} {_IMPOSSIBLE}")
        self.positions = int(source.about["positions"])
        tokenizer = source.tokenizer()
        if tokenizer is None:
            raise UserError(
                f"{self.folder} has no tokenizer (it was converted with --weights-only); convert the model again "
                "without that option, from a folder with tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.chat_template = find_template(self.folder)
        self.start_token = source.about.get(START_TOKEN)
        self.origin = source.about
        run_file = self.folder / RUN_FILE
        self.config: Mapping[str, Any] | None = written_values(run_file) if run_file.is_file() else None
        self._files, self.tensors = exported_tensors(self.folder, source.files)

    def read(self, tensors: Mapping[str, Stored], rows: slice | None = None) -> dict[str, Tensor]:
        return read_tensors(self.folder, self._files, tensors, rows)


def validated_model(values: Any, failure: str) -> ModelConfig:
    """A `model:` section as a file has it; a `UserError` where it cannot be one, or one of absurd size.

    Args:
        values: of the section, or the fingerprint of a model, which has the identities of its plug-ins besides.
        failure: how the message begins.
    """
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if key != "plugins"}
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        problems = []
        for each in error.errors():
            place, message = ".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")
            # Keys of the section that do not fit each other have no place of their own.
            problems.append(f"{place}: {message}" if place else message)
        raise UserError(f"{failure}: {'; '.join(problems)}") from None


def exported_tensors(folder: Path, listed: Iterable[str]) -> tuple[dict[str, str], dict[str, Stored]]:
    """`tensors_in` of those files that an export lists which are safetensors files."""
    return tensors_in(folder, sorted(name for name in listed if name.endswith(".safetensors")))


def tensors_in(
    folder: Path, names: Iterable[str], dtypes: Mapping[str, torch.dtype] = DTYPES
) -> tuple[dict[str, str], dict[str, Stored]]:
    """The file of each tensor, and what it is, of safetensors files in a folder.

    Args:
        folder: of the files.
        names: of the files.
        dtypes: that tensors may have, by their names in the format.

    Raises:
        UserError: a file is none.
    """
    files, tensors = dict[str, str](), dict[str, Stored]()
    for name in names:
        found = tensors_of(folder / name, dtypes)
        tensors |= found
        files |= dict.fromkeys(found, name)
    return files, tensors


def tensors_of(path: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> dict[str, Stored]:
    """The tensors of one safetensors file; a `UserError` if it is none, or has other types than these."""
    found = {}
    try:
        storage.open_regular(path).close()  # which `safe_open` does not look at
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                piece = tensors.get_slice(name)
                dtype = dtypes.get(piece.get_dtype())
                if dtype is None:
                    raise UserError(f"{path}: {name} has dtype {piece.get_dtype()}, which is not supported")
                found[name] = Stored(tuple(piece.get_shape()), dtype)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise UserError(f"{path} is not a valid safetensors file ({error}); is the download complete?") from error
    return found


def read_tensors(
    folder: Path, files: Mapping[str, str], tensors: Mapping[str, Stored], rows: slice | None = None
) -> dict[str, Tensor]:
    """Values of some tensors of files in a folder; with `rows` these rows of each."""
    by_file: dict[str, list[str]] = {}
    for name in tensors:
        by_file.setdefault(files[name], []).append(name)
    values: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            for name in names:
                values[name] = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
    return values
