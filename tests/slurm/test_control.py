"""Cancel, hold and release: with files and processes of this machine, and with real jobs that heed the stop file."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import EXIT_STOPPED, UserError
from pipeline.train.run.heartbeat import beat_file
from slurm import jobs, scheduler
from slurm.control import _Cancelling, cancel, hold, release
from slurm.devcluster import DevCluster
from slurm.jobs import Job, Stage
from slurm.record.launch_log import LaunchEnd, begin, end, launches
from slurm.record.live_jobs import LiveJobs
from slurm.scheduler import SchedulerError
from tests.waiting import until

WAIT = 90.0
STOPS = "while [ ! -e stop ]; do sleep .1; done; echo saved > saved"
"""A job that does as training does."""


def cancelled(run: Path, *, now: bool = False, chain: bool = False, wait: float = WAIT, evaluate: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200)
    cancel(run, console, now=now, chain=chain, wait=wait, evaluate=evaluate)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def changed(change: Callable[[Path, Console], None], run: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    change(run, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that has nothing but the place for jobs, as one that waits in the queue."""
    folder = tmp_path / "run"
    jobs.jobs_folder(folder).mkdir(parents=True)
    return folder


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let squeue be a script, before those that are installed."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)

    def write(script: str) -> None:
        (programs / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "squeue").chmod(0o755)

    return write


def launched(run: Path, job: str, stage: Stage = "train") -> None:
    begin(run, stage, job, restarts=0, number=1, link=1, nodes=(), processes_per_node=1, logs="logs/here", checkpoint=0)


def test_nothing_to_cancel(run: Path, squeue: Callable[[str], None]) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        cancelled(run / "slurm")
    squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    jobs.note(run, jobs.new_job("train", "77", "slurm", "name", "none.json"))
    assert cancelled(run) == f"no job of {run} waits or runs\n"
    assert jobs.cancelled(run) is None, "it is as it was"
    assert not (run / "stop").exists()
    assert changed(hold, run) == f"no job of {run} waits\n"
    squeue("echo this is not asked >&2; exit 1")
    launched(run, "77")
    end(run, launches(run)[0], LaunchEnd(0, "done", "done", 8, time.time()))
    assert "waits or runs" in cancelled(run), "the ledger tells that all is over"


def test_a_scheduler_that_does_not_answer(run: Path, squeue: Callable[[str], None]) -> None:
    squeue("echo 'Unable to contact slurm controller' >&2; exit 1")
    jobs.note(run, jobs.new_job("train", "77", "slurm", "name", "none.json"))
    launched(run, "77")
    text = cancelled(run, wait=0)
    assert "Unable to contact slurm controller; check that the controller is up, and that SLURM_CONF names" in text
    assert "those that wait start nothing" in text
    assert f"pipeline cancel {run} --now" in text
    assert (run / "stop").exists()
    assert jobs.cancelled(run, "train") and jobs.cancelled(run, "eval")
    with pytest.raises(SchedulerError):
        hold(run, Console())


def test_a_training_that_ends_before_it_is_cancelled(run: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    cancelling = _Cancelling(run, console, ("train",), now=True)
    storage.put_json(run / "exit.json", {"code": 0, "reason": "done"})
    os.utime(run / "exit.json", (time.time() + 1,) * 2)
    cancelling._say_finished(LiveJobs([], [], False, None))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "is done" in text and "is cancelled" not in text


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_that_was_started_by_hand(run: Path) -> None:
    code = """
import json, sys, time
from pathlib import Path
from pipeline.train.run.lock import Lock
run = Path(sys.argv[1])
lock = Lock.take(run)
print(flush=True)
while not (run / "stop").exists():
    time.sleep(0.05)
(run / "stop").unlink()
(run / "exit.json").write_text(json.dumps({"reason": "stop file at step 5; saved"}))
lock.release()
"""
    shutil.rmtree(run / "slurm")
    process = python(code, run)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        text = cancelled(run)
        assert text.startswith(f"asked process {process.pid} on ")
        assert "it has ended: stop file at step 5; saved\n" in text
        assert process.wait(WAIT) == 0
        assert not (run / "slurm").exists(), "it has no jobs that should know"
    finally:
        process.kill()
        process.communicate()


LOCAL = """
import signal, subprocess, sys, time
from pathlib import Path
run, stops = Path(sys.argv[2]), sys.argv[3] == "stops"
sleep = "import time; time.sleep(600)"
stop = "import os, sys, time\\nwhile not os.path.exists(sys.argv[2]): time.sleep(.1)"
file = run / "slurm" / "submissions" / "now.yaml"
step = subprocess.Popen([sys.executable, "-c", stop if stops else sleep, file, run / "stop"], start_new_session=True)
sys.exit(75 if step.wait() in (0, -signal.SIGTERM) else 1)
"""


@pytest.mark.parametrize(("stage", "now"), [("train", False), ("train", True), ("preprocess", False)])
def test_a_job_in_the_background_of_this_machine(run: Path, stage: Stage, now: bool) -> None:
    process = python(LOCAL, jobs.jobs_folder(run), run, "sleeps" if now or stage != "train" else "stops")
    try:
        until(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())  # the step
        job = jobs.new_job(stage, str(process.pid), "local", "name", "none.json")
        jobs.note(run, job)
        launched(run, job.job, stage)
        reaper = threading.Thread(target=process.wait, daemon=True)  # else it stays in the table
        reaper.start()
        text = cancelled(run, now=now)
        assert text.endswith(f"{run} is cancelled\n")
        reaper.join(WAIT)
        assert process.returncode == EXIT_STOPPED, "the step was ended, the job noted it"
        assert jobs.cancelled(run, "eval"), "one process does them all"
        assert not (run / "stop").exists()
    finally:
        process.kill()
        process.communicate()


def test_a_run_of_a_sweep_whose_turn_has_not_come(run: Path) -> None:
    process = python(LOCAL, jobs.jobs_folder(run), run, "sleeps")
    try:
        until(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        jobs.note(run, jobs.new_job("train", str(process.pid), "local", "name", "none.json"))
        assert "because it is not in a queue" in changed(hold, run)
        text = cancelled(run)
        assert "will skip it\n" in text and text.endswith(f"{run} is cancelled\n")
        assert process.poll() is None and not (run / "stop").exists()
        assert jobs.cancelled(run, "train")
    finally:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.communicate()


class Jobs:
    """Real jobs of a run folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.sent: list[str] = []

    def send(self, stage: Stage, script: str, *options: str, tasks: int = 1) -> Job:
        """Send one, and note it as submitting does."""
        name = f"control-{os.getpid()}-{stage}"
        output = f"--output={jobs.jobs_folder(self.run)}/%j_0_log.out"
        words = ["sbatch", "--parsable", "--requeue", f"--job-name={name}", f"--chdir={self.run}", output, *options]
        number = scheduler.ask([*words, "--wrap", script]).strip()
        self.sent.append(number)
        job = jobs.new_job(stage, number, "slurm", name, "none.json", tasks=tasks)
        jobs.note(self.run, job)
        return job

    def states(self) -> dict[str, str]:
        """By number."""
        return {number: state.state for number, state in scheduler.jobs(self.sent).items()}

    def until_running(self, *found: Job) -> None:
        """Until these run."""
        until(lambda: all(self.states().get(number) == "RUNNING" for job in found for number in job.numbers))


@pytest.fixture
def sent(cluster: DevCluster, run: Path) -> Iterator[Jobs]:
    found = Jobs(run)
    yield found
    scheduler.cancel(found.sent)


@pytest.mark.parametrize("evaluate", [False, True])
def test_the_evaluation_of_a_cancelled_training_is_not_started(
    run: Path, squeue: Callable[[str], None], evaluate: bool
) -> None:
    """The evaluation of a checkpoint, which waits for nothing, stays."""
    for stage, number, after in (("train", "77", ()), ("eval", "78", ("77",)), ("eval", "79", ())):
        jobs.note(run, jobs.new_job(stage, number, "slurm", "name", "none.json", after=after))
    queue = run.parent / "queue"
    row = "{0}|PENDING|Dependency||N/A|N/A|\n"
    queue.write_text("".join(map(row.format, ("77", "78", "79"))))
    squeue(f"cat {queue}")
    scancel = run.parent / "bin" / "scancel"
    scancel.write_text(f'#!/bin/sh\nfor job; do sed -i "/^$job|/d" {queue}; done\n')
    scancel.chmod(0o755)
    text = cancelled(run, evaluate=evaluate)
    left = {"78", "79"} if evaluate else {"79"}
    assert {line.partition("|")[0] for line in queue.read_text().split()} == left
    assert ("eval: job 78 leaves the queue" in text) == (not evaluate)
    assert "stays: eval: job 79" in text


@pytest.mark.slurm
def test_training_stops_its_links_leave_and_the_evaluation_stays(sent: Jobs) -> None:
    run = sent.run
    train = sent.send("train", STOPS)
    link = sent.send("train", "sleep 600", f"--dependency=afterany:{train.job}")
    later = sent.send("eval", "sleep 600", "--begin=now+1hour")
    sent.until_running(train)
    beat_file(run, 0).parent.mkdir()
    beat = '{"rank": 0, "host": "n", "pid": 1, "attempt": 1, "step": 7, "phase": "save", "time": 1e12}'
    beat_file(run, 0).write_text(beat)
    text = cancelled(run)
    assert (run / "saved").exists()
    states = sent.states()
    assert (states[train.job], states[link.job], states[later.job]) == ("COMPLETED", "CANCELLED", "PENDING")
    assert f"train: job {link.job} leaves the queue\n" in text
    assert "asked the training to save and stop\n" in text
    assert "rank 0: save\n" in text
    assert f"stays: eval: job {later.job} (PENDING, BeginTime)\n" in text
    assert f"{run} is cancelled (train)\n" in text
    assert not (run / "stop").exists(), "which would stop the next start"
    assert jobs.cancelled(run, "train") and not jobs.cancelled(run, "eval")
    assert f"eval: job {later.job} leaves the queue\n" in cancelled(run, chain=True)
    assert sent.states()[later.job] == "CANCELLED"
    assert jobs.cancelled(run, "eval")
    assert "waits or runs" in cancelled(run)
    assert jobs.cancelled(run), "it stays so"


@pytest.mark.slow
@pytest.mark.slurm
def test_one_that_goes_back_into_the_queue_at_the_same_moment(sent: Jobs) -> None:
    train = sent.send("train", f"{STOPS}; scontrol requeue $SLURM_JOB_ID; sleep 600")
    sent.until_running(train)
    assert f"train: job {train.job} leaves the queue\n" in cancelled(sent.run)
    assert sent.states()[train.job] == "CANCELLED"


@pytest.mark.slurm
def test_at_once_and_what_has_nothing_to_save(sent: Jobs) -> None:
    train = sent.send("train", STOPS)
    sent.until_running(train)
    text = cancelled(sent.run, wait=0)
    assert "it has not ended yet" in text or "is cancelled" in text
    until(lambda: sent.states()[train.job] == "COMPLETED")
    (sent.run / "stop").unlink(missing_ok=True)
    train = sent.send("train", "sleep 600")
    array = sent.send("preprocess", "sleep 600", "--array=0-2", tasks=3)
    sent.until_running(train, array)
    text = cancelled(sent.run)
    assert f"preprocess: job {array.job} is ended now\n" in text
    assert f"stays: train: job {train.job} (RUNNING on " in text
    text = cancelled(sent.run, now=True)
    assert f"train: job {train.job} is ended now\n" in text
    assert not (sent.run / "stop").exists()
    states = sent.states()
    assert {states[number] for number in (train.job, *array.numbers)} == {"CANCELLED"}


@pytest.mark.slurm
def test_hold_and_release(sent: Jobs) -> None:
    waiting = [sent.send("train", "sleep 600", "--begin=now+1hour") for _ in range(2)]
    running = sent.send("eval", "sleep 600")
    sent.until_running(running)

    def reasons() -> set[str]:
        return {scheduler.jobs([job.job])[job.job].reason for job in waiting}

    text = changed(hold, sent.run)
    assert f"train: job {waiting[1].job} held until `pipeline release`\n" in text
    assert f"not affected, because it runs: eval: job {running.job} (RUNNING on " in text
    assert reasons() <= {"JobHeldUser", "JobHeldAdmin"}
    assert f"train: job {waiting[0].job} may start\n" in changed(release, sent.run)
    until(lambda: not reasons() & {"JobHeldUser", "JobHeldAdmin"})


@pytest.fixture
def shared(cluster: DevCluster) -> Iterator[Jobs]:
    """Jobs in a folder that everybody may write to."""
    folder = Path(tempfile.mkdtemp(prefix="control-"))
    run = folder / "run"
    jobs.jobs_folder(run).mkdir(parents=True)
    for path in (folder, run, *run.rglob("*")):
        path.chmod(0o777)
    found = Jobs(run)
    yield found
    scheduler.cancel(found.sent)
    shutil.rmtree(folder)


@pytest.mark.slurm
def test_a_colleague_whom_the_scheduler_does_not_obey(shared: Jobs) -> None:
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
    if os.geteuid() != 0 or subprocess.run([*as_nobody, "-c", "import slurm.control"], cwd="/").returncode != 0:
        pytest.skip("needs root, and a checkout that others can read")
    train = shared.send("train", STOPS)
    starts = "[ -e slurm/cancelled ] || sleep 600"  # as a link looks first whether it is wanted
    link = shared.send("train", starts, f"--dependency=afterany:{train.job}")
    shared.until_running(train)
    (shared.run / "slurm" / "jobs.jsonl").chmod(0o666)
    code = (
        "import sys\nfrom pathlib import Path\nfrom rich.console import Console\nfrom slurm.control import cancel\n"
        f"cancel(Path({str(shared.run)!r}), Console(width=500), now=False, chain=False, wait={WAIT})"
    )
    done = subprocess.run([*as_nobody, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    refused = f"train: job {link.job} is {train.user}'s, so SLURM does not let nobody end it; "
    assert f"{refused}it will see that the run is cancelled, " in done.stdout
    assert "has not ended" not in done.stdout
    assert (shared.run / "saved").exists()
    marker = jobs.cancelled(shared.run, "train")
    assert marker is not None and marker.by == "nobody"
