"""Held-out loss of a pruned and distilled model beside the same size from scratch, for the same tokens.

Trains a teacher on the text, measures the importance of its parts (`pipeline eval --importance`), and prunes half of
its layers and some of its channels, heads and mlp channels. Then, with each seed and for the same number of tokens,
four students of that size are trained:

    scratch            random weights, on the text
    scratch, taught    random weights, distilled from the teacher
    pruned             a part of the teacher, on the text
    pruned, taught     a part of the teacher, distilled

All have the same learning rate, schedule and order of the data; a seed decides that order and the random weights.
Prints a JSON line for each model: tokens, parameters, the loss before the first step, and the held-out loss at the end,
nats per token; then the mean and the range of each kind, and how many tokens of the text the teacher was trained on.

Run it as `python benchmarks/train/pruning.py --text "FOLDER/*.py" --scratch DIR`, with `taskset -c 1` for one core. A
second call with the same DIR finds the teacher trained; `--student-lr` and `--kinds` train other students with it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.importance import measure_importance
from pipeline.eval.perplexity import evaluate
from pipeline.train.loop import trainer
from pipeline.train.start.importance_file import INFLUENCE, Importance

TEACHER = {"layers": 6, "dim": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_dim": 384}
STUDENT = {"layers": 3, "dim": 96, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn_dim": 256}

KINDS = ("scratch", "scratch, taught", "pruned", "pruned, taught")


def run_file(arguments: argparse.Namespace) -> Path:
    """The run file of all models, and the datasets that it names."""
    root: Path = arguments.scratch
    values: dict[str, Any] = {
        "run": {"dir": str(root / "teacher")},
        "launch": {"threads": arguments.threads},
        "data": {
            "dir": str(root / "data"),
            "sources": [{"name": "text", "type": "text", "paths": arguments.text}],
            "splits": {"heldout": 0.05},
            "preprocess": {"workers": 1, "max_error_rate": 0.05},
        },
        "tokenizer": {"train": {"vocab_size": 2048}},
        "model": TEACHER,
        "train": {
            "precision": {"compute": "fp32"},
            "duration": f"{arguments.teacher_steps} steps",
            "sequence_length": 128,
            "batch_size": 16,
            "optimizer": {"lr": arguments.lr},
            "schedule": {"type": "cosine", "warmup": "20 steps"},
            "validation": {"samples": 0},
            "checkpoint": {"every_steps": 10**6},
            "metrics": {"log_every_steps": 100, "tensorboard": False},
        },
        "eval": {"importance_samples": 256, "batch_size": 32},
    }
    root.mkdir(parents=True, exist_ok=True)
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    preprocess(load(file))
    return file


def trained(file: Path, name: str, *keys: str) -> dict[str, Any]:
    """A model that is trained and scored: what is printed of it."""
    config = load(file, [f"run.dir={file.parent / name}", *keys])
    quiet = Console(quiet=True)
    trainer.train(config, quiet)
    report = evaluate(config, None, quiet)
    rows = [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]
    losses = [row for row in rows if "loss" in row]
    found = {"model": name, "tokens": losses[-1]["tokens"], "first_loss": round(losses[0]["loss"], 3)}
    found |= {"heldout_loss": round(report.blended.loss, 4)}
    print(json.dumps(found), flush=True)
    return found


def chosen_layers(importance: Path, count: int) -> list[int]:
    """The layers with the most influence."""
    influence = Importance.read(importance, "importance").values[INFLUENCE]
    return sorted(influence.argsort(descending=True)[:count].tolist())


def main() -> None:
    """Train the teacher and all students, and print what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, help="patterns of text files")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for runs and datasets, on a local disk")
    parser.add_argument("--teacher-steps", type=int, default=800)
    parser.add_argument("--student-steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--student-lr", type=float, help="learning rate of the students, by default that of the teacher"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="students to train")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    file = run_file(arguments)
    teacher = trained(file, "teacher")
    path = measure_importance(load(file), None, Console(quiet=True))
    assert path is not None
    layers = chosen_layers(path, STUDENT["layers"])
    print(json.dumps({"layers": layers}), flush=True)
    size = [f"model.{key}={value}" for key, value in STUDENT.items()]
    lr = arguments.student_lr or arguments.lr
    size += [f"train.duration={arguments.student_steps} steps", f"train.optimizer.lr={lr}"]
    pruned = [
        f"train.init_from.path={file.parent / 'teacher'}",
        f"train.init_from.layers={layers}",
        f"train.init_from.dims={path}",
    ]
    taught = [f"train.distill.teacher.path={file.parent / 'teacher'}", "train.distill.dtype=fp32"]
    keys = dict(zip(KINDS, ([], taught, pruned, [*pruned, *taught]), strict=True))
    losses: dict[str, list[float]] = {kind: [] for kind in arguments.kinds}
    for seed in range(arguments.seeds):
        for kind, found in losses.items():
            name = f"{kind.replace(', ', '-')}-{lr:g}-{seed}"
            found.append(trained(file, name, *size, *keys[kind], f"run.seed={seed}")["heldout_loss"])
    for kind, found in losses.items():
        print(json.dumps({"kind": kind, "mean": sum(found) / len(found), "from": min(found), "to": max(found)}))
    print(json.dumps({"teacher_tokens": teacher["tokens"], "teacher_loss": teacher["heldout_loss"]}))


if __name__ == "__main__":
    main()
