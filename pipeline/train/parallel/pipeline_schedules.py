"""Pipeline schedules: what each demands, how long ranks wait in it and what they keep, by playing it through.

The order of actions itself is torch's; gpipe, 1F1B and the others are run by `PipelineRunner`, in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeline.config.parallel import ZERO_BUBBLE, ScheduleName
from pipeline.train.torch_compat.pipeline_stage import schedule_actions

_DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Duration of an action, in units of its stage's cost: each of the three matrix products of a layer counts the same."""


@dataclass(frozen=True)
class ScheduleFacts:
    """Facts of a schedule: its demands and costs."""

    torch_name: str
    """Name in `torch.distributed.pipelining`."""
    stages: str
    """Stages on a rank, in words."""
    default_stages: int
    """Stages on a rank unless the run file says otherwise."""
    allows_stages: Callable[[int], bool]
    """True for a number of stages that a rank may have."""
    demand: str
    """Micro-batches that it needs, in words; p: ranks of the pipeline, m: micro-batches."""
    allows: Callable[[int, int], bool]
    """(m, p) -> true if it can run m micro-batches."""
    bubble: str
    """Share of the time that ranks wait, with equal stages, m a multiple of p, and gradients of inputs and of weights
    that each take as long as the forward pass; v: stages on a rank."""
    kept: str
    """Micro-batches whose activations the fullest rank keeps, each counting as one for all its layers together."""
    what: str
    """Description of it, for the documentation."""


def _whole_rounds(m: int, p: int) -> bool:
    return m % max(1, m // p) == 0


_ROUNDS = "m < 2p, or a multiple of the rounds m // p, as every multiple of p is"

SCHEDULES: dict[ScheduleName, ScheduleFacts] = {
    "gpipe": ScheduleFacts(
        "GPipe",
        "1",
        1,
        lambda v: v == 1,
        "any",
        lambda m, p: m >= 1,
        "(p - 1) / (m + p - 1)",
        "m",
        "all forward passes, then all backward passes (Huang et al. 2019)",
    ),
    "1f1b": ScheduleFacts(
        "1F1B",
        "1",
        1,
        lambda v: v == 1,
        "p or more",
        lambda m, p: m >= p,
        "(p - 1) / (m + p - 1)",
        "p",
        "after a warm-up one forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021)",
    ),
    "interleaved_1f1b": ScheduleFacts(
        "Interleaved1F1B",
        "2 or more",
        2,
        lambda v: v >= 2,
        _ROUNDS,
        _whole_rounds,
        "(p - 1) / (vm + p - 1)",
        "p + (p - 1) / v",
        "1F1B over several smaller stages on each rank (Narayanan et al. 2021)",
    ),
    "interleaved_zero_bubble": ScheduleFacts(
        "InterleavedZeroBubble",
        "2 or more",
        2,
        lambda v: v >= 2,
        _ROUNDS,
        _whole_rounds,
        "(p - 1) / (3vm + p - 1)",
        "p",
        "interleaved, and computing weight gradients fills the bubble (ZB-H1, Qi et al. 2023)",
    ),
    "zbv": ScheduleFacts(
        "ZBVZeroBubble",
        "2",
        2,
        lambda v: v == 2,
        "2p or more",
        lambda m, p: m >= 2 * p,
        "(p - 1) / (6m + p - 1)",
        "p",
        "two stages per rank in a V shape, and computing weight gradients fills the bubble (ZB-V, Qi et al. 2023)",
    ),
    "dualpipev": ScheduleFacts(
        "DualPipeV",
        "2",
        2,
        lambda v: v == 2,
        "2p or more",
        lambda m, p: m >= 2 * p,
        "(p - 1) / (6m + p - 1)",
        "p + 1/2",
        "V-shaped, forward of one micro-batch beside backward of another (after DeepSeek-V3, 2024)",
    ),
}
WHOLE_BACKWARD: tuple[ScheduleName, ...] = tuple(name for name in SCHEDULES if name not in ZERO_BUBBLE)
"""The schedules that do not split the backward pass."""


@lru_cache(maxsize=8)
def actions_of(
    schedule: ScheduleName, pp: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[tuple[int, str, int], ...], ...]:
    """Actions of each pp rank in a step, in order, see `schedule_actions`; cached, since torch takes long."""
    order = schedule_actions(SCHEDULES[schedule].torch_name, pp, stages_per_rank, micro_batches)
    return tuple(tuple(actions) for actions in order)


@dataclass(frozen=True)
class Play:
    """Course of a pipeline's step if communication took no time."""

    bubble: float
    """Share of the time of all ranks in which they wait, from 0 to 1. Unequal stages make it larger."""
    in_flight: list[int]
    """Pairs of stage and micro-batch whose activations a rank keeps at the same time at most, by rank."""
    activations: list[float]
    """Activations that a rank keeps at most, by rank; each pair weighs what its stage does."""


def play(
    schedule: ScheduleName,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    costs: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> Play:
    """Play a step of a schedule through, in the order of actions that torch gives it.

    A forward pass takes its stage's cost, the gradients of inputs the same, those of weights too. Activations are kept
    from the beginning of the forward pass to the end of the last backward pass of the micro-batch.

    Args:
        schedule: Its name in the run file.
        pp: Ranks.
        stages_per_rank: Virtual stages.
        micro_batches: Of a step, on one data-parallel rank.
        costs: By stage, first to last; by default all equal.
        weights: By stage, what the activations of a micro-batch weigh; by default 1.
    """
    stages = pp * stages_per_rank
    costs = [1.0] * stages if costs is None else costs
    weights = [1.0] * stages if weights is None else weights
    assert len(costs) == len(weights) == stages
    order = actions_of(schedule, pp, stages_per_rank, micro_batches)
    done: dict[tuple[str, int, int], float] = {}
    clock, place = [0.0] * pp, [0] * pp
    pairs, kept = [0] * pp, [0.0] * pp
    most_pairs, most_kept = [0] * pp, [0.0] * pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while place[rank] < len(actions):
                stage, kind, micro_batch = actions[place[rank]]
                after = _needs(stage, kind, micro_batch, stages)
                if any(need not in done for need in after):
                    break
                start = max([clock[rank], *(done[need] for need in after)])
                clock[rank] = start + _DURATIONS[kind] * costs[stage]
                # The next stage backwards waits for gradients of inputs, whether they come alone or not.
                done["I" if kind == "B" else kind, stage, micro_batch] = clock[rank]
                if kind == "F":
                    pairs[rank], kept[rank] = pairs[rank] + 1, kept[rank] + weights[stage]
                    most_pairs[rank] = max(most_pairs[rank], pairs[rank])
                    most_kept[rank] = max(most_kept[rank], kept[rank])
                elif kind != "I":
                    pairs[rank], kept[rank] = pairs[rank] - 1, kept[rank] - weights[stage]
                place[rank], moved = place[rank] + 1, True
    assert all(at == len(actions) for at, actions in zip(place, order, strict=True)), "the schedule waits for itself"
    busy = 3 * micro_batches * sum(costs)
    return Play(1 - busy / (pp * max(clock)), most_pairs, most_kept)


def _needs(stage: int, kind: str, micro_batch: int, stages: int) -> list[tuple[str, int, int]]:
    """The actions that must have ended before one begins."""
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("I", stage, micro_batch)]
    below = [("I", stage + 1, micro_batch)] if stage < stages - 1 else []
    return [("F", stage, micro_batch), *below]
