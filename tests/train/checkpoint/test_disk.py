"""Disks that are full or read-only, for real: small tmpfs mounts (needs root; skipped elsewhere)."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline.common import storage
from pipeline.config.load import load
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.loop import trainer
from pipeline.train.monitor.loggers import retrying
from pipeline.train.run.folder import read_metrics
from pipeline.train.torch_compat.checkpoint_files import HashingWriter
from tests import tiny

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


def mount(folder: Path, options: str) -> bool:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    if not mount(folder, "size=3m"):
        pytest.skip("this machine does not let root mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


def file_of_a_run_on(tmp_path: Path, small_disk: Path, keep: int) -> Path:
    keys = {"run.dir": str(small_disk / "run"), "model.dim": 96, "model.layers": 1, "train.checkpoint.keep": keep}
    more = {"train.checkpoint.every_steps": 1, "train.checkpoint.retries": 0, "train.duration": "8 steps"}
    file = tiny.write_run(tmp_path, {**keys, **more})
    assert tiny.pipeline("preprocess", file).returncode == 0
    return file


@pytest.mark.guard
def test_on_a_full_disk_training_goes_on_and_only_the_last_save_ends_the_run(tmp_path: Path, small_disk: Path) -> None:
    file = file_of_a_run_on(tmp_path, small_disk, keep=9)
    done = tiny.pipeline("train", file)
    assert done.returncode == 1, done.stdout + done.stderr
    message = done.stderr.replace("\n", " ")
    assert "Traceback" not in message
    assert 8 in tiny.failed_saves(message), message
    run = small_disk / "run"
    checkpoints = Checkpoints.of_run(run)
    last = checkpoints.latest()
    assert last is not None and last.step < 7
    assert last.problems() == []
    assert not list(checkpoints.folder.glob("*.tmp"))
    # That of step 7 is known only when the last one has failed, too.
    lines = (done.stdout + done.stderr).splitlines()
    given_up = [line for line in lines if last.path.name in line and tiny.failed_saves(line) not in ([], [8])]
    assert len(given_up) == 8 - last.step - 1

    # With room again, the same command goes on.
    subprocess.run(["mount", "-o", "remount,size=60m", small_disk], check=True)
    done = tiny.pipeline("train", file)
    assert done.returncode == 0, done.stderr
    assert tiny.resumed_from(done.stdout) == last.step
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 9))


@pytest.mark.slow
def test_a_disk_that_has_room_again_gets_checkpoints_and_metrics_again(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Full to the last byte after step 3, so that metrics have no room either; freed after step 6."""
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    monkeypatch.setattr(retrying, "_PAUSE", 0.0)
    file = file_of_a_run_on(tmp_path, small_disk, keep=1)
    filler, original = small_disk / "filler", trainer.Trainer._read_numbers

    def read_numbers(self: trainer.Trainer) -> None:
        issued = self._issued
        original(self)
        step = None if issued is None else issued.data.step + 1
        if step == 3:
            self._saver.wait()
            with filler.open("wb", buffering=0) as out, suppress(OSError):
                while True:
                    out.write(bytes(512))
        if step == 6:
            self._saver.wait()
            filler.unlink()

    monkeypatch.setattr(trainer.Trainer, "_read_numbers", read_numbers)
    out = io.StringIO()
    trainer.train(load(file, ["train.metrics.tensorboard=true"]), Console(file=out, width=500))
    run = small_disk / "run"
    failed = tiny.failed_saves(out.getvalue())
    assert 4 in failed and 6 not in failed
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 9))
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) >= 8
    assert [checkpoint.step for checkpoint in Checkpoints.of_run(run).all()] == [8]
    jsonl = [text for text in caplog.messages if text.startswith("metrics.jsonl")]
    assert len(jsonl) == 2 and "No space left" in jsonl[0] and "0 rows" in jsonl[1]
    steps = set()
    # Each file by itself: of two of the same second, the reader of a folder takes `.10` before `.9`.
    for path in (run / "tensorboard").iterdir():
        events = EventAccumulator(str(path))
        events.Reload()
        steps |= {event.step for event in events.Scalars("loss")} if "loss" in events.Tags()["scalars"] else set()
    assert max(steps) == 8


@pytest.mark.parametrize("kibibytes", [100, 200, 300, 400, 500])
def test_wherever_the_disk_ends_the_message_is_one_of_a_full_disk(
    tmp_path: Path, small_disk: Path, kibibytes: int
) -> None:
    """torch's writer calls a full disk by other names, depending on where in the file it comes."""
    subprocess.run(["mount", "-o", f"remount,size={kibibytes}k", small_disk], check=True)
    writer = HashingWriter(small_disk / "checkpoint")
    with pytest.raises(CheckpointException) as failure:
        save({str(i): torch.randn(10_000) for i in range(20)}, storage_writer=writer, no_dist=True)
    cause = failure.value.failures[0][0]
    assert isinstance(cause, OSError) and cause.errno == errno.ENOSPC


def test_on_a_full_disk_a_run_notes_its_end_and_keeps_its_exit_code(small_disk: Path) -> None:
    """A process that can write nothing, not even what it prints."""
    script = """
import errno, os, sys, time
from pathlib import Path
from pipeline.cli.main import app, main
from pipeline.common.errors import MachineError
from pipeline.train.run.folder import open_run
run = Path(sys.argv[1])
def train(*_):
    with open_run(run) as folder, open(run / "filler", "wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(512))
        except OSError:
            folder.step = 7
            sys.stdout.buffer.write(b"x" * 3000)  # stays in the buffer until the end
            raise type("Full", (MachineError,), {"exit_code": 79})("no room")
app.command("now")(lambda: train())
sys.argv = ["pipeline", "now"]
main()
"""
    run = small_disk / "run"
    with (small_disk / "log").open("wb") as log:
        log.write(bytes(4096))  # a whole page: nothing of it is left for another byte
        log.flush()
        words = [sys.executable, "-c", script, run]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(words, stdout=log, stderr=log, env=buffered, check=False)
    end = orjson.loads((run / "exit.json").read_bytes())
    assert (end["code"], end["reason"], end["step"]) == (79, "no room", 7)
    assert done.returncode == 79


def test_room_that_was_kept_can_be_written_on_a_full_disk(small_disk: Path) -> None:
    reserved = storage.Reserved(small_disk / "reserved", 4096)
    with (small_disk / "log").open("ab", buffering=0) as log:
        storage.keep_room(log.fileno())
        assert log.tell() == 0 and (small_disk / "log").stat().st_size == 0
        with (small_disk / "filler").open("wb", buffering=0) as out, suppress(OSError):
            while True:
                out.write(bytes(512))
        assert storage.cannot_write(small_disk) == os.strerror(errno.ENOSPC)
        assert log.write(bytes(60_000)) == 60_000
        reserved.write(b"old")
        reserved.become(small_disk / "new", b'{"a": 1}')
        with pytest.raises(OSError, match="No space"):
            reserved.write(b"again")
    assert orjson.loads((small_disk / "new").read_bytes()) == {"a": 1}
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "log", "new"]


@pytest.mark.slow
def test_a_read_only_run_folder_is_named(tmp_path: Path, small_disk: Path) -> None:
    file = tiny.write_run(tmp_path, {"run.dir": str(small_disk / "run")})
    assert tiny.pipeline("preprocess", file).returncode == 0
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for command in ("train", "run"):
        done = tiny.pipeline(command, file)
        assert done.returncode == 1
        message = " ".join(done.stderr.split())
        assert f"run.dir {small_disk / 'run'} cannot be written to" in message and "Traceback" not in message
