"""A model in files of another program, with its tensors by our names: whole ones, and the pieces that a rank reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.train.checkpoint.tensors import Stored
from pipeline.train.huggingface.family import Family
from pipeline.train.huggingface.quantized import Read
from pipeline.train.huggingface.tensors import TensorMapping, extra_layers, map_tensors, names_in_files
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec

_ROWS = 4096
"""Rows of two tensors that are compared at a time."""


class TensorFiles(Protocol):
    """Files with tensors that have names."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Shapes and types, by name."""

    def opened(self) -> AbstractContextManager[Read]:
        """A function that reads a range of a tensor, for as long as the files are open."""


class ForeignModel(ABC):
    """A model in files of another program, with its tensors by our names.

    Args:
        folder: of the files.
        family: that its names are of.
        model: the `model:` section that computes the same.
    """

    def __init__(self, folder: Path, family: Family, model: ModelConfig) -> None:
        self.folder, self.family, self.model = folder, family, model
        self.tokenizer_path = folder
        """Folder or file of its tokenizer."""
        self.missing_mtp = 0
        """Layers of multi-token prediction that the settings speak of, where the files have none."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """The longest context that the settings speak of, in tokens."""

    settings: ClassVar[str]
    """Name of the file that describes the model, for messages."""

    way_to_untie: ClassVar[str]
    """Advice where the head differs from the embedding that it is tied to, for messages."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The model in words, for messages."""

    @property
    @abstractmethod
    def _found(self) -> TensorFiles:
        """Tensors by the names in the files."""

    @property
    def start_token(self) -> int | None:
        """Id that the decoder of an encoder-decoder begins with."""
        return None

    @property
    def in_place(self) -> dict[str, str] | None:
        """The `train.init_from` that reads these files as they are; None where they have to be converted."""
        return None

    @property
    def hint(self) -> str | None:
        """Words about settings of training that the files had and a run file has to say."""
        return None

    @cached_property
    def spec(self) -> DecoderSpec:
        """The spec of the model."""
        assert self.model.vocab_size is not None
        return decoder_spec(self.model, self.model.vocab_size, self.model.max_positions or self.positions)

    @cached_property
    def mapping(self) -> TensorMapping:
        """Its tensors and ours."""
        return map_tensors(self.family, self.spec)

    @cached_property
    def _names(self) -> dict[str, str]:
        """The names that the files have for those of the plan."""
        shapes = {name: each.shape for name, each in self._found.tensors.items()}
        return names_in_files(self.family, self.mapping, shapes, str(self.folder), self.settings)

    @property
    def left_out(self) -> list[str]:
        """Tensors of layers after the last one, which transformers leaves out, too."""
        return extra_layers(self.family, self.mapping, self._found.tensors)

    def _has_head(self) -> bool:
        return self.family.names.head in self._found.tensors

    def _check_copies(self) -> None:
        """Files may have a tensor a second time: then both must be the same."""
        mapping = self.mapping
        for name, rule in mapping.theirs.items():
            if rule.copy and name in self._names:
                self._check_copy(
                    self._names[name],
                    self._names[mapping.ours[rule.ours[0]].theirs],
                    "multi-token prediction has those of the model here; set num_nextn_predict_layers to 0 to leave it "
                    "out",
                )
        if self._has_head() and self.family.names.head not in mapping.theirs:
            self._check_copy(
                self.family.names.head,
                self._names[mapping.ours["embedding.weight"].theirs],
                f"{self.settings} ties them; {self.way_to_untie}",
            )

        for name, other in self.family.copies.items():
            if name in self._found.tensors:
                self._check_copy(name, self._names[other], "the model has one of them; remove the one that is not used")

    def _check_copy(self, name: str, other: str, why: str) -> None:
        tensors = self._found.tensors
        with self._found.opened() as read:
            same = tensors[name] == tensors[other] and all(
                read(name, part).equal(read(other, part))
                for part in ((slice(row, row + _ROWS),) for row in range(0, tensors[name].shape[0], _ROWS))
            )
        if not same:
            raise UserError(f"{self.folder}: {name} differs from {other}, though {why}")

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Ours, by name: of the type that theirs have. Whoever asks for them has all that can be checked checked."""
        self._check_copies()
        mapping = self.mapping
        return {
            name: Stored(mapping.our_shapes[name], torch.float32 if name in mapping.buffers else self._dtype(name))
            for name in mapping.ours
        }

    def _dtype(self, name: str) -> torch.dtype:
        """The type of all tensors of theirs that have one of ours."""
        theirs = self.mapping.ours[name].names(self.mapping.our_shapes[name][0])
        found = {each: self._found.tensors[self._names[each]].dtype for each in theirs}
        other = next((each for each, dtype in found.items() if dtype != found[theirs[0]]), None)
        if other is not None:
            raise UserError(
                f"{self.folder}: {other} is of {found[other]} and {theirs[0]} of {found[theirs[0]]}; they are one "
                "tensor here, so they must have the same type"
            )
        return found[theirs[0]]

    def read(self, tensors: Mapping[str, Stored], rows: slice | None = None) -> dict[str, Tensor]:
        """Values of some tensors of ours, with `rows` these rows of each; padding of the vocabulary is 0."""
        found = {}
        for name, each in tensors.items():
            count, *others = each.shape
            of_this = rows or slice(0, count)
            found[name] = torch.empty((of_this.stop - of_this.start, *others), dtype=each.dtype)
            self.read_into(found[name], name, of_this, *(slice(0, size) for size in others))
        return found

    def read_into(self, target: Tensor, name: str, rows: slice, *others: slice) -> None:
        """Fill a tensor with these rows and columns of one of ours, in its own type; padding is 0.

        Experts are read one by one, so that little beside the target is in memory.
        """
        filled = 0
        with self._found.opened() as read:
            for theirs, piece, place in self.mapping.ours[name].pieces(rows, *others):
                target[place].copy_(piece.of(read(self._names[theirs], piece.source)))
                filled = place + 1 if isinstance(place, int) else place.stop
        target[filled:].zero_()
