"""Importance of a model's channels, heads, experts and layers, as the file that `pipeline eval --importance` writes.

The file is in the format of safetensors: an fp64 vector for each width that can be pruned, and in the metadata what it
was measured on. Widths are `dim` for the channels of the residual stream, and of layer 3 `layers.3.heads`,
`layers.3.ffn_dim`, `layers.3.experts.count` and `layers.3.experts.shared_ffn_dim`. `influence` has a number per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash

INFLUENCE = "influence"
"""Name of the vector of layers: 1 - the mean cosine similarity of what enters a layer and what leaves it."""
_FORMAT = "importance 1"


@dataclass(frozen=True)
class Importance:
    """Importance of all that can be pruned in a model."""

    about: Mapping[str, Any]
    """Weights, text and settings that it was measured on. Keys of weights are those of the results of evaluations."""
    values: Mapping[str, Tensor]
    """By width, fp64 vectors of numbers that are not negative: larger is more important."""
    path: Path | None = None
    """File that it was read from."""
    digest: str = ""
    """Hash of that file."""

    def save(self, path: Path) -> None:
        """Write the file, which is complete or not there.

        Args:
            path: of the file.
        """
        values = {name: value.double().cpu().contiguous() for name, value in self.values.items()}
        about = orjson.dumps(dict(self.about)).decode()
        metadata = {"format": _FORMAT, "about": about, "hash": _hash(about, values)}
        path.parent.mkdir(exist_ok=True)
        storage.put(path, save(values, metadata))

    @classmethod
    def read(cls, path: Path, key: str) -> Importance:
        """The importance in a file.

        Args:
            path: of the file.
            key: that names it, for messages.

        Raises:
            UserError: there is no such file, it is another one, or it is damaged.
        """
        again = "name a file that `pipeline eval --importance` has written"
        try:
            storage.open_regular(path).close()  # which `safe_open` does not look at
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{key}: {path} cannot be read: {error.strerror or error}; {again}") from None
        except Exception as error:
            raise UserError(f"{key}: {path} is damaged or no file of importance ({error}); {again}") from None
        if metadata.get("format") != _FORMAT:
            raise UserError(f"{key}: {path} has no importance, but other tensors; {again}")
        if metadata.get("hash") != _hash(metadata.get("about", ""), values):
            raise UserError(f"{key}: {path} is damaged: its hash differs; measure again")
        for name, value in values.items():
            if value.ndim != 1 or value.dtype != torch.float64 or not bool((value.isfinite() & (value >= 0)).all()):
                raise UserError(
                    f"{key}: {path}: {name} is not a list of numbers from 0 on: the activations of these weights are "
                    "not finite; take other weights"
                )
        try:
            about = dict(orjson.loads(metadata["about"]))
        except (ValueError, TypeError) as error:
            raise UserError(f"{key}: {path} is damaged: it does not say what it was measured on ({error})") from None
        return cls(about, values, path, f"{file_hash(path):016x}")

    def most(self, name: str, size: int, count: int, key: str) -> list[int]:
        """The most important entries of a width, in ascending order; of equal ones the first.

        Args:
            name: of the width.
            size: entries that the model has.
            count: entries to take.
            key: that names the file, for messages.

        Raises:
            UserError: the file does not have the width, or another number of entries.
        """
        return sorted(self.of(name, size, key).argsort(descending=True, stable=True)[:count].tolist())

    def of(self, name: str, size: int, key: str) -> Tensor:
        """The vector of a width; arguments and errors as those of `most`."""
        value = self.values.get(name)
        if value is None or len(value) != size:
            has = "nothing" if value is None else f"{len(value):,} entries"
            raise UserError(f"{key}: {self.path} has {has} for {name}, of which the source has {size:,}; measure again")
        return value


def _hash(about: str, values: Mapping[str, Tensor]) -> str:
    """Hash of the content of a file."""
    digest = xxhash.xxh3_64(about.encode())
    for name in sorted(values):
        digest.update(name.encode())
        digest.update(values[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
