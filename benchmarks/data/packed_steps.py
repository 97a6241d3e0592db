"""Steps of packs of a dataset beside steps of windows: balance of attention over ranks, and CPU time of a loader.

A line of JSON for each number of ranks, then one for the loader. `rank` is the work of the dearest rank of a step over
the mean, `side_by_side` that of the dearest rank of each micro-batch, summed; both are means over steps, in the order
of the run and balanced. Work is the sum of the squared lengths of what attends to itself. Times are CPU seconds of this
thread.

python benchmarks/data/packed_steps.py --dataset DATA_DIR/SOURCE/train --length 4096 --batch 512 --ranks 8 64
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.order.balance import rank_rows
from pipeline.data.order.blend import UNIT
from pipeline.data.order.journal import Journal, version_of
from pipeline.data.order.locate import RankSamples
from pipeline.data.order.locate_packs import PackLookup
from pipeline.data.order.packs import instances_of
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Segment, SourceState


def journal_of(dataset: Dataset, length: int, batch: int, *, packed: bool) -> Journal:
    """The plan of a run on one dataset."""
    packs = Packs.open(dataset, length).count if packed else None
    state = SourceState(tokens=dataset.tokens, packs=packs, weight=UNIT, offset=0, lap=0, cursor=0)
    segment = Segment(first_step=0, first_sample=0, batch_size=batch, sequence_length=length, sources={"s": state})
    return Journal(order_version=version_of([segment]), seed=1, segments=[segment])


def balance(dataset: Dataset, length: int, batch: int, ranks: int, micro: int, steps: int) -> dict[str, object]:
    """Work of the dearest rank, in the order of the run and balanced."""
    journal = journal_of(dataset, length, batch, packed=True)
    lookup = PackLookup(journal, Sampler(journal), instances_of(journal, {"s": dataset}))
    found: dict[str, list[tuple[float, float]]] = {"in_order": [], "balanced": []}
    for step in range(steps):
        costs = lookup.step(step).costs()
        for name, given in (("in_order", None), ("balanced", costs)):
            rows = [rank_rows(RankSamples(batch, micro, rank, ranks), given) for rank in range(ranks)]
            work = np.array([[costs[micro_batch].sum() for micro_batch in of_rank] for of_rank in rows])
            mean = work.sum() / ranks
            found[name].append((work.sum(axis=1).max() / mean, work.max(axis=0).sum() / mean))
    result: dict[str, object] = {"ranks": ranks, "micro_batch_size": micro, "batch": batch, "length": length}
    for name, values in found.items():
        rank, side_by_side = np.mean(values, axis=0)
        result[name] = {"rank": round(float(rank), 4), "side_by_side": round(float(side_by_side), 4)}
    return result


def seconds_per_step(dataset: Dataset, length: int, batch: int, ranks: int, steps: int, *, packed: bool) -> float:
    """Mean CPU seconds of one rank for a step."""
    journal = journal_of(dataset, length, batch, packed=packed)
    instances, micro = instances_of(journal, {"s": dataset}), batch // ranks
    loader = Loader(journal, instances, Causal(), dp_size=ranks, micro_batch_size=[micro], balanced=True)
    loader.batches(0)
    start = time.thread_time()
    for step in range(1, steps + 1):
        loader.batches(step)
    return (time.thread_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    dataset = Dataset.open(args.dataset)
    for ranks in args.ranks:
        print(json.dumps(balance(dataset, args.length, args.batch, ranks, args.micro, args.steps)), flush=True)
    for ranks in args.ranks:
        times = {
            name: round(1000 * seconds_per_step(dataset, args.length, args.batch, ranks, args.steps, packed=packed), 2)
            for name, packed in (("windows_ms", False), ("packs_ms", True))
        }
        print(json.dumps({"ranks": ranks, "batch": args.batch, **times}), flush=True)


if __name__ == "__main__":
    main()
