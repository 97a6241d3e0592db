"""A run that begins with the whole state of another one: its past is the parent's, bit for bit, the rest is its own."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from pipeline.common.errors import MachineError, UserError
from pipeline.config.load import load
from pipeline.data.datasets.open import open_datasets
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import plan_journal
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.fork import fork
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
    assert not [line for line in out.splitlines() if line.startswith("  ")]
    assert out.endswith("; resume from it: pipeline train NEW.yaml\n")
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


@pytest.mark.slow
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
        mine, other = open_view(root / "blend"), open_view(folder)
        for run in (mine, other):
            assert not run.warnings
        assert where(mine, step, say=print).json["samples"] == where(other, step, say=print).json["samples"]
    shown = tiny.pipeline("data", "plan", root / "blend")
    assert shown.returncode == 0, shown.stderr
    assert "parent" in shown.stdout and "1 land" in shown.stdout


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert "steps 8 to 9 will be skipped, as in the parent (fault at step 9)" in said
    code, out = start(root, "fault", *settings)
    assert code == 0 and "steps 8 to 9 are skipped (fault at step 9)" in out
    assert [row["step"] for row in read_metrics(root / "fault") if row.get("passed_over")] == [8, 9]
    assert exact(root / "fault")[0] == exact(parent)[6]
    state = orjson.loads((root / "fault/checkpoints/step-00000012/state.json").read_bytes())
    assert state["journal"]["skips"] == [{**journal.to_json()["skips"][0]}]
    masked = where(open_view(root / "fault"), 8, say=print)
    assert any("skipped because of the fault at step 9" in line for line in masked.lines())


def test_a_dry_run_writes_nothing(root: Path, parent: Path) -> None:
    out = forked(root, "dry", 6, *WSD, "train.duration=20 steps", "train.optimizer.lr=1e-3", dry_run=True)
    assert "  train.optimizer.lr: 0.01 -> 0.001\n" in out and "nothing was written" in out
    assert not (root / "dry").exists()


@pytest.mark.slow
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
        (6, ("train.duration=6 steps",), r"would end at step 6 .*raise train.duration"),
        (6, ("model.norm_eps=0.1",), r"(?s)model.norm_eps: .*resume.allow=\[model\]"),
        (6, ("run.seed=1",), r"run.seed 1234 -> 1\. Set run.seed to 1234"),
        (6, ("data.dir={root}/elsewhere",), r"the parent has its data in .*data: set data.dir to that"),
        (6, ("blend.skip=[{{steps: 2, from_step: 1}}]",), "In blend.skip, remove from_step"),
        (6, ("tokenizer.train.vocab_size=280",), r"tokenizer.train changed since it was trained"),
        (6, ("data.preprocess.unit_bytes=2000000",), r"(?s)source 'sea' was made with other settings.*unit_bytes"),
        (6, ("train.validation.split=gone",), r"gone"),
        (6, ("model.dim=64", "resume.allow=[model]"), r"embedding.weight is 304 x 32 in .* and 304 x 64 in this model"),
        (6, ("resume.from=3",), r"resume.from: 3 .* step 6; leave resume.from out"),
        (6, ("run.dir={root}/parent/child",), r"is inside the run folder of its parent"),
        (6, ("run.dir={root}",), r"contains the run folder of its parent"),
        (6, ("run.dir={root}/data",), r"is the data folder of the parent"),
    ],
)
def test_what_cannot_be_forked(root: Path, parent: Path, step: int, overrides: tuple[str, ...], message: str) -> None:
    values = [value.format(root=root) for value in overrides]
    for dry_run in (True, False):
        with pytest.raises(UserError, match=message):
            forked(root, "refused", step, *WSD, "train.duration=12 steps", *values, dry_run=dry_run)
        assert not (root / "refused").exists()


def test_nobody_is_told_to_remove_a_data_folder_that_other_runs_use(root: Path, parent: Path) -> None:
    with pytest.raises(UserError, match=r"Restore that") as refused:
        forked(root, "refused", 6, *WSD, "train.duration=12 steps", "tokenizer.train.vocab_size=280")
    assert "remove" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["export.json", "COMMIT", "tokenizer/tokenizer.json", "sea/train/manifest.json", "src/a.py"]
)
def test_a_folder_of_another_use_is_not_forked_into(root: Path, parent: Path, tmp_path: Path, name: str) -> None:
    used = tmp_path / "used"
    (used / name).parent.mkdir(parents=True)
    (used / name).touch()
    for dry_run in (True, False):
        with pytest.raises(UserError, match=rf"used has {Path(name).parts[0]}, .*set run.dir to a new folder"):
            forked(root, str(used), 6, *WSD, "train.duration=12 steps", dry_run=dry_run)
    assert [path for path in used.rglob("*") if path.is_file()] == [used / name]


@pytest.mark.slow
def test_what_commands_leave_before_the_first_step_does_not_hinder_a_fork(root: Path, parent: Path) -> None:
    """The data of the fork are its own here: the same, made again in its own folder."""
    settings = ("train.duration=12 steps", *WSD, "data.dir=null")
    child = root / "own"
    preprocess(load(root / "run.yaml", [f"run.dir={child}", *settings]))
    assert start(root, "own", *settings, "resume.from=6")[0] == 2
    (child / "own.yaml").write_text("run: {}\n")
    (child / "eval").mkdir()
    (child / "eval" / "weights-00ff.json").write_text("{}")  # as `pipeline eval --weights` names it
    forked(root, "own", 6, *settings)
    train(root, "own", *settings)
    assert exact(child) == exact(parent)[6:]


def test_a_parent_that_is_not_there_may_have_been_a_file_or_a_folder(root: Path, parent: Path) -> None:
    with pytest.raises(UserError, match="no run file or run folder .*nothere; "):
        forked(root, "refused", 6, parent="nothere")
    with pytest.raises(UserError, match=f"checkpoints is not a run folder.*name the run folder, {parent}$"):
        forked(root, "refused", 6, parent="parent/checkpoints")


def test_a_new_run_folder_that_cannot_be_written_is_named(
    root: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    message = rf"run\.dir {root / 'no-room'} of the new run cannot be written \(No space left on device\); free some"
    with pytest.raises(MachineError, match=message):
        forked(root, "no-room", 6, "train.duration=12 steps", *WSD)
    assert Checkpoints.of_run(root / "no-room").all() == []


def test_a_run_that_has_begun_is_not_written_over(root: Path, parent: Path) -> None:
    settings = ("train.duration=12 steps", *WSD)
    forked(root, "begun", 6, *settings)
    before = {path: path.stat().st_mtime_ns for path in (root / "begun").rglob("*")}
    with pytest.raises(UserError, match="a run has already started in .*begun"):
        forked(root, "begun", 9, *settings)
    assert {path: path.stat().st_mtime_ns for path in (root / "begun").rglob("*")} == before


def test_a_fork_that_was_never_trained_can_be_undone(root: Path, parent: Path) -> None:
    """As the message says; after a step it says no such thing."""
    settings = ("train.duration=12 steps", *WSD)
    forked(root, "undone", 6, *settings)
    undo = root / "undone" / "checkpoints"
    with pytest.raises(UserError, match=f"remove {undo} and fork again"):
        forked(root, "undone", 9, *settings)
    shutil.rmtree(undo)
    forked(root, "undone", 9, *settings)
    train(root, "undone", *settings)
    assert exact(root / "undone") == exact(parent)[9:]
    with pytest.raises(UserError, match="set run.dir to a new folder") as refused:
        forked(root, "undone", 9, *settings)
    assert "remove" not in str(refused.value)


def test_a_damaged_checkpoint_is_not_forked(root: Path, parent: Path) -> None:
    damaged = root / "damaged" / "checkpoints" / "step-00000006"
    damaged.mkdir(parents=True)
    for path in (parent / "checkpoints/step-00000006").iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    tensors = next(damaged.glob("*.distcp"))
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(UserError, match=rf"(?s)step-00000006 is damaged.*{tensors.name}"):
        forked(root, "of-damaged", 6, *WSD, "train.duration=12 steps", parent="damaged")
    assert not (root / "of-damaged").exists()


@pytest.mark.slow
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
from pipeline.cli.main import main
main()
"""
    done = subprocess.run([tiny.command()[0], "-c", script], capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert Checkpoints.of_run(root / "again").all() == []
    shown = tiny.pipeline("fork", parent, root / "run.yaml", f"run.dir={root / 'again'}", *settings, "--step", 6)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert f"fork: {root / 'again'} has the checkpoint" in shown.stdout
    assert not list((root / "again/checkpoints").glob("*.tmp"))
    train(root, "again", *settings)
    assert exact(root / "again") == exact(parent)[6:]


def test_the_plan_of_a_fork_knows_the_parents_past(root: Path, parent: Path) -> None:
    """As every rank plans it: from the checkpoint alone, whatever the run file says of the past."""
    settings = ("train.duration=12 steps", *WSD, "blend.phases=[{weights: {land: 1}}]")
    forked(root, "past", 6, *settings)
    config = load(root / "run.yaml", [f"run.dir={root / 'past'}", *settings])
    saved = Journal.from_json(Checkpoints.of_run(root / "past").at(6).state()["journal"])
    journal = plan_journal(config, open_datasets(config, "train"), saved).going_on(saved, 6)
    assert [(segment.first_step, sorted(segment.sources)) for segment in journal.segments] == [
        (0, ["land", "sea"]),
        (6, ["land"]),
    ]
    assert Journal.from_json(orjson.loads((root / "past/journal.json").read_bytes())) == journal
