"""Look up a block of 1,024 samples of a blend at a far position: milliseconds, one JSON line a number of sources.

python benchmarks/order.py --position 10000000000000 --sources 5 100
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from pipeline.data.blend import Order, integer_weights, keyed_offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--position", type=int, default=10**13, help="first global sample of the block")
    parser.add_argument("--sources", type=int, nargs="+", default=[5, 100, 1000], help="numbers of sources")
    parser.add_argument("--rounds", type=int, default=50, help="look-ups, each of another block")
    arguments = parser.parse_args()
    for count in arguments.sources:
        names = [f"source-{k}" for k in range(count)]
        weights = integer_weights({name: 1 / (k + 1) for k, name in enumerate(names)})
        order = Order(names, [weights[name] for name in names], [keyed_offset(1, name) for name in names])
        times = []
        for number in range(arguments.rounds):
            start = time.perf_counter()
            order.at(arguments.position + number * 1024, 1024)
            times.append(1000 * (time.perf_counter() - start))
        result = {"sources": count, "position": arguments.position, "median_ms": round(statistics.median(times), 3)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
