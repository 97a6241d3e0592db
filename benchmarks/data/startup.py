"""Open a blend up to its first batch: seconds and added memory, as JSON lines.

    python benchmarks/data/startup.py --work /tmp/startup
    python benchmarks/data/startup.py --work /tmp/startup --one --megatron-python PYTHON --olmo-python PYTHON

In a fresh process, after imports and after the run file was read: open the datasets, check the files of all parts,
plan the order, open the loader, make the first batch. The blend has 50 sources, 10,000 parts, and 10^6 or 10^8
documents; the run is 1 epoch or 100 long. Memory is what the peak of the process (VmHWM) is above what it had before,
pages of mapped files included. With --one it is a blend of one source of one part, which the peers can read too:

    megatron   `BlendedMegatronDatasetBuilder` without its cache; needs a Python that has `megatron-core` (0.16.1)
    olmo-core  `NumpyFSLDataset` and `NumpyFSLDataLoader`, first epoch; needs `ai2-olmo-core` (3.0.0)

Their samples are other ones: OLMo-core shuffles windows that are cut at the same places in each epoch. Sides with more
than 3 * 10^8 documents times epochs to shuffle are left out. Files are in the page cache after the first round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, LENGTH = 8, 4096
PEERS = ("megatron", "olmo-core")
MOST = 3 * 10**8
"""Documents times epochs that a peer is asked to shuffle; that takes Megatron-LM a minute and 8 GB."""


class Clock:
    """Seconds of each stage, and the memory that all of them add."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        self._before = status("VmRSS")
        self._cpu = time.process_time()
        self._begin = self._last = time.perf_counter()
        self.stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """A stage has ended."""
        now = time.perf_counter()
        self.stages[f"{stage}_s"] = round(now - self._last, 4)
        self._last = now

    def result(self) -> dict[str, float]:
        """The stages, their sum, the CPU time of all threads, and the added memory in MB."""
        total = round(self._last - self._begin, 4)
        cpu = round(time.process_time() - self._cpu, 4)
        return {**self.stages, "total_s": total, "cpu_s": cpu, "added_mb": round(status("VmHWM") - self._before, 1)}


def status(key: str) -> float:
    """A value of /proc/self/status in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024 / 1e6


def ours(file: Path) -> dict[str, float]:
    from pipeline.config.load import load
    from pipeline.data.datasets.open import open_datasets
    from pipeline.data.datasets.validate import check_datasets
    from pipeline.data.loading.loader import open_loader
    from pipeline.data.order.phases import plan_journal

    config = load(file)
    clock = Clock()
    datasets = open_datasets(config, "train")
    clock.lap("open")
    check_datasets(datasets)
    clock.lap("checks")
    journal = plan_journal(config, datasets)
    clock.lap("plan")
    loader = open_loader(config, datasets, journal=journal)
    clock.lap("loader")
    data = loader.batches(0)
    clock.lap("first_batch")
    assert data.micro_batches[0].tokens.shape == (BATCH, LENGTH)
    return clock.result()


def samples_of(file: Path) -> tuple[Path, int]:
    """Prefix of the only part of a blend, and the samples of the run."""
    import yaml

    values = yaml.safe_load(file.read_text())
    (source,) = values["data"]["sources"]
    tokens = int(values["train"]["duration"].split()[0])
    return Path(source["dataset"]) / "train" / "parts" / "00000" / "00000000", tokens // LENGTH


def megatron(file: Path) -> dict[str, float]:
    from megatron.core.datasets import helpers_cpp  # noqa: F401  # compiled; without it nothing works
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class NullTokenizer:
        vocab_size, eod, pad = 300, 0, -1
        unique_identifiers = {"class": "null"}  # noqa: RUF012

    prefix, samples = samples_of(file)
    cache = file.parent / "megatron-cache"
    shutil.rmtree(cache, ignore_errors=True)
    clock = Clock()
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=NullTokenizer(),
        path_to_cache=str(cache),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
    clock.lap("open")
    for number in range(BATCH):
        assert len(dataset[number]["tokens"]) == LENGTH
    clock.lap("first_batch")
    shutil.rmtree(cache)
    return clock.result()


def olmo_core(file: Path) -> dict[str, float]:
    import numpy as np
    from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset

    prefix, _ = samples_of(file)
    work = file.parent / "olmo-core"
    shutil.rmtree(work, ignore_errors=True)
    clock = Clock()
    dataset = NumpyFSLDataset(
        prefix.with_suffix(".bin"),
        sequence_length=LENGTH,
        pad_token_id=0,
        eos_token_id=0,
        vocab_size=300,
        dtype=np.uint16,
    )
    dataset.work_dir = work
    dataset.prepare()
    loader = NumpyFSLDataLoader(
        dataset, collator=DataCollator(pad_token_id=0), global_batch_size=BATCH * LENGTH, work_dir=work, num_workers=0
    )
    clock.lap("open")
    loader.reshuffle(epoch=1)
    clock.lap("shuffle")
    batch: Any = next(iter(loader))
    assert batch["input_ids"].shape == (BATCH, LENGTH)
    clock.lap("first_batch")
    return clock.result()


SIDES: dict[str, Callable[[Path], dict[str, float]]] = {"ours": ours, "megatron": megatron, "olmo-core": olmo_core}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the blends, kept for the next time")
    parser.add_argument("--documents", type=int, nargs="+", default=[10**6, 10**8])
    parser.add_argument("--epochs", type=float, nargs="+", default=[1.0, 100.0], help="lengths of the run")
    parser.add_argument("--one", action="store_true", help="one source of one part, and the peers")
    parser.add_argument("--rounds", type=int, default=5, help="times that each side is run")
    parser.add_argument("--megatron-python", help="a Python with megatron-core; without it that side is left out")
    parser.add_argument("--olmo-python", help="a Python with ai2-olmo-core; without it that side is left out")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.file)))
        return
    from benchmarks.synthetic import make_blend

    arguments.work.mkdir(parents=True, exist_ok=True)
    pythons = {"ours": sys.executable}
    if arguments.one:
        pythons |= {"megatron": arguments.megatron_python, "olmo-core": arguments.olmo_python}
    blend = {"sources": 1, "parts": 1} if arguments.one else {}
    cases = list(itertools.product(arguments.documents, arguments.epochs))
    files = {(n, epochs): make_blend(arguments.work, documents=n, epochs=epochs, **blend) for n, epochs in cases}
    results: dict[tuple[str, int, float], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for (documents, epochs), (side, python) in itertools.product(cases, pythons.items()):
            if python is None or (side in PEERS and documents * epochs > MOST):
                continue
            command = [python, __file__, "--work", arguments.work, "--side", side, "--file", files[documents, epochs]]
            run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
            if run.returncode:
                sys.exit(f"error: {side}: {run.stderr[-3000:]}")
            result = json.loads(run.stdout.strip().splitlines()[-1])
            results.setdefault((side, documents, epochs), []).append(result)
            print(json.dumps({"side": side, "documents": documents, "epochs": epochs, **result}), flush=True)
    for (side, documents, epochs), runs in results.items():
        median = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
        print(json.dumps({"side": side, "documents": documents, "epochs": epochs, "runs": len(runs), "median": median}))


if __name__ == "__main__":
    main()
