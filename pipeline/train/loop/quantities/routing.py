"""Routing of tokens to experts in a step: choices on all ranks, the biases of routers that follow, and their metrics.

Choices are counted in whole numbers, which fp64 adds up exactly in any order: biases are the same bits on every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.train import BalanceConfig
from pipeline.data.loading.batch import StepData
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.model.mlps.experts.module import Experts
from pipeline.train.model.mlps.experts.routing import Routed, Routing
from pipeline.train.monitor.imbalance import Imbalance
from pipeline.train.parallel.experts import mixtures
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.torch_compat.core import all_reduce

_NUMBERS = 3
"""Sums of a layer behind its counts: the balance loss and the z loss, without coefficients, and the largest distance of
two biases of its router, to which one process adds it."""


class Balance(Quantity):
    """Losses and biases that balance the routers of a model, and counts of how often their experts were chosen.

    Args:
        config: The `train.balance:` section.
        model: With experts.
        mesh: Of the run.
        device: Of this process.
        layers_every_steps: Steps after which loads are written by layer.
    """

    def __init__(
        self,
        config: BalanceConfig,
        model: ParallelModel,
        mesh: Mesh,
        device: torch.device,
        layers_every_steps: int | None,
    ) -> None:
        self._config = config
        self._every_steps = layers_every_steps
        roles: tuple[Literal["cp", "tp"], ...] = ("cp", "tp")
        self._groups = [mesh.role(role).get_group() for role in roles if mesh.size(role) > 1]
        routers = {index: spec.router for index, spec in model.spec.expert_layers.items()}
        self._imbalance = Imbalance(config, routers)
        self._layers = {index: router.count for index, router in routers.items()}
        self._places: dict[int, slice] = {}
        size = 0
        for index, count in self._layers.items():
            self._places[index] = slice(size, size + count + _NUMBERS)
            size += count + _NUMBERS
        self._mixtures: dict[int, Experts] = {
            block.index: mixture
            for part in model.parts.values()
            for block in part.blocks
            for mixture in mixtures(block)
        }
        self._tells = all(mesh.rank(role) == 0 for role in ("batch", "cp", "tp"))
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)
        self._rows = 0
        self._by_layer = False

    def begin(self, data: StepData) -> None:
        """Begin with no choice."""
        self._by_layer = self._every_steps is not None and (data.step + 1) % self._every_steps == 0
        self._sums.zero_()
        self._rows = 0
        for index, mixture in self._mixtures.items():
            bias_E = mixture.router.score_bias
            if bias_E is not None and self._tells:
                self._sums[self._places[index]][-1] = bias_E.max() - bias_E.min()

    def routing(self, real: int, samples: int, length: int, scale: Tensor | None) -> Routing:
        """Demands on the routers in a micro-batch, see `Routing` for the arguments."""
        config = self._config
        return Routing(real, samples, length, config.loss, config.over, config.z_loss, scale, self._summed)

    def _summed(self, counts: Tensor) -> Tensor:
        for group in self._groups:
            counts = all_reduce(counts, group)
        return counts

    def routed(self, index: int, chosen: Routed) -> None:
        """Count what the tokens of a micro-batch chose in a layer."""
        losses = torch.stack((chosen.balance, chosen.z)).double()
        self._sums[self._places[index]][:-1] += torch.cat((chosen.counts_E, losses))
        self._rows = max(self._rows, chosen.rows)

    def parts(self) -> list[Tensor]:
        """Counts and losses; rows of each rank, of which this one fills its own place."""
        rows = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        rows[dist.get_rank()] = self._rows
        return [self._sums, rows]

    @torch.no_grad()
    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers:
        """Move the biases of this rank's routers, unless the step is withheld."""
        of_layers, rows = sums
        for index, mixture in self._mixtures.items():
            router, counts_E = mixture.router, of_layers[self._places[index]][: self._layers[index]]
            router.loads.copy_(torch.where(update.is_made, counts_E.float(), router.loads))
            if router.score_bias is not None:
                # Whole numbers are compared, as a mean would be rounded.
                ahead = torch.sign(counts_E.sum() - counts_E * len(counts_E)).float() * self._config.bias_rate
                router.score_bias.add_(torch.where(update.is_made, ahead, 0.0))
        columns = partial(routing_columns, self._layers, forced=self._config.force, by_layer=self._by_layer)
        return QuantityNumbers({"of_layers": of_layers, "rows": rows}, columns)

    def warning(self, step: int, row: Mapping[str, Any], seconds: float) -> str | None:
        """A warning of experts that stay unevenly used, see `Imbalance`."""
        return self._imbalance.see(step, row["experts"]) if "experts" in row else None


def routing_columns(
    layers: Mapping[int, int], of_layers: Tensor, rows: Tensor, *, forced: bool = False, by_layer: bool = False
) -> dict[str, Any]:
    """The layer with the worst load, sums over layers, and how uneven the ranks' rows were.

    Args:
        layers: number of experts by index of the layer.
        of_layers: for each of them the choices of each expert, the balance loss, the z loss, the range of biases.
        rows: [ranks], rows that the experts of a rank got at most in a layer and micro-batch.
        forced: tokens were dealt in turn.
        by_layer: loads of each layer are written too.
    """
    worst = {"load_max_over_mean": 0.0, "load_max_layer": 0}
    worst |= {"load_cv": 0.0, "dead_experts": 0, "load_entropy": 1.0}
    balance, z, bias_range = 0.0, 0.0, 0.0
    loads = {}
    pieces = iter(torch.split(of_layers, [size for count in layers.values() for size in (count, _NUMBERS)]))
    for index, count in layers.items():
        chosen, of_layer = next(pieces), next(pieces).tolist()
        balance, z, bias_range = balance + of_layer[0], z + of_layer[1], max(bias_range, of_layer[2])
        shares = chosen / chosen.sum().clamp(min=1)
        if (most := (shares.max() * count).item()) > worst["load_max_over_mean"]:
            worst |= {"load_max_over_mean": most, "load_max_layer": index}
        worst["load_cv"] = max(worst["load_cv"], (shares.std(correction=0) * count).item())
        worst["dead_experts"] = max(worst["dead_experts"], int((chosen == 0).sum()))
        entropy = torch.special.entr(shares).sum().exp().item() / count
        worst["load_entropy"] = min(worst["load_entropy"], entropy)
        loads[str(index)] = (shares * count).tolist()
    found: dict[str, Any] = {
        **worst,
        "balance_loss": balance,
        "z_loss": z,
        "router_bias_range": bias_range,
        "rows_max_over_mean": (rows.max() / rows.mean().clamp(min=1)).item(),
    }
    if by_layer:
        found["load_by_layer"] = loads
    return {"experts": found | ({"balance_forced": True} if forced else {})}
