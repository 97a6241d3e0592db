"""Layouts: the number of processes on each axis of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

from pipeline.common.errors import UserError
from pipeline.config.parallel import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first."""


@dataclass(frozen=True)
class Layout:
    """Degrees by axis, outermost first: the order in which ranks are counted."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Processes that the experts of a layer are dealt to: some of those of dp_shard, cp and tp, and no axis besides."""

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def settings(self) -> dict[str, int]:
        """Key of the `parallel:` section -> degree: the axes, and ep."""
        return {**self.degrees, "ep": self.ep}

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Processes that the samples of a step are dealt to."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Processes that weights, gradients and optimizer states are sharded over; those of one sequence too."""
        return self.dp_shard * self.cp

    @property
    def places(self) -> int:
        """Processes that have other tokens of a model, or shards of its weights: those that experts are cut over."""
        return self.dp_shard * self.cp * self.tp

    @property
    def expert_shards(self) -> int:
        """Processes that the experts of a rank of ep are sharded over."""
        return self.places // self.ep

    def to_json(self) -> dict[str, int]:
        """For the records of a run: the degrees, and what follows from them."""
        of_experts = {"ep": self.ep} if self.ep > 1 else {}
        return {**self.degrees, **of_experts, "dp": self.dp, "world_size": self.world_size}

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1) or "one process"
        return f"{axes}, experts over ep {self.ep}" if self.ep > 1 else axes


def sequence_multiple(parallel: ParallelConfig, layout: Layout, *, experts: bool = False) -> int:
    """Divisor of the length of every sequence, so that cp and sequence parallelism can cut it evenly.

    With experts, ranks of tp that have the whole residual stream route a share of its positions each.
    """
    tp = layout.tp if parallel.sequence_parallel or experts else 1
    if layout.cp == 1:
        return tp
    return layout.cp * (lcm(2, tp) if parallel.cp_method == "all_gather" else tp)


def sequence_pieces(parallel: ParallelConfig, layout: Layout) -> int:
    """Pieces that cp cuts a sequence into."""
    return layout.cp * (2 if layout.cp > 1 and parallel.cp_method == "all_gather" else 1)


def fixed_processes(parallel: ParallelConfig) -> int:
    """Processes that the layout names; the axis that takes the rest counts as one."""
    return prod(max(1, degree) for degree in _degrees(parallel).values())


def resolve(
    parallel: ParallelConfig, world_size: int, *, section: str = "parallel", processes: str = "launch.processes"
) -> Layout:
    """The layout over `world_size` processes.

    Args:
        parallel: The degrees.
        world_size: How many there are.
        section: What the run file calls `parallel`, for messages.
        processes: What it calls their number.

    Raises:
        UserError: the degrees do not multiply to it.
    """
    degrees = _degrees(parallel)
    fixed = fixed_processes(parallel)
    rest = [axis for axis, degree in degrees.items() if degree == -1]
    named = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "no axis above 1"
    if rest and world_size % fixed == 0:
        degrees[rest[0]] = world_size // fixed
    elif rest:
        below, above = world_size // fixed * fixed, -(-world_size // fixed) * fixed
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"{section}: {named} needs a multiple of {fixed} processes, but there are {world_size}; set "
            f"{processes}={nearest}, or start that many, or change the degrees"
        )
    elif fixed != world_size:
        raise UserError(
            f"{section}: {named} needs {fixed} processes, but there are {world_size}; set {processes}={fixed}, or "
            f"{section}.dp_shard=-1 to take all there are"
        )
    layout = Layout(**degrees, ep=parallel.ep)
    if layout.places % layout.ep:
        places = layout.places
        near = [ep for ep in range(1, places + 1) if places % ep == 0]
        raise UserError(
            f"{section}.ep={layout.ep} does not divide the {places} processes of dp_shard x cp x tp: set {section}.ep="
            f"{' or '.join(map(str, sorted(near, key=lambda ep: abs(ep - layout.ep))[:2]))}"
        )
    return layout


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    shard = parallel.dp_shard
    if parallel.dp_replicate == -1 and shard == -1:  # dp_shard's -1 is the default, and the other one was asked for
        shard = 1
    return {
        "pp": parallel.pp,
        "dp_replicate": parallel.dp_replicate,
        "dp_shard": shard,
        "cp": parallel.cp,
        "tp": parallel.tp,
    }
