"""Ranks that are stopped or stuck under real runs: noticed, told with stacks and collectives, and ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.run.heartbeat import read_beats
from tests import tiny
from tests.slurm.local.test_launcher import Launched
from tests.train.distributed.ranks import environment, free_port
from tests.train.distributed.test_train_command import ranks_of, steps
from tests.waiting import until

pytestmark = pytest.mark.parallel

LAYOUTS = {
    "pp2": ("launch.processes=2", "parallel.pp=2"),
    "tp2-dp2": ("launch.processes=4", "parallel.tp=2", "parallel.dp_shard=2"),
}
STACK = r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hangs")
    keys: dict[str, Any] = {
        "train.duration": "100000 steps",
        "train.precision": {"compute": "fp32"},
        "train.validation.samples": 0,
        "train.checkpoint.every_steps": 100000,
        "launch.time_limits": {"step_seconds": 6},
        "launch.device": "cpu",
    }
    preprocess(load(tiny.write_run(folder, keys)))
    return folder


def start(root: Path, name: str, *values: str) -> subprocess.Popen[str]:
    command = tiny.command("train", root / "run.yaml", f"run.dir={root / name}", *values)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def evidence(run: Path) -> Path:
    (folder,) = (run / "logs").iterdir()
    return folder


@pytest.mark.guard
@pytest.mark.parametrize(("layout", "stopped"), [("pp2", 1), pytest.param("tp2-dp2", 0, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_with_the_stacks_of_all(root: Path, layout: str, stopped: int) -> None:
    run = root / f"{layout}-stopped"
    process = start(root, run.name, *LAYOUTS[layout])
    until(lambda: (beat := read_beats(run).get(stopped)) and beat.phase == "step", process)
    pids = ranks_of(run / "logs")
    os.kill(pids[stopped], signal.SIGSTOP)
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 76, err

    name = f"rank {stopped} on {socket.gethostname()} (process {pids[stopped]}) has given no sign of life for "
    assert name in err
    ended = json.loads((run / "exit.json").read_bytes())
    assert ended["code"] == 76
    assert name in ended["reason"]
    assert "launch.time_limits.step_seconds (6)" in err and "launch.time_limits.step_seconds (6)" in ended["reason"]
    step = int(re.search(r"no progress for \d+ s in a step \(step (\d+)\)", err)[1])  # type: ignore[index]
    # It may have come further since.
    assert 1 <= int(re.search(r"the last one came from step (\d+) \(phase step\)", err)[1]) <= step  # type: ignore[index]

    logs = evidence(run)
    texts = {rank: (logs / f"rank-{rank:04d}.log").read_text() if rank else err for rank in pids}
    for rank, text in texts.items():
        assert re.search(STACK, text), f"stacks of rank {rank}"
        assert "pipeline/train/loop/trainer.py" in text, f"where rank {rank} was"
    for rank in pids.keys() - {stopped}:
        recorded = json.loads((logs / f"flight-recorder-rank-{rank:04d}.json").read_bytes())["gloo"]
        assert recorded, "collectives"
        assert all("site-packages/torch" not in line for entry in recorded for line in entry["frames"])
    waiting = [
        rank
        for rank in pids.keys() - {stopped}
        for entry in json.loads((logs / f"flight-recorder-rank-{rank:04d}.json").read_bytes())["gloo"][-1:]
        if not entry["retired"]
    ]
    assert waiting or layout == "pp2", "somebody is in a collective; messages of a pipeline are not recorded"
    assert ranks_of(run / "logs") == {}


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_its_own_code_is_told_from_those_that_wait(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "hang", "launch.time_limits.step_seconds=3")
    code, _out, err = launched.result()
    assert code == 76
    found = re.search(r"rank 1 on \S+ \(process \d+\) is not in a collective, but at (\S+):\d+ \((\w+)\)", err)
    assert found, err
    assert found[1].endswith("tests/train/distributed/launched.py")
    assert found[2] == "this_is_where_it_hangs"
    assert "rank 0 on" not in err, "it waits, and is not to blame"
    beats = read_beats(launched.run)
    assert {rank: (beat.phase, beat.waits) for rank, beat in beats.items()} == {
        0: ("hang", True), 1: ("hang", False), 2: ("hang", True)
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_that_nobody_watches_find_out_for_themselves(root: Path) -> None:
    run, port = root / "alone", free_port()
    command = tiny.command("train", root / "run.yaml", f"run.dir={run}", *LAYOUTS["pp2"])
    ranks = [
        subprocess.Popen(command, env=os.environ | environment(rank, 2, port), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        until(lambda: steps(run) >= 3, ranks[0])
        os.kill(ranks[1].pid, signal.SIGSTOP)
        _out, err = ranks[0].communicate(timeout=300)
        assert ranks[0].returncode == 76, err
        assert f"rank 1 on {socket.gethostname()} (process {ranks[1].pid}) has given no sign of life" in err
        assert re.search(STACK, err)
        assert (run / "logs" / "hang-0001" / "flight-recorder-rank-0000.json").exists()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
def test_time_in_which_all_is_suspended_is_no_hang(root: Path) -> None:
    """As by `scontrol suspend`: launcher and ranks, for longer than a step may take."""
    run = root / "suspended"
    process = start(root, run.name, *LAYOUTS["pp2"], "launch.time_limits.step_seconds=4")
    until(lambda: steps(run) >= 3, process)
    pids = [process.pid, *ranks_of(run / "logs").values()]
    for number, seconds in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    done = steps(run)
    until(lambda: steps(run) > done + 2, process)
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err


@pytest.mark.slow
def test_heartbeats_tell_where_each_rank_is_and_stacks_come_on_request(root: Path) -> None:
    run = root / "beats"
    (run / "heartbeats").mkdir(parents=True)
    (run / "heartbeats" / "rank-0007.json").write_text('{"rank": 7}')
    process = start(root, run.name, *LAYOUTS["pp2"], "launch.heartbeat_seconds=0.2")
    until(lambda: steps(run) >= 2, process)
    pids = ranks_of(run / "logs")
    until(lambda: all((beat := read_beats(run).get(rank)) and beat.phase == "step" for rank in pids), process)
    beats = read_beats(run)
    assert {rank: (beat.pid, beat.host, beat.attempt) for rank, beat in beats.items()} == {
        rank: (pid, socket.gethostname(), 1) for rank, pid in pids.items()
    }
    before = {rank: beat.step or 0 for rank, beat in beats.items()}
    until(lambda: all((read_beats(run)[rank].step or 0) > step for rank, step in before.items()), process)

    refused = tiny.pipeline("train", root / "run.yaml", f"run.dir={run}")
    assert refused.returncode == 2
    assert read_beats(run)[0].pid == pids[0], "whoever is refused leaves the signs of life alone"

    log = evidence(run) / "rank-0001.log"
    os.kill(pids[1], signal.SIGUSR1)
    until(lambda: re.search(STACK, log.read_text()), process)
    done = steps(run)
    until(lambda: steps(run) > done + 2, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 75
    assert {rank: beat.phase for rank, beat in read_beats(run).items()} == {0: "end", 1: "end"}
    assert [path.name for path in sorted((run / "heartbeats").iterdir())] == ["node-0000.jsonl"]
