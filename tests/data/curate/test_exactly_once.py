"""Decisions are the same bytes whatever happens: kills in all passes, two commands at a time, full disks, damage."""

import errno
import os
import random
import secrets
import signal
import subprocess
import time

import pytest

from pipeline.data.curate.stage import curate
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.provenance.excerpts import ExcerptReader
from tests import tiers
from tests.data.curate.runs import curate_config, results, write_corpus
from tests.data.stage import children, left_behind, write_run_file
from tests.tiny import command

pytestmark = pytest.mark.guard

PASSES = {
    "measure": "/measured/",
    "contamination": "/contamination/",
    "match": "/edges/",
    "join": "/members/",
    "shingles": "/shingles/",
    "rank": "/rank/",
    "choose": "/chosen/",
    "kept": "/kept/",
    "lines": "/lines/",
    "decide": "/verdicts/",
}
"""Part of the path of what each pass writes."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), 200)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A run that nothing disturbed."""
    config = curate_config(tmp_path_factory.mktemp("done"), corpus)
    curate(config, read_texts=ExcerptReader(config.data.curate))
    return config


def start(file):
    """The command, in a process group of its own."""
    return subprocess.Popen(
        command("curate", file), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def files(config):
    """Number of committed files."""
    return sum(path.is_file() and path.suffix != ".tmp" for path in config.data_dir.rglob("*"))


def check_finished(config, done):
    assert results(config) == results(done)
    assert left_behind(config) == []


def end(process):
    said, _ = process.communicate(timeout=300)
    assert "Traceback" not in said
    return process.returncode, said


@pytest.mark.parallel
@pytest.mark.parametrize("workers", tiers.first(1, [2, 1, 7], rest="slow"))
@pytest.mark.slow
def test_killed_at_random_points_of_all_passes(corpus, done, tmp_path, workers):
    """Workers or the whole command are killed; in the end the same command, or two at a time, finish."""
    config = curate_config(tmp_path, corpus, workers=workers)
    file = write_run_file(config, tmp_path / "run.yaml")
    seed = int(os.environ.get("KILL_SEED", secrets.randbits(32)))
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed)
    total = files(done)
    for count in sorted(chance.randint(1, total) for _ in range(8)):
        processes = [start(file) for _ in range(chance.randint(1, 2))]
        while files(config) < count and any(process.poll() is None for process in processes):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        for process in processes:
            held = children(process.pid)
            if held and chance.random() < 0.5:
                os.kill(chance.choice(held), signal.SIGKILL)
            else:
                process.kill()
        for process in processes:
            process.communicate(timeout=300)
    last = [start(file), start(file)]
    assert [end(process)[0] for process in last] == [0, 0]
    assert end(start(file))[0] == 0
    check_finished(config, done)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers.first(1, PASSES, rest="slow"))
def test_full_disk_in_a_pass(corpus, done, tmp_path, name):
    """The pass ends with one error and leaves nothing half-written; the same call goes on from there."""
    config = curate_config(tmp_path, corpus)
    with pytest.MonkeyPatch.context() as patch:
        write = HashedFile.write

        def full(self, data):
            if PASSES[name] in str(self.final) and len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.final))
            write(self, data)

        patch.setattr(HashedFile, "write", full)
        with pytest.raises(OSError, match="No space left") as caught:
            curate(config, read_texts=ExcerptReader(config.data.curate))
        assert PASSES[name] in str(caught.value.filename)
    assert left_behind(config) == []
    curate(config, read_texts=ExcerptReader(config.data.curate))
    check_finished(config, done)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers.first(1, PASSES, rest="slow"))
def test_a_flipped_byte_in_a_file_of_a_pass(corpus, done, tmp_path, name, capsys):
    """A run that needs the file finds the damage, names file and pass, and makes it again."""
    config = curate_config(tmp_path, corpus)
    curate(config, read_texts=ExcerptReader(config.data.curate))
    for path in sorted(config.data_dir.rglob("*")):
        inside = f"/{path.relative_to(config.data_dir)}"
        if path.is_file() and PASSES[name] in inside and path.stat().st_size > 8 and path.suffix != ".json":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
    later = list(PASSES)[list(PASSES).index(name) + 1 :]
    for path in config.data_dir.rglob("*.json"):  # what comes behind is to be made again
        receipt = any(path.name.startswith(each) or f"receipts/{each}/" in str(path) for each in later)
        if receipt or ("/decisions/" in str(path) and name != "decide"):
            path.unlink()
    capsys.readouterr()
    if name == "decide":
        return  # `test_stage` has what reads verdicts
    curate(config, read_texts=ExcerptReader(config.data.curate))
    assert f"pass '{name}'" in capsys.readouterr().out.replace("\n", " ")
    check_finished(config, done)
