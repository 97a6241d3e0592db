"""AdamW and Muon in groups of parameters, and the guard that keeps a non-finite step out of the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.config import Config
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.init import lr_scale, stack_of, takes_muon
from pipeline.train.optim.bf16_adamw import Bf16AdamW
from pipeline.train.optim.muon import Muon
from pipeline.train.optim.muon_owners import group_of
from pipeline.train.optim.parameter_groups import group_lr_scale, weight_decay
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.torch_compat.core import guard_optimizer_step


class Optimizers:
    """Optimizers of all parts of the model that this process has, as if they were one.

    AdamW has all parameters, or with `type: muon` all but the matrices of layers.
    """

    def __init__(self, config: Config, model: ParallelModel) -> None:
        group = None
        if config.train.optimizer.type == "muon":
            _, parameter = next(model.named_parameters())
            assert isinstance(parameter, DTensor)
            group = group_of(parameter.device_mesh)
        self.by_stage = {index: _build(config, part, group) for index, part in model.parts.items()}
        """Each parameter of a part belongs to one of the optimizers of its stage."""

    def step(self, lr: float, finite: Tensor) -> None:
        """Update the weights and drop the gradients.

        Args:
            lr: learning rate; each group multiplies it by its `lr_scale`.
            finite: bool scalar on the device; if it is false, weights and states stay bit for bit.
        """
        found_inf = (~finite).float()
        for optimizer in self.all():
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            guard_optimizer_step(optimizer, found_inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def all(self) -> Iterator[torch.optim.Optimizer]:
        """Optimizers of all pipeline stages."""
        for optimizers in self.by_stage.values():
            yield from optimizers


def _build(config: Config, part: Decoder, group: dist.ProcessGroup | None) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a part, whose groups keep the `lr_scale` of their parameters."""
    optimizer = config.train.optimizer
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in part.named_parameters():
        muon = optimizer.type == "muon" and takes_muon(name, part.spec)
        dimensions = parameter.ndim if stack_of(name, part.spec) is None else parameter.ndim - 1
        decay = weight_decay(name, dimensions, optimizer)
        scale = lr_scale(name, part.spec, config.model.init) * group_lr_scale(name, optimizer.groups)
        groups[muon, decay, scale].append(parameter)
    of_muon, of_adamw = (
        [
            {
                "params": params,
                "lr": optimizer.lr,
                "lr_scale": scale,
                "weight_decay": decay,
            }
            for (muon, decay, scale), params in groups.items()
            if muon == wanted
        ]
        for wanted in (True, False)
    )
    names = {parameter: name for name, parameter in part.named_parameters()}
    optimizers: list[torch.optim.Optimizer] = []
    if of_muon:  # a stage may be without layers
        assert group is not None
        dtype = torch.bfloat16 if optimizer.states == "bf16" else torch.float32
        optimizers.append(Muon(of_muon, names, optimizer.muon, dtype, group))
    if of_adamw:
        if optimizer.states == "bf16":
            optimizers.append(Bf16AdamW(of_adamw, names, optimizer.betas, optimizer.eps))
        else:
            # Fused, as `found_inf` is for this implementation alone: foreach refuses it. DTensors work, too.
            optimizers.append(torch.optim.AdamW(of_adamw, betas=optimizer.betas, eps=optimizer.eps, fused=True))
    return tuple(optimizers)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Moments of zero for an AdamW of torch that has made no step, as its first step would make them.

    Where there are none, torch's checkpoints make them in a step of their own, with gradients of zero: that takes the
    memory of all gradients, and counts as a step, though the first ones of the run may have been skipped. The other
    optimizers have their states from the start.
    """
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} | {
                moment: torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
                for moment in ("exp_avg", "exp_avg_sq")
            }
