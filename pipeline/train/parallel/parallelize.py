"""A model on meta becomes a sharded model with weights: the order of composition, read top to bottom."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeline.config.model import ModelConfig
from pipeline.config.train import PrecisionConfig
from pipeline.train.init import init_weights
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.decoder import Decoder
from pipeline.train.parallel.mesh import Mesh

# The logits are a view of the head's product, and nothing changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

_COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parallelize(spec: DecoderSpec, mesh: Mesh, precision: PrecisionConfig, device: torch.device) -> Decoder:
    """Build the decoder on meta, shard it, and give it (uninitialized) memory on `device`.

    The shards are fp32 and are the master weights; forward and backward see parameters in the compute dtype, and
    gradients are reduced in fp32. They are summed over ranks, never averaged: the loss is already divided by the
    number of valid targets of the global batch.
    """
    with torch.device("meta"):
        model = Decoder(spec)
    params = mesh.role("params")
    policy = MixedPrecisionPolicy(param_dtype=_COMPUTE_DTYPE[precision.compute], reduce_dtype=torch.float32)
    # With one shard there is no memory to win back between forward and backward.
    reshard = params.size() > 1
    for layer in model.layers.values():
        fully_shard(layer, mesh=params, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=params, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    return model


def build_model(
    config: ModelConfig, spec: DecoderSpec, mesh: Mesh, precision: PrecisionConfig, device: torch.device, seed: int
) -> Decoder:
    """`parallelize`, then the initial weights, which are the same for every layout."""
    model = parallelize(spec, mesh, precision, device)
    init_weights(model, spec, config.init, seed)
    return model
