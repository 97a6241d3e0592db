"""Sweeps: which runs come of the words, and that each is trained once, evaluated and compared with the others."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from slurm import jobs, scheduler
from slurm.control import cancel
from slurm.devcluster import DevCluster
from slurm.record import active_jobs
from slurm.record.launch_log import launches
from slurm.sweep.command import RunsFailed, sweep
from slurm.sweep.members import make_sweep, short_names, split_values, value_name
from tests.tiny import command, write_run
from tests.waiting import until

LR = "train.optimizer.lr=1e-3,1e-2"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose data are there."""
    file = write_run(tmp_path_factory.mktemp("sweep"), {"train.duration": "4 steps", "train.checkpoint.every_steps": 4})
    preprocess(load(file))
    return file


@pytest.fixture
def fresh(run_file: Path, tmp_path: Path) -> list[str]:
    """Words that give the test runs of its own, with the same data."""
    return [f"run.dir={tmp_path / 'run'}"]


def do(run: Path, words: list[str], *, per_node: int = 1, **options: bool) -> None:
    everything = dict.fromkeys(("slurm", "local", "dry_run", "table", "as_json"), False) | options
    sweep(run, words, Console(width=150), **everything, per_node=per_node)


def table(run: Path, words: list[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    do(run, words, table=True, as_json=True)
    value: dict[str, Any] = json.loads(capfd.readouterr().out)
    return value


def test_values_are_cut_at_commas_of_the_top_level() -> None:
    cut = {
        "1e-4,3e-4": ["1e-4", "3e-4"],
        "[1,2],[3,4]": ["[1,2]", "[3,4]"],
        "'a,b', c": ["'a,b'", "c"],
        '"a\\",b",c': ['"a\\",b"', "c"],
        "don't,can't": ["don't", "can't"],
        "{a: 1, b: [2,3]},{a: 2}": ["{a: 1, b: [2,3]}", "{a: 2}"],
        "2000 steps": ["2000 steps"],
    }
    assert {text: split_values(text) for text in cut} == cut


def test_names_of_values_and_keys() -> None:
    assert value_name("0.0001") == value_name("1.0e-4") == "1e-4"
    assert [value_name(text) for text in ("12", "0.10", "1e9", "true", "2000 steps")] == [
        "12",
        "0.1",
        "1e9",
        "true",
        "2000_steps",
    ]
    odd = {value_name(text) for text in ("[1,2]", "[1, 3]", "/a/b", "/a_b", "../..", "'a,b=c'")}
    assert len(odd) == 6
    assert not any(set("/,= []") & set(name) for name in odd)
    assert short_names(["train.optimizer.lr", "x.lr", "model.layers", "data.sources.0.weight"]) == {
        "train.optimizer.lr": "optimizer.lr",
        "x.lr": "x.lr",
        "model.layers": "layers",
        "data.sources.0.weight": "weight",
    }


def test_same_values_same_folders(run_file: Path) -> None:
    one = make_sweep(
        run_file, ["train.optimizer.lr=1e-4,3e-4", "model.layers=2,4", "train.batch_size=8", "slurm.nodes=1"]
    )
    again = make_sweep(run_file, ["model.layers=4,2", "train.batch_size=8", "train.optimizer.lr=0.0001,3.0e-4,1e-3"])
    base = load(run_file)
    folder = base.run.dir / "sweeps" / "layers,lr,batch_size=8"
    assert {m.folder for m in one.members} == {
        folder / f"layers={layers},lr={lr}" for layers in (2, 4) for lr in ("1e-4", "3e-4")
    }
    assert {m.folder for m in one.members} < {m.folder for m in again.members}
    for member in one.members:
        assert member.config.data_dir == base.data_dir
        assert member.config.train.batch_size == 8
        assert f"layers={member.config.model.layers}," in member.name
    other = make_sweep(run_file, ["train.optimizer.lr=1e-4,3e-4", "model.layers=2,4"])
    assert other.folder != folder, "other fixed values are another sweep"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.optimizer.lr"], "does not have the form key.path=value,value"),
        (["train.optimizer.lr=1e-3"], "no key has several values"),
        (["train.optimizer.lr=1e-3,0.001"], "are the same value"),
        (["train.optimizer.lr=1e-3,"], "has an empty value"),
        ([LR, LR], "is given twice"),
        (["run.dir=a,b"], "run.dir is set by the sweep"),
        ([LR, "data.dir=/nowhere/data"], r"First: pipeline preprocess .*run\.yaml data\.dir=/nowhere/data"),
    ],
)
def test_words_that_are_refused(run_file: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        do(run_file, words)


def test_all_problems_of_all_runs_at_once_and_nothing_started(run_file: Path, fresh: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        do(run_file, [*fresh, "train.optimizer.lr=1e-3,much", "model.layers=0,1"])
    text = str(caught.value)
    assert text.startswith("3 of the 4 runs")
    assert "layers=0,lr=1e-3: " in text
    assert 'train.optimizer.lr = "much": must be a number' in text
    # What only training would refuse.
    with pytest.raises(UserError, match=r"(?s)1 of the 2 runs.*duration=4000_steps: .*max_epochs"):
        do(
            run_file,
            [*fresh, "train.duration=4 steps,4000 steps", "data.sources.0.max_epochs=1", "data.sources.1.max_epochs=1"],
        )
    assert not (tmp_path / "run").exists()


def test_dry_run_shows_and_writes_nothing(
    run_file: Path, fresh: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    do(run_file, [*fresh, LR, "model.layers=1,2"], dry_run=True)
    said = capfd.readouterr().out
    assert "4 runs one after the other" in said
    assert said.count("to do") == 4
    assert said.startswith(f"sweep {tmp_path}") and said.endswith("nothing was written (--dry-run)\n")
    words = [*fresh, LR, "model.layers=1,2", "slurm.train.time=10"]
    do(run_file, words, dry_run=True, slurm=True)
    assert "#SBATCH" not in capfd.readouterr().out
    monkeypatch.setenv("PIPELINE_VERBOSE", "1")
    do(run_file, words, dry_run=True, slurm=True)
    said = capfd.readouterr().out
    assert "an array of 4 jobs, each with 1 node x 1 process, for 10 min" in said
    assert "\n#SBATCH --array=0-3" in said and "nothing was sent" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.guard
def test_in_the_foreground_to_the_end_and_on(
    run_file: Path, fresh: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    do(run_file, [*fresh, LR])
    found = table(run_file, [*fresh, LR], capfd)
    folder = tmp_path / "run/sweeps/lr"
    assert [each["state"] for each in found["members"]] == ["done", "done"]
    assert [each["step"] for each in found["members"]] == [4, 4]
    assert found["sorted_by"] == "eval_loss"
    assert found["best"] == found["members"][0]["name"] == "lr=0.01", "in so few steps the larger rate learns more"
    for each in found["members"]:
        evaluation = json.loads((folder / each["name"] / "eval/step-00000004.json").read_text())["blended"]
        assert (each["eval_loss"], each["bits_per_byte"]) == (evaluation["loss"], evaluation["bits_per_byte"])
        rows = [json.loads(line) for line in (folder / each["name"] / "metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in rows if "loss" in row]
        assert math.isclose(each["train_loss"], sum(losses) / 4)
        assert each["validation_loss"] == [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
    with (folder / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["name"], line["best"], line["train.optimizer.lr"]) for line in lines] == [
        ("lr=0.01", "True", "1e-2"),
        ("lr=1e-3", "False", "1e-3"),
    ]

    # One more value: only that is trained. A run file that has changed since is refused.
    ledgers = {each: (folder / each / "ledger.jsonl").read_bytes() for each in ("lr=0.01", "lr=1e-3")}
    do(run_file, [*fresh, "train.optimizer.lr=1e-2,1e-3,3e-3"])
    assert {each: (folder / each / "ledger.jsonl").read_bytes() for each in ledgers} == ledgers
    assert (folder / "lr=3e-3/eval/step-00000004.json").exists()
    changed = run_file.with_name("changed.yaml")
    changed.write_text(run_file.read_text().replace("batch_size: 4", "batch_size: 6"))
    with pytest.raises(
        UserError, match=r"2 of the 2 runs(?s:.)*all runs: train.batch_size was 4 when it began and is 6"
    ):
        do(changed, [*fresh, LR])


@pytest.mark.guard
def test_a_run_that_fails_does_not_keep_the_others_from_it(
    run_file: Path, fresh: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*fresh, "train.optimizer.lr=1e30,1e-2", "train.faults.on_nonfinite=stop"]
    with pytest.raises(RunsFailed, match=r"1 of 2 runs failed: lr=1e30"):
        do(run_file, words)
    found = table(run_file, words, capfd)
    assert [(each["name"], each["state"]) for each in found["members"]] == [
        ("lr=0.01", "done"),
        ("lr=1e30", "diverged"),
    ]
    assert "not finite" in found["members"][1]["why"]
    assert found["best"] == "lr=0.01"


def test_the_table_needs_no_torch(run_file: Path, fresh: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run/sweeps/lr"
    folder.mkdir(parents=True)
    noted = {"lr=1e-3": {"values": {"train.optimizer.lr": "1e-3"}, "steps": 4}}
    (folder / "sweep.json").write_text(json.dumps({"members": noted}))
    words = command("sweep", run_file, *fresh, LR, "--table", "--json")[3:]
    code = (
        "import sys; from pipeline.cli.main import app\n"
        f"app({words!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["members"][0]["state"] == "not started"


def states(run: Path, words: list[str], capfd: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {each["name"]: each["state"] for each in table(run, words, capfd)["members"]}


@pytest.mark.parallel
@pytest.mark.slow
def test_in_the_background_one_after_the_other(
    run_file: Path, fresh: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*fresh, "train.optimizer.lr=1e30,1e-2", "train.faults.on_nonfinite=stop"]
    do(run_file, words, local=True)
    folder = tmp_path / "run/sweeps/lr,on_nonfinite=stop"
    begun = states(run_file, words, capfd)
    assert set(begun.values()) <= {"pending", "running"}
    do(run_file, words, local=True)
    assert capfd.readouterr().out.count(", skipped") == 2, "it is under way"
    until(lambda: states(run_file, words, capfd) == {"lr=0.01": "done", "lr=1e30": "diverged"})
    assert [each.stage for each in launches(folder / "lr=1e30")] == ["train"]
    assert [each.stage for each in launches(folder / "lr=0.01")] == ["train", "eval"]
    assert len({job.job for name in begun for job in jobs.sent(folder / name)}) == 1


@pytest.mark.parallel
@pytest.mark.slow
def test_a_run_that_is_done_is_left_alone_by_what_asks_for_its_end(
    run_file: Path, fresh: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*fresh, "train.duration=4 steps,100000 steps"]
    do(run_file, words, local=True)
    done, next_one = (tmp_path / "run/sweeps/duration" / f"duration={steps}_steps" for steps in (4, 100_000))
    try:
        until(lambda: states(run_file, words, capfd) == {done.name: "done", next_one.name: "running"})
        cancel(done, Console(), now=False, chain=False, wait=5)
        assert "nothing of" in capfd.readouterr().out
        assert not (done / "stop").exists() and jobs.cancelled(done) is None
        assert not active_jobs.find(done) and active_jobs.find(next_one)
    finally:
        cancel(next_one, Console(), now=True, chain=False, wait=60)


@pytest.mark.slurm
@pytest.mark.slow
def test_an_array_of_jobs_each_of_which_goes_on_by_itself(
    run_file: Path, fresh: list[str], tmp_path: Path, cluster: DevCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    more = [
        "slurm.profile=devcluster",
        "slurm.doctor=false",
        "train.duration=1000 steps",
        "train.checkpoint.every_steps=1000",
    ]
    words = [*fresh, "train.optimizer.lr=1e-3,2e-3,3e-3", *more, "train.validation.every_steps=1000"]
    folder = tmp_path / "run/sweeps/lr,duration=1000_steps,every_steps=1000"  # where checkpoints are does not matter
    # An earlier command got no answer from sbatch, which had sent the job.
    script = jobs.jobs_folder(folder) / ".submission_file_lost.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\nsleep 600\n")
    lost = scheduler.ask(["sbatch", "--parsable", "--hold", f"--output={tmp_path}/log", str(script)]).strip()
    do(run_file, words, slurm=True)
    assert f"cancelled {lost}, which sbatch got no answer about" in capfd.readouterr().out
    assert scheduler.details(lost)["JobState"] == "CANCELLED" and not script.exists()
    names = ["lr=1e-3", "lr=2e-3", "lr=3e-3"]
    numbers = [jobs.sent(folder / name)[0].job for name in names]
    array = numbers[0].partition("_")[0]
    assert numbers == [f"{array}_{task}" for task in range(3)], "one array"
    do(run_file, words, slurm=True)
    assert capfd.readouterr().out.count(", skipped") == 3
    assert [len(jobs.sent(folder / name)) for name in names] == [1, 1, 1]

    # The end of the time of the second one is ahead; somebody ends the third one.
    until((folder / names[1] / "metrics.jsonl").exists)
    subprocess.run(["scancel", "--signal=USR2", numbers[1]], check=True)
    until((folder / names[2] / "metrics.jsonl").exists)
    subprocess.run(["scancel", numbers[2]], check=True)
    until(lambda: states(run_file, words, capfd) == dict.fromkeys(names[:2], "done") | {names[2]: "cancelled"})
    first, second, third = (launches(folder / name) for name in names)
    assert [(each.stage, each.restarts) for each in first] == [("train", 0), ("eval", 0)]
    assert [(each.stage, each.restarts) for each in second] == [("train", 0), ("train", 1), ("eval", 1)]
    assert {each.job for each in second} == {numbers[1]}, "the same task of the array, again"
    ends = ["requeue", "done", "done"]
    until(lambda: [each.end.next for each in launches(folder / names[1]) if each.end] == ends)
    assert len(third) == 1
    # The same command sends what is left, and only that.
    do(run_file, words, slurm=True)
    assert [len(jobs.sent(folder / name)) for name in names] == [1, 1, 2]
    until(lambda: set(states(run_file, words, capfd).values()) == {"done"})
    found = {each["name"]: each for each in table(run_file, words, capfd)["members"]}
    assert all(each["step"] == 1000 and each["eval_loss"] < 6 for each in found.values())


@pytest.mark.slurm
def test_what_the_cluster_does_not_allow_is_told_before_anything_is_sent(
    run_file: Path, fresh: list[str], tmp_path: Path, cluster: DevCluster
) -> None:
    many = "train.optimizer.lr=" + ",".join(f"{number}e-5" for number in range(1, 103))
    with pytest.raises(UserError, match="102 runs .*MaxArraySize.* fewer values"):
        do(run_file, [*fresh, many, "slurm.profile=devcluster"], slurm=True)
    # Of two groups, with resources of their own, the second one asks for more time than its partition gives.
    words = [*fresh, LR, "slurm.train.time=5,30", "slurm.profile=devcluster", "slurm.train.partition=short"]
    with pytest.raises(UserError, match="time"):
        do(run_file, words, slurm=True)
    assert not list(tmp_path.rglob("jobs.jsonl"))
