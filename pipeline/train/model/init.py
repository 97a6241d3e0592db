"""Initial weights that do not depend on how the parameters are laid out.

Every element of a parameter is a function of the seed, the parameter's name, and its row and column in the whole: a
rank draws its own rows, and any sharding starts bitwise equal to one process. The bits are those of Philox-4x64-10
(Salmon et al. 2011), a counter-based generator: the key is a hash of seed and name, the counter follows from the row.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeline.config.model import InitConfig
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.parameter_spec import Matrix, Normal, Stack, Uniform, Vector
from pipeline.train.model.part_spec import RELATIVE, LayerPartSpec
from pipeline.train.torch_compat.core import strided_shard

_PART = re.compile(r"(?:layers\.(\d+)|mtp\.(\d+)\.layer)\.(\w+)\.(.+)")
_MTP = re.compile(r"mtp\.(\d+)\.(\w+)\.weight")
_TABLES = ("embedding.weight", "position_embedding.weight", "type_embedding.weight", "head.weight", "head.dense.weight")
_NORM = re.compile(r"(?:.*\.)?\w*norm\.weight")

_CHUNK_ELEMENTS = 1 << 20  # elements drawn at once, which bounds the memory of the draw


@torch.no_grad()
def init_weights(model: nn.Module, spec: DecoderSpec, init: InitConfig, seed: int) -> None:
    """Fills the parameters, plain tensors or DTensors sharded or replicated over any mesh.

    Matrices are normal with the std of `weight_std`, the factors of norms are 1, biases 0; other parameters as their
    `Vector` says.

    Args:
        model: A `Decoder`, or a part of one with the names of the whole.
        spec: What the model was built from.
        init: The `model.init:` section.
        seed: The run's seed.
    """
    for buffer in model.buffers():
        buffer.zero_()  # `to_empty` has given it memory and no values
    for name, parameter in model.named_parameters():
        # Not by `normal_` of a DTensor: under `fully_shard` ranks would draw the same numbers for different shards.
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        stack = stack_of(name, spec)
        if vector := _vector(name, spec):
            rows, width = local_range(parameter, 0), math.prod(vector.shape[1:])
            # What has one dimension or several is drawn by rows, too.
            _fill_vector(local.view(len(rows), width), vector.initial, f"{seed}/{name}", rows, width)
        elif name.endswith(".bias") or (stack is not None and parameter.ndim == 2):
            local.zero_()
        elif _NORM.fullmatch(name):
            local.fill_(1 - _norm_offset(name, spec))
        elif stack is not None:
            std = weight_std(name, spec, init)
            rows, columns = local_range(parameter, 1), local_range(parameter, 2)
            for place, expert in enumerate(local_range(parameter, 0)):
                _fill_normal(local[place], std, f"{seed}/{name}.{expert}", rows, columns, stack.columns)
        else:
            rows, columns = local_range(parameter, 0), local_range(parameter, 1)
            _fill_normal(local, weight_std(name, spec, init), f"{seed}/{name}", rows, columns, parameter.shape[1])


def weight_std(name: str, spec: DecoderSpec, init: InitConfig) -> float:
    """Standard deviation of a matrix.

    - `normal`: `init.std` everywhere.
    - `depth_scaled`: as normal, but matrices that write to the residual stream get std / sqrt(2 * layers), so
      that the stream's size does not grow with depth (Radford et al. 2019).
    - `mup`: as depth_scaled, but all matrices of the layers are divided by the root of their fan-in over that in the
      model of `mup_base_dim`, too: sqrt(dim / mup_base_dim), and 1 of a size in `mup_fixed`. Embedding and head keep
      `init.std`; the head's input is multiplied by mup_base_dim / dim (`DecoderSpec.logit_scale`), and
      attention logits are divided by head_dim instead of its root, scaled to agree for heads of 64
      (the scale of attention). Learning rates: `lr_scale`. Source: Yang et al. 2022 (Tensor Programs V), table 8, Adam.
    """
    if name in _TABLES or name.startswith(RELATIVE):
        return init.std
    matrix = _matrix(name, spec) or stack_of(name, spec)
    assert matrix is not None, f"no rule for the initial weights of {name}"
    std = init.std
    if init.scheme != "normal" and matrix.to_residual:
        std /= math.sqrt(2 * len(spec.layers))
    return std * math.sqrt(_base_fan_in(matrix, spec, init))


def _base_fan_in(matrix: Matrix | Stack, spec: DecoderSpec, init: InitConfig) -> float:
    """Fan-in of a matrix of a layer in muP's base model, divided by the own one; 1 without muP."""
    if init.mup_base_dim is None or matrix.input_key in (init.mup_fixed or ()):
        return 1.0
    return init.mup_base_dim / spec.dim


def is_layer_matrix(name: str, spec: DecoderSpec) -> bool:
    """True for a matrix, or matrices, of a layer or of multi-token prediction; False for embeddings and head."""
    stack = stack_of(name, spec)
    return _matrix(name, spec) is not None or (stack is not None and name.endswith(stack.name))


def takes_muon(name: str, spec: DecoderSpec) -> bool:
    """True for a matrix that Muon may have."""
    matrix = _matrix(name, spec)
    return is_layer_matrix(name, spec) and (matrix is None or matrix.takes_muon)


def _matrix(name: str, spec: DecoderSpec) -> Matrix | None:
    part, own = _part(name, spec)
    if part is not None:
        return part.matrix(own)
    if (match := _MTP.fullmatch(name)) is None:
        return None
    depth, own = match.groups()
    return next((each for each in spec.mtp[int(depth)].inputs if each.name == own), None)


def stack_of(name: str, spec: DecoderSpec) -> Stack | None:
    """The stack of experts' matrices that a parameter is, or has the biases of."""
    part, own = _part(name, spec)
    return None if part is None else part.stack(own)


def _vector(name: str, spec: DecoderSpec) -> Vector | None:
    part, own = _part(name, spec)
    return None if part is None else next((each for each in part.vectors if each.name == own), None)


def _norm_offset(name: str, spec: DecoderSpec) -> float:
    """Offset of a norm within a part, or of the norms of the model."""
    part, own = _part(name, spec)
    within = () if part is None else part.head_norms
    return next((norm.spec.offset for norm in within if own == f"{norm.name}.weight"), spec.norm.offset)


def _part(name: str, spec: DecoderSpec) -> tuple[LayerPartSpec | None, str]:
    """The part of a layer that a parameter is in, and its name there."""
    if (match := _PART.fullmatch(name)) is None:
        return None, name
    index, depth, place, own = match.groups()
    layer = spec.mtp[int(depth)].layer if index is None else spec.layers[int(index)]
    return layer.parts.get(place), own


def lr_scale(name: str, spec: DecoderSpec, init: InitConfig) -> float:
    """Factor on a parameter's learning rate (Adam): `_base_fan_in` for matrices of layers, 1 for others."""
    if not is_layer_matrix(name, spec):
        return 1.0
    matrix = _matrix(name, spec) or stack_of(name, spec)
    assert matrix is not None
    return _base_fan_in(matrix, spec, init)


def local_range(parameter: Tensor, dim: int, coordinate: Sequence[int] | None = None) -> range:
    """Indices along `dim` of the whole parameter that a rank holds; nothing is communicated.

    Args:
        parameter: Plain, or a DTensor.
        dim: Of the parameter.
        coordinate: Of the rank, on the parameter's mesh; by default this one.
    """
    indices = range(parameter.shape[dim])
    if not isinstance(parameter, DTensor):
        return indices
    mesh, placements = parameter.device_mesh, parameter.placements
    cuts = [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]
    # FSDP's axis comes before that of tp in the mesh, and yet it cuts the pieces that tp has made.
    for axis, placement in enumerate(placements):
        strided = strided_shard(placement)
        assert strided or type(placement) in (Shard, Replicate), f"initial weights of a parameter placed {placement}"
        if strided and strided[0] == dim:
            assert strided[1] == math.prod(mesh.size(cut) for cut in cuts if cut > axis), f"{placements} over {mesh}"
            cuts.append(axis)
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None, f"a parameter of other processes: {mesh}"
    for axis in cuts:
        # As torch.chunk cuts: the last pieces may be smaller, or empty.
        size = -(-len(indices) // mesh.size(axis))
        indices = indices[coordinate[axis] * size : (coordinate[axis] + 1) * size]
    return indices


def _fill_normal(local: Tensor, std: float, key: str, rows: range, columns: range, width: int) -> None:
    """Writes rows and columns of the whole matrix [., width] named by `key` into `local`."""
    chunk = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        values = normal_rows(key, part.start, len(part), width)[:, columns.start : columns.stop]
        local[start : start + len(part)].copy_(torch.from_numpy(values * std))


def _fill_vector(local: Tensor, initial: Normal | Uniform, key: str, rows: range, width: int) -> None:
    """Writes rows of the whole [., width] named by `key` into `local`."""
    if isinstance(initial, Normal):
        _fill_normal(local, initial.std, key, rows, range(width), width)
        local.add_(initial.mean)
        return
    values = initial.low + (initial.high - initial.low) * uniform_rows(key, rows.start, len(rows), width)
    if initial.then == "log":
        values = np.log(values)
    elif initial.then == "inverse_softplus_of_exp":
        steps = np.exp(values)
        values = steps + np.log(-np.expm1(-steps))
    local.copy_(torch.from_numpy(values))


def uniform_rows(key: str, first_row: int, rows: int, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Draws from [0, 1) for some rows of a matrix, float64 [rows, width]; see `normal_rows`."""
    blocks = -(-width // 4)  # a block of the generator is four words, each of them a value
    digest = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=16).digest(), dtype="<u8")
    words = np.random.Philox(key=digest, counter=first_row * blocks).random_raw(rows * blocks * 4)
    values = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return values.reshape(rows, blocks * 4)[:, :width]


def normal_rows(key: str, first_row: int, rows: int, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Standard normal draws for some rows of a matrix, float64 [rows, width].

    Every row owns a fixed stretch of the counter, so that consecutive rows are one stretch of the stream. A 64-bit word
    makes two values by the transform of Box and Muller (1958): its high half the radius, its low half the angle.
    """
    blocks = -(-width // 8)  # a block of the generator is four words, eight values
    digest = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=16).digest(), dtype="<u8")
    words = np.random.Philox(key=digest, counter=first_row * blocks).random_raw(rows * blocks * 4)
    # In (0, 1], for the logarithm.
    radius = np.sqrt(-2.0 * np.log(((words >> np.uint64(32)) + 1.0) * 2.0**-32))
    angle = (words & np.uint64(0xFFFFFFFF)) * (2.0 * np.pi * 2.0**-32)
    pairs = np.empty((len(words), 2))
    np.multiply(radius, np.cos(angle), out=pairs[:, 0])
    np.multiply(radius, np.sin(angle), out=pairs[:, 1])
    return pairs.reshape(rows, blocks * 8)[:, :width]
