"""`pipeline status` on run folders that were really made, and on ledgers written line by line for each state."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from pipeline.cli.main import main
from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config.load import load, load_written
from pipeline.train.run.attempts import RunningAttempt
from pipeline.train.run.heartbeat import Beat, node_file
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.local.stage_ledger import Ledger
from slurm.local.stages import evaluate, preprocess, train
from slurm.record import active_jobs, launch_log
from slurm.record.launch_log import LaunchEnd
from slurm.scheduler import Accounted, JobState
from slurm.status import run as status_run
from slurm.status.command import show_status, status
from slurm.status.files import RunSnapshot
from slurm.status.queued import SchedulerSnapshot
from slurm.status.run import RunStatus, describe
from tests import tiny
from tests.config.runfile import MINIMAL, write

SILENT = SchedulerSnapshot(None, problem="squeue: no answer")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 1,000 tokens that is done."""
    root = tmp_path_factory.mktemp("made")
    file = tiny.write_run(root, {"train.duration": "1K tokens"})
    config = load(file)
    preprocess(config)
    train(config)
    evaluate(config)
    return root / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def say(run: Path, answer: SchedulerSnapshot | None = None) -> RunStatus:
    return describe(RunSnapshot(run), answer or SchedulerSnapshot({}))


def send(run: Path, stage: jobs.Stage = "train", job: str = "77", **more: Any) -> None:
    RunFiles(run).slurm.mkdir(parents=True, exist_ok=True)
    jobs.note(run, jobs.new_job(stage, job, "slurm", "name", "slurm/submissions/x.json", **more))


def launch(run: Path, job: str = "77", stage: jobs.Stage = "train", **more: Any) -> launch_log.Launch:
    values = {"restarts": 0, "number": 1, "link": 1, "nodes": ("n1", "n2"), "processes_per_node": 1, "checkpoint": 0}
    return launch_log.begin(run, stage, job, **{**values, "logs": "logs/x", **more})


def end(run: Path, begun: launch_log.Launch, code: int, following: launch_log.Next, **more: Any) -> None:
    how = LaunchEnd(code, f"it left with {code}", following, 0, time.time(), **more)
    launch_log.end(run, begun, how)


def answered(job: str = "77", state: str = "PENDING", **more: Any) -> SchedulerSnapshot:
    return SchedulerSnapshot({job: JobState(job, state, **more)})


def test_a_stage_that_was_refused_by_hand_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError), Ledger(tmp_path).stage("preprocess"):
        raise UserError("4 of 10 records are bad\n  1. fix them")
    found = say(tmp_path)
    assert (found.state, found.stage, found.why) == ("refused", "preprocess", "4 of 10 records are bad")


@pytest.mark.guard
def test_a_refused_start_after_the_end_counts_in_a_job_alone(run: Path) -> None:
    with pytest.raises(UserError), Ledger(run).stage("train"):
        raise UserError("no such key")
    assert say(run).state == "done", "by hand it comes to nothing"
    send(run)
    end(run, launch(run), 2, "end")
    found = say(run)
    assert (found.state, found.why) == ("refused", "it left with 2")


def test_a_run_that_is_done(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(made.parent.rglob("*"))}
    done = tiny.pipeline("status", made.parent / "run.yaml", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["runs"]
    assert {path: path.stat().st_mtime_ns for path in sorted(made.parent.rglob("*"))} == before, "nothing is written"
    rows = storage.read_json_lines(made / "metrics.jsonl")
    losses = [row for row in rows if "loss" in row]
    assert (found["state"], found["stage"], found["run"]) == ("done", "train", str(made))
    # 4 windows of 32 tokens a step.
    assert (found["step"], found["steps"], found["tokens"]) == (8, 8, 1024)
    assert found["loss"] == losses[-1]["loss"]
    assert found["validation_loss"] == [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
    assert (found["checkpoint"], found["evaluations"], found["last_evaluation"]["step"]) == (8, 1, 8)
    assert found["seconds_left"] is None
    assert [(row["number"], row["outcome"], row["step"]) for row in found["attempts"]] == [(1, "done", 8)]
    assert 0 < found["goodput"]["share"] < 1
    assert not found["problems"] and found["scheduler"] is None


def test_it_needs_no_torch_and_tells_all_in_a_block(made: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rich.console import Console; "
        "from slurm.status.command import show_status; "
        f"show_status([Path({str(made)!r})], Console(width=200)); print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = said.splitlines()
    assert lines[0].endswith("run: done (train)")
    labels = {line.split()[0] for line in lines[1:-1]}
    assert labels >= {"step", "loss", "speed", "checkpoint", "goodput", "evaluations", "attempts"}
    assert lines[-1] == "False"


@pytest.mark.guard
def test_a_run_that_runs_stalls_and_stops(tmp_path: Path) -> None:
    changes = {"train.duration": "1M steps", "launch.heartbeat_seconds": 0.1, "train.checkpoint.every_steps": 10_000}
    file = tiny.write_run(tmp_path, changes)
    assert tiny.pipeline("preprocess", file).returncode == 0
    run = tmp_path / "run"
    assert say(run).state == "done" and say(run).stage == "preprocess"
    process = subprocess.Popen(tiny.command("train", file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = until(run, lambda now: (now.step or 0) > 2)
        assert found.state == "running" and found.stage == "train"
        assert found.steps == 1_000_000 and (found.seconds_left or 0) > 0
        assert found.newest_beat is not None and found.newest_beat.rank == 0
        assert found.nodes and found.attempts[-1].outcome == "running"
        process.send_signal(signal.SIGSTOP)
        found = until(run, lambda now: now.state == "stalled")
        assert "no sign of life for" in found.why
        process.send_signal(signal.SIGCONT)
        until(run, lambda now: now.state == "running")
        (run / "stop").touch()
        assert process.wait(60) == 75
    finally:
        process.kill()
        process.wait()
    found = say(run)
    assert found.state == "stopped" and "stop file" in found.why
    assert found.checkpoint == found.step == found.attempts[-1].step


def until(run: Path, holds: Callable[[RunStatus], bool]) -> RunStatus:
    end = time.monotonic() + 90
    while not holds(found := say(run)):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def test_jobs_that_wait(tmp_path: Path) -> None:
    send(tmp_path)
    found = say(tmp_path, answered(reason="Priority", start=2e9))
    assert found.state == "pending" and "Priority" in found.why and "2033" in found.why
    assert say(tmp_path, answered(reason="JobHeldUser")).state == "held"
    begun = launch(tmp_path)
    end(tmp_path, begun, 75, "requeue")
    found = say(tmp_path, answered(reason="BeginTime"))
    assert (
        found.state == "requeued" and found.why.startswith("requeued 1 time, waits") and "it left with 75" in found.why
    )
    again = launch(tmp_path, restarts=1)
    end(tmp_path, again, 1, "requeue")
    found = say(tmp_path, answered())
    assert found.why.startswith("requeued 2 times") and found.restarts == 1
    assert [(row.restarts, row.next) for row in found.attempts] == [(0, "requeue"), (1, "requeue")]


def test_jobs_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are what squeue 22.05 has said."""
    down = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    reasons = {
        "BadConstraints|c[1-2]": ("`scontrol update JobId=77 ExcNodeList=`", "excludes c[1-2]", "slurm.train"),
        "BadConstraints|": ("constraint", "slurm.train", "submit it again"),
        "ReqNodeNotAvail, UnavailableNodes:c1|": ("sinfo -R",),
        f"{down}|c1": ("sinfo -R", "ExcNodeList="),
        "PartitionDown|": ("partition",),
        "DependencyNeverSatisfied|": ("pipeline cancel",),
        "Priority|c1": (),
        "Resources|": (),
    }
    send(tmp_path)
    (tmp_path / "squeue").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for said, words in reasons.items():
        reason, _, excluded = said.partition("|")
        (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '77|PENDING|{reason}||N/A|N/A|{excluded}'\n")
        (found,) = status({tmp_path: None})
        assert (found.state, found.scheduler) == ("pending", None) and reason in found.why
        assert ("cannot start" in found.why) == bool(words), found.why
        assert all(word in found.why for word in words), found.why
        assert ("ExcNodeList" in found.why) == ("ExcNodeList=" in "".join(words))


def test_jobs_that_run(tmp_path: Path) -> None:
    send(tmp_path, "preprocess", "70", tasks=3)
    send(tmp_path, "train", "77", after=("70",))
    states = {f"70_{task}": JobState(f"70_{task}", "RUNNING", nodes="n1") for task in range(2)}
    states |= {"70_2": JobState("70_2", "PENDING", "Resources"), "77": JobState("77", "PENDING", "Dependency")}
    found = say(tmp_path, SchedulerSnapshot(states))
    assert found.state == "preprocessing"
    assert found.queue[0].tasks == {"RUNNING": 2, "PENDING": 1} and found.nodes == ["n1"]
    found = say(tmp_path, answered(state="RUNNING"))
    assert found.state == "running" and "processes have not yet" in found.why
    begun = launch(tmp_path)
    found = say(tmp_path, answered(state="RUNNING"))
    assert found.state == "running" and found.nodes == ["n1", "n2"]
    end(tmp_path, begun, 76, "relaunch")
    found = say(tmp_path, answered(state="RUNNING"))
    assert found.state == "running" and "starts again after: it left with 76" in found.why
    end(tmp_path, launch(tmp_path, number=2), 0, "done")
    send(tmp_path, "eval", "80", step=5)
    found = say(tmp_path, answered("80", "RUNNING"))
    assert found.state == "evaluating" and found.queue[0].step == 5


@pytest.mark.parametrize(
    ("code", "state"),
    [(0, "done"), (2, "refused"), (76, "hung"), (77, "diverged"), (79, "unsaved"), (75, "stopped"), (1, "failed")],
)
def test_how_a_training_ended(tmp_path: Path, code: int, state: str) -> None:
    send(tmp_path)
    end(tmp_path, launch(tmp_path), code, "done" if code == 0 else "end")
    assert not RunSnapshot(tmp_path).questions(), "nobody needs to be asked"
    for answer in (SchedulerSnapshot({}), SILENT):
        found = say(tmp_path, answer)
        assert found.state == state
        assert found.attempts[0].number is None and found.attempts[0].outcome == state


def test_an_evaluation_that_failed_is_told_beside_a_training_that_is_done(tmp_path: Path) -> None:
    send(tmp_path)
    end(tmp_path, launch(tmp_path), 0, "done")
    send(tmp_path, "eval", "80")
    assert say(tmp_path, answered("80")).why == "", "it waits"
    end(tmp_path, launch(tmp_path, "80", "eval"), 1, "end")
    found = say(tmp_path)
    assert (found.state, found.stage, found.why) == ("done", "train", "evaluation failed: it left with 1")
    send(tmp_path, job="81")
    end(tmp_path, launch(tmp_path, "81"), 0, "done")
    assert say(tmp_path).why == "", "it was of an earlier training"


def test_an_evaluation_of_a_job_is_not_one_by_hand(tmp_path: Path) -> None:
    send(tmp_path, "eval", "80", step=5)
    launch(tmp_path, "80", "eval")
    with Ledger(tmp_path).stage("eval"):
        found = say(tmp_path, answered("80", "RUNNING"))
        assert found.state == "evaluating" and found.why.startswith("job 80 (step 5), since ")
        assert say(tmp_path, SchedulerSnapshot({})).why.startswith(f"process {os.getpid()} on ")


def test_evaluations_that_are_not_in_the_table_yet(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def table() -> list[str]:
        monkeypatch.setattr(sys, "argv", ["pipeline", "eval", str(run), "--table"])
        with pytest.raises(SystemExit):
            main()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("not in the table yet")]

    assert table() == []
    with Ledger(run).stage("eval"):
        (line,) = table()
        assert f"an evaluation by process {os.getpid()} on " in line
        send(run, "eval", "80", step=8)
        monkeypatch.setattr(
            active_jobs, "states_of", lambda run, queued: {each.job: JobState(each.job, "PENDING") for each in queued}
        )
        assert table() == ["not in the table yet: an evaluation of step 8, by eval: job 80 (PENDING)"]


def test_a_submission_that_was_refused(tmp_path: Path) -> None:
    RunFiles(tmp_path).slurm.mkdir(parents=True)
    jobs.note_refused(tmp_path, "train", "sbatch: Invalid account")
    found = say(tmp_path)
    assert (found.state, found.stage) == ("refused", "train") and found.why.endswith("refused: sbatch: Invalid account")
    send(tmp_path)
    assert say(tmp_path, answered()).state == "pending"
    end(tmp_path, launch(tmp_path), 75, "end")
    assert say(tmp_path).why == "it left with 75", "it was accepted after that"
    jobs.note_refused(tmp_path, "train", "sbatch: Invalid account")
    found = say(tmp_path)
    assert found.state == "stopped" and "it left with 75; the submission of train at " in found.why


def test_a_stage_of_another_version_is_shown(tmp_path: Path) -> None:
    send(tmp_path, "bench")  # type: ignore[arg-type]
    assert say(tmp_path, SchedulerSnapshot({"77": JobState("77", "PENDING", "Priority")})).stage == "bench"
    jobs.note_cancelled(tmp_path, now=True, stages=("bench",))  # type: ignore[arg-type]
    end(tmp_path, launch(tmp_path), 75, "end")
    assert "cancelled" in say(tmp_path).state


def test_who_cancelled(tmp_path: Path) -> None:
    send(tmp_path)
    jobs.note_cancelled(tmp_path, now=False)
    end(tmp_path, launch(tmp_path), 75, "end")
    found = say(tmp_path)
    assert found.state == "cancelled" and found.why.startswith(f"by {jobs.user()} at ")


def test_what_was_cancelled_has_nothing_to_do_with_an_older_end(tmp_path: Path) -> None:
    send(tmp_path)
    how = LaunchEnd(75, "stop file at step 2; saved. Run the same command to go on.; end: asked", "end", 2, time.time())
    launch_log.end(tmp_path, launch(tmp_path), how)
    assert say(tmp_path).why == "stop file at step 2; saved. Run the same command to go on; end: asked"
    send(tmp_path, "preprocess", "78")
    jobs.note_cancelled(tmp_path, now=True, stages=("preprocess", "finish"))
    found = say(tmp_path)
    assert (found.state, found.stage) == ("cancelled", "preprocess")
    assert "stop file" not in found.why and "saving" not in found.why


def test_the_cause_goes_before_what_came_of_it(tmp_path: Path) -> None:
    send(tmp_path)
    begun = launch(tmp_path)
    tried = RunningAttempt(tmp_path, 1, 0, {"world_size": 2}, "hash")
    tried.end(1, "[pair.cc:553] Connection closed by peer", 3)
    cause = "rank 1 on n1: was killed by SIGKILL"
    text = f"{cause}; relaunch: start 1 of 3 without a newer checkpoint"
    launch_log.end(tmp_path, begun, LaunchEnd(1, text, "relaunch", 0, time.time(), 1, "n1"))
    (row,) = say(tmp_path).attempts
    assert (row.number, row.outcome, row.reason, row.next) == (1, "failed", cause, "relaunch")


def test_a_launch_that_was_lost_with_its_node(tmp_path: Path) -> None:
    send(tmp_path)
    first = launch(tmp_path)
    (row,) = say(tmp_path, answered(state="RUNNING", start=first.time - 5)).attempts
    assert row.outcome == "running"
    again = answered(state="RUNNING", start=first.time + 100)
    for answer, state in (
        (answered(reason="BeginTime"), "requeued"),
        (again, "running"),
        (SchedulerSnapshot({}), "failed"),
    ):
        found = say(tmp_path, answer)
        assert found.state == state and [each.outcome for each in found.attempts] == ["lost"]
        assert not found.attempts[0].seconds and found.nodes != ["n1", "n2"]
    assert "starts again after" in say(tmp_path, again).why
    second = launch(tmp_path, restarts=1)
    for answer in (answered(state="RUNNING", start=(first.time + second.time) / 2), SILENT):
        assert [each.outcome for each in say(tmp_path, answer).attempts] == ["lost", "running"]


def test_an_attempt_that_was_lost_with_its_node(elsewhere: Path) -> None:
    """Its job runs again, which does not make it the lock's holder."""
    begun = launch(elsewhere)
    beats(elsewhere, 2, 400, 500)
    found = say(elsewhere, answered(state="RUNNING", start=begun.time + 100))
    assert found.state == "running" and "starts again after" in found.why
    assert [(row.number, row.outcome) for row in found.attempts] == [(2, "killed"), (None, "lost")]


def test_a_job_that_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    send(tmp_path)
    jobs.note_cancelled(tmp_path, now=False, stages=("train",))
    found = say(tmp_path, answered(state="CANCELLED"))
    assert found.state == "cancelled" and "save" not in found.why and "before job 77 began" in found.why
    end(tmp_path, launch(tmp_path), 75, "end")
    assert "without saving" in say(tmp_path).why
    how = LaunchEnd(75, "stop file at step 2 of 8; saved. Run the same command to go on.", "end", 2, time.time())
    launch_log.end(tmp_path, launch(tmp_path, number=2), how)
    assert "after a save" in say(tmp_path).why


def test_tasks_that_are_over_do_not_start_again(tmp_path: Path) -> None:
    send(tmp_path, "preprocess", "70", tasks=3)
    for task, following in ((1, "scheduler"), (2, "done")):
        end(tmp_path, launch(tmp_path, f"70_{task}", "preprocess"), 75, following)  # type: ignore[arg-type]
        states = {"70_0": JobState("70_0", "RUNNING", nodes="n1"), "70_1": JobState("70_1", "CANCELLED")}
        found = say(tmp_path, SchedulerSnapshot(states))
        assert found.state == "preprocessing" and "has started" in found.why
    begun = launch(tmp_path, "70_0", "preprocess")
    end(tmp_path, launch(tmp_path, "70_1", "preprocess", restarts=1), 75, "scheduler")
    found = say(tmp_path, SchedulerSnapshot(states))
    assert found.why.startswith("job 70, since ")
    end(tmp_path, begun, 75, "requeue")
    end(tmp_path, launch(tmp_path, "70_0", "preprocess", restarts=1), 75, "requeue")
    assert "starts again" in say(tmp_path, SchedulerSnapshot(states)).why
    send(tmp_path, "train", "80")
    end(tmp_path, launch(tmp_path, "80"), 75, "scheduler")
    assert "is about to end" in say(tmp_path, answered("80", "COMPLETING")).why


def test_a_cancel_that_does_not_stop_a_training(tmp_path: Path) -> None:
    """A colleague's, whom the scheduler does not obey, or one that comes at the very end."""
    send(tmp_path)
    begun = launch(tmp_path)
    tried = RunningAttempt(tmp_path, 1, 0, {"world_size": 2}, "hash")
    jobs.note_cancelled(tmp_path, now=True, stages=("train",))
    tried.end(0, "done", 8)
    for following in ("scheduler", "done"):
        end(tmp_path, begun, 75 if following == "scheduler" else 0, following)  # type: ignore[arg-type]
        found = say(tmp_path, answered(state="CANCELLED" if following == "scheduler" else "COMPLETED"))
        assert found.state == "done" and found.why.startswith(f"{jobs.user()} cancelled it at "), found
        assert "did not stop it" in found.why


def test_a_chain_that_is_exhausted(tmp_path: Path) -> None:
    for link, job in enumerate(("77", "78"), start=1):
        send(tmp_path, job=job, link=link)
        end(tmp_path, launch(tmp_path, job, link=link), 75, "next link")
    assert say(tmp_path).state == "chain exhausted"
    send(tmp_path, job="79", link=3)
    assert say(tmp_path, answered("79")).state == "pending"
    assert RunSnapshot(tmp_path).questions() == ["79"]


@pytest.mark.parametrize(
    ("accounted", "state", "words"),
    [
        (Accounted("OUT_OF_MEMORY", "0:125", "01:02:03", "n1"), "failed", "OUT_OF_MEMORY after 01:02:03 on n1"),
        (Accounted("NODE_FAIL", "0:0", "00:00:03", "n1"), "failed", "ended as NODE_FAIL"),
        (Accounted("CANCELLED by 0", "0:15", "00:00:03", "n1"), "cancelled", "by root"),
        (Accounted("RUNNING", "0:0", "00:00:03", "n1"), "failed", "has left the queue"),
        (None, "failed", "has left the queue"),
    ],
)
def test_jobs_that_left_without_a_word(tmp_path: Path, accounted: Accounted | None, state: str, words: str) -> None:
    send(tmp_path)
    found = say(tmp_path, SchedulerSnapshot({}, {"77": accounted} if accounted else {}))
    assert found.state == state and words in found.why
    # A launch without an end changes nothing.
    launch(tmp_path)
    if accounted is not None:
        assert say(tmp_path, SchedulerSnapshot({}, {"77": accounted})).state == state


def test_a_job_that_was_refused_is_told_from_its_own_log(tmp_path: Path) -> None:
    send(tmp_path)
    log = jobs.sent(tmp_path)[0].log(tmp_path)
    log.parent.mkdir(parents=True)
    log.write_text("12:00:01 hello\nerror: slurm/submissions/x.json has changed\nsubmit the run again\n")
    gone = SchedulerSnapshot({}, {"77": Accounted("FAILED", "2:0", "00:00:03", "n1")})
    for answer in (answered(state="FAILED"), gone, SchedulerSnapshot({})):
        found = say(tmp_path, answer)
        assert found.state == "failed" and "x.json has changed" in found.why and "\n" not in found.why
    end(tmp_path, launch(tmp_path), 1, "end")
    assert "has changed" not in say(tmp_path).why, "a launch has noted its end"
    send(tmp_path, job="78")
    jobs.sent(tmp_path)[1].log(tmp_path).write_text("error: run.yaml has changed\n")
    assert say(tmp_path).why.endswith("job 78 has left the queue without an entry in the ledger; run.yaml has changed")


def test_a_scheduler_that_does_not_answer(tmp_path: Path) -> None:
    send(tmp_path)
    assert say(tmp_path, SILENT).state == "pending"
    begun = launch(tmp_path)
    found = say(tmp_path, SILENT)
    assert found.state == "running" and "files alone" in found.why and found.scheduler == SILENT.problem
    end(tmp_path, begun, 75, "requeue")
    assert say(tmp_path, SILENT).state == "requeued"


def test_an_end_that_was_noted_counts_where_no_scheduler_answers(tmp_path: Path) -> None:
    """Also for the stages that would have come after it; not where the job wanted to start again."""
    send(tmp_path, "preprocess", "44", tasks=2)
    send(tmp_path, "finish", "45", after=("44",))
    send(tmp_path, "train", "46", after=("45",))
    begun = [launch(tmp_path, f"44_{task}", "preprocess") for task in range(2)]
    end(tmp_path, begun[0], 75, "scheduler")
    assert say(tmp_path, SILENT).state == "preprocessing", "a task has no end yet"
    end(tmp_path, begun[1], 0, "done")
    found = say(tmp_path, SILENT)
    assert (found.state, found.stage, found.why) == ("stopped", "preprocess", "it left with 75")
    assert [job.job for job in found.queue] == ["44", "45", "46"], "their states are not known"
    end(tmp_path, launch(tmp_path, "44_0", "preprocess", restarts=1), 75, "requeue")
    assert say(tmp_path, SILENT).state == "requeued"
    jobs.note_cancelled(tmp_path, now=False)
    assert say(tmp_path, SILENT).state == "cancelled"


def test_a_chain_is_not_over_with_one_of_its_jobs(tmp_path: Path) -> None:
    send(tmp_path)
    send(tmp_path, job="78", link=2, after=("77",))
    end(tmp_path, launch(tmp_path), 75, "scheduler")
    assert say(tmp_path, SILENT).state == "pending"


def test_a_job_that_was_cancelled_where_no_scheduler_answers(tmp_path: Path) -> None:
    send(tmp_path)
    jobs.note_cancelled(tmp_path, now=False)
    found = say(tmp_path, SILENT)
    assert found.state == "cancelled" and "before job 77 began" in found.why
    send(tmp_path, job="78")
    assert say(tmp_path, SILENT).state == "pending", "it was sent later"


def test_nodes_that_are_suspects(tmp_path: Path) -> None:
    send(tmp_path)
    end(tmp_path, launch(tmp_path, nodes=("n1", "n2")), 1, "relaunch")
    end(tmp_path, launch(tmp_path, number=2, nodes=("n2", "n3"), checkpoint=0), 78, "end", failed_nodes=("n3",))
    assert "failed in 1 of 2 launches" in say(tmp_path).suspects["n3"]
    end(tmp_path, launch(tmp_path, number=3, nodes=("n2", "n3")), 1, "end", node="n2", rank=0)
    end(tmp_path, launch(tmp_path, number=4, nodes=("n1", "n2")), 1, "end", node="n2", rank=1)
    assert say(tmp_path).suspects.keys() == {"n3"}, "the accused differ in the row"


def test_one_crash_makes_no_suspect_while_the_next_launch_runs(tmp_path: Path) -> None:
    send(tmp_path)
    first = launch(tmp_path)
    end(tmp_path, first, 1, "relaunch", node="n1", rank=0)
    launch(tmp_path, number=2)
    runs = answered(state="RUNNING", nodes="n[1-2]")
    assert say(tmp_path, runs).suspects == {}
    end(tmp_path, launch(tmp_path, number=3), 1, "relaunch", node="n1", rank=0)
    launch(tmp_path, number=4)
    assert say(tmp_path, runs).suspects.keys() == {"n1"}


@pytest.mark.parametrize(
    ("code", "cancelled", "state"), [(75, False, "stopped"), (75, True, "cancelled"), (1, False, "failed")]
)
def test_of_a_run_that_was_stopped_nothing_is_left(run: Path, code: int, cancelled: bool, state: str) -> None:
    (run / "ledger.jsonl").unlink()
    RunningAttempt(run, 2, 3, {"world_size": 1}, "hash").end(code, "it ended", 5)
    if cancelled:
        jobs.note_cancelled(run, now=False)
    found = say(run)
    assert (found.state, found.step, found.steps) == (state, 5, 8)
    assert (found.seconds_left is None) == (state != "failed") and found.starts_left is None


def test_while_a_cancelled_run_is_evaluated_nothing_is_left(run: Path) -> None:
    (run / "ledger.jsonl").unlink()
    send(run, "eval", "80", step=5)
    RunningAttempt(run, 2, 3, {"world_size": 1}, "hash").end(75, "it ended", 5)
    assert (say(run, answered("80", "RUNNING")).seconds_left or 0) > 0
    jobs.note_cancelled(run, now=False, stages=("train",))
    found = say(run, answered("80", "RUNNING"))
    assert (found.state, found.step, found.steps, found.seconds_left) == ("evaluating", 5, 8, None)


def test_ranks_that_outlive_their_launch_stay_with_it(tmp_path: Path) -> None:
    send(tmp_path)
    first = launch(tmp_path)
    rank = RunningAttempt(tmp_path, 1, 0, {"world_size": 1}, "hash")
    time.sleep(1.1)
    end(tmp_path, first, 1, "relaunch", node="n1", rank=0)
    second = launch(tmp_path, number=2)
    rank.end(1, "it left with 1", 3)
    time.sleep(1.1)
    RunningAttempt(tmp_path, 2, 0, {"world_size": 1}, "hash").end(0, "all steps are trained", 5)
    end(tmp_path, second, 0, "done")
    found = say(tmp_path)
    assert [(row.number, row.launch, row.next) for row in found.attempts] == [(1, 1, "relaunch"), (2, 2, "done")]


def beats(run: Path, attempt: int, *ages: float) -> None:
    found = [Beat(rank, f"host-{rank}", 1, attempt, 6, "step", time.time() - age) for rank, age in enumerate(ages)]
    node_file(run, 0).parent.mkdir(exist_ok=True)
    node_file(run, 0).write_bytes(b"\n".join(orjson.dumps(beat.__dict__) for beat in found))


@pytest.fixture
def elsewhere(run: Path) -> Iterator[Path]:
    """A run that another machine makes another attempt at, as far as its files say, in job 77."""
    from pipeline.train.run.attempts import append_entry

    (run / "ledger.jsonl").unlink()
    send(run)
    values = {"time": time.time() - 1000, "host": "host-0", "pid": 1, "first_step": 3, "config": "x"}
    append_entry(
        run, {"event": "attempt", "attempt": 2, "layout": {"dp": 2, "tp": 1, "world_size": 2}, "job": "77", **values}
    )
    held = {"host": "host-0", "pid": 1, "started": 1, "boot": "b", "namespace": "n", "job": "77", "attempt": 2}
    (run / "lock").write_bytes(orjson.dumps(held))
    return run


def test_another_machine_holds_the_lock(elsewhere: Path) -> None:
    beats(elsewhere, 2, 1, 5)
    launch(elsewhere)
    clock = JobState("77", "RUNNING", nodes="n1", start=time.time() + 5)  # of the controller, which is ahead
    for answer in (answered(state="RUNNING"), SchedulerSnapshot({"77": clock}), SILENT, SchedulerSnapshot({})):
        found = say(elsewhere, answer)
        assert found.state == "running", "heartbeats count even where the scheduler does not tell of others' jobs"
    assert (found.step, found.tokens, found.ranks, found.beating) == (3, 3 * 4 * 32, 2, 2), "later steps are lost"
    assert found.oldest_beat is not None and (found.oldest_beat.rank, found.oldest_beat.node) == (1, "host-1")
    beats(elsewhere, 2, 1, 500)
    assert "rank 1 on host-1 has given no sign of life for 8 min" in say(elsewhere, SILENT).why
    beats(elsewhere, 2, 400, 500)
    found = say(elsewhere, answered(state="RUNNING"))
    assert found.state == "stalled" and "rank 1 on host-1" in found.why
    found = say(elsewhere, SchedulerSnapshot({}, {"77": Accounted("NODE_FAIL", "0:0", "00:10:00", "n1")}))
    assert found.state == "failed" and "NODE_FAIL" in found.why


def test_a_job_that_is_suspended(elsewhere: Path) -> None:
    beats(elsewhere, 2, 400, 500)
    found = say(elsewhere, answered(state="SUSPENDED", start=time.time() - 900))
    assert found.state == "suspended" and "scontrol resume 77" in found.why
    assert say(elsewhere, answered(state="RUNNING", start=time.time() - 900)).state == "stalled"
    (elsewhere / "lock").unlink()
    assert say(elsewhere, answered(state="SUSPENDED")).state == "suspended"


def test_damaged_files_are_told_and_the_rest_is_shown(run: Path) -> None:
    for name in ("exit.json", "lock", "config.yaml", "journal.json", "heartbeats/node-0000.jsonl"):
        (run / name).write_bytes(b'{"half')
    for file in (run / "metrics.jsonl", run / "ledger.jsonl"):
        file.write_bytes(file.read_bytes() + b'[]\nnull\n{"event": 1, "step": "x"}\n{"event": "attempt", "att')
    (run / "eval" / "step-00000009.json").write_bytes(b"[]")
    found = say(run, SILENT)
    assert found.state == "done" and found.step == 8 and found.loss is not None
    told = " ".join(found.problems)
    assert all(name in told for name in ("exit.json", "lock", "config.yaml", "eval/step-00000009.json")), told
    (run / "ledger.jsonl").write_bytes(b'{"event": "launch", "job": []}\n{"stage": "train", "event": "start"}\n')
    (run / "metrics.jsonl").unlink()
    say(run)


def test_the_metrics_of_a_long_run_are_read_from_their_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = say(run)
    monkeypatch.setattr(status_run, "_LARGE", 1)
    found = say(run)
    assert found.goodput_to_last_end and found.goodput is not None and whole.goodput is not None
    assert found.goodput["productive"] == pytest.approx(whole.goodput["productive"])
    assert found.loss == whole.loss


def test_several_runs_and_those_below_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run in"):
        show_status((), Console())
    for name in ("a", "sweep/b"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run, tmp_path / "runs" / name)
    show_status((), Console(width=200, force_terminal=True, color_system=None))
    said = capsys.readouterr().out
    assert "MFU" in said and "runs/a" in said and "runs/sweep/b" in said and "8/8" in said
    show_status((), Console(width=60))
    assert capsys.readouterr().out.splitlines()[0].startswith("runs/a: done (train), step 8/8, loss ")
    monkeypatch.chdir(run)
    show_status((), Console(width=200))
    assert capsys.readouterr().out.splitlines()[0] == f"{run}: done (train)"
    with pytest.raises(UserError, match="no run file or run folder"):
        show_status((tmp_path / "nothing",), Console())
    (tmp_path / "empty").mkdir()
    show_status((tmp_path / "empty",), Console(width=200))
    assert "nothing known" in capsys.readouterr().out


def test_the_runs_of_a_sweep(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/a/sweeps/lr"
    shutil.copytree(run, folder / "lr=1")
    (folder / "slurm").mkdir()
    storage.put_json(folder / "sweep.json", {"members": {"lr=1": {}, "lr=2": {}}})
    both = ["runs/a/sweeps/lr/lr=1: done (train), ", "runs/a/sweeps/lr/lr=2: nothing known, "]
    for named in ((), (folder,), (folder / "lr=2", *folder.iterdir())):
        show_status(named, Console(width=60))
        said = sorted(capsys.readouterr().out.splitlines())
        assert len([line for line in said for start in both if line.startswith(start)]) == 2, said
        assert not [line for line in said if "sweep.json" in line or line.startswith("runs/a/sweeps/lr/slurm")]
    with pytest.raises(UserError, match="sweep.json is not a run of the sweep"):
        show_status([folder / "sweep.json"], Console())


@pytest.mark.guard
def test_watching_ends_quietly(made: Path) -> None:
    process = subprocess.Popen(
        tiny.command("status", made, "--watch", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["runs"][0]["state"] == "done"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(tmp_path)
    monkeypatch.setenv("PATH", "")
    (found,) = status({tmp_path: None})
    assert found.state == "pending" and found.scheduler == "squeue: squeue is not on the path"


@pytest.mark.slurm
def test_a_held_job_of_a_real_scheduler(cluster: DevCluster, run: Path) -> None:
    command = ["sbatch", "--parsable", "--hold", "--job-name=test-status", "--output=/dev/null", "--wrap=sleep 60"]
    job = subprocess.run(command, capture_output=True, text=True, check=True, cwd=run).stdout.strip()
    try:
        send(run, "eval", job, step=8)
        (found,) = status({run: None})
        assert found.state == "done" and found.scheduler is None
        assert [(each.job, each.state, each.reason) for each in found.queue] == [(job, "PENDING", "JobHeldUser")]
        send(run, "train", job)
        (found,) = status({run: None})
        assert found.state == "held" and "JobHeldUser" in found.why
    finally:
        scheduler.cancel([job])
    (found,) = status({run: None})
    assert found.state == "cancelled", "squeue remembers it for a while"


@pytest.mark.slurm
def test_accounting_knows_what_the_queue_does_not(cluster: DevCluster, tmp_path: Path) -> None:
    command = ["sbatch", "--parsable", "--job-name=test-status", "--output=/dev/null", "--wait", "--wrap=exit 3"]
    job = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path).stdout.strip()
    end = time.monotonic() + 300
    while (found := scheduler.accounting([job, "99999999"])) and not found[job].over:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert found.keys() == {job} and (found[job].state, found[job].exit_code) == ("FAILED", "3:0")
    send(tmp_path, job=job)
    (said,) = status({tmp_path: None})
    assert said.state == "failed" and "ended as FAILED" in said.why


def test_a_squeue_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error: Unable to contact controller >&2\nexit 1\n")
    (tools / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    send(tmp_path)
    (found,) = status({tmp_path: None})
    assert found.state == "pending"
    assert found.scheduler == "squeue: slurm_load_jobs error: Unable to contact controller"


def test_secrets_of_the_reader_are_not_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is somebody else's, and what its files name is the reader's."""
    monkeypatch.setenv("HARMLESS", "HIDDEN")
    text = MINIMAL + "generate: {prompt: '${oc.env:HARMLESS}'}\n"
    for file in (tmp_path / "config.yaml", tmp_path / "slurm/submissions/x.yaml"):
        write(file.parent, text, file.name)
        facts = RunSnapshot(tmp_path)
        assert facts.config is None and "HIDDEN" not in "".join(facts.problems)
        with pytest.raises(UserError, match=str(file)):
            load_written(file)
        file.unlink()
