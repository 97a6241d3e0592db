"""AdamW in groups, the global gradient norm, and the guard that keeps a non-finite step out of the weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.config.model import InitConfig
from pipeline.config.train import OptimizerConfig
from pipeline.train.init import lr_scale
from pipeline.train.model.config import DecoderSpec
from pipeline.train.parallel.compat import guard_optimizer_step


def build_optimizer(
    model: nn.Module, spec: DecoderSpec, init: InitConfig, config: OptimizerConfig
) -> torch.optim.AdamW:
    """Fused AdamW. Matrices decay, vectors do not; each group keeps its `lr_scale` (1 but for muP)."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        groups[parameter.ndim >= 2, lr_scale(name, spec, init)].append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": params,
                "lr": config.lr,
                "lr_scale": scale,
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for (decays, scale), params in groups.items()
        ],
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group, times the group's scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; returns the norm before that."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def guarded_step(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Step, unless `finite` (bool scalar on the device) is false: then weights and states stay bit for bit."""
    guard_optimizer_step(optimizer, (~finite).float())
    optimizer.step()
