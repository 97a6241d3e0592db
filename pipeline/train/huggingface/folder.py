"""A model's folder as Hugging Face has it: config.json, safetensors files, the tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.paths import StrPath
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.definition import MAX_FILE_BYTES, check_definition
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from pipeline.train.checkpoint.exported import HF_CONFIG
from pipeline.train.checkpoint.weight_files import INDEX, SINGLE
from pipeline.train.huggingface.config_experts import loss_hint
from pipeline.train.huggingface.config_source import ConfigSource
from pipeline.train.huggingface.configs import from_hf_config
from pipeline.train.huggingface.foreign_model import ForeignModel
from pipeline.train.huggingface.names import LAYER
from pipeline.train.huggingface.quantized import KEY, FolderTensors, read_quantization

CONFIG_FILE = HF_CONFIG
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_START_TOKEN = "decoder_start_token_id"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HuggingFaceFolder(ForeignModel):
    """A model in a folder on this machine. Nothing is downloaded, unpickled or run.

    Args:
        folder: with config.json and safetensors files, as a download or `save_pretrained` leaves it.
        ignore: keys of config.json that the user says do not matter.
        vocab_multiple: as in `model:`; by default its default.

    Raises:
        UserError: it is none, or of a family or with a feature that is not computed here.
    """

    settings = CONFIG_FILE
    way_to_untie = "set tie_word_embeddings to false if the head has its own weights"

    def __init__(self, folder: StrPath, ignore: Collection[str] = (), vocab_multiple: int | None = None) -> None:
        folder = Path(folder)
        file = folder / CONFIG_FILE
        if not file.is_file():
            raise UserError(f"{folder} has no {CONFIG_FILE}; give the folder of a downloaded model")
        self.values: dict[str, Any] = read_json(file)
        self._source = ConfigSource(self.values, str(file))
        family, model = from_hf_config(self.values, str(file), ignore)
        changes = {} if vocab_multiple is None else {"vocab_multiple": vocab_multiple}
        super().__init__(folder, family, model.model_copy(update=changes))
        self.quantization = None if KEY in ignore else read_quantization(self._source)
        """How its files are quantized; they are read as the numbers that they stand for."""
        # transformers leaves the layers of multi-token prediction out when it saves a model.
        if model.mtp is not None and not self._has_mtp(model.layers):
            self.missing_mtp = model.mtp.depth
            self.model = self.model.model_copy(update={"mtp": None})
        if not model.tie_embeddings and self.values.get("tie_word_embeddings") is True and not self._has_head():
            # Where a T5 may have either, config.json says the same of both, and the files tell.
            self.model = self.model.model_copy(update={"tie_embeddings": True})

    @property
    def title(self) -> str:
        """See `ForeignModel`."""
        return f"{self.family.architecture} of {self.folder}"

    @property
    def in_place(self) -> dict[str, str]:
        """See `ForeignModel`."""
        return {"hf": str(self.folder.absolute())}

    @property
    def hint(self) -> str | None:
        """See `ForeignModel`."""
        return loss_hint(self.family, self.values, self.model)

    @property
    def files(self) -> list[str]:
        """Names of the files that decide what it computes."""
        return [CONFIG_FILE, *self._weight_files()]

    @property
    def positions(self) -> int:
        """The longest context that config.json speaks of, in tokens."""
        key, default = self.family.positions
        found: int = self._source.size(key, default)
        return self.model.max_positions or found

    @cached_property
    def _found(self) -> FolderTensors:
        """Tensors by the names in the files."""
        names = self._weight_files()
        for path in (self.folder / name for name in names):
            if not path.is_file():
                raise UserError(f"{path} is missing, though {INDEX} names it; is the download complete?")
        return FolderTensors(self.folder, names, self.quantization, self._decoded_dtype())

    @property
    def start_token(self) -> int | None:
        """Id that the decoder of an encoder-decoder begins with."""
        found: int | None = self._source.size(_START_TOKEN, least=0)
        return None if self.model.encoder is None else found

    def _has_mtp(self, layers: int) -> bool:
        first = self.family.names.layer.replace(LAYER, str(layers)).removeprefix(self.family.prefix)
        return any(name.removeprefix(self.family.prefix).startswith(first) for name in self._found.tensors)

    def tokenizer(self, config: TokenizerConfig | None = None) -> Tokenizer:
        """Its tokenizer.

        Args:
            config: how it is used; by default with the model's own end of text as the end of a document.
        """
        if not (self.folder / TOKENIZER_FILE).is_file():
            raise UserError(
                f"{self.folder} has no {TOKENIZER_FILE}. If it has other files of a tokenizer, transformers makes one: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR). `pipeline convert from-hf --weights-only` "
                "needs none"
            )
        if config is None:
            config = TokenizerConfig(path=self.folder, end_of_document=self._end_of_text())
        return Tokenizer.load(self.folder, config)

    def _end_of_text(self) -> str:
        """The token by that name in the tokenizer's files, or else by its id in config.json."""
        if (file := self.folder / TOKENIZER_CONFIG_FILE).is_file():
            source = ConfigSource(read_json(file), str(file))
            token = source.get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str | None):
                source.refuse("eos_token", token, "it must be a text")
            if token:
                return token
        ids = self._source.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        file = self.folder / TOKENIZER_FILE
        for entry in check_definition(storage.read_bytes(file, MAX_FILE_BYTES), file).state.get("added_tokens") or []:
            if type(first) is int and entry["id"] == first:
                return str(entry["content"])
        raise UserError(
            f"neither {TOKENIZER_CONFIG_FILE} (eos_token) nor {CONFIG_FILE} (eos_token_id) of {self.folder} says which "
            "token ends a document; name it with --end-of-document"
        )

    def _decoded_dtype(self) -> torch.dtype:
        """Type of quantized tensors: that of config.json, if it is one of the two that have all their values."""
        named = self.values.get("dtype") or self.values.get("torch_dtype")
        return torch.float32 if named == "float32" else torch.bfloat16

    def _weight_files(self) -> list[str]:
        if (self.folder / SINGLE).is_file():  # before an index, which may be of an earlier save, as transformers does
            return [SINGLE]
        if (index := self.folder / INDEX).is_file():
            named = storage.get_json(index, "weight_map")["weight_map"]
            if not isinstance(named, dict):
                raise UserError(
                    f"{index} is damaged: weight_map is not a table of tensors and files; download it again"
                )
            return sorted({storage.plain_name(name, index) for name in named.values()})
        if found := sorted(path.name for path in self.folder.glob("*.safetensors")):
            return found
        if pickles := [path.name for pattern in _PICKLES for path in sorted(self.folder.glob(pattern))]:
            raise UserError(
                f"{self.folder} has its weights in {pickles[0]}, a pickle, which could run code and is not read; if "
                "you trust it, convert it to safetensors: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR, safe_serialization=True)"
            )
        raise UserError(f"{self.folder} has no *.safetensors files; is the download complete?")


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file, with Infinity as transformers 4 wrote it; a `UserError` where there is none."""
    try:
        value = json.loads(storage.read_bytes(path, storage.SMALL_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value
