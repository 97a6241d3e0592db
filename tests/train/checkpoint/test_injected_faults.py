"""A rank is killed, or its disk fails, at the worst instants: the run goes on from the last commit, bit for bit."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash

from pipeline.common.errors import EXIT_SUPERSEDED
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.distributed.faulty import KILLED, Fault, Instant, Start
from tests.train.runs import exact, weights_hash

pytestmark = [pytest.mark.parallel, pytest.mark.guard]

STEPS = 6
MANY_STEPS = 24
SEED = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(2**32))
"""Of the random instants; printed where a test fails, and FAULT_SEED=... draws the same ones again."""

CHECKPOINT = r"/step-\d+$"
UPDATE = "pipeline.train.optim.optimizers:Optimizers.step"

INSTANTS: dict[str, tuple[int, Instant]] = {
    "in a step, of rank 0": (0, Instant(function=UPDATE, number=4)),
    "in a step, of another rank": (1, Instant(function=UPDATE, number=4)),
    "while the state is copied": (
        1,
        Instant(
            function="pipeline.train.checkpoint.host_snapshot:with_local",
            number=20,
            after=Instant(function="pipeline.train.checkpoint.host_snapshot:Staging.copy", number=3),
        ),
    ),
    "before it writes its file": (1, Instant("open", r"/__1_\d+\.distcp$", number=3)),
    "in the middle of its file": (
        1,
        Instant(
            function="pipeline.train.torch_compat.checkpoint_files:_HashingStream.write",
            number=9,
            after=Instant("open", r"/__1_\d+\.distcp$", number=3),
        ),
    ),
    "between files": (0, Instant("open", r"/\.metadata", number=3)),
    "before state.json": (0, Instant("os.rename", r"/state\.json$", number=3)),
    "before COMMIT": (0, Instant("os.rename", r"/COMMIT$", number=3)),
    "after COMMIT, before the rename": (0, Instant("os.rename", CHECKPOINT, number=3)),
    "after the rename, before latest": (0, Instant("os.rename", r"/latest$", number=3)),
    "after latest, before retention": (0, Instant("os.rename", r"\.pruned\.tmp$")),
    "in retention, before the removal": (0, Instant("os.rmdir", r"\.pruned\.tmp$")),
    "in retention, half removed": (0, Instant("os.remove", r"^__\d_\d\.distcp$", number=2)),
}
"""Which rank dies when."""
SLOW = (
    *("in a step, of another rank", "before it writes its file", "between files", "before state.json"),
    *("after COMMIT, before the rename", "after latest, before retention", "while the state is copied"),
    *("in retention, before the removal", "in the middle of its file", "after the rename, before latest"),
)
"""Much like one of the others."""

FAILING: dict[str, tuple[int, Instant]] = {
    "the folder": (0, Instant("os.mkdir", r"/step-\d+\.\d+\.tmp$", number=3)),
    "the file of a rank": (1, Instant("open", r"\.distcp$", number=3)),
    "COMMIT": (0, Instant("os.rename", r"/COMMIT$", number=3)),
    "the rename": (0, Instant("os.rename", CHECKPOINT, number=3)),
    "latest": (0, Instant("os.rename", r"/latest$", number=3)),
}
"""What cannot be written, and on which rank."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    keys: dict[str, Any] = {
        "train.duration": f"{STEPS} steps",
        "train.precision": {"compute": "fp32"},
        "train.validation.samples": 0,
        "train.checkpoint": {"every_steps": 1, "keep": 2},
        "train.ema": {"decay": 0.9},
        "parallel.dp_shard": 2,
    }
    preprocess(load(tiny.write_run(folder, keys)))
    return folder


def train(root: Path, name: str, *values: str) -> str:
    """A start on two ranks that must come to the end; what rank 0 has said."""
    with Start(root / "run.yaml", root / name, 2, values) as start:
        assert start.wait() == [0, 0], start.said()
        return start.text()


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    """The run that nothing happens to."""
    train(root, "whole")
    return root / "whole"


@pytest.fixture(scope="module")
def long_whole(root: Path) -> Path:
    """The same with more steps."""
    train(root, "long-whole", f"train.duration={MANY_STEPS} steps")
    return root / "long-whole"


def steps_there(run: Path) -> list[int]:
    """Steps of the committed checkpoints, by their names."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))


def assert_good(run: Path, step: int) -> None:
    """Every file of a checkpoint is there and has the hash that COMMIT has of it."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    files = orjson.loads((folder / "COMMIT").read_bytes())["files"]
    assert files.keys() >= {"state.json", ".metadata"}
    for name, (size, digest) in files.items():
        content = (folder / name).read_bytes()
        assert (len(content), xxhash.xxh3_64_hexdigest(content)) == (size, digest), name


def assert_same_end(run: Path, whole: Path) -> None:
    """The bits of the run that nothing happened to, and nothing left behind."""
    assert exact(run) == exact(whole)
    assert weights_hash(run) == weights_hash(whole)
    assert list((run / "checkpoints").glob("*.tmp")) == []
    # A run that is done is not touched, though its last process was killed before it removed what is too old.
    too_old = steps_there(run)[: -len(steps_there(whole))]
    assert too_old in ([], [steps_there(whole)[0] - 1])
    assert steps_there(run)[len(too_old) :] == steps_there(whole)
    assert not (run / "lock").exists()
    ended = orjson.loads((run / "exit.json").read_bytes())
    assert (ended["code"], ended["step"]) == (0, exact(whole)[-1]["step"])


@pytest.mark.parametrize(
    "instant", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in INSTANTS]
)
def test_a_rank_is_killed(root: Path, whole: Path, instant: str) -> None:
    rank, at = INSTANTS[instant]
    name = instant.replace(" ", "-").replace(",", "")
    with Start(root / "run.yaml", root / name, 2, faults={rank: Fault(at)}) as start:
        codes = start.wait()
        assert codes[rank] == KILLED and codes[1 - rank] not in (0, KILLED), start.said()
    there = steps_there(root / name)
    assert there, "it was killed before there was anything to resume from"
    for step in there:
        assert_good(root / name, step)
    said = train(root, name)
    assert tiny.resumed_from(said) == there[-1]
    assert "abandoned" not in said
    assert_same_end(root / name, whole)


@pytest.mark.parametrize(
    "number", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["before the first", "between two"]
)
@pytest.mark.slow
def test_rank_0_is_killed_while_it_puts_later_checkpoints_away(root: Path, whole: Path, number: int) -> None:
    """`resume.from` names the one before the two newest; the next start, without it, finishes that."""
    run = root / f"abandoned-{number}"
    train(root, run.name, "train.checkpoint.keep=9")
    at = Instant("os.rename", r"/abandoned/", number=number)
    with Start(root / "run.yaml", run, 2, [f"resume.from={STEPS - 2}"], faults={0: Fault(at)}) as start:
        assert start.wait()[0] == KILLED, start.said()
    said = train(root, run.name)
    assert tiny.resumed_from(said) == STEPS - 2
    assert sorted(path.name for path in (run / "checkpoints" / "abandoned").iterdir()) == [
        f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}"
    ]  # fmt: skip
    assert_same_end(run, whole)


def flip_a_byte(run: Path, step: int) -> Path:
    """Change one bit of the tensors of a rank."""
    file = max((run / "checkpoints" / f"step-{step:08d}").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def test_a_flipped_byte_is_found_on_load_and_by_the_tool(root: Path, whole: Path) -> None:
    run = root / "flipped"
    shutil.copytree(whole, run)
    file = flip_a_byte(run, STEPS)
    found = tiny.pipeline("checkpoint", "verify", run)
    assert found.returncode == 1
    text = "".join((found.stdout + found.stderr).split())
    assert str(file) in text, text
    said = train(root, run.name)
    assert f"step-{STEPS:08d} is damaged" in said and file.name in said
    assert tiny.resumed_from(said) == STEPS - 1
    assert_same_end(run, whole)
    assert tiny.pipeline("checkpoint", "verify", run).returncode == 0


# Random instants.


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_ten_random_instants(root: Path, long_whole: Path, part: int) -> None:
    """A rank is killed from outside after a random time, or at a random call about a file of the run; then again.

    A run that has come to its end leaves its place to a new one.
    """
    print(f"FAULT_SEED={SEED}")
    chance = random.Random(SEED + part)
    values = [f"train.duration={MANY_STEPS} steps", "launch.crash_loop=100"]
    # Rank 0 may be killed before it listens; without a launcher that ends it, the other one waits for so long.
    values.append("launch.time_limits.init_seconds=90")
    run, runs, killed = root / f"random-{part}", 0, 0
    place = run
    while killed < 10:
        rank = chance.randrange(2)
        by_call = chance.random() < 0.5
        at = Instant(number=chance.randint(1, 200 if rank == 0 else 20))
        delay = chance.uniform(0, 1.0)
        print(f"{place.name}: rank {rank}", f"at call {at.number}" if by_call else f"{delay:.2f} s after a step")
        with Start(root / "run.yaml", place, 2, values, {rank: Fault(at)} if by_call else None) as start:
            if not by_call:
                wait_for_a_step(start)
                time.sleep(delay)
                start.kill(rank)
            codes = start.wait()
            assert codes == [0, 0] or codes[rank] == KILLED, start.said()
        killed += codes[rank] == KILLED
        for step in steps_there(place):
            assert_good(place, step)
        if codes == [0, 0]:
            assert_same_end(place, long_whole)
            runs += 1
            place = run.with_name(f"{run.name}-{runs}")
    train(root, place.name, *values)
    assert_same_end(place, long_whole)


def wait_for_a_step(start: Start) -> None:
    """Until this start, and not one before it, has made a step."""
    metrics = start.run / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    while start.running() and (not metrics.exists() or metrics.stat().st_size == size):
        time.sleep(0.005)


# A disk that is full.


@pytest.mark.parametrize(
    "where", [pytest.param(name, marks=pytest.mark.slow if number else ()) for number, name in enumerate(FAILING)]
)
def test_a_write_that_fails_once_is_tried_again(root: Path, whole: Path, where: str) -> None:
    rank, at = FAILING[where]
    run = root / where.replace(" ", "-")
    with Start(root / "run.yaml", run, 2, ["train.checkpoint.keep=9"], {rank: Fault(at, errno.ENOSPC)}) as start:
        assert start.wait() == [0, 0], start.said()
        assert not tiny.failed_saves(start.text())
    assert steps_there(run) == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert_good(run, step)
    assert exact(run) == exact(whole)
    assert weights_hash(run) == weights_hash(whole)


@pytest.mark.slow
def test_a_save_that_is_given_up_is_told_and_the_next_one_tried(root: Path, whole: Path) -> None:
    fault = Fault(Instant("open", r"\.distcp$", number=3, last=4), error=errno.ENOSPC)
    values = ["train.checkpoint.keep=9", "train.checkpoint.retries=0"]
    with Start(root / "run.yaml", root / "given-up", 2, values, {1: fault}) as start:
        assert start.wait() == [0, 0], start.said()
        said = start.text()
    assert set(tiny.failed_saves(said)) == {3, 4}
    assert os.strerror(errno.ENOSPC) in said and "step-00000002" in said
    assert steps_there(root / "given-up") == [1, 2, 5, 6]
    state = orjson.loads((root / "given-up" / "checkpoints" / "step-00000005" / "state.json").read_bytes())
    assert state["parent"]["step"] == 2
    assert exact(root / "given-up") == exact(whole)
    assert weights_hash(root / "given-up") == weights_hash(whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not possible here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.slow
def test_training_goes_on_while_the_disk_is_full(root: Path, long_whole: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    values = [f"train.duration={MANY_STEPS} steps", "train.checkpoint.keep=99", "train.checkpoint.retries=0"]
    with Start(root / "run.yaml", run, 2, values) as start:
        until = time.monotonic() + 300
        while len(tiny.failed_saves(start.text())) < 2:
            assert start.running() and time.monotonic() < until, start.said()
            time.sleep(0.01)
        latest = int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
        assert_good(run, latest)
        subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
        assert start.wait() == [0, 0], start.said()
        said = start.text()
    assert "Traceback" not in start.said()
    assert "No space left on device" in said and f"step-{latest:08d}" in said
    there = steps_there(run)
    assert there[-1] == MANY_STEPS and len(there) < MANY_STEPS
    for step in there:
        assert_good(run, step)
    assert exact(run) == exact(long_whole)
    assert weights_hash(run) == weights_hash(long_whole)


# Two runs on one folder.


def test_the_second_of_two_runs_refuses_and_says_who_is_there(root: Path) -> None:
    values = ["train.duration=4000 steps", "train.checkpoint.every_steps=1000"]
    with Start(root / "run.yaml", root / "used", 2, values) as first:
        wait_for_a_step(first)
        with Start(root / "run.yaml", root / "used", 2, values) as second:
            assert second.wait() == [2, 2], second.said()
            assert f"process {first.processes[0].pid} on " in second.text()
        (root / "used" / "stop").touch()
        assert first.wait() == [75, 75], first.said()


def test_a_job_that_was_started_again_takes_over_from_ranks_that_were_cut_off(root: Path, whole: Path) -> None:
    """As after a node that the scheduler has given up, and that comes back when others have taken its place."""
    run = root / "taken-over"
    fault = Fault(Instant(function=UPDATE, number=3), touch=root / "now", stop=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    # Its host is another one, as far as can be seen from here: what runs there cannot be looked up.
    with Start(root / "run.yaml", run, 2, faults={0: fault}, variables=job, host="gone") as first:
        while not (root / "now").exists():
            assert first.running(), first.said()
            time.sleep(0.02)
        os.kill(first.processes[1].pid or 0, signal.SIGSTOP)  # which waits for the other
        with Start(root / "run.yaml", run, 2, variables={**job, "SLURM_RESTART_COUNT": "1"}) as second:
            assert second.wait() == [0, 0], second.said()
        before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
        for process in first.processes:
            os.kill(process.pid or 0, signal.SIGCONT)
        codes = first.wait()
        assert codes[0] == EXIT_SUPERSEDED and codes[1] not in (0, KILLED), first.said()
        # By then the one that has taken it over has given it back.
        assert re.search("lock was (taken over|removed).*attempt 2 takes the place of attempt 1", first.text())
    after = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
    assert {path: time for path, time in after.items() if path in before} == before
    assert steps_there(run) == steps_there(whole)
    assert exact(run) == exact(whole)
    assert weights_hash(run) == weights_hash(whole)
    assert read_metrics(run)[-1]["attempt"] == 2
