"""A model on meta becomes sharded parts with weights: the order of composition, read top to bottom."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeline.config.model import ModelConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.train import PrecisionConfig, TrainConfig
from pipeline.train.fp8.convert import check_fp8, refresh_scales, use_fp8
from pipeline.train.fp8.matrices import gathers_fp8
from pipeline.train.model.block import Block
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.context import SequenceCut
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.init import init_weights
from pipeline.train.model.kernels.choice import KernelChoice, KernelRequirements, choose_on
from pipeline.train.model.loss import VocabShard
from pipeline.train.model.recompute import Recompute, check_offload
from pipeline.train.parallel.compile import check_compiler, compile_layers, compiles
from pipeline.train.parallel.context import build_cut
from pipeline.train.parallel.layout import sequence_multiple
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.overlap import check_async_tp, set_prefetch
from pipeline.train.parallel.pipeline_stages import Stage, split_stages
from pipeline.train.parallel.tensor import apply_tensor_parallel
from pipeline.train.parallel.tested import LayoutKind
from pipeline.train.parallel.torch_compat.core import prepare_async_tp

# The logits are a view of the head's product, and nothing changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ParallelModel:
    """What this process has of the model: one part for each of its pipeline stages, the whole without a pipeline."""

    spec: DecoderSpec
    stages: list[Stage]
    """All stages of the pipeline, first to last."""
    parts: dict[int, Decoder]
    """By stage, those of this process."""
    vocab_shard: VocabShard | None
    """Which columns of the logits this process has; None: all."""
    cut: SequenceCut | None
    """How this process's share of every sequence is cut; None: it has all of it."""
    sequence_multiple: int
    """What the length of every sequence is a multiple of."""
    fp8_weights: bool = False
    """Whether weights are sent in fp8."""

    @property
    def whole(self) -> Decoder:
        """The model, where there is no pipeline."""
        (part,) = self.parts.values()
        return part

    @property
    def vocab_columns(self) -> int:
        """Columns of the logits that this process has."""
        return self.spec.vocab_padded // (1 if self.vocab_shard is None else self.vocab_shard.group.size())

    @property
    def tied_over_stages(self) -> bool:
        """Whether the last stage has a copy of the embedding."""
        return self.spec.tie_embeddings and len(self.stages) > 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of all parts. A tied embedding comes twice where a process has the first stage and the last."""
        for part in self.parts.values():
            yield from part.named_parameters()

    def prepare_passes(self) -> None:
        """Comes before passes over weights that may have changed; every process calls this."""
        if self.fp8_weights:
            for part in self.parts.values():
                refresh_scales(part)

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of every part."""
        for part in self.parts.values():
            part.train(mode)


def parallelize(
    spec: DecoderSpec,
    mesh: Mesh,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    device: torch.device,
    sequence_length: int,
    train: TrainConfig | None = None,
) -> ParallelModel:
    """Build this process's parts on meta, cut and shard them, and give them (uninitialized) memory on `device`.

    The shards are fp32 and are the master weights; forward and backward see parameters in the compute dtype, and
    gradients are reduced in fp32. They are summed over ranks, never averaged: the loss is already divided by the
    number of valid targets of the global batch.

    Args:
        sequence_length: What stages are balanced for.
        train: How layers are computed in training passes: what is kept for backward, and whether they are compiled.
            None: everything, and not.
    """
    tp, pp = mesh.size("tp"), mesh.size("pp")
    stages = split_stages(spec, pp, parallel.pipeline, sequence_length)
    parts = {}
    for stage in stages:
        if stage.rank == mesh.rank("pp"):
            with torch.device("meta"):
                part = Decoder(spec, stage.part)
            if train is not None and precision.fp8 is not None:
                use_fp8(part, precision.fp8, mesh.layout)
            if tp > 1:
                apply_tensor_parallel(part, mesh.role("tp"), sequence_parallel=parallel.sequence_parallel)
            if train is not None:
                _prepare_training(part, train, parallel, mesh.role("tp") if tp > 1 else None, device)
            _shard(part, mesh, precision, reshard=LayoutKind.of(parallel, mesh.layout).reshard or False)
            set_prefetch(part, parallel.overlap)
            parts[stage.index] = part.to_empty(device=device)
    shard = None
    if tp > 1:
        shard = VocabShard(mesh.role("tp").get_group(), mesh.rank("tp") * (spec.vocab_padded // tp))
    multiple = sequence_multiple(parallel, mesh.layout)
    fp8 = precision.fp8 if train is not None else None
    if fp8 is not None:
        multiple = math.lcm(multiple, fp8.multiple * mesh.layout.cp)
    return ParallelModel(
        spec,
        stages,
        parts,
        shard,
        build_cut(mesh, parallel),
        multiple,
        fp8_weights=fp8 is not None and gathers_fp8(fp8, spec, mesh.layout),
    )


def _prepare_training(
    part: Decoder, train: TrainConfig, parallel: ParallelConfig, tp: DeviceMesh | None, device: torch.device
) -> None:
    """How the layers of a part are computed in training passes, alone or over a mesh of tp."""
    degree = 1 if tp is None else tp.size()
    for block in part.layers.values():
        layer = cast(Block, block)
        layer.recompute = Recompute.of_layer(train.recompute, layer.index, part.spec.layers[layer.index], degree)
    if compiles(train, parallel, device):
        compile_layers(part, train.recompute)
        if tp is not None and parallel.overlap.async_tp:
            prepare_async_tp(tp.get_group())


def _shard(part: Decoder, mesh: Mesh, precision: PrecisionConfig, *, reshard: bool) -> None:
    params = mesh.role("params")
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[precision.compute],
        reduce_dtype=torch.float32,
        # It would also round what the context has in fp32: rotary tables, and how much each token counts.
        cast_forward_inputs=False,
    )
    for layer in part.layers.values():
        fully_shard(layer, mesh=params, mp_policy=policy, reshard_after_forward=reshard)
    # What the last layer used is what backward needs first.
    fully_shard(part, mesh=params, mp_policy=policy, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def attention_choice(
    config: ModelConfig, spec: DecoderSpec, train: TrainConfig, parallel: ParallelConfig, device: torch.device
) -> KernelChoice:
    """What computes attention in a training, see `choose_on`."""
    need = KernelRequirements.of(config, spec, train, compiles(train, parallel, device))
    return choose_on(train.attention, need, device)


def build_model(
    config: ModelConfig,
    spec: DecoderSpec,
    mesh: Mesh,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    device: torch.device,
    seed: int,
    sequence_length: int,
    train: TrainConfig | None = None,
) -> ParallelModel:
    """`parallelize`, then the initial weights, which are the same for every layout.

    Raises:
        UserError: The device or the machine cannot do what `train` asks for; nothing is built then.
    """
    if train is not None:
        check_offload(train.recompute, device)
        if precision.fp8 is not None:
            check_fp8(precision.fp8, device)
        if compiles(train, parallel, device):
            check_compiler(device)
        check_async_tp(parallel, train, device, mesh.role("tp") if mesh.size("tp") > 1 else None)
        kernel = attention_choice(config, spec, train, parallel, device).build(train.deterministic)
    model = parallelize(spec, mesh, parallel, precision, device, sequence_length, train)
    for part in model.parts.values():
        if train is not None:
            part.kernel = kernel
        init_weights(part, spec, config.init, seed)
    return model
