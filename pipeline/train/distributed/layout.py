"""Layouts: the number of processes on each axis of parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm, prod

from pipeline.common.errors import UserError
from pipeline.config.parallel import ParallelConfig
from pipeline.train.distributed.axes import AXES, EXPERT_PLACES, AxisName, axis_names

_RANK_AXES = axis_names()
"""Axes that multiply the number of processes, in the order in which ranks are counted."""
_DEALT = axis_names(lambda axis: axis.data == "samples")
_SHARDED = axis_names(lambda axis: axis.weights == "shards")


@dataclass(frozen=True)
class Layout:
    """Degrees by axis, in the order of `AXES`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Processes that the experts of a layer are dealt to: some of those of dp_shard, cp and tp, and no axis besides."""

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, outermost first; their product is the number of processes."""
        return {axis: getattr(self, axis) for axis in _RANK_AXES}

    @property
    def settings(self) -> dict[str, int]:
        """Key of the `parallel:` section -> degree, of all axes."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Processes that the samples of a step are dealt to."""
        return self.product(_DEALT)

    @property
    def shards(self) -> int:
        """Processes that weights, gradients and optimizer states are sharded over; those of one sequence too."""
        return self.product(_SHARDED)

    @property
    def places(self) -> int:
        """Processes that have other tokens of a model, or shards of its weights: those that experts are cut over."""
        return self.product(EXPERT_PLACES)

    @property
    def expert_shards(self) -> int:
        """Processes that the experts of a rank of ep are sharded over."""
        return self.places // self.ep

    def product(self, axes: Iterable[AxisName]) -> int:
        """Product of the degrees of some axes."""
        return prod(getattr(self, axis) for axis in axes)

    def stride(self, axis: AxisName) -> int:
        """Difference between the numbers of two neighboring ranks of an axis; those of ep are consecutive."""
        inner = _RANK_AXES[_RANK_AXES.index(axis) + 1 :] if axis in _RANK_AXES else ()
        return self.product(inner)

    def place(self, rank: int, axes: Iterable[AxisName]) -> int:
        """Place of a rank along some axes, outermost first, as if they were one."""
        place = 0
        for axis in axes:
            degree = getattr(self, axis)
            place = place * degree + rank // self.stride(axis) % degree
        return place

    def to_json(self) -> dict[str, int]:
        """The record of a layout in the files of a run: the degrees, and what follows from them."""
        of_experts = {"ep": self.ep} if self.ep > 1 else {}
        return {**self.degrees, **of_experts, "dp": self.dp, "world_size": self.world_size}

    def __str__(self) -> str:
        axes = degrees_text(self.degrees) or "one process"
        return f"{axes}, experts over ep {self.ep}" if self.ep > 1 else axes


def degrees_text(degrees: Mapping[str, int]) -> str:
    """Degrees above 1 in words: `dp_shard 4 x tp 2`."""
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


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
    return prod(max(1, degree) for degree in given_degrees(parallel).values())


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
    degrees = given_degrees(parallel)
    fixed = fixed_processes(parallel)
    rest = [axis for axis, degree in degrees.items() if degree == -1]
    given = degrees_text(degrees) or "no axis above 1"
    if rest and world_size % fixed == 0:
        degrees[rest[0]] = world_size // fixed
    elif rest:
        below, above = world_size // fixed * fixed, -(-world_size // fixed) * fixed
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"{section}: {given} needs a multiple of {fixed} processes, but there are {world_size}; set "
            f"{processes}={nearest}, or start that many, or change the degrees"
        )
    elif fixed != world_size:
        raise UserError(
            f"{section}: {given} needs {fixed} processes, but there are {world_size}; set {processes}={fixed}, or "
            f"{section}.dp_shard=-1 to take all there are"
        )
    layout = Layout(**degrees, ep=parallel.ep)
    if layout.places % layout.ep:
        places = layout.places
        near = [ep for ep in range(1, places + 1) if places % ep == 0]
        raise UserError(
            f"{section}.ep={layout.ep} does not divide the {places} processes of {' x '.join(EXPERT_PLACES)}: set "
            f"{section}.ep="
            f"{' or '.join(map(str, sorted(near, key=lambda ep: abs(ep - layout.ep))[:2]))}"
        )
    return layout


def given_degrees(parallel: ParallelConfig) -> dict[str, int]:
    """Axis -> degree of a run file, of the axes that multiply the number of processes; -1 for the one with the rest."""
    degrees: dict[str, int] = {axis: getattr(parallel, axis) for axis in _RANK_AXES}
    if degrees["dp_replicate"] == degrees["dp_shard"] == -1:
        degrees["dp_shard"] = 1  # its -1 is the default, and the other one was asked for
    return degrees
