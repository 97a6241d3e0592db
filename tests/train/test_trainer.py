"""Whole runs: killed, stopped, damaged, changed, resumed; compared bit for bit with one that was left alone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from pipeline.cli.main import main
from pipeline.common.errors import Stopped
from pipeline.config.load import load
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.loop import trainer
from pipeline.train.model.decoder import Decoder
from pipeline.train.monitor.loggers.base import Logger
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.setup import be_deterministic
from tests import tiny
from tests.train.runs import exact, start, train, weights_hash

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def straight(root: Path) -> list[dict[str, Any]]:
    """Metrics of a run that nobody disturbs."""
    return exact(train(root, "straight"))


def test_a_run_leaves_what_it_should(root: Path, straight: list[dict[str, Any]]) -> None:
    run = root / "straight"
    assert [row["step"] for row in straight] == list(range(1, 9))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-00000006", "step-00000008"]
    checkpoint = run / "checkpoints" / "step-00000008"
    assert {"tokenizer.json", "state.json", "COMMIT", ".metadata"} <= {p.name for p in checkpoint.iterdir()}
    assert orjson.loads((run / "exit.json").read_bytes())["code"] == 0
    assert load(run / "config.yaml") == load(root / "run.yaml", [f"run.dir={run}"])
    rows = read_metrics(run)
    assert rows[-1]["tokens"] == 8 * 4 * 32
    assert sum(rows[-1]["tokens_by_source"].values()) == rows[-1]["tokens"]
    assert "mfu" not in rows[-1]
    assert rows[-1]["model_flops_per_second"] > 0
    assert rows[3]["validation_loss"] > 0 and rows[7]["validation_loss"] > 0
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_seven_calls_from_the_command_to_the_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the code from the command on is soon where the model computes."""
    seen: list[list[str]] = []
    forward = Decoder.forward

    def noted(self: Decoder, *args: Any) -> Any:
        frames = traceback.extract_stack(sys._getframe(1))
        names = [f"{Path(frame.filename).relative_to(ROOT)}:{frame.name}" for frame in frames if own(frame.filename)]
        seen.append([*names[names.index("pipeline/cli/main.py:train") :], "forward"])
        return forward(self, *args)

    def own(file: str) -> bool:
        return any(Path(file).is_relative_to(ROOT / package) for package in ("pipeline", "slurm"))

    monkeypatch.setattr(Decoder, "forward", noted)
    command = ["train", str(root / "run.yaml"), f"run.dir={root / 'called'}", "train.duration=4 steps"]
    monkeypatch.setattr(sys, "argv", ["pipeline", *command])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert len(seen[0]) <= 7, seen[0]


def test_the_time_of_steps_adds_up_to_less_than_that_of_the_run(root: Path) -> None:
    """Each second belongs to one step at most, or tokens_per_second is wrong."""
    begin = time.monotonic()
    run = train(root, "timed", "train.validation.every_steps=1")
    wall = time.monotonic() - begin
    assert sum(4 * 32 / row["tokens_per_second"] for row in read_metrics(run)) < wall


def test_the_same_run_twice_has_the_same_bits(root: Path, straight: list[dict[str, Any]]) -> None:
    again = train(root, "again")
    assert exact(again) == straight
    assert weights_hash(again) == weights_hash(root / "straight")


def test_a_finished_run_says_so_and_a_longer_one_goes_on(root: Path, straight: list[dict[str, Any]]) -> None:
    run = train(root, "longer", "train.duration=4 steps", "train.schedule.type=constant")
    code, out = start(root, "longer", "train.duration=4 steps")
    assert code == 0
    assert "already at step 4" in out
    train(root, "longer", "train.schedule.type=constant")
    whole = train(root, "whole", "train.schedule.type=constant")
    longer = [{**row, "validation_loss": None} for row in exact(run)]
    assert longer == [{**row, "validation_loss": None} for row in exact(whole)]
    assert weights_hash(run) == weights_hash(whole)
    assert [row["order_hash"] for row in exact(run)] == [row["order_hash"] for row in straight]


@pytest.mark.guard
@pytest.mark.parametrize(
    ("kills", "steps"), [(1, 16), pytest.param(20, 400, marks=[pytest.mark.slow, pytest.mark.timeout(2400)])]
)
def test_sigkill_at_any_instant_then_the_same_bits(root: Path, kills: int, steps: int) -> None:
    """SIGKILL at random instants of a run, then a run to the end: same losses at every step, same weights."""
    seed = int(os.environ.get("PIPELINE_TEST_SEED", random.SystemRandom().randrange(10**6)))
    print(f"PIPELINE_TEST_SEED={seed}")
    chance = random.Random(seed)
    settings = (f"train.duration={steps} steps", "train.checkpoint.every_steps=2")
    undisturbed = train(root, f"undisturbed-{steps}", *settings)
    run = root / f"killed-{seed}"
    command = tiny.command("train", root / "run.yaml", f"run.dir={run}", *settings)
    for _ in range(kills):
        # Start-up differs between machines: count from the first sign of the attempt, or the kill meets only imports.
        before = len(read_metrics(run))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(read_metrics(run)) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if len(read_metrics(run)) == steps:
            break
    done = tiny.pipeline(*command[3:], timeout=600)  # up to the whole run again, on a machine that may be busy
    assert done.returncode == 0, done.stdout + done.stderr
    assert exact(run) == exact(undisturbed)
    assert weights_hash(run) == weights_hash(undisturbed)
    assert not list((run / "checkpoints").glob("*.tmp"))
    shutil.rmtree(run)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("when", "target"),
    [("after", "step-00000006"),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in
       (("before", "COMMIT"), ("before", "step-00000006"), ("after", "latest"),
        ("after", "step-00000003.pruned.tmp")))],
)  # fmt: skip
def test_sigkill_between_the_renames_of_a_save(
    root: Path, straight: list[dict[str, Any]], when: str, target: str
) -> None:
    """Killed right before or after the rename that gives a file of the second save its name."""
    run = root / f"renamed-{when}-{target}"
    saved = "step-00000006" if target == "latest" else "step-00000003"
    script = f"""
import os, signal, sys
rename = os.replace
def replace(source, final, **folders):
    hit = os.fspath(final).endswith({target!r}) and os.path.exists({str(run / "checkpoints" / saved)!r})
    if hit and {when!r} == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, final, **folders)
    if hit:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
sys.argv = ["pipeline", "train", {str(root / "run.yaml")!r}, "run.dir={run}", "train.checkpoint.keep=1"]
from pipeline.cli.main import main
main()
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    code, out = start(root, run.name)
    assert code == 0, out
    # From the rename on the run goes on from step 6, whether `latest` has been moved or not.
    assert tiny.resumed_from(out) == (6 if when == "after" else 3)
    assert exact(run) == straight
    assert weights_hash(run) == weights_hash(root / "straight")
    assert not list((run / "checkpoints").glob("*.tmp"))


def test_metrics_of_a_device_that_runs_ahead_are_the_same(
    root: Path, straight: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host does not wait for a step, its numbers are read a step later."""
    original = trainer.Trainer.run

    def run(self: trainer.Trainer) -> None:
        self._runs_ahead = True
        original(self)

    monkeypatch.setattr(trainer.Trainer, "run", run)
    assert exact(train(root, "ahead")) == straight


def test_precision_may_change_on_resume(root: Path) -> None:
    run = train(root, "precise", "train.duration=3 steps", "train.schedule.type=constant")
    train(root, "precise", "train.duration=5 steps", "train.schedule.type=constant", "train.precision.compute=fp32")
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5]


@pytest.mark.guard
@pytest.mark.parametrize(
    "how", ["SIGTERM", *(pytest.param(how, marks=pytest.mark.slow) for how in ("file", "SIGINT", "SIGUSR2", "SIGHUP"))]
)
@pytest.mark.usefixtures("hangup")
def test_a_stop_request_saves_and_the_run_goes_on(root: Path, straight: list[dict[str, Any]], how: str) -> None:
    run = root / f"stopped-{how}"
    long = ["train", root / "run.yaml", f"run.dir={run}", "train.schedule.type=constant", "train.duration=100000 steps"]
    process = subprocess.Popen(tiny.command(*long), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(read_metrics(run)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    if how == "file":
        (run / "stop").touch()
    else:
        process.send_signal(getattr(signal, how))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, out + err
    assert "saved" in err and "Traceback" not in err
    exit_file = orjson.loads((run / "exit.json").read_bytes())
    assert exit_file["code"] == 75
    assert (run / "checkpoints" / f"step-{exit_file['step']:08d}").is_dir()
    assert not (run / "stop").exists()
    more = exit_file["step"] + 3
    train(root, f"stopped-{how}", "train.schedule.type=constant", f"train.duration={more} steps")
    assert [row["step"] for row in read_metrics(run)] == list(range(1, more + 1))
    for row, undisturbed in zip(exact(run), straight, strict=False):
        assert row["order_hash"] == undisturbed["order_hash"] and row["data_hash"] == undisturbed["data_hash"]
    shutil.rmtree(run)


@pytest.mark.guard
def test_a_damaged_checkpoint_is_named_and_its_parent_taken(root: Path, straight: list[dict[str, Any]]) -> None:
    run = train(root, "damaged", "train.duration=6 steps", "train.schedule.type=constant")
    train(root, "undamaged", "train.schedule.type=constant")
    (run / "checkpoints" / "step-00000006" / "__0_0.distcp").unlink()
    code, out = start(root, "damaged", "train.schedule.type=constant")
    assert code == 0, out
    assert "step-00000006/__0_0.distcp is missing" in out
    assert tiny.resumed_from(out) == 3
    assert weights_hash(run) == weights_hash(root / "undamaged")
    assert (run / "checkpoints" / "abandoned" / "step-00000006").is_dir()


def test_no_trusted_checkpoint_is_refused(root: Path) -> None:
    run = train(root, "ruined", "train.duration=3 steps")
    (run / "checkpoints" / "step-00000003" / ".metadata").write_bytes(b"nonsense")
    code, out = start(root, "ruined")
    assert code == 2
    assert "step-00000003/.metadata has 8 bytes" in out


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("model.sliding_window=8", "model.sliding_window: none -> 8"),
        ("train.batch_size=8", "from step 1 of the 8 that are done (sample 0, after 0 tokens): batch size 4 -> 8"),
        ("train.sequence_length=16", "sequence length 32 -> 16"),
        ("run.seed=5", "run.seed 1234 -> 5"),
        ("data.sources.0.weight=1", "share of 'sea' 0.75 -> 0.5"),
    ],
)
def test_what_a_resume_depends_on_is_compared(
    root: Path, straight: list[dict[str, Any]], change: str, shown: str
) -> None:
    code, out = start(root, "straight", "train.duration=9 steps", change)
    assert code == 2, out
    assert shown in out
    # The refused values are not written down as the run's.
    assert load(root / "straight" / "config.yaml") == load(root / "run.yaml", [f"run.dir={root / 'straight'}"])


def test_an_allowed_difference_is_shown_and_accepted(root: Path) -> None:
    run = train(root, "allowed", "train.duration=2 steps", "train.schedule.type=constant")
    code, out = start(root, run.name, "train.duration=3 steps", "model.sliding_window=8", "resume.allow=[model]")
    assert code == 0, out
    assert "model.sliding_window: none -> 8" in out


@pytest.mark.guard
def test_micro_batches_change_the_arithmetic_only_by_rounding(root: Path, straight: list[dict[str, Any]]) -> None:
    run = train(root, "whole-batch", "train.micro_batch_size=4", "train.precision.compute=fp32")
    split = train(root, "split-batch", "train.micro_batch_size=1", "train.precision.compute=fp32")
    for one, other in zip(exact(run), exact(split), strict=True):
        assert one["data_hash"] == other["data_hash"] and one["order_hash"] == other["order_hash"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert [row["data_hash"] for row in exact(run)] == [row["data_hash"] for row in straight]


def test_three_non_finite_steps_end_the_run_and_are_recorded(root: Path) -> None:
    run = root / "infinite"
    code, out = start(root, "infinite", "train.optimizer.lr=1e30", "train.schedule.warmup=0 steps")
    assert code == 77, out
    assert "3 steps in a row" in out and "The start of the run (there is no checkpoint yet) is from before them" in out
    assert "NaN" in out and "too high: lower train.optimizer.lr" in out and "resume.from" not in out
    assert Checkpoints(run / "checkpoints").all() == []
    assert [row["skipped"] for row in read_metrics(run)][-3:] == [True, True, True]
    records = [orjson.loads(line) for line in (run / "faults.jsonl").read_bytes().splitlines()]
    assert [record["action"] for record in records] == ["skip", "skip", "stop"]
    assert {record["kind"] for record in records} == {"nonfinite"}
    assert len(records[0]["samples"]) == 4
    assert all("spans" in sample for sample in records[0]["samples"])
    assert orjson.loads((run / "exit.json").read_bytes())["code"] == 77


@pytest.mark.slow
def test_two_runs_on_one_folder(root: Path) -> None:
    run = root / "twice"
    process = subprocess.Popen(
        tiny.command("train", root / "run.yaml", f"run.dir={run}", "train.duration=100000 steps"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while len(read_metrics(run)) < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        second = tiny.pipeline("train", root / "run.yaml", f"run.dir={run}")
        assert second.returncode == 2
        assert f"process {process.pid} on " in second.stderr.replace("\n", " ")
    finally:
        process.kill()
        process.wait()


def test_a_model_that_does_not_fit_is_told_what_to_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB. GPU 0 has 79.00 GiB")

    monkeypatch.setattr(trainer, "build_model", build_model)
    code, out = start(root, "too-large")
    assert code == 1, out
    assert "out of memory: building or loading the model" in out and "parallel.dp_shard" in out
    assert "CUDA out of memory" in out and "micro_batch_size" not in out


def test_a_stop_file_that_comes_too_late_does_not_stop_the_next_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = trainer.Trainer._save

    def save(self: trainer.Trainer, step: int, *arguments: Any, **keys: Any) -> None:
        original(self, step, *arguments, **keys)
        if step == 8:
            (self._folder.path / "stop").touch()

    monkeypatch.setattr(trainer.Trainer, "_save", save)
    run = train(root, "stopped-late")
    assert not (run / "stop").exists()


def test_a_stop_is_saved_before_a_validation(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be little time until the process is killed."""
    done = []

    def noting(name: str) -> Any:
        original = getattr(trainer.Trainer, name)

        def call(self: trainer.Trainer, step: int, *arguments: Any, **options: Any) -> None:
            done.append((name, step))
            original(self, step, *arguments, **options)

        return call

    for name in ("_save", "_validate"):
        monkeypatch.setattr(trainer.Trainer, name, noting(name))
    monkeypatch.setattr(trainer.Requests, "reason", lambda self: "SIGUSR2" if (root / "now/stop").exists() else None)
    after = trainer.GcSchedule.after

    def after_step(self: trainer.GcSchedule, step: int) -> None:
        after(self, step)
        if step == 3:
            (root / "now/stop").touch()

    monkeypatch.setattr(trainer.GcSchedule, "after", after_step)
    with pytest.raises(Stopped, match="SIGUSR2 at step 4 of 8"):
        start(root, "now")
    assert done == [("_save", 3), ("_save", 4), ("_validate", 4)]
    assert [row["step"] for row in read_metrics(root / "now") if "validation_loss" in row] == [4]


def test_what_is_waited_for_has_its_own_time_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying a checkpoint that of loading one, and sinks that are closed none."""
    dogs: list[Any] = []
    seen = []

    class Watched(trainer.Watchdog):
        def __enter__(self) -> Any:
            dogs.append(self)
            return super().__enter__()

    class Slow(Logger):
        def write(self, row: dict[str, Any]) -> None:
            pass

        def close(self) -> None:
            seen.append(dogs[-1]._phase)

    original = Checkpoints.resumable

    def resumable(self: Checkpoints, *arguments: Any) -> Any:
        seen.append(dogs[-1]._phase)
        return original(self, *arguments)

    monkeypatch.setattr(trainer, "Watchdog", Watched)
    monkeypatch.setattr(trainer, "open_loggers", lambda *_: [("slow", Slow())])
    monkeypatch.setattr(Checkpoints, "resumable", resumable)
    train(root, "limits")
    assert seen == ["save", None]


def test_the_limits_of_the_watchdog(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is the first one that is trained, and each save that is waited for has the whole limit."""
    seen: list[str] = []

    def noting(owner: Any, name: str, says: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            seen.append(says(*arguments))
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    noting(trainer.Watchdog, "phase", lambda dog, phase, step=None: f"{phase} {step}")
    noting(trainer.Watchdog, "beat", lambda dog: "beat")
    noting(trainer.Saver, "wait", lambda saver: "wait")
    changes = ("blend.skip=[{steps: 1-2}]", "train.duration=4 steps", "train.validation.samples=0")
    train(root, "watched", *changes)
    assert seen[seen.index("first_step 1") :] == [
        *("first_step 1", "first_step 2", "first_step 3"),
        *("save 3", "wait", "beat", "step 4"),
        *("save 4", "wait", "beat", "step 5", "wait"),
    ]


def test_new_shapes_have_the_limit_of_the_first_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are compiled for the shape of a micro-batch: another phase of the data may have them compiled anew."""
    seen: list[str] = []
    original = trainer.Watchdog.phase

    def phase(dog: trainer.Watchdog, phase: Any, step: int | None = None) -> None:
        seen.append(f"{phase} {step}")
        original(dog, phase, step)

    monkeypatch.setattr(trainer.Watchdog, "phase", phase)
    longer = {"sequence_length": 64, "batch_size": 2}
    phases = [{"until": "2 steps"}, {"until": "4 steps", **longer}, {"until": "6 steps"}, longer | {"batch_size": 1}]
    changes = ("train.validation.samples=0", "train.checkpoint.every_steps=99", "train.micro_batch_size=null")
    train(root, "phases", f"blend.phases={json.dumps(phases)}", *changes)
    steps = [each for each in seen if each.partition(" ")[0] in ("first_step", "step")]
    # Four windows of 32, two of 64, the first again, and one of 64.
    assert steps == [
        *("first_step 1", "step 2", "first_step 3", "step 4"),
        *("step 5", "step 6", "first_step 7", "step 8", "step 9"),
    ]


def test_deterministic_does_not_fill_new_memory() -> None:
    """It would write every tensor twice."""
    try:
        be_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
