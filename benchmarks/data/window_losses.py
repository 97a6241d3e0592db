"""The cost of recording the losses of samples, and of reading those of a long run, as JSON lines.

    python benchmarks/data/window_losses.py --step --layers 4 --dim 256 --length 256 --batch 32
    python benchmarks/data/window_losses.py --read --work /tmp/losses --samples 10000000

`--step` trains a model in this process, with and without the losses of samples in turn, and gives the ratio of the
medians: sums on the device, their copy to the host and the write of each step. `same` is the ratio of two sides
without, which shows what this machine makes of equal sides, and `own_ms` the time of this process in what
recording does in a step. On a CPU times are those that this process had a core.

`--read` makes a blend of 10 sources as `synthetic.py` does and a file of losses for all of its samples, and times
questions of `pipeline data losses` in processes of their own, each with its largest memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from benchmarks.one_process import stepper_of
from benchmarks.synthetic import make_blend
from pipeline.data.loading.batch import Batch, StepData
from pipeline.data.provenance import loss_file
from pipeline.data.provenance.loss_file import LossHead, encode
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.loop.quantities.windows import LossWriter, WindowSums
from pipeline.train.model.loss import TokenLosses

VOCABULARY = 4096
DOCUMENT_TOKENS = 1000


def measure_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result line of `--step`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = {"layers": arguments.layers, "dim": arguments.dim, "heads": max(1, arguments.dim // 64)}
    shape = {"sequence_length": arguments.length, "batch_size": arguments.batch, "micro_batch_size": arguments.micro}
    stepper = stepper_of(device, VOCABULARY, model=model, train=shape)
    recorded = _Recorded(arguments.batch, device)
    stepper.quantities.append(recorded)
    ids = torch.randint(VOCABULARY, (arguments.batch, arguments.length + 1))
    starts = torch.arange(arguments.micro, dtype=torch.int32) * arguments.length
    batches = [
        Batch(
            tokens[:, :-1], tokens[:, 1:], torch.ones(arguments.micro, arguments.length), starts,
            torch.zeros(arguments.micro, dtype=torch.int64), {}, torch.arange(first, first + arguments.micro),
        )
        for first in range(0, arguments.batch, arguments.micro)
        for tokens in [ids[first : first + arguments.micro]]
    ]  # fmt: skip
    # On a CPU that others use, too, the time that this process had it.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds: dict[str, list[float]] = {"off": [], "on": [], "again": []}
    host, own = HostTime(), list[float]()
    for owner, name in ((WindowSums, "add"), (WindowSums, "reduce"), (LossWriter, "write"), (loss_file, "encode")):
        host.of(owner, name)
    with tempfile.TemporaryDirectory() as folder:
        writer = LossWriter(Path(folder) / "losses.bin", 1)
        for step in range(arguments.steps * len(seconds)):
            side = list(seconds)[(step + step // len(seconds)) % len(seconds)]
            recorded.writer = writer if side == "on" else None
            begin = clock()
            host.seconds = 0.0
            stepper.step(StepData(step, batches, ids[:, 1:].numel()), 1e-4).to_host()().columns()
            if side == "on":
                own.append(host.seconds)
            if step >= 5 * len(seconds):
                seconds[side].append(clock() - begin)
        writer.close()
    assert len(seconds["off"]) == len(seconds["on"])
    off, on, again = (statistics.median(values) for values in seconds.values())
    # Each triple of neighbouring steps is a pair of ratios; their median hardly sees what else the machine does.
    paired = statistics.median(b / a for a, b in zip(seconds["off"], seconds["on"], strict=False))
    result_line = {"device": str(device), "off_ms": 1e3 * off, "on_ms": 1e3 * on, "on_over_off": on / off}
    result_line |= {"own_ms": 1e3 * statistics.median(own), "own_over_off": statistics.median(own) / off}
    return {**result_line, "paired_on_over_off": paired, "same": again / off, "steps": len(seconds["on"])}


class _Recorded(Quantity):
    """Losses of samples, written while there is a writer."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._samples, self._device = samples, device
        self.writer: LossWriter | None = None
        self._sums: WindowSums | None = None

    def begin(self, data: StepData) -> None:
        self._sums = WindowSums(range(self._samples), self._device) if self.writer is not None else None

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        if self._sums is not None:
            self._sums.add(losses.loss_BS, batch)

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers | None:
        found = None if self._sums is None else self._sums.reduce()
        return None if found is None else QuantityNumbers({"sums": found}, self._write)

    def _write(self, sums: Tensor) -> dict[str, Any]:
        assert self.writer is not None
        self.writer.write({"step": 1, "first": 0, "codes": loss_file.encode(*sums.numpy())})
        return {}


class HostTime:
    """Time of this process in what recording does."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, owner: Any, name: str) -> None:
        """Count a function from now on."""
        function = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.process_time() - begin

        setattr(owner, name, counted)


def make_run(work: Path, samples: int, length: int) -> Path:
    """A run file whose run has a loss for each of its samples."""
    documents = max(1000, samples * length // DOCUMENT_TOKENS // 1000 * 1000)
    file = make_blend(work, sources=10, parts=100, documents=documents)
    values = yaml.safe_load(file.read_text())
    values["train"] |= {"sequence_length": length, "batch_size": 1000, "micro_batch_size": 8}
    values["train"]["duration"] = f"{samples // 1000} steps"
    file.write_text(yaml.safe_dump(values))
    (work / "run").mkdir(exist_ok=True)
    chance = np.random.default_rng(0)
    with (work / "run/losses.bin").open("wb") as out:
        out.write(LossHead(0, 0, 1).packed())
        for _ in range(0, samples, 10**6):
            out.write(encode(chance.uniform(1, 5, min(samples, 10**6)), np.ones(min(samples, 10**6))).tobytes())
    return file


def measure_read(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The result lines of `--read`."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    file = make_run(arguments.work, arguments.samples, arguments.length)
    to = arguments.work / "losses.parquet"
    lines = []
    for name, options in {
        "by source": [],
        "by step": ["--by", "step"],
        "one document": ["--source", "source-000", "--document", "1000"],
        "highest": ["--highest", "10"],
        "parquet": ["--parquet", str(to)],
    }.items():
        to.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pipeline", "data", "losses", str(file), *options]
        code = (
            "import resource, subprocess, sys; "
            f"code = subprocess.run({command!r}, stdout=subprocess.DEVNULL).returncode; "
            "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        begin = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        status, kilobytes = map(int, out.split())
        assert status == 0, command
        line = {"question": name, "samples": arguments.samples, "seconds": round(time.perf_counter() - begin, 1)}
        lines.append({**line, "max_rss_mb": kilobytes // 1000})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true", help="measure a training step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--read", action="store_true", help="measure reading")
    parser.add_argument("--work", type=Path, default=Path("/tmp/losses"))
    parser.add_argument("--samples", type=int, default=10**6)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.step:
        print(json.dumps(measure_step(arguments)))
    if arguments.read:
        for line in measure_read(arguments):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
