"""The reference run and its evidence: three seeds, and a twin that is killed, moved and given its blend late.

    python benchmarks/reference_run.py --work /scratch/reference            # two hours; rerun to resume
    python benchmarks/reference_run.py --work /scratch/reference --page     # the page of it, and its curves

The run file is `configs/reference-run.yaml`. Everything is done by the commands that a user types. The twin is seed 1
once more. It begins in one process, with a run file that does not know of the second phase. Five times its processes
get SIGKILL, at the steps of `KILLS`. Before the third launch it moves to two processes that share the batch. Before
the fifth it moves to two that share every matrix, and only then it gets its second phase. Its order and data must be
those of seed 1 to the last hash, its losses equal up to the rounding of sums.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import xxhash
from matplotlib.figure import Figure

from pipeline.config.load import packaged_configs
from pipeline.train.run.folder import read_metrics

SEEDS = (1, 2, 3)
RUN_FILE = packaged_configs() / "reference-run.yaml"
KILLS = (160, 370, 580, 790, 1010)
"""The twin's processes are killed as soon as its metrics have these steps."""
ONE = ("launch.processes=1", "launch.threads=2")
ALONE = "blend.phases=[{weights: {library: 0.6, tests: 0.4}}]"
TWO = ("launch.processes=2", "launch.threads=1")
SHARDED = (*TWO, "parallel.tp=2")
LAYOUTS = ((*ONE, ALONE), (*ONE, ALONE), (*TWO, ALONE), (*TWO, ALONE), SHARDED, SHARDED)
"""Of each launch of the twin, what differs from the run file."""
EVIDENCE = Path(__file__).parent / "evidence" / "reference_run.json"
DOCS = Path(__file__).parents[1] / "docs"


def pipeline(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pipeline", *map(str, arguments)]


def run_seed(work: Path, seed: int) -> None:
    """Train and evaluate one seed; what is done already is skipped."""
    settings = [f"run.dir={work / f'seed-{seed}'}", f"data.dir={work / 'data'}", f"run.seed={seed}", *ONE]
    subprocess.run(pipeline("run", RUN_FILE, *settings), check=True)


def last_step(run: Path) -> int:
    """Steps that the metrics of a run have; 0 where there are none."""
    path = run / "metrics.jsonl"
    for line in reversed(path.read_bytes().splitlines() if path.exists() else []):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0


def run_twin(work: Path) -> None:
    """Train seed 1 once more, with all that goes wrong; the launches that are over stand in a file of their own."""
    twin, log = work / "twin", work / "twin-launches.jsonl"
    while True:
        launches = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        number = sum(1 for each in launches if each["killed_at"] is not None)
        if launches and launches[-1]["killed_at"] is None:
            break
        settings = [f"run.dir={twin}", f"data.dir={work / 'data'}", "run.seed=1", *LAYOUTS[number]]
        kill_at = KILLS[number] if number < len(KILLS) else None
        process = subprocess.Popen(pipeline("train", RUN_FILE, *settings))
        killed = None
        while process.poll() is None:
            time.sleep(0.2)
            if kill_at is not None and last_step(twin) >= kill_at:
                ranks = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for each in ranks:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                process.wait()
                psutil.wait_procs(ranks)
                killed = last_step(twin)
        if killed is None and process.returncode:
            sys.exit(f"launch {number + 1} of the twin ended with {process.returncode}")
        row = {"settings": LAYOUTS[number], "killed_at": killed, "exit": process.returncode}
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
    settings = [f"run.dir={twin}", f"data.dir={work / 'data'}", "run.seed=1", *LAYOUTS[-1]]
    subprocess.run(pipeline("eval", RUN_FILE, *settings), check=True)


def digest(values: list[Any]) -> str:
    """One hash of a list of hashes."""
    return xxhash.xxh3_128_hexdigest("\n".join(map(str, values)).encode())


def collect(run: Path) -> dict[str, Any]:
    """Figures of a finished run: each step's loss and hashes, and the held-out loss."""
    rows = [row for row in read_metrics(run) if "loss" in row]
    evaluation = json.loads(max((run / "eval").glob("step-*.json")).read_bytes())
    return {
        "loss": [row["loss"] for row in rows],
        "hashes": [(row["order_hash"], row["data_hash"]) for row in rows],
        "validation": [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row],
        "heldout_loss": evaluation["blended"]["loss"],
    }


def evidence(work: Path) -> dict[str, Any]:
    """What the runs show, as it is kept beside the script."""
    runs = {f"seed {seed}": collect(work / f"seed-{seed}") for seed in SEEDS}
    first, twin = runs["seed 1"], collect(work / "twin")
    losses = np.array(first["loss"]), np.array(twin["loss"])
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "runs": {
            name: {
                "steps": len(each["loss"]),
                "order": digest([order for order, _ in each["hashes"]]),
                "data": digest([data for _, data in each["hashes"]]),
                "heldout_loss": each["heldout_loss"],
                "validation": each["validation"],
                "loss_by_50_steps": [round(float(x), 4) for x in np.array(each["loss"]).reshape(-1, 50).mean(1)],
            }
            for name, each in (*runs.items(), ("twin", twin))
        },
        "twin": {
            "launches": [json.loads(line) for line in (work / "twin-launches.jsonl").read_text().splitlines()],
            "steps_with_equal_hashes": sum(
                one == two for one, two in zip(first["hashes"], twin["hashes"], strict=True)
            ),
            "first_steps_with_equal_losses": int(np.argmax(losses[0] != losses[1])),
            "largest_difference_of_losses": float(np.abs(losses[0] - losses[1]).max()),
            "mean_difference_of_losses": float(np.abs(losses[0] - losses[1]).mean()),
            "difference_of_heldout_losses": twin["heldout_loss"] - first["heldout_loss"],
        },
    }


def draw(found: dict[str, Any], to: Path) -> None:
    """The curves: loss by step of each run, means of 50 steps, and validation."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, each in found["runs"].items():
        style = {"linestyle": "--", "color": "black", "linewidth": 1} if name == "twin" else {}
        means = each["loss_by_50_steps"]
        left.plot(50 * np.arange(1, len(means) + 1), means, label=name, **style)
        right.plot(*zip(*each["validation"], strict=True), label=name, marker=".", **style)
    for axes, title in ((left, "training loss, means of 50 steps"), (right, "validation loss")):
        axes.set(title=title, xlabel="step", ylim=(None, 6))
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(to, metadata={"Date": None})


def page(found: dict[str, Any]) -> str:
    """The page."""
    rows = [
        f"| {name} | {each['heldout_loss']:.4f} | `{each['order']}` | `{each['data']}` |"
        for name, each in found["runs"].items()
    ]
    launches = []
    for number, each in enumerate(found["twin"]["launches"], start=1):
        settings = ", ".join(f"`{one}`" for one in each["settings"])
        end = "ended" if each["killed_at"] is None else f"SIGKILL at step {each['killed_at']:,}"
        launches.append(f"| {number} | {settings} | {end} |")
    twin, steps = found["twin"], found["runs"]["seed 1"]["steps"]
    return PAGE.format(
        python=found["python"],
        torch=found["torch"],
        machine=found["machine"],
        runs="\n".join(rows),
        launches="\n".join(launches),
        equal=f"{twin['steps_with_equal_hashes']:,} of {steps:,}",
        same=f"{twin['first_steps_with_equal_losses']:,}",
        largest=f"{twin['largest_difference_of_losses']:.1e}",
        mean=f"{twin['mean_difference_of_losses']:.1e}",
        heldout=f"{abs(twin['difference_of_heldout_losses']):.1e}",
    )


PAGE = """\
# The reference run

**Does a run end the same, whatever happens to it?** Here is one that everybody can repeat on a laptop: about ten
million parameters on the sources of Python's own library, 1,200 steps, `configs/reference-run.yaml`. It was trained
with three seeds. A twin of the first was killed five times, moved to another layout twice, and was given the second
phase of its blend only shortly before that began.

![curves of the runs](reference-run.svg)

| run | held-out loss | hash of the order | hash of the data |
|---|---|---|---|
{runs}

The hashes are xxh3-128 over those of all steps, as `metrics.jsonl` has them. The text is the library of Python
{python}: with the same files the hashes of a seed are the same on any machine. torch {torch}; {machine}.

## The twin

| launch | beside the run file | end |
|---|---|---|
{launches}

- Steps whose hashes of order and data are those of seed 1: **{equal}**.
- Losses are equal to the last bit for the first {same} steps: the third launch resumes from the save before its kill,
  in another layout. Layouts add the same numbers in another order, and training amplifies that: over all steps, losses
  differ by {mean} in the mean, by {largest} at most.
- Difference of held-out losses: {heldout} nats per token.

[The order of the data](sampler.md) explains why the hashes are equal, [Checkpoints](checkpoints.md) what a resume
restores.

## Repeat it

It took two hours on two cores that had other work, too. Rerun to resume.

```bash
python benchmarks/reference_run.py --work /scratch/reference
python benchmarks/reference_run.py --work /scratch/reference --page     # this page, from your figures
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--work", type=Path, help="folder for data and runs; about 2 GB")
    which.add_argument("--curves", type=Path, help="draw the curves of the kept figures into a file, and do no more")
    parser.add_argument("--page", action="store_true", help="write the page from what is there")
    arguments = parser.parse_args()
    if arguments.curves is not None:
        draw(json.loads(EVIDENCE.read_text()), arguments.curves)
        return
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if arguments.page:
        found = evidence(work)
        EVIDENCE.write_text(json.dumps(found, indent=1) + "\n")
        draw(found, DOCS / "reference-run.svg")
        (DOCS / "reference-run.md").write_text(page(found))
    else:
        for seed in SEEDS[:1]:
            run_seed(work, seed)
        run_twin(work)
        for seed in SEEDS[1:]:
            run_seed(work, seed)
        subprocess.run(
            pipeline(
                "report", *(work / f"seed-{seed}" for seed in SEEDS), work / "twin", "--out", work / "report.html"
            ),
            check=True,
        )


if __name__ == "__main__":
    main()
