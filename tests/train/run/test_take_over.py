"""The table of docs/shared-clusters.md: what becomes of a run's lock, by the scheduler's answer, the last sign of life,
and whose job holds it; and what a holder learns that was replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common import slurm_commands
from pipeline.common.errors import EXIT_SUPERSEDED, MachineError, SupersededError, UserError
from pipeline.train.monitor.metrics import Metrics
from pipeline.train.run import lock_holder
from pipeline.train.run.folder import note_end, open_run
from pipeline.train.run.heartbeat import node_file
from pipeline.train.run.lock import Lock, clear, refusal, take_over, taken_over
from tests.clock import set_time

ME, OTHER = os.getuid(), os.getuid() + 1
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
SINCE = 1_700_000_000.0
BEFORE, LATER = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(SINCE + more)) for more in (-3600, 3600))


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(lock_holder, "WATCH_SECONDS", 0.0)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts programs of SLURM's names first in PATH: what `scontrol show job` and `sacct` do."""

    def put(job: str, accounting: str = "exit 1", config: str = "NEXT_JOB_ID = 100\nClusterName = here") -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        bodies = {"scontrol": f'[ "$2" = config ] && {{ echo "{config}"; exit 0; }}\n{job}', "sacct": accounting}
        for name, body in bodies.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return put


def held(run: Path, *, silent: float = 0.0, **fields: Any) -> Path:
    """A run folder whose lock another machine's process has, with its last sign of life that many seconds ago."""
    run.mkdir(exist_ok=True)
    of_job = {"job": "77", "uid": ME, "cluster": "here", "restarts": 0, "since": SINCE, "attempt": 3}
    (run / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1, **of_job, **fields}))
    (run / "attempt").write_text("3\n")
    node_file(run, 0).parent.mkdir(exist_ok=True)
    node_file(run, 0).write_text("{}\n")
    for file in (run / "lock", node_file(run, 0)):
        os.utime(file, (time.time() - silent,) * 2)
    return run


def record(state: str, uid: int = ME, submitted: str = BEFORE, restarts: int = 0) -> str:
    """A program that shows a job as `scontrol show job --oneliner` does."""
    return f"echo JobId=77 'UserId=ada({uid})' JobState={state} Restarts={restarts} SubmitTime={submitted}"


def accounted(state: str, uid: int = ME, submitted: str = BEFORE) -> str:
    return f"echo '77|{state}|{uid}|{submitted}'"


ROWS = {
    "runs": (record("RUNNING"), "exit 1", {}, "running"),
    "runs, of another user": (record("RUNNING", OTHER), "exit 1", {"uid": OTHER}, "running"),
    "is about to end": (record("COMPLETING"), "exit 1", {}, "running"),
    "is suspended": (record("SUSPENDED"), "exit 1", {}, "running"),
    "waits for its next start": (record("PENDING", submitted=LATER, restarts=1), "exit 1", {}, "ended"),
    "has ended": (record("COMPLETED"), "exit 1", {}, "ended"),
    "has ended, of another user": (record("TIMEOUT", OTHER), "exit 1", {"uid": OTHER}, "ended"),
    "own, forgotten": (GONE, "exit 1", {}, "ended"),
    "own, in an empty answer": ("exit 0", "exit 1", {}, "ended"),
    "own, of a controller that lost its state": (GONE, "exit 1", {"job": "177"}, "unknown"),
    "own, of a controller that lost its state, ended by accounting": (
        GONE,
        accounted("COMPLETED").replace("77|", "177|"),
        {"job": "177"},
        "ended",
    ),
    "another's, of a controller that lost its state": (GONE, "exit 1", {"job": "177", "uid": OTHER}, "unknown"),
    "another's, whose number is a later job's now": (
        record("COMPLETED", OTHER, LATER),
        "exit 1",
        {"uid": OTHER},
        "unknown",
    ),
    "an error that nobody knows": ("exit 127", "exit 127", {}, "unknown"),
    "another's, hidden or forgotten": (GONE, "exit 1", {"uid": OTHER}, "unknown"),
    "another's, in an empty answer": ("exit 0", "exit 1", {"uid": OTHER}, "unknown"),
    "of an older version, without its user": (GONE, "exit 1", {"uid": None}, "unknown"),
    "another's, ended by accounting": (GONE, accounted("FAILED", OTHER), {"uid": OTHER}, "ended"),
    "another's, running by accounting": (GONE, accounted("RUNNING", OTHER), {"uid": OTHER}, "unknown"),
    "another's, hidden by accounting, too": (GONE, "exit 0", {"uid": OTHER}, "unknown"),
    "another's, its number used again in accounting": (
        GONE,
        accounted("COMPLETED", OTHER, LATER),
        {"uid": OTHER},
        "unknown",
    ),
    "number is another user's now": (record("COMPLETED", OTHER), "exit 1", {}, "unknown"),
    "number is a later job's now": (record("COMPLETED", submitted=LATER), "exit 1", {}, "unknown"),
    "controller away": (AWAY, accounted("COMPLETED"), {}, "unknown"),
    "of another cluster": (GONE, "exit 1", {"cluster": "there"}, "unknown"),
}
"""`scontrol show job`, `sacct`, the lock, and the answer."""


@pytest.mark.parametrize("row", ROWS)
def test_what_is_known_of_a_job_decides_who_gets_its_lock(tmp_path: Path, slurm: Callable[..., None], row: str) -> None:
    job, accounting, fields, answer = ROWS[row]
    slurm(job, accounting)
    run = held(tmp_path / "run", silent=3600, **fields)
    assert (refusal(run) is None) is (answer == "ended"), "however long its holder was silent"
    assert (clear(held(tmp_path / "other", **fields), "5") is None) is (answer == "ended")
    if answer == "running":
        with pytest.raises(UserError, match="in use"):
            take_over(run)
        return
    assert (take_over(run) is None) is (answer == "ended")
    assert (taken_over(run) == 0) is (answer == "ended"), "jobs that were sent before are fenced"
    with open_run(run) as folder:
        assert folder.attempt > 3


def test_where_there_is_no_slurm_nothing_is_known_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = held(tmp_path / "run", silent=3600)
    assert refusal(run) is not None and clear(run, "5") is not None
    assert "job 77" in str(take_over(run)) and taken_over(run) > 0


def test_a_holder_of_whom_nothing_is_known_is_not_taken_over_while_it_gives_signs_of_life(
    tmp_path: Path, slurm: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(GONE)
    fresh = held(tmp_path / "fresh", silent=lock_holder.STALE_SECONDS - 60, uid=OTHER)
    with pytest.raises(UserError, match="last sign of life"):
        take_over(fresh)
    # The clocks of two machines: its files seem old, but change while they are watched.
    late = held(tmp_path / "late", silent=3600, uid=OTHER)
    monkeypatch.setattr(lock_holder, "WATCH_SECONDS", 1.0)

    def beat(seconds: float) -> None:
        node_file(late, 0).write_text("{} \n")
        os.utime(node_file(late, 0), (time.time() - 3600,) * 2)

    set_time(monkeypatch, sleep=beat)
    with pytest.raises(UserError, match="sign of life just now"):
        take_over(late)
    assert orjson.loads((late / "lock").read_bytes())["attempt"] == 3


def test_who_was_taken_over_ends_for_good_also_when_the_next_attempt_is_over(
    tmp_path: Path, slurm: Callable[..., None]
) -> None:
    slurm(GONE)
    run = tmp_path / "run"
    with open_run(run) as folder:
        folder.begin(0, layout={}, config="")
        mine = (run / "lock").read_bytes()
        begun = (run / "ledger.jsonl").read_bytes()
        # As another machine sees it.
        (run / "lock").write_bytes(orjson.dumps({**orjson.loads(mine), "host": "elsewhere", "uid": OTHER, "job": "77"}))
        os.utime(run / "lock", (time.time() - 3600,) * 2)
        assert "process" in str(take_over(run))
        with pytest.raises(SupersededError) as found:
            folder.assert_mine()
        assert found.value.exit_code == EXIT_SUPERSEDED == 80
        with open_run(run) as other:
            other.begin(0, layout={}, config="")
            assert other.attempt > folder.attempt
            with pytest.raises(SupersededError):
                folder.assert_mine()
        begun, exit_state = (run / "ledger.jsonl").read_bytes(), (run / "exit.json").read_bytes()
        with pytest.raises(SupersededError):
            folder.assert_mine()
        with pytest.raises(SupersededError):
            folder.next_attempt(write=True)
        with pytest.raises(SupersededError):
            folder.begin(0, layout={}, config="")
        note_end(run, found.value, 0.0)
    assert ((run / "ledger.jsonl").read_bytes(), (run / "exit.json").read_bytes()) == (begun, exit_state)


def test_no_number_of_an_attempt_comes_twice(tmp_path: Path) -> None:
    """Neither that of a holder that is replaced before its attempt began, nor after the lock was free."""
    run = tmp_path / "run"
    numbers = []
    for _ in range(3):
        with open_run(run) as folder:
            folder.begin(0, layout={}, config="")
            numbers.append(folder.attempt)
    (run / "lock").write_bytes(orjson.dumps({**lock_holder.identity(), "started": 1, "attempt": 7}))
    lock = Lock.take(run)
    numbers.append(lock.attempt)
    lock.next_generation()
    assert orjson.loads((run / "lock").read_bytes())["generation"] == 1
    assert numbers == [1, 2, 3, 8]


def test_processes_of_an_older_generation_write_nothing_more(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with open_run(run) as folder:
        assert folder.lock is not None
        older = Lock(run / "lock", orjson.loads((run / "lock").read_bytes()))
        folder.lock.next_generation()
        folder.assert_mine()
        with pytest.raises(MachineError) as found:
            older.assert_mine()
        assert found.value.exit_code != EXIT_SUPERSEDED, "the attempt goes on: its launcher decides"


def test_metrics_are_not_written_by_who_has_lost_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.train.monitor.metrics._CHECK_SECONDS", 0.0)
    with open_run(tmp_path) as folder, Metrics([], folder.assert_mine) as metrics:
        metrics.write({"step": 1})
        (tmp_path / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1, "attempt": 9}))
        with pytest.raises(SupersededError):
            metrics.write({"step": 2})


def test_the_answers_do_not_depend_on_the_shell(
    tmp_path: Path, slurm: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that SLURM's programs take options from (their manual pages, ENVIRONMENT VARIABLES)."""
    changing = (
        *("SQUEUE_PARTITION", "SQUEUE_NAMES", "SQUEUE_STATES", "SQUEUE_USERS", "SQUEUE_FORMAT", "SQUEUE_SORT"),
        *("SINFO_FORMAT", "SINFO_PARTITION", "SACCT_FEDERATION", "SCONTROL_FUTURE", "SCANCEL_STATE", "SCANCEL_NAME"),
        *("SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_DEBUG_FLAGS", "SLURM_JOB_ID"),
        *("SBATCH_PARTITION", "SPRIO_FORMAT", "SREPORT_CLUSTER", "SRUN_CPUS_PER_TASK", "SLURMD_NODENAME"),
    )
    for name in (*changing, "SLURM_CONF", "SLURM_JWT", "HOME_OF_SLURM"):
        monkeypatch.setenv(name, "x")
    slurm(f"env > {tmp_path}/seen")
    slurm_commands.ask(["scontrol", "show", "job", "77"])
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert not seen & set(changing)
    assert seen >= {"SLURM_CONF", "SLURM_JWT", "HOME_OF_SLURM", "PATH"}
