"""Models that are compared: what they are, which package computes them, and their logits.

Shapes: S positions of a text, C of them that are asked for, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline import DISTRIBUTION
from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import EXPORT_ORIGIN
from pipeline.config.model import ModelConfig
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.definition import MAX_FILE_BYTES, check_definition
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from pipeline.eval.comparison.head_part import only_positions
from pipeline.eval.inference import plain_decoder
from pipeline.train.checkpoint.committed import changed
from pipeline.train.checkpoint.exported import HF_CONFIG, ExportedWeights
from pipeline.train.checkpoint.tensors import Stored
from pipeline.train.checkpoint.weight_source import exported_tensors, open_weights, read_tensors, validated_model
from pipeline.train.foreign.megatron import MegatronCheckpoint
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.context import Context
from pipeline.train.model.decoder_spec import decoder_spec

ReadRows = Callable[..., dict[str, Tensor]]
"""Reads tensors by name; a second argument is a slice of their rows."""


class ComputedModel(Protocol):
    """A model that computes logits."""

    vocab_size: int
    """Rows of its logits."""

    def logits(self, ids_S: Tensor, first: int, last: int) -> Tensor:
        """Logits [C, V] in fp32 on the CPU, of the positions from `first` to before `last` of a text."""


class ComparedSide(ABC):
    """One of two models, in a folder.

    Attributes:
        folder: of its files.
        package: name of the package that computes it.
        extra: what installs this package.
    """

    package: str
    extra: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def is_installed(self) -> bool:
        """True if the package that computes it is there."""
        return find_spec(self.package.replace("-", ".")) is not None

    @property
    def computed_by(self) -> str:
        """Package and version."""
        return f"{self.package} {metadata.version(self.package)}"

    @property
    @abstractmethod
    def positions(self) -> int:
        """The longest context, in tokens."""

    @abstractmethod
    def opened(self, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[ComputedModel]:
        """The model in memory, for as long as it is open."""

    @abstractmethod
    def stored(self) -> tuple[Mapping[str, Stored], ReadRows]:
        """Tensors by our names, and what reads rows of some."""

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None if there is none in the folder."""
        return find_tokenizer(self.folder) if (self.folder / TOKENIZER_FILE).is_file() else None


def open_side(folder: Path) -> ComparedSide:
    """Find out what is in a folder.

    Raises:
        UserError: nothing that is compared.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give that of a model")
    if (folder / EXPORT_ORIGIN).is_file():
        return _Exported(folder)
    if (folder / HF_CONFIG).is_file():
        return _HuggingFace(folder)
    if any(folder.glob("iter_*")) or (folder / "common.pt").is_file():
        return _Megatron(folder)
    return _InCheckpoint(folder)


def find_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer to encode text with; which token ends a document does not matter then.

    Args:
        path: a tokenizer.json, or a folder with one.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    state = check_definition(storage.read_bytes(file, MAX_FILE_BYTES), file).state
    special = [each["content"] for each in state.get("added_tokens") or [] if each.get("special")]
    if not special:
        raise UserError(f"{file} has no special token, which could end a document; give --tokenizer another file")
    return Tokenizer.load(file, TokenizerConfig(path=file, end_of_document=special[-1]))


class _Own(ComparedSide):
    """Weights of this package."""

    package, extra = DISTRIBUTION, ""

    is_installed = True

    @property
    @abstractmethod
    def _model(self) -> ModelConfig: ...

    def opened(self, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[ComputedModel]:
        """See `ComparedSide`."""
        model, (tensors, read) = self._model, self.stored()
        if model.encoder is not None or model.direction != "causal":
            raise UserError(f"{self.folder} is not a decoder alone, and has no logits of a next token to compare")
        tokenizer = None if model.vocab_size else self.tokenizer()
        vocabulary = model.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
        spec = decoder_spec(model, vocabulary, model.max_positions or self.positions)
        return nullcontext(_Decoder(plain_decoder(spec, read(tensors), dtype).to(device), spec.vocab_size))


@dataclass
class _Decoder:
    """See `ComputedModel`."""

    decoder: Any
    vocab_size: int

    @torch.inference_mode()
    def logits(self, ids_S: Tensor, first: int, last: int) -> Tensor:
        """See `ComputedModel`."""
        device = next(self.decoder.parameters()).device
        with only_positions(self.decoder.head, first, last):
            found: Tensor = self.decoder(ids_S[None].to(device), Context())
        return found[0, :, : self.vocab_size].float().cpu()


class _Exported(_Own):
    @cached_property
    def _source(self) -> ExportedWeights:
        source = ExportedWeights.open(self.folder)
        for name, (size, digest) in source.files.items():
            if problem := changed(self.folder / name, digest, size=size, symlinks=True):
                raise UserError(f"{problem}; export them again")
        return source

    @cached_property
    def _model(self) -> ModelConfig:
        described = self._source.about["fingerprints"]["model"]
        return validated_model(described, f"{self.folder} describes a model that cannot be built")

    @property
    def positions(self) -> int:
        """See `ComparedSide`."""
        return int(self._source.about["positions"])

    def stored(self) -> tuple[Mapping[str, Stored], ReadRows]:
        """See `ComparedSide`."""
        files, tensors = exported_tensors(self.folder, self._source.files)
        return tensors, lambda wanted, rows=None: read_tensors(self.folder, files, wanted, rows)

    def tokenizer(self) -> Tokenizer | None:
        """See `ComparedSide`."""
        return self._source.tokenizer()


class _InCheckpoint(_Own):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._source = open_weights(folder, None, "model")

    @property
    def _model(self) -> ModelConfig:
        return self._source.model

    @property
    def positions(self) -> int:
        """See `ComparedSide`."""
        return self._source.positions

    def stored(self) -> tuple[Mapping[str, Stored], ReadRows]:
        """See `ComparedSide`."""
        return self._source.tensors, self._source.read

    def tokenizer(self) -> Tokenizer | None:
        """See `ComparedSide`."""
        return self._source.tokenizer


class _HuggingFace(ComparedSide):
    """A folder in the format of Hugging Face, as transformers computes it. No code in it is run."""

    package, extra = "transformers", "hf"

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a wrong value can be any error there
            raise UserError(
                f"transformers cannot read {self.folder / HF_CONFIG}: {_named(error)}; correct it, or "
                "give another folder"
            ) from None

    @property
    def positions(self) -> int:
        """See `ComparedSide`."""
        if not self.is_installed:
            return HuggingFaceFolder(self.folder).positions
        found = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else 2**31

    def opened(self, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[ComputedModel]:
        """See `ComparedSide`."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        # A config.json may name kernels, which transformers would download and run.
        options |= {"attn_implementation": "eager", "experts_implementation": "eager"}
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                self.folder, config=self._config, dtype=dtype, output_loading_info=True, **options
            )
        except Exception as error:  # as above
            raise UserError(
                f"transformers cannot load {self.folder}: {_named(error)}; correct its config.json, copy its "
                "files again, or give another folder"
            ) from None
        model, info = found
        # transformers draws weights that the files lack.
        for key in ("missing_keys", "mismatched_keys"):
            if lost := sorted(map(str, info.get(key) or ())):
                raise UserError(f"transformers finds no weights in {self.folder} for {lost[0]} ({len(lost)} in all)")
        return nullcontext(_Transformers(model.eval().to(device)))

    def stored(self) -> tuple[Mapping[str, Stored], ReadRows]:
        """See `ComparedSide`."""
        found = HuggingFaceFolder(self.folder)
        return found.tensors, found.read


def _named(error: Exception) -> str:
    """An error of another package in a line: some are nothing but the name of a key."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


class _Transformers:
    """See `ComputedModel`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    @torch.inference_mode()
    def logits(self, ids_S: Tensor, first: int, last: int) -> Tensor:
        """See `ComputedModel`."""
        head = self._model.get_output_embeddings()
        with only_positions(head, first, last):
            found: Tensor = self._model(input_ids=ids_S[None].to(self._model.device), use_cache=False).logits[0]
        return found.float().cpu()


class _Megatron(ComparedSide):
    """A checkpoint of Megatron Core in torch_dist, as megatron-core computes it on a CPU, in a process of its own."""

    package, extra = "megatron-core", ""

    @property
    def is_installed(self) -> bool:
        """See `ComparedSide`."""
        return find_spec("megatron") is not None and find_spec("megatron.core") is not None

    @cached_property
    def _checkpoint(self) -> MegatronCheckpoint:
        return MegatronCheckpoint(self.folder)

    @property
    def positions(self) -> int:
        """See `ComparedSide`."""
        return self._checkpoint.positions

    def opened(self, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[ComputedModel]:
        """See `ComparedSide`; it is always in fp32."""
        from pipeline.eval.comparison.megatron_process import MegatronProcess

        return MegatronProcess(self._checkpoint.folder)

    def stored(self) -> tuple[Mapping[str, Stored], ReadRows]:
        """See `ComparedSide`."""
        return self._checkpoint.tensors, self._checkpoint.read
