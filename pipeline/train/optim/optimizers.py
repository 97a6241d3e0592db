"""AdamW and Muon in groups, the global gradient norm, and the guard that keeps a non-finite step out of the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from pipeline.config.model import InitConfig
from pipeline.config.train import OptimizerConfig
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.init import is_layer_matrix, lr_scale
from pipeline.train.optim.bf16_adamw import Bf16AdamW
from pipeline.train.optim.muon import Muon
from pipeline.train.optim.muon_owners import group_of
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.pipeline_parallel import TiedEmbedding
from pipeline.train.parallel.torch_compat.core import guard_optimizer_step, scale_tensors


class Optimizers:
    """Those of each part of the model that this process has, as if they were one.

    AdamW has all parameters, or with `type: muon` all but the matrices of layers.
    """

    def __init__(self, model: ParallelModel, init: InitConfig, config: OptimizerConfig) -> None:
        group = None
        if config.type == "muon":
            _, parameter = next(model.named_parameters())
            assert isinstance(parameter, DTensor)
            group = group_of(parameter.device_mesh)
        self.by_stage = {index: _build(part, model.spec, init, config, group) for index, part in model.parts.items()}
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
        """Of all stages."""
        for optimizers in self.by_stage.values():
            yield from optimizers


def _build(
    part: Decoder, spec: DecoderSpec, init: InitConfig, config: OptimizerConfig, group: dist.ProcessGroup | None
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a part. Matrices decay, vectors do not; a group keeps its `lr_scale` (1 but for muP)."""
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in part.named_parameters():
        muon = config.type == "muon" and is_layer_matrix(name, spec)
        groups[muon, parameter.ndim >= 2, lr_scale(name, spec, init)].append(parameter)
    of_muon, of_adamw = (
        [
            {
                "params": params,
                "lr": config.lr,
                "lr_scale": scale,
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for (muon, decays, scale), params in groups.items()
            if muon == wanted
        ]
        for wanted in (True, False)
    )
    names = {parameter: name for name, parameter in part.named_parameters()}
    optimizers: list[torch.optim.Optimizer] = []
    if of_muon:  # a stage may be without layers
        assert group is not None
        dtype = torch.bfloat16 if config.states == "bf16" else torch.float32
        optimizers.append(Muon(of_muon, names, config.muon, dtype, group))
    if of_adamw:
        if config.states == "bf16":
            optimizers.append(Bf16AdamW(of_adamw, names, config.betas, config.eps))
        else:
            optimizers.append(torch.optim.AdamW(of_adamw, betas=config.betas, eps=config.eps, fused=True))
    return tuple(optimizers)


class Gradients:
    """The gradients that this process has of the model, after the backward passes of a step."""

    def __init__(self, model: ParallelModel, mesh: Mesh) -> None:
        self._tied = None
        if model.tied_over_stages:
            self._tied = TiedEmbedding(model.stages, model.parts, mesh.role("pp"))
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        # Of equal copies on several processes one counts for the norm.
        elsewhere = None if self._tied is None else self._tied.counted_elsewhere
        self._counted = {name: p for name, p in model.named_parameters() if _owns(p) and p is not elsewhere}

    def share_tied(self) -> None:
        """Add up the gradients of a tied embedding, of which the first and the last stage have copies."""
        if self._tied is not None:
            self._tied.share_gradients()

    def sum_of_squares(self) -> Tensor:
        """This process's share of the squared L2 norm of the whole gradient, fp64 scalar."""
        if not self._counted:
            return torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        return _square(self._local(self._counted.values()))

    def squares_by(self, group: Callable[[str], str]) -> dict[str, Tensor]:
        """The same, by what `group` makes of the names of parameters; those of which nothing is here are missing."""
        groups: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self._counted.items():
            groups[group(name)].append(parameter)
        return {name: _square(self._local(parameters)) for name, parameters in groups.items()}

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar on the device."""
        scale_tensors(self._local(self._parameters), factor)

    def _local(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        local = []
        for parameter in parameters:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            assert not any(isinstance(placement, Partial) for placement in gradient.placements)
            local.append(gradient.to_local())
        return local


def _square(tensors: list[Tensor]) -> Tensor:
    """The squared L2 norm of some tensors together, fp64 scalar."""
    return nn.utils.get_total_norm(tensors, foreach=True).double().square()


def _owns(parameter: nn.Parameter) -> bool:
    """Whether this process counts what it has of a parameter: it is the first along each axis of copies."""
    assert isinstance(parameter, DTensor)
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    return not any(
        isinstance(placement, Replicate) and coordinate > 0
        for placement, coordinate in zip(parameter.placements, coordinates, strict=True)
    )
