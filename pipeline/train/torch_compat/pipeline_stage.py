"""Names of torch that are not public, of the order in which pipelines work; see `core.py`."""

from __future__ import annotations

import torch

SPLITS_BACKWARD = torch.__version__ >= "2.13"  # which torch compares as versions
"""True if schedules whose backward passes have two halves can train; an evaluation has no backward passes.

In 2.11 and 2.12 they fail where the loss is computed in pieces, as it is by default. The first half frees the node of
the loss in torch's graph, from which the second half starts: "Attribute '_input_metadata' is invalid". All three were
tried: they fail in 2.11.0 and 2.12.1, and work in 2.13.0, 2.14.1 and 2.15.0.
"""


def schedule_actions(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int
) -> list[list[tuple[int, str, int]]]:
    """Actions of each pp rank in a step, in order, by torch's own schedule classes: (stage, kind, micro-batch).

    Kinds: F forward, B backward, I and W its two halves, the gradients of inputs and of weights. Forward and backward
    that a schedule lets overlap come one after the other, as torch runs them. In 2.11 and 2.13 the schedules are made
    by a helper of torch's visualizer, without processes.

    Args:
        schedule: Name that torch knows the schedule by.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    result: list[list[tuple[int, str, int]]] = []
    for actions in get_schedule_ops(schedule, pp, micro_batches, stages_per_rank):
        # Further kinds of actions are about communication and have no micro-batch.
        single = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
        mine: list[tuple[int, str, int]] = [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in single
            if action.microbatch_index is not None and action.computation_type.value in ("F", "B", "I", "W")
        ]
        if schedule == "1F1B":
            # What runs is right, but this description of it counts the last rank's forward passes from 1.
            forward = min((number for _, kind, number in mine if kind == "F"), default=0)
            mine = [(stage, kind, number - (forward if kind == "F" else 0)) for stage, kind, number in mine]
        result.append(mine)
    return result
