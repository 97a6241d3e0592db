"""Tensors of a checkpoint of Megatron Core by the names of its model, with the number of a layer in them.

The weights and, if the optimizer was saved in a layout that any run can read, its states are tensors of the model's
shapes, in which layers may be stacked. Otherwise the states of all parameters are one flat tensor per bucket.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.checkpoint.tensors import Stored
from pipeline.train.foreign.distributed import DistributedFiles
from pipeline.train.huggingface.quantized import Index, Read

_MODEL = ("decoder.", "embedding.", "output_layer.")
_BESIDE = re.compile(r"(chained_\d+\.)?optimizer\.|opt_param_scheduler|rng_state|rerun_state")
"""Beginnings of names of tensors that are not the model's."""
_MOST_TENSORS = 2**18
"""Tensors of all layers, which are listed before any is looked at."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = "decoder.layers."
_RENAMED = {
    # A norm that Transformer Engine computes together with the product behind it.
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mlp.experts.experts.": "mlp.experts.",
}
_ALIGNMENT = 64
"""Elements of a bucket that the first one of a parameter is a multiple of."""
_BEFORE = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_AFTER = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight")
_NORM, _MLP_NORM = (
    ("input_layernorm.weight", "input_layernorm.bias"),
    (
        "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm.bias",
    ),
)
_PROJECTION = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_HEAD_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_MLP = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.linear_fc2.weight", "mlp.linear_fc2.bias")
_ORDERS = {
    "local": (*_NORM, *_PROJECTION, *_QKV, *_HEAD_NORMS, *_MLP_NORM, *_MLP),
    # Its products have the norms before them.
    "transformer_engine": (*_PROJECTION, *_NORM, *_QKV, *_HEAD_NORMS, *_MLP_NORM, *_MLP),
}
"""Parameters of a layer in the order in which its modules have them, by `--transformer-impl`."""


def model_tensors(files: DistributedFiles) -> dict[str, str]:
    """The names of the weights, each with itself; a `UserError` for a tensor of another kind of model."""
    for name in files.tensors:
        if not name.startswith(_MODEL) and not _BESIDE.match(name):
            raise UserError(
                f"{files.folder} has the tensor {storage.shown(name)}, which is not one of a GPT model of Megatron Core"
            )
    return {name: name for name in files.tensors if name.startswith(_MODEL)}


class UnstackedTensors:
    """Tensors with the number of a layer in their names, whether the files have the layers stacked or not.

    Args:
        files: of the checkpoint.
        names: of the model, and those that the files have for them.
        layers: of the model.

    Raises:
        UserError: they are of another number of layers, of a type that is not read, or there twice.
    """

    def __init__(self, files: DistributedFiles, names: Mapping[str, str], layers: int) -> None:
        self._files = files
        self._places: dict[str, tuple[str, int | None]] = {}
        self.tensors: dict[str, Stored] = {}
        for name, full in names.items():
            stored = files.tensors[full]
            if stored.dtype not in _DTYPES:
                raise UserError(f"{files.folder}: {full} is of {stored.dtype}, which is not read")
            for own, index, shape in self._unstacked(name, full, stored.shape, layers):
                if len(self.tensors) >= _MOST_TENSORS:
                    raise UserError(f"{files.folder} has more than {_MOST_TENSORS:,} tensors, which no GPT model has")
                if own in self.tensors:
                    raise UserError(f"{files.folder} has {own} twice, as {self._places[own][0]} and as {full}")
                self.tensors[own] = Stored(shape, stored.dtype)
                self._places[own] = (full, index)

    def _unstacked(
        self, name: str, full: str, shape: tuple[int, ...], layers: int
    ) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
        """Names by layer, with the index in the stack and the shape of each."""
        own = name
        for old, new in _RENAMED.items():
            own = own.replace(old, new)
        rest = own.removeprefix(_LAYER)
        if rest == own or re.match(r"\d+\.", rest):
            yield own, None, shape
            return
        if not shape or shape[0] != layers:
            raise UserError(
                f"{self._files.folder}: {full} is of {shape[0] if shape else 0} layers, and the arguments have "
                f"num_layers {layers}; do the files belong together?"
            )
        for index in range(layers):
            yield f"{_LAYER}{index}.{rest}", index, shape[1:]

    @contextmanager
    def opened(self) -> Iterator[Read]:
        """See `TensorFiles`."""
        yield self._read

    def _read(self, name: str, index: Index = ()) -> Tensor:
        stacked, layer = self._places[name]
        ranges = _ranges(index, self.tensors[name].shape)
        found = self._files.read(stacked, [*([] if layer is None else [slice(layer, layer + 1)]), *ranges])
        return _without_numbers(found if layer is None else found[0], index)


class BucketTensors:
    """States of all parameters that lie one after the other in flat buckets, the last parameter first.

    Megatron's distributed optimizer works on such buckets. Their files do not name the parameters.

    Args:
        files: of the checkpoint.
        buckets: names of the tensors, in order.
        shapes: of the parameters, by the names of the model.
        implementation: of the layers, `--transformer-impl`.

    Raises:
        UserError: the sizes are not those of these parameters in this order.
    """

    def __init__(
        self,
        files: DistributedFiles,
        buckets: Sequence[str],
        shapes: Mapping[str, tuple[int, ...]],
        implementation: str,
    ) -> None:
        self._files = files
        self._places: dict[str, tuple[str, int]] = {}
        waiting = list(reversed(_parameter_order(shapes, implementation)))
        for bucket in buckets:
            size, borders = files.tensors[bucket].numel, files.borders(bucket)
            end = 0
            while waiting and end < size:
                name = waiting.pop(0)
                first = -(-end // _ALIGNMENT) * _ALIGNMENT
                end = first + prod(shapes[name])
                if not {first, end} <= borders:
                    raise ValueError(f"{name} is not at {first:,} to {end:,} of {bucket}")
                self._places[name] = bucket, first
            if end != size:
                raise ValueError(f"{bucket} has {size:,} elements in place of {end:,}")
        if waiting:
            raise ValueError(f"{waiting[0]} is in none of the buckets")
        self.tensors = {
            name: Stored(shapes[name], files.tensors[bucket].dtype) for name, (bucket, _) in self._places.items()
        }

    @contextmanager
    def opened(self) -> Iterator[Read]:
        """See `TensorFiles`."""
        yield self._read

    def _read(self, name: str, index: Index = ()) -> Tensor:
        bucket, first = self._places[name]
        shape = self.tensors[name].shape
        rows, *others = _ranges(index, shape) or [slice(0, shape[0])]
        width = prod(shape[1:])
        found = self._files.read(bucket, [slice(first + rows.start * width, first + rows.stop * width)])
        found = found.view(rows.stop - rows.start, *shape[1:])
        return _without_numbers(found[(slice(None), *others)], index)


def _parameter_order(names: Collection[str], implementation: str) -> list[str]:
    """Parameters in the order in which the modules of Megatron have them; a `ValueError` if it is not known."""
    order = _ORDERS.get(implementation)
    if order is None:
        raise ValueError(f"transformer_impl is {implementation!r}")
    layers = sorted({int(name.split(".")[2]) for name in names if name.startswith(_LAYER)})
    every = (*_BEFORE, *(f"{_LAYER}{layer}.{name}" for layer in layers for name in order), *_AFTER)
    found = [name for name in every if name in names]
    if len(found) < len(names):
        raise ValueError(f"the place of {next(iter(set(names) - set(found)))} is not known")
    return found


def _ranges(index: Index, shape: Sequence[int]) -> list[slice]:
    return [
        slice(each, each + 1) if isinstance(each, int) else slice(*each.indices(size)[:2])
        for each, size in zip(index, shape, strict=False)
    ]


def _without_numbers(found: Tensor, index: Index) -> Tensor:
    """Values of an index with numbers, from those that ranges in their place have given."""
    return found[tuple(0 if isinstance(each, int) else slice(None) for each in index)]
