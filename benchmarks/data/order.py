"""The order of a run far into it: a block of 1,024 samples, the way back, a step of 8 samples and its hash, a plan.

One JSON line a number of sources.

python benchmarks/data/order.py --position 10000000000000 --sources 5 100
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from pipeline.data.order.blend import UNIT, Order, integer_weights, keyed_offset
from pipeline.data.order.journal import Journal
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Segment, SourceState

DRAWS = 1000
STEPS = 10_000
BATCH_SIZE = 8


def median(rounds: int, function: Callable[[int], object]) -> float:
    """Median seconds of `function(number of the round)`."""
    times = []
    for number in range(rounds):
        start = time.perf_counter()
        function(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def journal_of(weights: dict[str, int], segments: int) -> Journal:
    """A plan of many segments, of 1,000 steps each but for the last."""
    offsets = {name: keyed_offset(1, name) for name in weights}
    rows = []
    for number in range(segments):
        rows.append(
            Segment(
                first_step=number * 1000,
                first_sample=number * 1000 * BATCH_SIZE,
                batch_size=BATCH_SIZE,
                sequence_length=4096,
                sources={
                    name: SourceState(tokens=10**12, weight=weight, offset=offsets[name], lap=0, cursor=0)
                    for name, weight in weights.items()
                },
            )
        )
        order = rows[-1].order()
        carried = order.carry(1000 * BATCH_SIZE)
        offsets = {name: offset or 0 for name, offset in zip(order.names, carried, strict=True)}
    return Journal(seed=1, segments=rows)


def measure(sources: int, position: int, segments: int, rounds: int) -> dict[str, float]:
    """Milliseconds and microseconds of the look-ups of a blend."""
    weights = integer_weights({f"source-{k}": 1 / (k + 1) for k in range(sources)})
    order = Order(list(weights), list(weights.values()), [keyed_offset(1, name) for name in weights])
    block = median(rounds, lambda number: order.at(position + number * 1024, 1024))
    first = position * next(iter(weights.values())) // UNIT
    back = median(3, lambda _: order.position_of(0, np.arange(first, first + DRAWS)))

    start = time.perf_counter()
    journal = journal_of(weights, segments)
    sampler = Sampler(journal)
    planned = time.perf_counter() - start

    far = position // BATCH_SIZE
    sampler.step(far)
    start = time.perf_counter()
    for step in range(far, far + STEPS):
        sampler.step(step)
        sampler.order_hash(step)
    steps = time.perf_counter() - start
    return {
        "sources": sources,
        "position": position,
        "segments": segments,
        "block_ms": round(1e3 * block, 3),
        "back_1000_ms": round(1e3 * back, 2),
        "step_us": round(1e6 * steps / STEPS, 2),
        "plan_ms": round(1e3 * planned, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--position", type=int, default=10**13, help="first global sample of the block")
    parser.add_argument("--sources", type=int, nargs="+", default=[5, 100, 1000], help="numbers of sources")
    parser.add_argument("--segments", type=int, default=20, help="segments of the plan")
    parser.add_argument("--rounds", type=int, default=50, help="look-ups, each of another block")
    arguments = parser.parse_args()
    for sources in arguments.sources:
        result = measure(sources, arguments.position, arguments.segments, arguments.rounds)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
