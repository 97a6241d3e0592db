"""The ground that a model is built on: a device, the mesh of all processes, and the model's specification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.train.distributed.layout import resolve
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.parallel.mesh import Mesh, build_mesh


@dataclass(frozen=True)
class Setup:
    """Device, mesh and specification of a model, which exist before its first weight."""

    device: torch.device
    mesh: Mesh
    spec: DecoderSpec


def set_up(config: Config, vocab_size: int, device: torch.device) -> Setup:
    """The setup of a config over all processes, whose group exists already. Every process calls this."""
    layout = resolve(config.parallel, dist.get_world_size())
    spec = decoder_spec(config.model, vocab_size, config.max_positions)
    return Setup(device, build_mesh(layout, device.type, experts=bool(spec.expert_layers)), spec)
