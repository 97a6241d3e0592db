"""A model on meta becomes sharded parts with weights: the order of composition, read top to bottom."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch._dynamo  # FSDP imports it when it shards; here that is among the other imports
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeline.config import Config
from pipeline.config.parallel import ParallelConfig
from pipeline.train.distributed.layout import Layout, sequence_multiple, sequence_pieces
from pipeline.train.fp8.convert import check_fp8, refresh_scales, use_fp8
from pipeline.train.fp8.matrices import gathers_fp8
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.init import init_weights
from pipeline.train.model.kernels.choice import KernelChoice, KernelRequirements, choose_on
from pipeline.train.model.kernels.recurrence.choice import RecurrentChoice, choose_recurrent_on
from pipeline.train.model.loss import VocabShard
from pipeline.train.model.meta import on_meta
from pipeline.train.model.mixers.fp32_vectors import Fp32Vectors, fp32_parameters
from pipeline.train.model.mixers.sequence import SequenceCut
from pipeline.train.model.recompute import Recompute, check_offload
from pipeline.train.parallel.compile import check_compiler, compile_layers, compiles
from pipeline.train.parallel.context import build_cut
from pipeline.train.parallel.experts import deal_experts, mixtures, shard_dim
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.overlap import check_async_tp, set_prefetch
from pipeline.train.parallel.pipeline_stages import Stage, split_stages
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.step_shapes import run_stream
from pipeline.train.parallel.tensor import apply_tensor_parallel
from pipeline.train.parallel.tested import LayoutKind
from pipeline.train.torch_compat.compiler import prepare_async_tp

# The logits are a view of the head's product, and nothing changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ParallelModel:
    """This process's parts of the model: one for each of its pipeline stages, the whole without a pipeline."""

    spec: DecoderSpec
    stages: list[Stage]
    """All stages of the pipeline, first to last."""
    parts: dict[int, Decoder]
    """Parts of this process, by stage."""
    vocab_shard: VocabShard | None
    """Columns of the logits that this process has; None: all."""
    cut: SequenceCut | None
    """Cut of every sequence that gives this process its share; None: it has all of it."""
    sequence_multiple: int
    """Texts of any length are filled up to a multiple of it."""
    fp8_weights: bool = False
    """True if weights are sent in fp8."""

    @property
    def whole(self) -> Decoder:
        """The model, where there is no pipeline."""
        (part,) = self.parts.values()
        return part

    @property
    def vocab_columns(self) -> int:
        """Columns of the logits that this process has."""
        return self.spec.vocab_padded // (1 if self.vocab_shard is None else self.vocab_shard.group.size())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all parts. A tied table comes twice where a process has two stages with it."""
        for part in self.parts.values():
            yield from part.named_parameters()

    def prepare_passes(self) -> None:
        """Prepare passes with weights that may have changed; every process calls this."""
        if self.fp8_weights:
            for part in self.parts.values():
                refresh_scales(part)

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of every part."""
        for part in self.parts.values():
            part.train(mode)


def parallelize(config: Config, setup: Setup, storage: torch.dtype | None = None) -> ParallelModel:
    """Build this process's parts on meta, cut and shard them, and give them (uninitialized) memory on the device.

    The shards are fp32 and are the master weights; forward and backward see parameters in the compute dtype, and
    gradients are reduced in fp32. They are summed over ranks, never averaged: the loss is already divided by the
    number of valid targets of the global batch.

    Args:
        config: The run file.
        setup: What it is built on.
        storage: Type of the shards of a model that is not trained; its vectors that are always in fp32 stay so.
    """
    mesh, spec, parallel, fp8 = setup.mesh, setup.spec, config.parallel, config.train.precision.fp8
    tp = mesh.size("tp")
    stages = split_stages(spec, mesh.size("pp"), parallel.pipeline, run_stream(config))
    parts = {}
    for stage in stages:
        if stage.rank == mesh.rank("pp"):
            # The order matters. `fully_shard` comes after tp and ep: it shards what they have cut, and the placements
            # of its DTensors have both cuts. Recomputed and compiled code is within FSDP's hooks, so that it sees
            # whole weights and none of FSDP's collectives.
            with on_meta():
                part = Decoder(spec, stage.part)
            if storage is not None:
                _store_in(part, storage)
            if fp8 is not None:
                use_fp8(part, fp8, mesh.layout)
            if tp > 1:
                apply_tensor_parallel(part, mesh.role("tp"), sequence_parallel=parallel.sequence_parallel)
            if mesh.layout.ep > 1:
                deal_experts(part, mesh.role("ep"))
            _prepare_layers(part, config, setup)
            _shard(part, config, mesh)
            set_prefetch(part, parallel.overlap)
            # Memory comes last: no process ever holds more than its shards. It is not initialized here.
            parts[stage.index] = part.to_empty(device=setup.device)
    shard = None
    if tp > 1:
        shard = VocabShard(mesh.role("tp").get_group(), mesh.rank("tp") * (spec.vocab_padded // tp))
    multiple = sequence_multiple(parallel, mesh.layout, experts=bool(spec.expert_layers))
    if fp8 is not None:
        multiple = math.lcm(multiple, fp8.multiple * mesh.layout.cp)
    # A text of one position too is cut into pieces that are long enough.
    multiple *= -(-_least_length(spec, parallel, mesh.layout) // multiple)
    return ParallelModel(
        spec,
        stages,
        parts,
        shard,
        build_cut(mesh, parallel),
        multiple,
        fp8_weights=fp8 is not None and gathers_fp8(fp8, spec, mesh.layout),
    )


def _store_in(part: Decoder, dtype: torch.dtype) -> None:
    """Give the parameters of a part on meta another type, and take their gradients away."""
    always_fp32 = fp32_parameters(part)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(False)
        if name not in always_fp32:
            parameter.data = parameter.data.to(dtype)


def _least_length(spec: DecoderSpec, parallel: ParallelConfig, layout: Layout) -> int:
    """Positions that a sequence must have at least for cp to cut it."""
    mixers = [layer.mixer for layer in spec.different_layers if layer.mixer is not None]
    sent = [mixer.cp_transfer(parallel.cp_method, layout.tp, layout.cp) for mixer in mixers]
    least = max((each.least_piece for each in sent if each is not None), default=0)
    return max(1, least * sequence_pieces(parallel, layout)) if layout.cp > 1 else 1


def _prepare_layers(part: Decoder, config: Config, setup: Setup) -> None:
    """Set how the layers of a part are computed in training passes: recomputed, compiled."""
    recompute, tp = config.train.recompute, setup.mesh.size("tp")
    for block in part.blocks:
        block.recompute = Recompute.of_layer(recompute, block.index, block.spec, tp)
        for mixture in mixtures(block):
            mixture.experts.recompute = Recompute.of_experts(recompute, block.index, block.spec)
            mixture.router.force = config.train.balance.force
    if compiles(config, setup.device):
        compile_layers(part, recompute)
        if tp > 1 and config.parallel.overlap.async_tp:
            prepare_async_tp(setup.mesh.role("tp").get_group())


def _shard(part: Decoder, config: Config, mesh: Mesh) -> None:
    params = mesh.role("params")
    # Where a backward pass has two halves, True would give wrong gradients without an error; a rule refuses it.
    reshard = LayoutKind.of(config.parallel, mesh.layout).reshard or False
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[config.train.precision.compute],
        reduce_dtype=torch.float32,
        # It would also round what the context has in fp32: rotary tables, and how much each token counts.
        cast_forward_inputs=False,
    )
    fp32 = replace(policy, param_dtype=torch.float32)
    # From the inside out: `fully_shard` of a module takes the parameters that no call within it has taken.
    for layer in [*part.layers.values(), *part.mtp_layers]:
        for unit in layer.modules():
            if isinstance(unit, Fp32Vectors):
                # What a layer computes reads them after their own forward pass.
                fully_shard(unit, mesh=params, mp_policy=fp32, reshard_after_forward=False)
        for mixture in mixtures(layer):
            experts = mesh.role("experts")
            fully_shard(
                mixture.experts,
                mesh=experts,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=partial(shard_dim, mesh=experts),
            )
        fully_shard(layer, mesh=params, mp_policy=policy, reshard_after_forward=reshard)
    # What the last layer used is what backward needs first.
    fully_shard(part, mesh=params, mp_policy=policy, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means. For a factor FSDP takes PREMUL_SUM, which gloo does not have; the second call makes it a
            # plain sum everywhere (2.11, 2.13). Both are settings of one module, and not of those within it.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def attention_choice(config: Config, setup: Setup) -> KernelChoice:
    """The kernel that computes attention in a training, see `choose_on`."""
    cut = config.parallel.cp > 1 and config.parallel.cp_method == "all_gather"
    need = KernelRequirements.of(config.model, setup.spec, config.train, compiles(config, setup.device), cut)
    return choose_on(config.train.attention, need, setup.device)


def recurrent_choice(config: Config, setup: Setup) -> RecurrentChoice:
    """The kernels that compute recurrences in a training, see `choose_recurrent_on`; plain ones where it has none."""
    if not has_recurrence(setup.spec):
        return RecurrentChoice("plain", "the model has no recurrence")
    return choose_recurrent_on(config.train, setup.device)


def has_recurrence(spec: DecoderSpec) -> bool:
    """True if some layer of a model has one."""
    return any(layer.mixer is not None and layer.mixer.recurrent for layer in spec.different_layers)


def build_model(config: Config, setup: Setup) -> ParallelModel:
    """The parts of `parallelize` with initial weights, which are the same for every layout.

    Raises:
        UserError: The device or the machine cannot do what `train` asks for; nothing is built then.
    """
    train, device = config.train, setup.device
    check_offload(train.recompute, device)
    if train.precision.fp8 is not None:
        check_fp8(train.precision.fp8, device)
    if compiles(config, device):
        check_compiler(device)
    check_async_tp(config, setup)
    kernel = attention_choice(config, setup).build(train.deterministic)
    recurrent = recurrent_choice(config, setup).build()
    model = parallelize(config, setup)
    for part in model.parts.values():
        part.kernel = kernel
        part.recurrent = recurrent
        init_weights(part, setup.spec, config.model.init, config.run.seed)
    return model
