"""A run that begins with the whole state of another one: its past is the parent's, bit for bit, the rest is its own."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from pipeline.config.load import load
from pipeline.data.journal import Journal
from pipeline.data.opening import open_datasets
from pipeline.data.provenance import ask
from pipeline.data.where import where
from pipeline.errors import UserError
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.fork import fork
from pipeline.train.run_folder import read_metrics
from tests import tiny
from tests.train.runs import column, exact, start, train, weights_hash

WSD = ("train.schedule={type: wsd, decay: 2 steps, warmup: 2 steps}", "train.checkpoint.keep=9", "train.ema.decay=0.9")
"""Of the parent. Its learning rate is constant from step 2 to step 10."""


@pytest.fixture(scope="module")
def parent(root: Path) -> Path:
    return train(root, "parent", "train.duration=12 steps", *WSD)


def forked(root: Path, name: str, step: int, *overrides: str, parent: str = "parent", dry_run: bool = False) -> str:
    """Fork a run of `root`; returns what was printed."""
    out = io.StringIO()
    config = load(root / "run.yaml", [f"run.dir={root / name}", *overrides])
    fork(root / parent, step, config, Console(file=out, width=500), dry_run=dry_run)
    return out.getvalue()


def test_the_same_run_file_gives_the_parents_continuation_bit_for_bit(root: Path, parent: Path) -> None:
    settings = ("train.duration=12 steps", *WSD)
    out = forked(root, "same", 6, *settings)
    assert [line for line in out.splitlines() if line.startswith("  ")] == [f"  run.dir: {parent} -> {root / 'same'}"]
    train(root, "same", *settings)
    assert exact(root / "same") == exact(parent)[6:]
    assert weights_hash(root / "same", 12) == weights_hash(parent, 12)
    state = orjson.loads((root / "same/checkpoints/step-00000012/state.json").read_bytes())
    of_parent = Checkpoints.of_run(parent).at(6)
    assert {key: state["origin"][key] for key in ("kind", "run", "step", "fingerprint", "origin")} == {
        "kind": "fork",
        "run": str(parent),
        "step": 6,
        "fingerprint": of_parent.fingerprint,
        "origin": None,
    }
    # What is there of the parent is whole, and so is the copy.
    assert not of_parent.problems() and not Checkpoints.of_run(root / "same").at(6).problems()


def test_a_cool_down_from_the_middle_of_a_run(root: Path, parent: Path) -> None:
    """The learning rate falls from step 6 on; the samples stay the parent's, and the loss falls below the parent's."""
    settings = (*WSD, "train.duration=10 steps", "train.schedule.decay=4 steps")
    out = forked(root, "cool", 6, *settings)
    assert "  train.schedule.decay: 2 steps -> 4 steps\n" in out
    train(root, "cool", *settings)
    assert column(root / "cool", "data_hash") == column(parent, "data_hash")[6:10]
    # Linear from 1 to min_ratio (0.1) over the four steps.
    assert column(root / "cool", "lr") == pytest.approx([1e-2 * (1 - 0.9 * k / 4) for k in (1, 2, 3, 4)])
    assert column(parent, "lr")[6:10] == [1e-2] * 4
    assert column(root / "cool", "loss")[-1] != column(parent, "loss")[9]


def test_another_blend_from_the_middle_of_a_run(root: Path, parent: Path) -> None:
    """Equal to a run that had the new blend as a phase from the beginning, which is planned without a fork."""
    phases = "blend.phases=[{until: 6 steps}, {name: land, weights: {sea: 1, land: 4}, batch_size: 3}]"
    settings = (*WSD, "train.duration=12 steps")
    whole = train(root, "whole", phases, *settings)
    future = (*settings, "blend.phases=[{name: land, weights: {sea: 1, land: 4}, batch_size: 3}]")
    out = forked(root, "blend", 6, *future)
    assert "  blend.phases.land: (not there) -> " in out and "fork: then steps 7 to 12, 3 windows" in out
    code, said = start(root, "blend", *future)
    assert code == 0 and "step 7: phase 1 land begins" in said
    assert exact(root / "blend") == exact(whole)[6:]
    assert weights_hash(root / "blend", 12) == weights_hash(whole, 12)
    # Its data can be asked for, before the fork and after it.
    for folder, step in ((parent, 3), (whole, 9)):
        mine, other = ask(root / "blend"), ask(folder)
        for run in (mine, other):
            assert not run.warnings
        assert where(mine, step, say=print).json["samples"] == where(other, step, say=print).json["samples"]
    shown = tiny.pipeline("data", "plan", root / "blend")
    assert shown.returncode == 0, shown.stderr
    assert "parent" in shown.stdout and "1 land" in shown.stdout


def test_a_forked_run_is_killed_and_goes_on_and_is_forked_again(root: Path, parent: Path) -> None:
    settings = (*WSD, "train.duration=11 steps", "blend.phases=[{weights: {sea: 1, land: 1}}]")
    forked(root, "child", 3, *settings)
    train(root, "child", *settings)
    forked(root, "killed", 3, *settings)
    command = tiny.command("train", root / "run.yaml", f"run.dir={root / 'killed'}", *settings)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(read_metrics(root / "killed")) < 4 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    train(root, "killed", *settings)
    assert exact(root / "killed") == exact(root / "child")
    assert weights_hash(root / "killed", 11) == weights_hash(root / "child", 11)
    # Again, with the child's own blend: bit for bit the child's continuation.
    forked(root, "grandchild", 6, *settings, parent="child")
    train(root, "grandchild", *settings)
    assert exact(root / "grandchild") == exact(root / "child")[3:]
    assert weights_hash(root / "grandchild", 11) == weights_hash(root / "child", 11)
    origin = orjson.loads((root / "grandchild/checkpoints/step-00000011/state.json").read_bytes())["origin"]
    assert [origin["run"], origin["origin"]["run"]] == [str(root / "child"), str(parent)]


def test_steps_that_the_parent_passes_over_because_of_a_fault_are_passed_over(root: Path, parent: Path) -> None:
    """Decided after the checkpoint was written: only the parent's journal.json has it."""
    path = parent / "journal.json"
    before = path.read_bytes()
    journal = Journal.from_json(orjson.loads(before)).passing_over((7, 9), 6)
    settings = ("train.duration=12 steps", *WSD)
    path.write_bytes(orjson.dumps(journal.to_json()))
    try:
        said = forked(root, "fault", 6, *settings)
    finally:
        path.write_bytes(before)
    assert "steps 8 to 9 will be passed over, as in the parent (fault at step 9)" in said
    code, out = start(root, "fault", *settings)
    assert code == 0 and "steps 8 to 9 are passed over (fault at step 9)" in out
    assert [row["step"] for row in read_metrics(root / "fault") if row.get("passed_over")] == [8, 9]
    assert exact(root / "fault")[0] == exact(parent)[6]
    state = orjson.loads((root / "fault/checkpoints/step-00000012/state.json").read_bytes())
    assert state["journal"]["skips"] == [{**journal.to_json()["skips"][0]}]
    masked = where(ask(root / "fault"), 8, say=print)
    assert any("passed over because of the fault at step 9" in line for line in masked.lines())


def test_a_dry_run_writes_nothing(root: Path, parent: Path) -> None:
    out = forked(root, "dry", 6, *WSD, "train.duration=20 steps", "train.optimizer.lr=1e-3", dry_run=True)
    assert "  train.optimizer.lr: 0.01 -> 0.001\n" in out and "nothing was written" in out
    assert not (root / "dry").exists()


def test_files_are_copied_where_they_cannot_be_linked(
    root: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    settings = ("train.duration=12 steps", *WSD)
    assert " linked)" in forked(root, "linked", 9, *settings)
    monkeypatch.setattr(os, "link", refused)
    assert " copied)" in forked(root, "copied", 9, *settings)
    for name in ("linked", "copied"):
        checkpoint = Checkpoints.of_run(root / name).at(9)
        same = [os.path.samefile(checkpoint.path / file, parent / "checkpoints/step-00000009" / file)
                for file in checkpoint.files() if file != "state.json"]  # fmt: skip
        assert set(same) == {name == "linked"}
    monkeypatch.undo()
    train(root, "copied", *settings)
    assert exact(root / "copied") == exact(parent)[9:]


@pytest.mark.parametrize(
    ("step", "overrides", "message"),
    [
        (5, (), r"does not have a checkpoint of step 5 \(steps there: 3, 6, 9, 12\)"),
        (6, ("run.dir={root}/parent",), "is that of its parent"),
        (6, ("train.duration=6 steps",), r"would end with step 6 .*raise train.duration"),
        (6, ("model.norm_eps=0.1",), r"(?s)model.norm_eps: .*resume.allow=\[model\]"),
        (6, ("run.seed=1",), r"run.seed 1234 -> 1\. Set run.seed to 1234"),
        (6, ("data.dir={root}/elsewhere",), r"the parent has its data in .*data: set data.dir to that"),
        (6, ("blend.skip=[{{steps: 2, from_step: 1}}]",), "In blend.skip, leave from_step out"),
    ],
)
def test_what_cannot_be_forked(root: Path, parent: Path, step: int, overrides: tuple[str, ...], message: str) -> None:
    values = [value.format(root=root) for value in overrides]
    with pytest.raises(UserError, match=message):
        forked(root, "refused", step, *WSD, "train.duration=12 steps", *values)
    assert not (root / "refused").exists()


def test_a_run_that_has_begun_is_not_written_over(root: Path, parent: Path) -> None:
    settings = ("train.duration=12 steps", *WSD)
    forked(root, "begun", 6, *settings)
    before = {path: path.stat().st_mtime_ns for path in (root / "begun").rglob("*")}
    with pytest.raises(UserError, match="a run has begun in .*begun"):
        forked(root, "begun", 9, *settings)
    assert {path: path.stat().st_mtime_ns for path in (root / "begun").rglob("*")} == before


def test_a_damaged_checkpoint_is_not_forked(root: Path, parent: Path) -> None:
    damaged = root / "damaged" / "checkpoints" / "step-00000006"
    damaged.mkdir(parents=True)
    for path in (parent / "checkpoints/step-00000006").iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    tensors = next(damaged.glob("*.distcp"))
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(UserError, match=rf"{tensors.name} has changed since it was written"):
        forked(root, "of-damaged", 6, *WSD, "train.duration=12 steps", parent="damaged")
    assert not (root / "of-damaged").exists()


def test_a_fork_that_was_killed_is_made_again(root: Path, parent: Path) -> None:
    """What it leaves is no checkpoint: training would not take it for one, and the same command makes it whole."""
    settings = ("train.duration=12 steps", *WSD)
    script = f"""
import os, signal, sys
rename = os.replace
def replace(source, target, **options):
    if str(target).endswith("step-00000006"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, target, **options)
os.replace = replace
sys.argv = {tiny.command("fork", parent, root / "run.yaml", f"run.dir={root / 'again'}", *settings, "--step", 6)[2:]!r}
from pipeline.cli import main
main()
"""
    done = subprocess.run([tiny.command()[0], "-c", script], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert Checkpoints.of_run(root / "again").all() == []
    shown = tiny.pipeline("fork", parent, root / "run.yaml", f"run.dir={root / 'again'}", *settings, "--step", 6)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "`pipeline train` goes on from it" in shown.stdout
    assert not list((root / "again/checkpoints").glob("*.tmp"))
    train(root, "again", *settings)
    assert exact(root / "again") == exact(parent)[6:]


def test_the_plan_of_a_fork_knows_the_parents_past(root: Path, parent: Path) -> None:
    """As every rank plans it: from the checkpoint alone, whatever the run file says of the past."""
    settings = ("train.duration=12 steps", *WSD, "blend.phases=[{weights: {land: 1}}]")
    forked(root, "past", 6, *settings)
    config = load(root / "run.yaml", [f"run.dir={root / 'past'}", *settings])
    saved = Journal.from_json(Checkpoints.of_run(root / "past").at(6).state()["journal"])
    journal = Journal.plan(config, open_datasets(config, "train"), saved).going_on(saved, 6)
    assert [(segment.first_step, sorted(segment.sources)) for segment in journal.segments] == [
        (0, ["land", "sea"]),
        (6, ["land"]),
    ]
    assert Journal.from_json(orjson.loads((root / "past/journal.json").read_bytes())) == journal
