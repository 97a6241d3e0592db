"""`pipeline drill`: what is killed comes back, and what would not is refused."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import storage
from pipeline.common.console import Console
from pipeline.common.errors import MachineError, UserError
from pipeline.common.run_files import RunFiles
from pipeline.config.load import load
from slurm import jobs
from slurm.drill.command import _Before, _watch, drill
from slurm.local import stages
from slurm.record import launch_log
from slurm.record.drill_record import DrillRecord, read_drill
from slurm.record.launch_log import LaunchEnd
from tests import tiny
from tests.slurm.training import Run
from tests.waiting import until


def drilled(run: Path, *words: str) -> tuple[int, str]:
    done = tiny.pipeline("drill", run, *words)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("train", [("train.duration=100000 steps",)], indirect=True)
@pytest.mark.parametrize("kill", ["rank", pytest.param("node", marks=pytest.mark.slow), "batch"])
def test_a_training_of_a_job_comes_back(train: Run, kill: str) -> None:
    train.submit()
    train.until_saved(10)
    code, shown = drilled(train.folder, "--kill", kill)
    assert code == 2 and "nothing was killed; give --yes" in shown and "to be expected: " in shown
    assert len(train.launches()) == 1
    code, shown = drilled(train.folder, "--kill", kill, "--yes")
    assert code == 0, shown
    first, second = train.launches()
    assert first.end is not None and f"the end was noticed: {first.end.reason}" in shown
    assert "killed by `pipeline drill`" in first.end.reason and "memory" not in first.end.reason
    assert f"attempt 2 has begun, from step {second.checkpoint:,}" in shown and " is trained; " in shown


@pytest.mark.slow
def test_a_training_in_the_background_comes_back(tmp_path: Path) -> None:
    changes = {
        "train.duration": "100000 steps",
        "train.checkpoint": {"every_steps": 20},
        "launch": {"threads": 1, "processes": 2, "heartbeat_seconds": 0.2},
        "slurm.max_restarts": 3,
    }
    file = tiny.write_run(tmp_path, changes)
    stages.preprocess(load(file))
    sent = tiny.pipeline("train", file, "--local")
    assert sent.returncode == 0, sent.stderr
    run = tmp_path / "run"
    (job,) = jobs.sent(run)
    try:
        until((run / "checkpoints" / "latest").exists)
        code, shown = drilled(run, "--kill", "batch", "--yes")
        assert code == 2 and "nothing would start a training in the background" in shown
        assert "--rank 7: there are ranks 0 to 1" in drilled(run, "--kill", "rank", "--rank", "7")[1]
        code, shown = drilled(run, "--kill", "rank", "--rank", "1", "--yes")
        assert code == 0 and "to be killed: rank 1 (process " in shown, shown
        assert "attempt 2 has begun, from step " in shown
        assert "rank 1" in shown and "killed by `pipeline drill`" in shown, shown
    finally:
        os.kill(int(job.job), signal.SIGTERM)
        tiny.pipeline("cancel", run, "--now")


def test_what_nobody_would_start_again_is_refused(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path)
    with pytest.raises(UserError, match="no job of .* trains now; a drill needs one"):
        drill(file, Console(quiet=True), kill="rank", rank=None, yes=True, minutes=1)


@pytest.mark.parametrize("reason", ["rank 1 on n1: was killed by `pipeline drill` at 12:00:00", "the time is over"])
def test_only_the_end_by_its_own_kill_is_a_success(tmp_path: Path, reason: str) -> None:
    values = {"restarts": 0, "number": 1, "link": 1, "nodes": ("n1",), "processes_per_node": 2, "logs": "logs/a"}
    launch = launch_log.begin(tmp_path, "train", "77", checkpoint=0, **values)
    launch_log.end(tmp_path, launch, LaunchEnd(1, reason, "end", 0, time.time()))
    is_own = "drill" in reason
    message = "does not come back: rank 1" if is_own else "for another reason than this kill: the time is over"
    with pytest.raises(MachineError, match=message):
        _watch(tmp_path, Console(quiet=True), _Before(1, 5, 0, 1), time.time(), 1)


def test_a_batch_process_that_a_drill_killed_did_not_run_out_of_memory(tmp_path: Path) -> None:
    values = {"restarts": 0, "number": 1, "link": 1, "nodes": ("n1",), "processes_per_node": 2, "logs": "logs/a"}
    launch_log.begin(tmp_path, "train", "77", checkpoint=5, **values)
    killed = {"event": "batch killed", "job": "77", "restarts": 0, "signal": 9, "node": "n1", "next": "requeue"}
    storage.add_json_line(RunFiles(tmp_path).ledger, {**killed, "time": time.time()})

    def reason() -> str:
        (launch,) = launch_log.launches(tmp_path)
        assert launch.end is not None
        return launch.end.reason

    assert "as where the memory of a node runs out" in reason()
    (tmp_path / "logs" / "a").mkdir(parents=True)
    DrillRecord("batch", "77", "n1", (), 30, time.time()).write(tmp_path / "logs" / "a")
    assert "the batch process on n1 was killed by `pipeline drill`" in reason() and "memory" not in reason()


@pytest.mark.parametrize(
    "change",
    [{"step": "x"}, {"step": -1}, {"time": "x"}, {"time": 1e300}, {"ranks": [[1]]}, {"part": 3}, {"host": "x" * 10**6}],
)
def test_a_record_of_a_stranger_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    DrillRecord("rank", "77", "n1", (1, 2), 30, 1005.0).write(tmp_path)
    sound = read_drill(tmp_path)
    assert sound == DrillRecord("rank", "77", "n1", (1, 2), 30, 1005.0)
    path = tmp_path / "drill.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    assert read_drill(tmp_path) is None
