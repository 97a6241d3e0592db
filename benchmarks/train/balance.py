"""Balance of experts by what keeps it: the load of the busiest expert, and the loss beside a dense model's.

Trains a small decoder on the bytes of a text, once for each way and seed, in processes of their own; all ways see the
same batches. The dense twin has an mlp of as many active parameters as the experts of a token have together. JSON
lines, and with `--to` a picture:

    loss               mean training loss of the last 50 steps, nats per byte
    load               mean `load_max_over_mean` of the layer with the worst, over the same steps
    load_most          the largest of them
    dead               experts of a layer without a token, at most in one of these steps
    grad_norm_most     largest norm after the warm-up
    cpu_s              CPU seconds of a step, median

Run it as `python benchmarks/train/balance.py TEXT --seeds 1 2 --keep balance.jsonl --to balance.svg`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_process import stepper_of
from pipeline.data.loading.batch import Batch, StepData

_VOCABULARY, _WARM_UP, _LAST = 256, 20, 50
_TOP_K = 2
_SIGMOID: dict[str, Any] = {"score": "sigmoid", "score_bias": True}

WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "dense": (None, {}),
    "none": ({}, {"loss": 0.0}),
    "sequence": ({}, {"loss": 0.01}),
    "batch": ({}, {"loss": 0.01, "over": "batch"}),
    "sequence, scale 2": ({"scale": 2.0}, {"loss": 0.01}),
    "bias, scale 2": (_SIGMOID | {"scale": 2.0}, {"loss": 0.0, "bias_rate": 0.01}),
    "none, sigmoid": ({"score": "sigmoid"}, {"loss": 0.0}),
    "bias": (_SIGMOID, {"loss": 0.0, "bias_rate": 0.001}),
    "bias, rate 0.01": (_SIGMOID, {"loss": 0.0, "bias_rate": 0.01}),
    "bias and sequence": (_SIGMOID, {"loss": 0.0001, "bias_rate": 0.001}),
    "sequence, 0.1": ({}, {"loss": 0.1}),
    "batch, 0.1": ({}, {"loss": 0.1, "over": "batch"}),
    "sequence, 1": ({}, {"loss": 1.0}),
    "batch, 1": ({}, {"loss": 1.0, "over": "batch"}),
}
"""What `model.experts` and `train.balance` have in addition; the model is dense without the first."""
SETTINGS = ("steps", "rows", "length", "layers", "dim", "count", "ffn_dim", "lr")
"""Arguments on which a row depends besides."""
DRAWN = ("dense", "none", "sequence", "batch", "bias, rate 0.01")
"""Ways in the picture."""


def train(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """A row of the result, with the curves of all steps."""
    experts, balance = WAYS[way]
    model: dict[str, Any] = {"layers": given.layers, "dim": given.dim, "heads": given.dim // 32}
    if experts is None:
        model["ffn_dim"] = _TOP_K * given.ffn_dim
    else:
        size = {"count": given.count, "top_k": _TOP_K, "ffn_dim": given.ffn_dim}
        model |= {"mlp": "experts", "experts": size | experts}
    config = {
        "sequence_length": given.length,
        "precision": {"compute": "fp32"},
        "compile": False,
        "optimizer": {"lr": given.lr},
        "balance": balance,
    }
    stepper = stepper_of(torch.device("cpu"), _VOCABULARY, model=model, train=config, seed=given.seed)
    text, generator = _text(given.text), torch.Generator().manual_seed(given.seed)
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": [], "load": [], "dead": [], "cpu_s": []}
    for step in range(given.steps):
        starts = torch.randint(len(text) - given.length - 1, (given.rows,), generator=generator)
        rows = torch.stack([text[start : start + given.length + 1] for start in starts.tolist()]).long()
        ones, zeros = torch.ones(given.rows, given.length), torch.zeros(given.rows, dtype=torch.int64)
        batch = Batch(rows[:, :-1], rows[:, 1:], ones, torch.zeros(0, dtype=torch.int32), zeros, {})
        # Up, and down to a tenth.
        factor = min((step + 1) / _WARM_UP, 1 - 0.9 * step / given.steps)
        begin, targets = time.process_time(), rows[:, 1:].numel()
        data = StepData(step, [batch], targets, samples=range(given.rows))
        row = stepper.step(data, given.lr * factor).columns()
        curves["loss"].append(row["loss"])
        curves["cpu_s"].append(time.process_time() - begin)
        curves["grad_norm"].append(row["grad_norm"])
        if (routed := row.get("experts")) is not None:
            curves["load"].append(routed["load_max_over_mean"])
            curves["dead"].append(routed["dead_experts"])
    last = {name: values[-_LAST:] for name, values in curves.items() if values}
    row = {
        "way": way,
        "seed": given.seed,
        **{name: getattr(given, name) for name in SETTINGS},
        "loss": round(statistics.mean(last["loss"]), 4),
        "grad_norm_most": round(max(curves["grad_norm"][_WARM_UP:], default=0.0), 3),
        "cpu_s": round(statistics.median(curves["cpu_s"]), 3),
    }
    if "load" in last:
        loads = {"load": statistics.mean(last["load"]), "load_most": max(last["load"]), "dead": max(last["dead"])}
        row |= {name: round(value, 3) for name, value in loads.items()}
    return row | {"curves": {name: [round(each, 4) for each in curves[name]] for name in ("loss", "load")}}


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The picture: load and loss by step, means over seeds and, of the loss, over steps."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "balance", "font.size": 9.0}):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        figure.set_facecolor("white")
        left, right = figure.subplots(1, 2)
        for number, way in enumerate(DRAWN):
            curves = [row["curves"] for row in rows if row["way"] == way]
            for axes, name, width in ((left, "load", 1), (right, "loss", 10)):
                if curves and curves[0][name]:
                    mean = torch.tensor([each[name] for each in curves]).mean(0)
                    smooth = mean.unfold(0, width, 1).mean(-1)
                    places = range(width, len(mean) + 1)
                    axes.plot(places, smooth.tolist(), label=way, color=f"C{number}", linewidth=1.2)
        left.axhline(1.5, color="0.5", linewidth=0.8, linestyle=":")
        left.set(xlabel="step", ylabel="load_max_over_mean, worst layer", ylim=(1, None))
        right.set(xlabel="step", ylabel="loss, nats per byte, mean of 10 steps", yscale="log")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None})


def _text(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file of text, of 100 kB or more")
    parser.add_argument(
        "--keep", type=Path, default=Path("balance.jsonl"), help="rows with curves; those in it are not made again"
    )
    parser.add_argument("--to", type=Path, help="the picture, an SVG")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--count", type=int, default=8, help="experts of a layer")
    parser.add_argument("--ffn-dim", type=int, default=128, help="of an expert")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        given.seed = int(given.one[1])
        print(json.dumps(train(given.one[0], given)), flush=True)
        return
    kept = [json.loads(line) for line in given.keep.read_text().splitlines()] if given.keep.exists() else []
    rows = [row for row in kept if all(row[name] == getattr(given, name) for name in SETTINGS)]
    for seed in given.seeds:
        for way in given.ways:
            if any((row["way"], row["seed"]) == (way, seed) for row in rows):
                continue
            command = [sys.executable, __file__, *sys.argv[1:], "--one", way, str(seed)]
            line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(json.loads(line))
            with given.keep.open("a") as file:
                file.write(line)
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "curves"}), flush=True)
    if given.to is not None:
        draw(rows, given.to)


if __name__ == "__main__":
    main()
