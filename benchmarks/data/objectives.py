"""Read windows as objectives arrange them: millions of raw tokens a CPU second, as JSON lines.

    python benchmarks/data/objectives.py --work /tmp/loader

For each objective: `Loader.batches`, with reading, hashing and checking of ids; and the time to count the targets of a
global batch of 4,096 windows without their tokens. The dataset is that of benchmarks/data/loader.py: random ids,
documents of 1,000 tokens in the mean. Each figure is the best of some rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from loader import VOCABULARY, make_dataset

WINDOWS = 4096
SENTINELS = np.arange(VOCABULARY, VOCABULARY + 1500)


def objectives() -> dict[str, tuple[Any, list[int]]]:
    """By name an objective and lengths of windows."""
    from pipeline.config.objective import ObjectiveConfig
    from pipeline.data.loading.objectives.causal import Causal
    from pipeline.data.loading.objectives.fim import FillInTheMiddle
    from pipeline.data.loading.objectives.masked import Masked
    from pipeline.data.loading.objectives.prefix import Prefix
    from pipeline.data.loading.objectives.spans import SpanCorruption, Tokens
    from pipeline.data.loading.objectives.ul2 import MixtureOfDenoisers

    tokens = Tokens(SENTINELS, 0, 0)
    return {
        "causal": (Causal(), [8192]),
        "fim": (FillInTheMiddle(0.5, 0.5, (50_000, 50_001, 50_002), 0), [8192]),
        "masked": (Masked(0.15, VOCABULARY, np.arange(1, VOCABULARY)), [512, 8192]),
        "prefix": (Prefix(), [8192]),
        "spans": (SpanCorruption(0.15, 3.0, tokens), [568, 8192]),
        "ul2": (MixtureOfDenoisers(ObjectiveConfig(type="ul2"), tokens, [None] * 7), [512, 8192]),
    }


def open_loader(folder: Path, objective: Any, length: int, batch: int) -> Any:
    from pipeline.data.datasets.dataset import Dataset
    from pipeline.data.loading.loader import Loader
    from pipeline.data.order.blend import integer_weights, keyed_offset
    from pipeline.data.order.journal import Journal
    from pipeline.data.order.packs import instances_of
    from pipeline.data.order.segments import Segment, SourceState

    dataset = Dataset.open(folder)
    source = SourceState(
        tokens=dataset.tokens, weight=integer_weights({"s": 1})["s"], offset=keyed_offset(1, "s"), lap=0, cursor=0
    )
    segment = Segment(first_step=0, first_sample=0, batch_size=batch, sequence_length=length, sources={"s": source})
    journal = Journal(seed=1, segments=[segment])
    # A rank's share of the step; counts are of all of it.
    return Loader(
        journal,
        instances_of(journal, {"s": dataset}),
        objective,
        dp_size=1,
        micro_batch_size=[8],
        vocab_size=VOCABULARY,
    )


def tokens_per_second(loader: Any, length: int, seconds: float, rounds: int) -> float:
    steps = itertools.count()
    best = 0.0
    for _ in range(20):
        loader.batches(next(steps))
    for _ in range(rounds):
        count, began = 0, time.process_time()
        while time.process_time() - began < seconds:
            loader.batches(next(steps))
            count += 8 * length
        best = max(best, count / (time.process_time() - began))
    return best


def count_ms(loader: Any, rounds: int) -> float:
    located = loader._lookup.step(0, None)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        loader._masks.valid(0, located, None)
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def main() -> None:
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the dataset, kept for the next time")
    parser.add_argument("--only", help="one objective")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a round")
    arguments = parser.parse_args()
    folder = arguments.work / "random-objectives" / "random000"
    make_dataset(folder, 100_000_000, 4, 0)
    for path in folder.glob("*/parts/*/*"):
        path.read_bytes()
    for name, (objective, lengths) in objectives().items():
        if arguments.only in (None, name):
            for length in lengths:
                loader = open_loader(folder, objective, length, 8)
                speed = tokens_per_second(loader, length, arguments.seconds, arguments.rounds)
                ms = count_ms(open_loader(folder, objective, length, WINDOWS), 20)
                line = {
                    "objective": name,
                    "length": length,
                    "mtok_cpu_s": round(speed / 1e6, 1),
                    "count_ms": round(ms, 3),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
