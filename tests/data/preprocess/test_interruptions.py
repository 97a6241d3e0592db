"""What was committed stays: the stage killed or interrupted at any instant, or with its workers dying one by one."""

import os
import random
import secrets
import signal
import subprocess
import sys
import time

import pytest

from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from tests.data import mixed
from tests.data.runs import datasets, make_config
from tests.data.stage import (
    children,
    gone,
    left_behind,
    on_terminal,
    receipts,
    start,
    wait_for,
    workers,
    write_run_file,
)
from tests.waiting import runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return mixed.write(tmp_path_factory.mktemp("corpus"), scale=4)


def config_of(root, corpus, shuffle="unit", **data):
    settings = {"workers": 2, "unit_bytes": 16_000, "max_document_bytes": 3000, "max_error_rate": 0.1}
    return make_config(root, mixed.sources(corpus), preprocess={**settings, "shuffle": shuffle}, **data)


@pytest.fixture(scope="module", params=["unit"])
def done(request, corpus, tmp_path_factory):
    """A run that nothing disturbed."""
    config = config_of(tmp_path_factory.mktemp("done"), corpus, request.param)
    preprocess(config)
    return config


@pytest.fixture
def run(corpus, tmp_path, done):
    """(config, run file) of a run with the tokenizer of `done`."""
    tokenizer = {"path": str(done.data_dir / "tokenizer")}
    config = config_of(tmp_path, corpus, done.data.preprocess.shuffle, tokenizer=tokenizer)
    return config, write_run_file(config, tmp_path / "run.yaml")


def finished(process):
    """Wait for the command; what it said."""
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    return said


def check_finished(config, done):
    """The same bytes, and nothing lies around."""
    assert datasets(config) == datasets(done)
    assert verify(config.data_dir).problems == []
    assert left_behind(config) == []


def kill_at_random(run, done, kills):
    """SIGKILL of workers and of the command itself, again and again from the beginning, and each time to the end."""
    config, file = run
    seed = int(os.environ.get("KILL_SEED", secrets.randbits(32)))
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed)
    links = receipts(done)
    while kills > 0:
        process = start(file)
        for count in sorted(chance.randint(0, links) for _ in range(min(kills, 10))):
            while process.poll() is None and receipts(config) < count:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.1)
            if process.poll() is not None:
                break  # nothing is left to be disturbed
            kills -= 1
            held = workers(process.pid)
            if held and chance.random() < 0.5:
                os.kill(chance.choice(held), signal.SIGKILL)
            else:
                process.kill()
                process.communicate()
                process = start(file)
        said, _ = process.communicate(timeout=300)
        if process.returncode:  # one unit was held by a victim three times
            assert process.returncode == 1
            assert "(3 attempts)" in said
            said = finished(start(file))
        assert "Traceback" not in said
        check_finished(config, done)
        for path in sorted(config.data_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_killed_at_10_random_instants(run, done):
    kill_at_random(run, done, 10)


@pytest.mark.slow
@pytest.mark.parametrize("done", ["unit", "global"], indirect=True)
def test_killed_at_50_random_instants(run, done):
    kill_at_random(run, done, 50)


@pytest.mark.guard
def test_interrupt_ends_the_workers(run, done):
    config, file = run
    process = start(file)
    wait_for(lambda: receipts(config) >= 2, process)
    started = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    gone(started)
    assert left_behind(config) == []
    assert 2 <= receipts(config) < receipts(done)
    preprocess(config)
    check_finished(config, done)


def test_interrupt_while_the_workers_start(run):
    config, file = run
    process = start(file)
    wait_for(lambda: children(process.pid), process)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert left_behind(config) == []


def test_a_worker_that_dies_is_replaced_and_its_unit_done(run, done):
    config, file = run
    process = start(file)
    wait_for(lambda: receipts(config) >= 2, process)
    worker = workers(process.pid)[0]
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: len([pid for pid in workers(process.pid) if runs(pid)]) == 2, process)
    said = finished(process).replace("\n", " ")
    assert f"worker process {worker} died by SIGKILL (sent by the system when memory runs out" in said
    assert "while it held unit" in said
    assert "attempt 1 of 3, it will be tried again" in said
    check_finished(config, done)


@pytest.mark.slow
def test_the_lease_of_a_worker_that_died_behind_its_receipt_goes(run, done):
    """All is done, so that nobody takes the lease any more."""
    config, file = run
    finished(start(file))
    (folder,) = config.data_dir.glob("zst/leases/*")
    lease = folder / "00000000.json"
    script = "import sys; from pathlib import Path; from pipeline.data.work.leases import LeaseWatch, take; "
    script += "take(Path(sys.argv[1]), 0, LeaseWatch())"

    subprocess.run([sys.executable, "-c", script, str(folder.parents[1])], check=True)
    assert lease.exists()
    preprocess(config)
    check_finished(config, done)


@pytest.mark.slow
def test_a_worker_that_dies_while_documents_are_counted(corpus, done, tmp_path):
    """The splits are numbers of documents, which are looked for first."""
    splits = {"heldout": "30 documents"}
    tokenizer = {"path": str(done.data_dir / "tokenizer")}
    expected = config_of(tmp_path / "expected", corpus, tokenizer=tokenizer, splits=splits)
    preprocess(expected)
    config = config_of(tmp_path, corpus, tokenizer=tokenizer, splits=splits)
    process = start(write_run_file(config, tmp_path / "run.yaml"))
    wait_for(lambda: workers(process.pid), process)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    said = finished(process).replace("\n", " ")
    assert "died by SIGKILL" in said
    assert "; attempt 1 of 3" in said
    assert "attempt 2" not in said
    check_finished(config, expected)


@pytest.mark.guard
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("hangup")
def test_a_signal_ends_it_with_a_word(run, number):
    """As a scheduler or a closed terminal sends it: the exit code says that it may be started again."""
    config, file = run
    process = start(file)
    wait_for(lambda: receipts(config) >= 2, process)
    held = workers(process.pid)
    if number == signal.SIGHUP:
        os.killpg(process.pid, number)  # the workers get it, too
    else:
        process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 75, said
    assert f"stopped: received {number.name}; what was committed is kept" in said.replace("\n", " ")
    gone(held)
    assert left_behind(config) == []


@pytest.mark.guard
@pytest.mark.parametrize("code", [75, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("hangup")
def test_a_terminal_that_is_gone_is_no_error(run, done, code):
    """Each write to it fails. A job whose shell does not send it SIGHUP, after `disown`, goes on to its end."""
    config, file = run
    if code == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with on_terminal(file, lambda: receipts(config) >= 2) as process:
        assert process.wait(timeout=300) == code
    assert left_behind(config) == []
    if code == 0:
        check_finished(config, done)
