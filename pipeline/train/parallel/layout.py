"""Layouts: the number of processes on each axis of parallelism."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import lcm, prod

from pipeline.common.errors import UserError
from pipeline.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Layout:
    """Degrees by axis, outermost first: the order in which ranks are counted."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, outermost first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

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

    def to_json(self) -> dict[str, int]:
        """For the records of a run: the degrees, and what follows from them."""
        return {**self.degrees, "dp": self.dp, "world_size": self.world_size}

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1) or "one process"


def sequence_multiple(parallel: ParallelConfig, layout: Layout) -> int:
    """Divisor of the length of every sequence, so that cp and sequence parallelism can cut it evenly."""
    tp = layout.tp if parallel.sequence_parallel else 1
    if layout.cp == 1:
        return tp
    return layout.cp * (lcm(2, tp) if parallel.cp_method == "all_gather" else tp)


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
    return Layout(**degrees)


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
