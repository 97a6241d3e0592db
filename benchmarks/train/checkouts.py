"""Two checkouts side by side: rows of metrics and checkpoints of small runs, which must be equal bit for bit.

    python benchmarks/train/checkouts.py --before CHECKOUT --work /tmp/bench [--only experts fp16]

Each case is a run of a few steps on a made-up corpus: kinds of data, of models, of layouts, one that is stopped and
resumed, one with faults. Both use this interpreter and its packages. One JSON line per case, with the columns and files
that differ; the exit code is 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import tiny  # noqa: E402

EXPERTS = {"count": 4, "top_k": 2, "ffn_dim": 16, "score": "sigmoid", "score_bias": True}
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
PHASES = {"phases": [{"until": "4 steps"}, {"weights": {"sea": 1, "land": 3}}]}
SPIKES = {"on_spike": "skip", "spike_window": 8, "spike_zscore": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "windows": {"train.metrics.windows": True},
    "packs": {"data.loader.packing": "best_fit", "model.document_attention": True, "train.metrics.windows": True},
    "fill in the middle": {"tokenizer.special_tokens": FIM, "train.objective": {"type": "fim"}},
    "masked": {
        "tokenizer.special_tokens": ["[MASK]"],
        "model.direction": "both",
        "train.objective": {"type": "masked"},
    },
    "spans": {
        "tokenizer.special_tokens": [f"<extra_id_{number}>" for number in range(16)],
        "model.encoder": {"layers": 2},
        "train.objective": {"type": "spans", "rate": 0.2},
    },
    "loss weights": {"data.sources.0.loss_weight": 0.5, "model.mtp": {"depth": 2}, "train.loss": {"mtp": 0.3}},
    "multi-token prediction": {"model.mtp": {"depth": 2}, "train.loss": {"mtp": 0.3, "z_loss": 1e-4}},
    "experts": {"model.mlp": "experts", "model.experts": EXPERTS, "train.metrics.layers_every_steps": 4},
    "forced experts": {"model.mlp": "experts", "model.experts": EXPERTS, "train.balance": {"force": True}},
    "fp16": {"train.precision": {"compute": "fp16", "loss_scale": {"initial": 65536.0, "growth_steps": 2}}},
    "bf16, dropout": {"train.precision.compute": "bf16", "model.dropout": 0.1},
    "spikes": {"train.faults": SPIKES, "train.optimizer.lr": 0.3, "train.duration": "24 steps"},
    "average of weights": {"train.ema": {"decay": 0.9}, "train.metrics.layers_every_steps": 1},
    "phases": {"blend": PHASES, "train.faults": SPIKES},
    "skipped steps": {"blend": {"skip": [{"steps": "3-4"}]}, "train.metrics.windows": True},
    "resumed": {"stop": 5, "train.duration": "16 steps", "train.faults": SPIKES, "train.metrics.windows": True},
    "dp 2": {"launch.processes": 2, "train.metrics.layers_every_steps": 2, "train.metrics.windows": True},
    "dp 3": {"launch.processes": 3, "train.batch_size": 6},
    "tp 2": {"launch.processes": 2, "parallel": {"tp": 2}, "train.metrics.windows": True},
    "pp 2, dp 2": {"launch.processes": 4, "parallel": {"pp": 2}, "train.batch_size": 8},
    "cp 2": {"launch.processes": 2, "parallel": {"cp": 2}, "model.mtp": {"depth": 1}, "train.loss": {"mtp": 0.3}},
    "ep 2": {"launch.processes": 2, "parallel": {"ep": 2}, "model.mlp": "experts", "model.experts": EXPERTS},
}
TIMES = {
    *("time", "tokens_per_second", "step_seconds", "model_flops_per_second", "data_wait", "work", "memory"),
    *("suspended", "save_blocked", "save_seconds", "validation_seconds", "saved", "exported"),
}
"""Columns of times and of this machine."""
KINDS = {"loss", "passed_over", "validation_loss"}
"""Rows that have one of these columns are compared; others are about saves, which end at any time."""


def run(checkout: Path, command: str, file: Path, *changes: str) -> None:
    """A command of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    words = [sys.executable, "-m", "pipeline", command, str(file), *changes]
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} in {checkout}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def results(checkout: Path, work: Path, changes: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of metrics without times, and hashes of the files of all checkpoints and of the losses of samples."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    changes = dict(changes)
    stop = changes.pop("stop", None)
    weight = changes.pop("data.sources.0.loss_weight", None)
    if weight is not None:
        sources = tiny.values(work)["data"]["sources"]
        sources[0]["loss_weight"] = weight
        changes["data.sources"] = sources
    file = tiny.write_run(work, changes)
    run(checkout, "preprocess", file)
    if stop is not None:
        run(checkout, "train", file, f"train.duration={stop} steps")
    run(checkout, "train", file)
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if key not in TIMES} for row in rows if not KINDS.isdisjoint(row)]
    files = {}
    for commit in sorted((work / "run" / "checkpoints").glob("*/COMMIT")):
        for name, value in json.loads(commit.read_bytes())["files"].items():
            if name.endswith((".distcp", ".safetensors")):
                files[f"{commit.parent.name}/{name}"] = value
    for losses in (work / "run").glob("losses*"):
        files[losses.name] = losses.read_bytes().hex()
    return kept, files


def main() -> None:
    """Compare all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases")
    arguments = parser.parse_args()
    differs = False
    for case in arguments.only:
        (rows, files), (rows_before, files_before) = (
            results(checkout.resolve(), arguments.work / "run", CASES[case]) for checkout in (ROOT, arguments.before)
        )
        pairs = list(zip(rows, rows_before, strict=False))
        columns = {key for row, other in pairs for key in {*row, *other} if row.get(key) != other.get(key)}
        names = sorted(name for name in {*files, *files_before} if files.get(name) != files_before.get(name))
        equal = not columns and not names and len(rows) == len(rows_before)
        differs |= not equal
        line = {"case": case, "equal": equal, "rows": [len(rows), len(rows_before)], "files": len(files)}
        print(json.dumps({**line, "columns": sorted(columns), "differing": names[:5]}), flush=True)
    sys.exit(differs)


if __name__ == "__main__":
    main()
