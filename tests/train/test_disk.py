"""Disks that are full or read-only, for real: small tmpfs mounts (needs root; skipped elsewhere)."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.parallel.compat import HashingWriter
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


def test_a_full_disk_during_a_save_is_one_message_and_the_last_checkpoint_stays(
    tmp_path: Path, small_disk: Path
) -> None:
    file = tiny.write_run(
        tmp_path, {"run.dir": str(small_disk / "run"), "model.dim": 96, "train.checkpoint.keep": 9, "model.layers": 1}
    )
    assert tiny.pipeline("preprocess", file).returncode == 0
    done = tiny.pipeline("train", file, "train.checkpoint.every_steps=1", "train.duration=8 steps")
    assert done.returncode == 1, done.stdout + done.stderr
    message = done.stderr.replace("\n", " ")
    assert "Traceback" not in message
    assert "could not be saved" in message and "is still good" in message, message
    checkpoints = Checkpoints(small_disk / "run" / "checkpoints")
    last = checkpoints.latest()
    assert last is not None
    assert last.problems() == []
    assert not list(checkpoints.folder.glob("*.tmp"))

    # With room again, the same command goes on.
    subprocess.run(["mount", "-o", "remount,size=60m", small_disk], check=True)
    done = tiny.pipeline("train", file, "train.checkpoint.every_steps=1", "train.duration=8 steps")
    assert done.returncode == 0, done.stderr
    assert f"going on from {last.path.name}" in done.stdout


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


def test_a_read_only_run_folder_is_named(tmp_path: Path, small_disk: Path) -> None:
    file = tiny.write_run(tmp_path, {"run.dir": str(small_disk / "run")})
    assert tiny.pipeline("preprocess", file).returncode == 0
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for command in ("train", "run"):
        done = tiny.pipeline(command, file)
        assert done.returncode == 1
        message = " ".join(done.stderr.split())
        assert f"run.dir {small_disk / 'run'} cannot be written to" in message and "Traceback" not in message
