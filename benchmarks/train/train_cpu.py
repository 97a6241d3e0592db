"""Training on a CPU beside transformers' Trainer, litgpt and a bare loop: tokens/s in steps that alternate.

    python benchmarks/train/train_cpu.py --work /tmp/train-cpu --dtype bf16
    python benchmarks/train/train_cpu.py --work /tmp/train-cpu --dtype fp32 --litgpt-python PYTHON

A Llama of 20 million parameters on the Python standard library's sources, 4 windows of 1,024 tokens a step. Each side
is a process of its own that stops between its steps; a round is a step of each, in an order that turns round. A step
is all that happens between two stops: for ours the whole loop of `pipeline train`, with its loader, metrics and log.
All start from the same weights and see the same batches, which the losses of the first steps show.

Sides, of which `--sides` chooses some:

    ours, ours-compiled             as `pipeline train` comes, with train.compile=false and true
    bare, bare-compiled             plain PyTorch (`train_cpu_peers.py`), as it comes
    bare-tuned, bare-tuned-compiled with what ours chooses for the machine: allocator, matrix products
    bare-fsdp                       bare-tuned with `fully_shard` over one process
    trainer, trainer-compiled       transformers' Trainer as it comes
    trainer-tuned, ...              with the same choices
    litgpt                          `litgpt.pretrain`'s loop, which always compiles; needs --litgpt-python
    litgpt-tuned

JSON lines: for each side tokens/s (median step), its ratio to `bare-tuned` or the first side (median of the ratios
within rounds, with their quartiles), the largest difference of its losses from those of `bare`; and what others used
of the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from train_cpu_peers import BETAS, CLIP, DECAY, EPS, LR, Gate

from benchmarks.measure import machine

BATCH, LENGTH, VOCABULARY = 4, 1024, 8192
SHAPE = {"layers": 8, "dim": 384, "heads": 6, "ffn_dim": 1024}
COMPARED = 20
"""Steps whose losses must agree."""
MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483647:glibc.malloc.top_pad=67108864"
"""What `pipeline.train.host.cpu_allocator` sets, for the others."""

SIDES: dict[str, tuple[str, list[str], bool]] = {
    "ours": ("ours", [], True),
    "ours-compiled": ("ours", ["--compile"], True),
    "bare": ("bare", [], False),
    "bare-compiled": ("bare", ["--compile"], False),
    "bare-tuned": ("bare", ["--medium"], True),
    "bare-tuned-compiled": ("bare", ["--medium", "--compile"], True),
    "bare-fsdp": ("bare", ["--medium", "--fsdp"], True),
    "trainer": ("transformers", [], False),
    "trainer-compiled": ("transformers", ["--compile"], False),
    "trainer-tuned": ("transformers", ["--medium"], True),
    "trainer-tuned-compiled": ("transformers", ["--medium", "--compile"], True),
    "litgpt": ("litgpt", ["--compile"], False),
    "litgpt-tuned": ("litgpt", ["--medium", "--compile"], True),
}
"""Who, options, and whether with the tuned allocator."""


def prepare(work: Path, steps: int) -> None:
    """Tokenized data, initial weights and the batches of the first steps."""
    run_file = work / "run.yaml"
    if not (work / "run" / "data").exists():
        work.mkdir(parents=True, exist_ok=True)
        run_file.write_text(yaml.safe_dump(run_values(work)))
        subprocess.run([sys.executable, "-m", "pipeline", "preprocess", str(run_file)], check=True, stdout=sys.stderr)
    if not (work / "model").exists():
        write_model(work / "model")
    if not (work / "batches.pt").exists() or len(torch.load(work / "batches.pt", weights_only=True)) < steps:
        torch.save(first_batches(run_file, steps), work / "batches.pt")


def run_values(work: Path) -> dict[str, Any]:
    """The run file."""
    return {
        "run": {"dir": str(work / "run")},
        "data": {
            "dir": str(work / "run" / "data"),
            "sources": [{"name": "stdlib", "type": "text", "paths": ["${sysconfig:stdlib}/[a-z]*.py"]}],
            "splits": {"heldout": 0.0},
            "preprocess": {"max_error_rate": 0.05},
        },
        "tokenizer": {"train": {"vocab_size": VOCABULARY, "max_bytes": "8MB"}},
        "model": {**SHAPE, "document_attention": False, "norm_eps": 1e-5},
        "train": {
            "duration": "1000000 steps",
            "sequence_length": LENGTH,
            "batch_size": BATCH,
            "init_from": {"hf": str(work / "model")},
            "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "clip_norm": CLIP},
            "schedule": {"type": "constant"},
            "validation": {"samples": 0},
            "checkpoint": {"every_steps": 1000000},
        },
    }


def write_model(folder: Path) -> None:
    """Random weights of a Llama, with the tokenizer that the data has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=SHAPE["dim"],
        intermediate_size=SHAPE["ffn_dim"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(next((folder.parent / "run").rglob("tokenizer.json")), folder)


def first_batches(run_file: Path, steps: int) -> torch.Tensor:
    """int64 [steps, B, S + 1]."""
    from pipeline.config.load import load
    from pipeline.data.datasets.open import open_datasets
    from pipeline.data.loading.loader import open_loader

    config = load(run_file, [])
    loader = open_loader(config, open_datasets(config, "train"))
    rows = []
    for step in range(steps):
        (batch,) = loader.batches(step).micro_batches
        rows.append(torch.cat((batch.tokens, batch.targets[:, -1:]), dim=1))
    return torch.stack(rows)


def train_ours(work: Path, name: str, dtype: str, threads: int, compiled: bool, keys: list[str]) -> None:
    """`pipeline train` with a gate behind each step."""
    from rich.console import Console

    import pipeline.train.loop.trainer as loop
    from pipeline.config.load import load

    gate = Gate()

    class Gated(loop.Trainer):
        def run(self) -> None:
            gate.step_ended()
            super().run()

    class GatedGarbage(loop.GcSchedule):
        def after(self, step: int) -> None:
            gate.step_ended()
            super().after(step)

    loop.Trainer, loop.GcSchedule = Gated, GatedGarbage  # type: ignore[misc]
    config = load(
        work / "run.yaml",
        [
            f"run.dir={work / 'runs' / f'{name}-{os.getpid()}'}",
            f"launch.threads={threads}",
            "launch.device=cpu",
            f"train.precision.compute={dtype}",
            f"train.compile={str(compiled).lower()}",
            *keys,
        ],
    )
    (config.run.dir).mkdir(parents=True)
    print(config.run.dir, file=sys.stderr)
    loop.train(config, Console(file=sys.stderr))


class Side:
    """A process that makes a step when it is told to."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        who, options, tuned = SIDES[name]
        common = ["--work", str(arguments.work), "--dtype", arguments.dtype, "--threads", str(arguments.threads)]
        python = arguments.litgpt_python if who == "litgpt" else sys.executable
        if who == "ours":
            command = [python, __file__, "--ours", name, *common, *options]
            for key in arguments.keys:
                command += ["--key", key]
        else:
            peers = Path(__file__).with_name("train_cpu_peers.py")
            command = [python, str(peers), who, *common, *options, "--batch", str(BATCH), "--length", str(LENGTH)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
        if tuned and who != "ours":
            environment["GLIBC_TUNABLES"] = MALLOC
        log = (arguments.work / f"{name}-{arguments.dtype}.log").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        self.seconds: list[float] = []
        self.losses: list[float | None] = []
        self.log = Path(log.name)

    def answer(self) -> dict[str, Any]:
        """The next line of it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended:\n{self.log.read_text()[-3000:]}")
        said: dict[str, Any] = json.loads(line)
        return said

    def step(self) -> None:
        """Let it make one."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = self.answer()
        while "ready" in said:
            said = self.answer()
        self.seconds.append(said["seconds"])
        self.losses.append(said["loss"])

    def end(self) -> None:
        """Let it leave; what it has not told yet is read from its metrics."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        if self.name.startswith("ours"):
            folder = next(line for line in self.log.read_text().splitlines() if "/runs/" in line)
            rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            self.losses = [row["loss"] for row in rows if "loss" in row]


def compare(arguments: argparse.Namespace) -> None:
    """All sides together."""
    prepare(arguments.work, max(arguments.rounds + arguments.warmup, COMPARED) + 8)
    sides = []
    for name in arguments.sides:
        sides.append(Side(name, arguments))
        sides[-1].answer()  # one after the other: loading is not timed
        print(f"{name}: ready", file=sys.stderr)
    for _ in range(arguments.warmup):  # the compiled ones compile
        for side in sides:
            side.step()
    before = machine()
    for number in range(arguments.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.step()
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    used, there = (after - start for after, start in zip(machine(), before, strict=True))
    for side in sides:
        side.end()
    names = [side.name for side in sides]
    base = sides[names.index("bare-tuned")] if "bare-tuned" in names else sides[0]
    reference = sides[names.index("bare")] if "bare" in names else base
    for side in sides:
        ours, theirs = side.seconds[arguments.warmup :], base.seconds[arguments.warmup :]
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found = [
            abs(a - b)
            for a, b in zip(side.losses[:COMPARED], reference.losses[:COMPARED], strict=False)
            if a is not None and b is not None
        ]
        line = {
            "side": side.name,
            "dtype": arguments.dtype,
            "tokens_per_second": round(BATCH * LENGTH / statistics.median(ours)),
            f"ratio to {base.name}": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            f"largest difference of losses from {reference.name}": max(found, default=None),
            "steps compared": len(found),
            "rounds": arguments.rounds,
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"machine used": round(used / there, 2), "threads": arguments.threads}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for data and logs; may be there already")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=["bare", "bare-tuned", "ours"])
    parser.add_argument("--rounds", type=int, default=20, help="steps of each side that are timed")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--litgpt-python", help="a Python with litgpt")
    parser.add_argument("--key", dest="keys", action="append", default=[], help="of our run file, KEY=VALUE")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.sides) - set(SIDES)
    if unknown:
        parser.error(f"unknown sides: {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    if arguments.ours:
        train_ours(
            arguments.work, arguments.ours, arguments.dtype, arguments.threads, arguments.compile, arguments.keys
        )
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
