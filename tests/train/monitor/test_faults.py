"""Runs in which steps go wrong, compared with runs that pass over the same steps by their run file."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common import storage
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.loop import trainer
from pipeline.train.run.folder import read_metrics
from tests.train.poison import INF, poison
from tests.train.runs import column, exact, start, train, weights_hash

STEPS = 24
SPIKE = 1000.0
COMMON = (
    f"train.duration={STEPS} steps",
    "train.validation.samples=0",
    "train.checkpoint.every_steps=4",
    "train.checkpoint.keep=9",
    "train.faults.spike_window=8",
    "train.faults.spike_zscore=20",
)
FACTOR = {"nonfinite": INF, "spike": SPIKE}


def policy(kind: str, action: str) -> tuple[str, ...]:
    """Look for spikes, too, in every case: their window is part of what must be equal."""
    on = {"on_spike": "skip", f"on_{kind}": action}
    return (*COMMON, *(f"train.faults.{key}={value}" for key, value in on.items()))


def faults(run: Path) -> list[dict[str, Any]]:
    return storage.read_json_lines(run / "faults.jsonl")


def state(run: Path, step: int = STEPS) -> dict[str, Any]:
    return Checkpoints.of_run(run).committed(step).state()


def passing_over(root: Path, *ranges: str) -> Path:
    """The run that passes over such steps from the start and meets no fault; made once."""
    skips = ", ".join(f"{{steps: {r}}}" for r in ranges)
    name = f"without-{'-and-'.join(ranges)}"
    if not (root / name).exists():
        with pytest.MonkeyPatch.context() as clean:
            poison(clean, {})
            train(root, name, *policy("spike", "skip"), f"blend.skip=[{skips}]")
    return root / name


def assert_same_training(run: Path, other: Path) -> None:
    keys = ("loss", "grad_norm", "lr", "order_hash", "tokens", "loss_zscore", "grad_norm_zscore", "passed_over")
    for key in keys:
        assert column(run, key) == column(other, key), key
    assert weights_hash(run) == weights_hash(other)
    assert state(run)["spikes"] == state(other)["spikes"]


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["nonfinite", pytest.param("spike", marks=pytest.mark.slow)])
def test_a_skipped_fault_leaves_the_run_as_if_its_step_had_been_passed_over(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = passing_over(root, "14")
    poison(monkeypatch, {14: FACTOR[kind]})
    code, out = start(root, f"skip-{kind}", *policy(kind, "skip"))
    assert code == 0, out
    run = root / f"skip-{kind}"
    assert f"warning: step 14: {'a spike, loss' if kind == 'spike' else 'loss or gradient is not finite'}" in out
    assert column(run, "skipped") == [step == 14 for step in range(1, STEPS + 1)]
    assert weights_hash(run) == weights_hash(other)
    assert state(run)["spikes"] == state(other)["spikes"]
    (fault,) = faults(run)
    assert {key: fault[key] for key in ("step", "attempt", "kind", "action")} == {
        "step": 14, "attempt": 1, "kind": kind, "action": "skip",
    }  # fmt: skip
    assert len(fault["samples"]) == 4 and all(sample["spans"] for sample in fault["samples"])
    if kind == "spike":
        assert fault["grad_norm_zscore"] > 20 > fault["loss_zscore"]
        assert fault["grad_norm"] == column(run, "grad_norm")[13]


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["nonfinite", pytest.param("spike", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [False, True])
def test_after_a_rewind_the_run_is_as_if_the_steps_had_been_passed_over(
    root: Path, kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host has issued the next step already when it learns of the fault."""
    other = passing_over(root, "11-14")
    poison(monkeypatch, {14: FACTOR[kind]})
    original = trainer.Trainer.run

    def run_ahead(self: trainer.Trainer) -> None:
        self._runs_ahead = ahead
        original(self)

    monkeypatch.setattr(trainer.Trainer, "run", run_ahead)
    name = f"rewind-{kind}-{ahead}"
    code, out = start(root, name, *policy(kind, "rewind"), "train.faults.rewind_steps=3")
    assert code == 0, out
    run = root / name
    assert "rewound to step 8, steps 11 to 14 will be skipped" in out
    assert_same_training(run, other)
    # Steps 9 and 10 were trained twice, and the second attempt counts.
    assert column(run, "attempt") == [1 if step <= 8 else 2 for step in range(1, STEPS + 1)]
    assert [row["action"] for row in faults(run)] == ["rewind"] and faults(run)[0]["passes_over"] == [11, 14]
    assert orjson.loads((run / "exit.json").read_bytes())["attempt"] == 2
    assert [path.name for path in (run / "checkpoints" / "abandoned").iterdir()] == ["step-00000012"]
    journal = orjson.loads((run / "journal.json").read_bytes())
    assert [skip["steps"] for skip in journal["skips"]] == [[10, 14]]


@pytest.mark.slow
def test_where_all_checkpoints_are_newer_than_wanted_the_oldest_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = passing_over(root, "5-14")
    poison(monkeypatch, {14: INF})
    run = train(root, "oldest", *policy("nonfinite", "rewind"))
    assert_same_training(run, other)


@pytest.mark.guard
def test_without_a_checkpoint_to_go_back_to_the_step_is_skipped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {3: INF})
    code, out = start(root, "nowhere", *policy("nonfinite", "rewind"))
    assert code == 0, out
    assert "there is no checkpoint from before it to rewind to; the weights were not updated" in out
    assert [row["action"] for row in faults(root / "nowhere")] == ["skip"]
    assert weights_hash(root / "nowhere") == weights_hash(passing_over(root, "3"))


def test_stop_ends_the_run_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {14: INF})
    code, out = start(root, "stop", *policy("nonfinite", "stop"))
    assert code == 77
    assert "step 14: loss or gradient is not finite, and train.faults.on_nonfinite is stop" in out
    assert "step-00000012 is from before it" in out
    assert [row["action"] for row in faults(root / "stop")] == ["stop"]
    assert len(read_metrics(root / "stop")) == 14
    # What the message says: pass over it, and run the same command.
    code, out = start(root, "stop", *policy("nonfinite", "stop"), "blend.skip=[{steps: 14}]")
    assert code == 0, out
    assert weights_hash(root / "stop") == weights_hash(passing_over(root, "14"))


@pytest.mark.slow
def test_rewinds_are_counted_over_all_attempts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = passing_over(root, "8-10", "18-20")
    poison(monkeypatch, {10: INF, 20: INF})
    keys = (*policy("nonfinite", "rewind"), "train.faults.rewind_steps=2")
    code, out = start(root, "counted", *keys, "train.faults.max_rewinds=1")
    assert code == 77
    assert "step 20: loss or gradient is not finite, and the run was already rewound 1 time" in out
    # Also where the checkpoint is from before the first of them.
    code, out = start(root, "counted", *keys, "train.faults.max_rewinds=1")
    assert code == 77 and "train.faults.max_rewinds" in out
    run = train(root, "counted", *keys, "train.faults.max_rewinds=2")
    assert weights_hash(run) == weights_hash(other)
    assert [row["action"] for row in faults(run)] == ["rewind", "stop", "stop", "rewind"]
    assert state(run)["faults"]["rewinds"] == 2


@pytest.mark.slow
def test_the_record_counts_rewinds_that_the_checkpoint_does_not_know(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed right after it went back."""
    poison(monkeypatch, {10: INF})
    keys = (*policy("nonfinite", "rewind"), "train.faults.rewind_steps=2")
    monkeypatch.setattr(trainer.Trainer, "rewind", lambda self, rewind: (_ for _ in ()).throw(rewind))
    with pytest.raises(trainer.Rewind):
        start(root, "unknown", *keys, "train.faults.max_rewinds=1")
    code, out = start(root, "unknown", *keys, "train.faults.max_rewinds=1")
    assert code == 77 and "train.faults.max_rewinds" in out


@pytest.mark.slow
@pytest.mark.parametrize("passed_over", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_after_a_rewind_still_passes_over_the_steps(root: Path, passed_over: int) -> None:
    """Killed before the first of them, and after a checkpoint in the midst of them."""
    other = passing_over(root, "7-14")
    run = root / f"killed-{passed_over}"
    arguments = ["train", str(root / "run.yaml"), f"run.dir={run}", *policy("nonfinite", "rewind")]
    script = f"""
import os, signal, sys
import pytest
from pipeline.train.loop.step_metrics import StepMetrics
from tests.train.poison import poison
poison(pytest.MonkeyPatch(), {{14: float("inf")}})
original, calls = StepMetrics.skipped, []
def passed_over(*arguments):
    calls.append(1)
    if len(calls) > {passed_over}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
StepMetrics.skipped = passed_over
sys.argv = ["pipeline", *{[*arguments, "train.faults.rewind_steps=7"]!r}]
from pipeline.cli.main import main
main()
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # The data are harmless now, so that nothing but the journal can say what is passed over.
    code, out = start(root, run.name, *policy("nonfinite", "rewind"))
    assert code == 0, out
    assert_same_training(run, other)
    assert len(faults(run)) == 1


def test_faulty_steps_in_a_row_are_counted_over_a_resume(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {7: INF, 8: INF, 9: INF})
    keys = (*policy("nonfinite", "skip"), "train.schedule.type=constant")
    train(root, "row", *keys, "train.duration=8 steps")
    code, out = start(root, "row", *keys, "train.duration=12 steps")
    assert code == 77
    assert "3 steps in a row up to step 9 were spikes or not finite" in out
    assert [row["attempt"] for row in faults(root / "row")] == [1, 1, 2]


def test_while_steps_go_wrong_nothing_is_saved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {8: INF, 12: SPIKE})
    run = train(root, "unsaved", *policy("nonfinite", "skip"))
    assert [checkpoint.step for checkpoint in Checkpoints.of_run(run).all()] == [4, 16, 20, 24]


@pytest.mark.slow
def test_a_resumed_run_finds_the_spikes_of_an_uninterrupted_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {14: SPIKE, 19: INF})
    keys = (*policy("spike", "skip"), "train.schedule.type=constant")
    whole = train(root, "spikes-whole", *keys)
    for steps in (7, 15, STEPS):
        parts = train(root, "spikes-parts", *keys, f"train.duration={steps} steps")
    assert exact(parts) == exact(whole)
    for key in ("spike", "skipped", "loss_zscore", "grad_norm_zscore"):
        assert column(parts, key) == column(whole, key)
    assert column(whole, "spike")[13] and not column(whole, "spike")[18]
    assert state(parts)["spikes"] == state(whole)["spikes"]


@pytest.mark.guard
def test_another_blend_begins_with_an_empty_window(root: Path) -> None:
    phases = "blend.phases=[{until: 12 steps}, {weights: {land: 1}}]"
    run = train(root, "phases", *policy("spike", "skip"), phases)
    compared = [row.get("loss_zscore") is not None for row in read_metrics(run)]
    assert compared == [4 < step <= 12 or step > 16 for step in range(1, STEPS + 1)]


def test_a_loss_in_fp16_that_no_scale_explains_is_a_fault_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {14: INF})
    run = train(root, "fp16-inf", *policy("nonfinite", "skip"), "train.precision.compute=fp16")
    assert [row["step"] for row in faults(run)] == [14]
    assert faults(run)[0]["loss_scale"] > 1


@pytest.mark.guard
def test_a_record_that_cannot_be_written_does_not_end_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {14: INF})
    (root / "unwritable").mkdir()
    (root / "unwritable" / "faults.jsonl").symlink_to(root / "no such folder" / "faults.jsonl")
    code, out = start(root, "unwritable", *policy("nonfinite", "skip"))
    assert code == 0, out
    assert "faults.jsonl could not be written: No such file" in out


@pytest.mark.slow
def test_a_fault_right_behind_what_was_passed_over_leads_back_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = passing_over(root, "11-15")
    poison(monkeypatch, {14: INF, 15: INF})
    code, out = start(root, "again", *policy("nonfinite", "rewind"), "train.faults.rewind_steps=3")
    assert code == 0, out
    assert "step 15 is skipped (fault at step 15)" in out
    assert_same_training(root / "again", other)
    assert [row["passes_over"] for row in faults(root / "again")] == [[11, 14], [12, 15]]
    assert column(root / "again", "attempt")[-1] == 3


def overflowing(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Steps whose gradients leave the range of fp16 at any loss scale, while the loss is what it always is."""
    poison(monkeypatch, dict.fromkeys(steps, 1e30))


FP16 = ("train.precision.compute=fp16", "train.validation.samples=0")


@pytest.mark.guard
def test_an_fp16_run_that_makes_no_update_at_all_does_not_end_well(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss scale is still on its way down when the run is over."""
    overflowing(monkeypatch, *range(1, 9))
    for attempt in (1, 2):  # the same command again, too: nothing was saved that would look like the end
        code, out = start(root, "no-update", *FP16)
        assert code == 77, out
        assert "8 updates were withheld and none was made" in out and "train.precision.compute: bf16" in out
        assert "train: done" not in out and Checkpoints.of_run(root / "no-update").all()[-1].step == 6, attempt


@pytest.mark.guard
def test_at_its_lowest_loss_scale_an_fp16_run_ends_and_the_message_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, *range(3, 25))
    code, out = start(root, "lowest", *FP16, "train.duration=24 steps", "train.precision.loss_scale.initial=4")
    assert code == 77
    assert "3 steps in a row up to step 7 were not finite, with the loss scale at its lowest" in out
    assert "train.precision.compute: bf16" in out and "5 updates were withheld" in out
    # A later attempt does not begin to count anew.
    code, out = start(root, "lowest", *FP16, "train.duration=24 steps", "train.precision.loss_scale.initial=4")
    assert code == 77 and "up to step 7 were" in out


@pytest.mark.slow
def test_the_summary_counts_updates_that_were_withheld_over_a_resume(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, 2, 5)
    keys = (*FP16, "train.schedule.type=constant")
    _, out = start(root, "summary", *keys, "train.duration=4 steps")
    assert "train: 1 update was withheld" in out
    code, out = start(root, "summary", *keys)
    assert code == 0 and "train: 2 updates were withheld" in out
    assert column(root / "summary", "skipped") == [step in (2, 5) for step in range(1, 9)]
    _, out = start(root, "summary-without", *keys, "train.precision.loss_scale.initial=2", "blend.skip=[{steps: 2-5}]")
    assert "withheld" not in out
