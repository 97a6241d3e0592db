"""Checkpoints of Megatron Core in its format torch_dist: settings, names of tensors, and the model.

A checkpoint is a folder `iter_NNNNNNN` with DCP files and `common.pt`, which has the arguments of the run. Layers that
are all alike are one tensor with the layers as its first dimension, whatever tp, pp and virtual stages were.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.weight_source import validated_model
from pipeline.train.foreign.distributed import DistributedFiles
from pipeline.train.foreign.megatron_arguments import (
    COMMON,
    ArgumentSource,
    read_arguments,
    read_common,
    read_model,
)
from pipeline.train.foreign.megatron_tensors import UnstackedTensors, model_tensors
from pipeline.train.huggingface.config_source import shortened
from pipeline.train.huggingface.family import Family
from pipeline.train.huggingface.foreign_model import ForeignModel, TensorFiles
from pipeline.train.huggingface.names import Names, TensorRule
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.tensor_names import RowNumbers, RowOrder, TensorNames, by_group, rope_pairs

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,15})")
_MOST_DIGITS = 15
_FORMAT = "metadata.json"
_WRITE_AGAIN = "write it again with Megatron's --ckpt-convert-format torch_dist --ckpt-convert-save DIR"


def _fused_rows(part: Any, interleaved: bool) -> RowNumbers:
    """Rows of linear_qkv: group by group its queries, its key and its value."""
    queries, keys = part.heads * part.head_dim, part.kv_heads * part.head_dim
    order = by_group(part.kv_heads, queries // part.kv_heads, part.head_dim, part.head_dim)
    if not interleaved or part.rope is None:
        return order
    turned = part.rope.dims
    inner = [rope_pairs(part.heads, part.head_dim, turned), queries + rope_pairs(part.kv_heads, part.head_dim, turned)]
    return np.concatenate([*inner, np.arange(queries + keys, queries + 2 * keys)])[order]


_QKV = {
    False: RowOrder("group by group", lambda part: _fused_rows(part, interleaved=False)),
    True: RowOrder("group by group, rotary pairs beside each other", lambda part: _fused_rows(part, interleaved=True)),
}


def _turned_rows(part: Any) -> RowNumbers:
    """Rows of a norm over a head, which the rotary pairs are in the order of, too."""
    return np.arange(part.head_dim) if part.rope is None else rope_pairs(1, part.head_dim, part.rope.dims)


_HEAD_NORM = {False: None, True: RowOrder("rotary pairs beside each other", _turned_rows)}


def megatron_names(*, interleaved: bool, norm_bias: bool) -> Names:
    """Names of the tensors of Megatron Core, with the number of a layer in them.

    Args:
        interleaved: rotary pairs are neighbours.
        norm_bias: norms have a bias.
    """
    norm = "decoder.final_layernorm"
    return Names(
        style="megatron",
        layer="decoder.layers.{i}.",
        before=(
            TensorRule("embedding.word_embeddings.weight", ("embedding.weight",)),
            TensorRule("embedding.position_embeddings.weight", ("position_embedding.weight",)),
        ),
        norms={"input_layernorm": "mixer_norm", "pre_mlp_layernorm": "mlp_norm"},
        after=(
            TensorRule(f"{norm}.weight", ("norm.weight",)),
            *[TensorRule(f"{norm}.bias", ("norm.bias",))] * norm_bias,
            TensorRule("output_layer.weight", ("head.weight",)),
        ),
        norm_bias=norm_bias,
        tables={
            AttentionSpec: (
                TensorNames("self_attention.linear_qkv", ("wq", "wk", "wv"), _QKV[interleaved]),
                ("self_attention.linear_proj", ("wo",)),
                TensorNames("self_attention.q_layernorm.weight", ("q_norm.weight",), _HEAD_NORM[interleaved]),
                TensorNames("self_attention.k_layernorm.weight", ("k_norm.weight",), _HEAD_NORM[interleaved]),
            ),
            MlpSpec: (
                TensorNames("mlp.linear_fc1", ("w1", "w3"), where=lambda part: part.gated),
                TensorNames("mlp.linear_fc1", ("w1",), where=lambda part: not part.gated),
                ("mlp.linear_fc2", ("w2",)),
            ),
            ExpertsSpec: (
                ("mlp.router", ("router",)),
                TensorNames("mlp.experts.linear_fc1.weight", ("experts.w1", "experts.w3"), experts="stacked"),
                TensorNames("mlp.experts.linear_fc2.weight", ("experts.w2",), experts="stacked"),
            ),
        },
    )


def _cannot_write(*_: object) -> NoReturn:
    raise UserError("models are not written in Megatron's format")


def _family(names: Names) -> Family:
    return Family(
        model_type="megatron",
        architecture="Megatron GPTModel",
        title="Megatron",
        what="",
        read=_cannot_write,
        write=_cannot_write,
        mark="mixer",
        needs={},
        names=names,
        prefix="",
    )


class MegatronCheckpoint(ForeignModel):
    """The model of a checkpoint of Megatron Core. Nothing of it is imported or run.

    Args:
        folder: with `latest_checkpointed_iteration.txt`, or one checkpoint in it.
        step: the iteration; by default the one that the file names.
        ignore: arguments that the user says do not matter.

    Raises:
        UserError: it is none, not complete, or has a feature that is not computed here.
    """

    settings = COMMON
    way_to_untie = "do the files belong together?"

    def __init__(self, folder: Path, step: int | None = None, ignore: Collection[str] = ()) -> None:
        path = find_checkpoint(folder, step)
        _check_format(path)
        self.common = read_common(path / COMMON)
        self.arguments = read_arguments(path / COMMON, self.common)
        source = ArgumentSource(self.arguments, f"{path / COMMON} (args)")
        try:
            values = read_model(source)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            if isinstance(error, UserError):
                raise
            key = str(source.last)
            raise UserError(
                f"{path / COMMON}: the argument {key} cannot be read: {shortened(self.arguments.get(key))}: {error}"
            ) from error
        interleaved = source.flag("rotary_interleaved", False)
        source.must_be("multi_latent_attention", (False,), False)
        for key in ("mtp_num_layers", "heterogeneous_layers_config_path", "spec"):
            source.must_be(key, (None,), None)
        self._positions = source.size("max_position_embeddings", source.size("seq_length", 2048))
        samples = source.size("consumed_train_samples", least=0)
        self._read = f"; the run had read {samples:,} samples" if samples else ""
        source.finish(ignore)
        model = validated_model(values, f"{path / COMMON} describes a model that cannot be built")
        names = megatron_names(interleaved=interleaved, norm_bias=model.norm == "layernorm")
        super().__init__(path, _family(names), model)

    @property
    def positions(self) -> int:
        """See `ForeignModel`."""
        return int(self.model.max_positions or self._positions)

    @property
    def title(self) -> str:
        """See `ForeignModel`."""
        return f"the model of {self.folder}"

    @property
    def hint(self) -> str:
        """See `ForeignModel`."""
        return f"Weights of Megatron's iteration {int(self.folder.name.removeprefix('iter_'))}{self._read}"

    @cached_property
    def files(self) -> DistributedFiles:
        """The files of all tensors, those of the optimizer as well."""
        return DistributedFiles(self.folder)

    @cached_property
    def _found(self) -> TensorFiles:
        return UnstackedTensors(self.files, model_tensors(self.files), self.model.layers)

    def tokenizer(self, path: Path, end_of_document: str) -> Tokenizer:
        """The tokenizer that the user names, which must not have more ids than the model has rows."""
        found = Tokenizer.load(path, TokenizerConfig(path=path, end_of_document=end_of_document))
        self.tokenizer_path = path
        if found.vocab_size > self.spec.vocab_size:
            raise UserError(
                f"{path} has ids up to {found.vocab_size - 1:,}, but the model of {self.folder} has "
                f"{self.spec.vocab_size:,} rows for them; is it the tokenizer of that run?"
            )
        return found


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The folder of one checkpoint, in that of a run or itself."""
    folder = folder.resolve()
    named = _NAME.fullmatch(folder.name)
    if named and step in (None, int(named[1])):
        return folder
    if step is None:
        if not (folder / TRACKER).is_file():
            raise UserError(
                f"{folder} has no {TRACKER}; give the folder that --save named, or one iter_NNNNNNN folder in it"
            )
        text = storage.read_bytes(folder / TRACKER, storage.SMALL_BYTES).decode(errors="replace").strip()
        if not text.isdecimal() or len(text) > _MOST_DIGITS:
            raise UserError(
                f"{folder / TRACKER} says {storage.shown(text[:100])}, which is not an iteration; give --step, or the "
                "folder of the checkpoint"
            )
        step = int(text)
    path = folder / f"iter_{step:07d}"
    if not path.is_dir():
        have = sorted(int(found[1]) for each in folder.iterdir() if (found := _NAME.fullmatch(each.name)))
        raise UserError(f"{folder} has no checkpoint of iteration {step}; it has {', '.join(map(str, have)) or 'none'}")
    return path


def _check_format(path: Path) -> None:
    if legacy := sorted(each.name for each in path.glob("mp_rank_*")):
        raise UserError(
            f"{path} is in Megatron's old format ({legacy[0]}), a pickle per rank, which is not read; {_WRITE_AGAIN}"
        )
    if (file := path / _FORMAT).is_file():
        backend = storage.get_json(file, "sharded_backend")["sharded_backend"]
        if backend != "torch_dist":
            raise UserError(f"{path} has the format {storage.shown(str(backend))}, which is not read; {_WRITE_AGAIN}")
