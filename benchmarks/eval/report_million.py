"""Time and size of a report on a run of many steps, whose metrics are made up here.

python benchmarks/eval/report_million.py --steps 1000000 --sources 8
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from pathlib import Path

import orjson
from rich.console import Console

from pipeline.eval.report.command import report
from pipeline.eval.report.gather import gather_all
from pipeline.eval.report.page import page


def main() -> None:
    """Write metrics of a run, make its report, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=40)
    parser.add_argument("--to", type=Path, help="keep the page here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        write(run, arguments.steps, arguments.sources, arguments.attempts)
        began = time.process_time()
        facts = gather_all([run])
        read = time.process_time()
        size = len(page(facts))
        done = time.process_time()
        print(f"{arguments.steps:,} steps, metrics.jsonl of {(run / 'metrics.jsonl').stat().st_size:,} bytes")
        print(f"processor time: read {read - began:.1f} s, page {done - read:.1f} s; page of {size:,} bytes")
        if arguments.to:
            report([run], Console(), out=arguments.to)


def write(run: Path, steps: int, sources: int, attempts: int) -> None:
    """A run folder with a loss that falls, noise, and a spike of one step every 100,003."""
    chance, each = random.Random(0), -(-steps // attempts)
    with (run / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            loss = 2 + 8 / math.sqrt(1 + step / 100) + chance.gauss(0, 0.05) + 5 * (step % 100_003 == 0)
            row = {
                "step": step,
                "attempt": 1 + (step - 1) // each,
                "time": 1.7e9 + 2.0 * step,
                "tokens": 4_194_304 * step,
                "loss": loss,
                "loss_by_source": {f"source-{n}": loss + 0.2 * n for n in range(sources)},
                "grad_norm": math.exp(chance.gauss(-1, 0.2)),
                "lr": 3e-4 * min(1.0, step / 2000) * (1 - 0.9 * step / steps),
                "tokens_per_second": 2.1e6 + chance.gauss(0, 2e4),
                "step_seconds": 2.0,
                "data_wait": 0.001,
                "spike": step % 100_003 == 0,
            }
            file.write(orjson.dumps(row) + b"\n")
            if step % 5000 == 0:
                looked = {"step": step, "attempt": row["attempt"], "time": row["time"], "validation_loss": loss - 0.02}
                file.write(orjson.dumps(looked) + b"\n")
    with (run / "ledger.jsonl").open("wb") as file:
        for number in range(1, attempts + 1):
            first = each * (number - 1)
            begun = {"event": "attempt", "attempt": number, "time": 1.7e9 + 2.0 * first, "first_step": first}
            ended = {"event": "attempt end", "attempt": number, "seconds": 2.0 * each, "step": min(steps, first + each)}
            head = {"host": "node", "pid": 1, "layout": {"world_size": 64}, "config": ""}
            for line in ({**begun, **head}, {**ended, "code": 0, "reason": "done"}):
                file.write(orjson.dumps(line) + b"\n")


if __name__ == "__main__":
    main()
