"""Tensor parallelism (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022) of a decoder.

Each rank of the tp axis has some attention heads, some columns of the feed-forward part and some rows of the
vocabulary; norms and the position embedding are whole on each. Every parameter becomes a DTensor on the tp mesh, so
that `fully_shard` finds one mesh for all of them; between the modules activations are plain local tensors:

- the residual stream is [B, S, D], equal on all ranks, or with sequence parallelism [B, S/tp, D], one piece a rank;
- a mixer and an mlp collect their input once, and sum their output once: an all-reduce backward and one forward, or
  with sequence parallelism an all-gather and a reduce-scatter of the same total size;
- logits are [B, S, V/tp], for `token_loss` with a `VocabShard`.

The gradient of a parameter that is cut is complete on its rank. One that is whole on all ranks is complete where all
ranks saw all tokens and heads; otherwise it is a sum over tp, which autograd leaves as a `Partial` DTensor and
`fully_shard` carries out before it reduces the gradient over its own mesh: norms and positions with sequence
parallelism, the norms of queries and keys, and shared keys and values.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from pipeline.train.model.block import Block
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.head import Head
from pipeline.train.model.loss import Criterion
from pipeline.train.model.mtp import MtpLayer
from pipeline.train.model.norm import grouped_rms_norm
from pipeline.train.model.parameter_spec import HeadNorm
from pipeline.train.model.part_spec import LayerPartSpec
from pipeline.train.parallel.experts import PositionsOfRanks, mixtures
from pipeline.train.torch_compat.core import all_reduce, with_parts_of_gradient

_OWN = Shard(0)
"""Layout of what each rank has for itself, heads or a gradient's part, as if it had samples of its own."""


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a decoder, or a part of one, over `mesh`, in place.

    Heads, `ffn_dim` and the padded vocabulary must be multiples of the mesh's size; `kv_heads` may also divide it. With
    sequence parallelism the length of every sequence must be a multiple too. The parts cannot be used with caches.

    Args:
        model: On the meta device. Afterwards every parameter is a DTensor on `mesh`, its name and global shape kept.
        mesh: The tp axis, of more than one process.
        sequence_parallel: Cut the residual stream along the sequence.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    for block in model.blocks:
        _cut_block(block, mesh, stream)
    for layer in model.mtp_layers:
        _cut_mtp(layer, mesh, stream)
    if sequence_parallel:
        model.stream_shard = lambda positions: positions.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        model.stream_shards = mesh.size()
    if hasattr(model, "relative"):
        for side, table in list(model.relative.items()):
            model.relative[side] = _distributed(table, mesh, Shard(1))
    if hasattr(model, "embedding"):
        model.set_submodule("embedding", VocabParallelEmbedding(model.embedding, mesh, stream))
    if hasattr(model, "position_embedding"):
        parallelize_module(model.position_embedding, mesh, _WholeParameters(stream, cut_input=True))
    if hasattr(model, "type_embedding"):
        parallelize_module(model.type_embedding, mesh, _WholeParameters(stream, cut_input=True))
    for name in ("embedding_norm", "norm"):
        if hasattr(model, name):
            parallelize_module(model.get_submodule(name), mesh, _WholeParameters(stream))
    if model.part.last:
        parallelize_module(model.head, mesh, _VocabParallelHead(stream))
    of_experts = {id(parameter) for mixture in mixtures(model) for parameter in mixture.experts.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in of_experts:  # tp cuts none
            continue
        assert isinstance(parameter, DTensor) and parameter.device_mesh == mesh, f"{name} has no place on the tp mesh"


def _cut_block(block: Block, mesh: DeviceMesh, stream: Placement) -> None:
    # torch would cut unevenly, and then take all pieces to be as large as its own.
    assert block.spec.fits(mesh.size()), (block.spec, mesh.size())
    plan: dict[str, ParallelStyle] = {name: _WholeParameters(stream) for name in block.spec.norms}
    for place, part in block.spec.parts.items():
        for inner in part.tp_inputs:
            # The other arguments are context and state; attention to an encoder gets its positions before them.
            inputs = 2 if place == "cross" else 1
            more = () if place == "mlp" else (None, None)
            # A DTensor goes to the matrices, and not a local tensor, so that their gradients are added before one sum
            # over tp.
            plan[f"{place}.{inner}".removesuffix(".")] = PrepareModuleInput(
                input_layouts=(stream,) * inputs + more, desired_input_layouts=(Replicate(),) * inputs + more
            )
        for name, style in _cut_part(block.get_submodule(place), part, mesh, stream).items():
            plan[f"{place}.{name}"] = style
    parallelize_module(block, mesh, plan)
    for mixture in mixtures(block):
        _distribute(mixture.router, mesh, Replicate())
        if stream.is_replicate():
            mixture.share = PositionsOfRanks(mesh)


def _cut_mtp(layer: MtpLayer, mesh: DeviceMesh, stream: Placement) -> None:
    """Cut what a depth of multi-token prediction has besides its block."""
    norms: dict[str, ParallelStyle] = {
        name: _WholeParameters(stream) for name, child in layer.named_children() if name.endswith("norm")
    }
    parallelize_module(layer, mesh, norms)
    for name, child in layer.named_children():
        if isinstance(child, nn.Linear):
            layer.set_submodule(name, WholeLinear(child, mesh, stream))


def _cut_part(module: nn.Module, part: LayerPartSpec, mesh: DeviceMesh, stream: Placement) -> dict[str, ParallelStyle]:
    """Styles by module name; a module that torch has no style for is replaced in place."""
    plan: dict[str, ParallelStyle] = {}
    for matrix in part.matrices:
        if matrix.cut == "positions":
            if isinstance(linear := module.get_submodule(matrix.name), nn.Linear):
                module.set_submodule(matrix.name, WholeLinear(linear, mesh, stream))
        elif matrix.shared(mesh.size()):
            linear = cast(nn.Linear, module.get_submodule(matrix.name))
            assert matrix.heads is not None
            rows = _shared_rows(matrix.heads, matrix.rows, mesh)
            module.set_submodule(matrix.name, SharedHeads(linear, rows, mesh))
        elif matrix.cut == "whole":
            plan[matrix.name] = _WholeParameters(_OWN)
        elif matrix.cut == "columns":
            plan[matrix.name] = RowwiseParallel(output_layouts=stream)
        else:
            plan[matrix.name] = _RowsOfWhole() if matrix.of_whole else ColwiseParallel()
    for norm in part.head_norms:
        if norm.heads is None:
            plan[norm.name] = _WholeParameters(_OWN)
        else:
            module.set_submodule(norm.name, ShardedRMSNorm(norm, module.get_submodule(norm.name), mesh))
    for vector in part.vectors:
        name, _, own = vector.name.rpartition(".")
        inner, shared = module.get_submodule(name), vector.shared(mesh.size())
        placed = _distributed(module.get_parameter(vector.name), mesh, Replicate() if shared else Shard(0))
        inner.register_parameter(own, placed)
        if shared:
            assert vector.heads is not None
            inner.own_rows = _shared_rows(vector.heads, vector.shape[0], mesh)  # type: ignore[assignment]
    return plan


def _shared_rows(heads: int, rows: int, mesh: DeviceMesh) -> slice:
    """Rows of the head that this rank uses: those that share one are consecutive."""
    assert mesh.size() % heads == 0, (heads, mesh.size())
    head, of_head = mesh.get_local_rank() * heads // mesh.size(), rows // heads
    return slice(head * of_head, (head + 1) * of_head)


def _distributed(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    # src_data_rank=None: nothing is sent, each rank takes its piece of what it has (here meta tensors).
    return nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None))


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, _distributed(parameter, mesh, placement))


class _WholeParameters(ParallelStyle):
    """Every rank has the module's parameters whole, and runs it on its own piece of the input, or on all of it.

    If the input is cut, the gradients of the parameters are sums over the ranks.

    Args:
        layout: What the local input is of the whole one, and the local output of the whole output.
        cut_input: The input comes whole, and this rank's piece has to be taken from it.
    """

    def __init__(self, layout: Placement, *, cut_input: bool = False) -> None:
        super().__init__()
        self._layout = layout
        self._comes_as = Replicate() if cut_input else layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Tensor]) -> DTensor:
            if isinstance(inputs[0], DTensor):  # the input of a mixer, the same on all ranks
                # Without `grad_placements`, torch takes the gradient that each rank has for the whole one, and sums
                # nothing.
                own = inputs[0].to_local(grad_placements=[Partial()])
                return DTensor.from_local(own, device_mesh, [self._layout], run_check=False)
            whole = DTensor.from_local(inputs[0], device_mesh, [self._comes_as], run_check=False)
            return whole.redistribute(placements=[self._layout])

        def leave(_module: nn.Module, _inputs: tuple[DTensor], output: DTensor) -> Tensor:
            return output.to_local()

        _distribute(module, device_mesh, Replicate())
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class _RowsOfWhole(ColwiseParallel):
    """A `ColwiseParallel` whose input all ranks have made for themselves: each keeps its part of the gradient.

    What made it, see `Matrix.cut`, takes the sum once, over gradients of weights, and not in each pass.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Tensor]) -> DTensor:
            return with_parts_of_gradient(inputs[0], device_mesh)

        module.register_forward_pre_hook(enter)
        return super()._apply(module, device_mesh)


class WholeLinear(nn.Module):
    """A matrix that every rank has whole, for its own piece of the stream, or for all of it.

    Of `nn.Linear` on DTensors torch cannot cut the sequence where there are several samples.
    """

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__()
        self._gradient = Replicate() if stream.is_replicate() else Partial()
        self.weight = _distributed(linear.weight, mesh, Replicate())

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D], both local."""
        return F.linear(x_BSD, cast(DTensor, self.weight).to_local(grad_placements=[self._gradient]))


class _VocabParallelHead(ParallelStyle):
    """Every rank has some rows of the head's weight, which may be the embedding's, and makes their logits.

    The input is gathered if it is cut along the sequence. Each rank knows the part of its gradient that its own logits
    have; the sum over the ranks is the gather's backward.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(
            _module: nn.Module, inputs: tuple[Tensor, DTensor, Criterion | None, Tensor | None]
        ) -> tuple[Tensor, Tensor, Criterion | None, Tensor | None]:
            x = DTensor.from_local(inputs[0], device_mesh, [self._stream], run_check=False)
            x = x.redistribute(placements=[Replicate()])
            return x.to_local(grad_placements=[Partial()]), inputs[1].to_local(), *inputs[2:]

        assert isinstance(module, Head)
        module.first_row = _first_row(module.spec.vocab_padded, device_mesh)
        _distribute(module, device_mesh, Shard(0))
        for child in module.children():  # which all ranks compute, for their own logits
            _distribute(child, device_mesh, Replicate())
        module.register_forward_pre_hook(enter)
        return module


def _first_row(vocab_padded: int, mesh: DeviceMesh) -> int:
    assert vocab_padded % mesh.size() == 0, (vocab_padded, mesh.size())
    return mesh.get_local_rank() * vocab_padded // mesh.size()


class VocabParallelEmbedding(nn.Module):
    """An embedding of which every rank has some rows: it looks up those it has, and the results are summed.

    torch's `RowwiseParallel` does the same, but every rank then makes the gradient of the whole table.

    Shapes: B batch, S positions, D width.
    """

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__()
        self._mesh = mesh
        self._stream = stream
        self._first_row = _first_row(embedding.num_embeddings, mesh)
        self.weight = _distributed(embedding.weight, mesh, Shard(0))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] -> [B, S, D], or this rank's [B, S/tp, D] with sequence parallelism."""
        assert self._stream.is_replicate() or tokens_BS.shape[1] % self._mesh.size() == 0, (
            "a sequence that tp cannot cut"
        )
        weight_VD = cast(DTensor, self.weight).to_local()
        rows_BS = tokens_BS - self._first_row
        elsewhere_BS = (rows_BS < 0) | (rows_BS >= weight_VD.shape[0])
        own_BSD = F.embedding(rows_BS.masked_fill(elsewhere_BS, 0), weight_VD)
        own_BSD = own_BSD.masked_fill(elsewhere_BS[..., None], 0)
        sum_BSD = DTensor.from_local(own_BSD, self._mesh, [Partial()], run_check=False)
        # The product is of a kind of its own while the sum is under way, and a compiled block that gets it loses its
        # gradient (2.13); any operation on it ends that, but not `wait`.
        return sum_BSD.redistribute(placements=[self._stream]).to_local() * 1


class ShardedRMSNorm(nn.Module):
    """RMSNorm over all heads, or over runs of them, of which this rank has some.

    The squares of what is normalized together are summed over the ranks, unless this one has all of it.
    """

    def __init__(self, norm: HeadNorm, whole: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        assert norm.heads is not None and norm.spec.kind == "rmsnorm"
        ranks, rank = mesh.size(), mesh.get_local_rank()
        assert norm.groups % ranks == 0 or ranks % norm.groups == 0, (norm, ranks)
        self._own_groups = max(1, norm.groups // ranks)
        self._summed = norm.sums(ranks)
        self._group_of_rank = rank * norm.groups // ranks
        self._size = norm.heads * norm.head_dim // norm.groups
        self._spec = norm.spec
        self._group = mesh.get_group()
        self.weight = _distributed(whole.get_parameter("weight"), mesh, Shard(0))

    def forward(self, x_BSC: Tensor) -> Tensor:
        """The channels of this rank's heads, [B, S, C]."""
        spec, weight_C = self._spec, cast(DTensor, self.weight).to_local()
        if not self._summed:
            return grouped_rms_norm(x_BSC, weight_C, spec.offset, spec.eps, self._own_groups)
        x = x_BSC.float()
        squares = x.square().sum(-1, keepdim=True)
        if self._summed > 1:  # each group's, of which this rank knows something of one
            before = self._group_of_rank
            squares = F.pad(squares, (before, self._summed - 1 - before))
        squares = cast(Tensor, _SumOverRanks.apply(squares, self._group))  # type: ignore[no-untyped-call]
        squares_BS1 = squares[..., self._group_of_rank, None] if self._summed > 1 else squares
        normalized = x * torch.rsqrt(squares_BS1 / self._size + spec.eps)
        return (normalized * (weight_C.float() + spec.offset)).to(x_BSC.dtype)


class _SumOverRanks(torch.autograd.Function):
    """A sum that all ranks use, each for other results: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], ctx.group), None


class SharedHeads(nn.Module):
    """A projection to fewer key or value heads than ranks: all ranks have all of it, and each computes one head.

    Its gradients, and that of the input, are sums over the ranks.
    """

    def __init__(self, linear: nn.Linear, rows: slice, mesh: DeviceMesh) -> None:
        super().__init__()
        self._rows = rows
        self.weight = _distributed(linear.weight, mesh, Replicate())
        self.bias = None if linear.bias is None else _distributed(linear.bias, mesh, Replicate())

    def forward(self, x_BSD: DTensor) -> Tensor:
        """[B, S, D], whole on every rank -> this rank's head [B, S, E]."""
        bias = None if self.bias is None else self._own(self.bias)
        return F.linear(x_BSD.to_local(grad_placements=[Partial()]), self._own(self.weight), bias)

    def _own(self, parameter: Tensor) -> Tensor:
        return cast(DTensor, parameter).to_local(grad_placements=[Partial()])[self._rows]
