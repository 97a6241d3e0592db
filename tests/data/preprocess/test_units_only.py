"""`preprocess --units`: commands that share the units and finish nothing, and the plain one that finishes for them."""

import os
import re
import signal

import pytest

from pipeline.data.datasets.files import MANIFEST_FILE
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.work.leases import Lease, LeaseWatch, take
from pipeline.data.work.receipts import Receipts
from tests.data import mixed
from tests.data.runs import datasets, make_config
from tests.data.stage import gone, left_behind, receipts, start, wait_for, workers, write_run_file

pytestmark = pytest.mark.guard


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return mixed.write(tmp_path_factory.mktemp("corpus"), scale=4)


def config_of(root, corpus, shuffle, **data):
    settings = {"workers": 1, "unit_bytes": 16_000, "max_error_rate": 0.1, "shuffle": shuffle}
    return make_config(root, mixed.sources(corpus), preprocess=settings, **data)


@pytest.fixture(scope="module", params=["unit"])
def done(request, corpus, tmp_path_factory):
    """A run of one plain command."""
    config = config_of(tmp_path_factory.mktemp("done"), corpus, request.param)
    preprocess(config)
    return config


@pytest.fixture
def run(corpus, tmp_path, done):
    """(config, run file) of a run that trains its own tokenizer."""
    config = config_of(tmp_path, corpus, done.data.preprocess.shuffle)
    return config, write_run_file(config, tmp_path / "run.yaml")


def counts(said):
    """Units that a command made, and those that others held when it left."""
    text = said.replace("\n", " ")
    made = re.search(r"([\d,]+) units? made", text)
    held = re.search(r"([\d,]+) (?:is|are) held by others; `pipeline preprocess` without", text)
    assert (held is None) == ("all units are complete" in text), said
    return tuple(int(found[1].replace(",", "")) if found else 0 for found in (made, held))


def finished(process):
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    return said


def manifests(config):
    return list(config.data_dir.glob(f"*/*/{MANIFEST_FILE}"))


def check_finished(config, done):
    assert datasets(config) == datasets(done)
    assert verify(config.data_dir).problems == []
    assert left_behind(config) == []


@pytest.mark.slow
@pytest.mark.parametrize("done", ["unit", pytest.param("global", marks=pytest.mark.slow)], indirect=True)
def test_three_share_the_units_and_a_plain_one_finishes(run, done):
    config, file = run
    said = [finished(process) for process in [start(file, "--units") for _ in range(3)]]
    assert sum("training the tokenizer" in text for text in said) == 1
    assert manifests(config) == []
    made = sum(counts(text)[0] for text in said)
    links = receipts(config)  # none of a second pass is among them
    assert 0 < made <= links

    finish = finished(start(file))
    assert "tokenizing" not in finish  # nothing was missing
    assert "wrote the datasets: " in finish and "missing or damaged" not in finish
    assert ("shuffling" in finish) == (done.data.preprocess.shuffle == "global")
    check_finished(config, done)
    assert counts(finished(start(file, "--units"))) == (0, 0)
    check_finished(config, done)


@pytest.mark.slow
def test_units_that_others_hold_are_left_to_them(run, done):
    config, file = run
    (config.data_dir / "zst").mkdir(parents=True)
    with take(config.data_dir / "zst", 0, LeaseWatch()) as lease:
        assert isinstance(lease, Lease)
        said = finished(start(file, "--units"))
    assert counts(said)[1] == 1
    assert "waiting" not in said
    assert manifests(config) == []
    assert not list(Receipts(config.data_dir / "zst").of(0))
    assert counts(finished(start(file, "--units"))) == (1, 0)
    finished(start(file))
    check_finished(config, done)


def test_one_is_killed_and_another_takes_its_units(run, done):
    config, file = run
    first, second = start(file, "--units"), start(file, "--units")
    wait_for(lambda: receipts(config) >= receipts(done) // 4, first)
    held = workers(first.pid)
    os.killpg(first.pid, signal.SIGKILL)  # as the end of a task does
    gone(held)
    first.communicate()
    assert counts(finished(second))[1] == 0
    assert "tokenizing" not in finished(start(file))
    check_finished(config, done)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_signal_ends_it_and_keeps_what_was_committed(run, done, number):
    config, file = run
    process = start(file, "--units")
    wait_for(lambda: receipts(config) >= 2, process)
    held = workers(process.pid)
    process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 75, said
    assert f"stopped: received {number.name}; " in said.replace("\n", " ")
    gone(held)
    assert left_behind(config) == []
    before = receipts(config)
    assert 2 <= before < receipts(done)
    finished(start(file, "--units"))
    assert "tokenizing" not in finished(start(file))
    check_finished(config, done)


@pytest.mark.slow
def test_a_unit_that_fails_again_and_again_is_told(run, done):
    """The units of the others are made; and what was in the way is mended before the end."""
    config, file = run
    (config.data_dir / "text").mkdir(parents=True)
    (config.data_dir / "text" / "train").touch()  # a file where its folder has to be
    process = start(file, "--units")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "(3 attempts)" in said
    assert "text cannot be finished" in said.replace("\n", " ")
    (config.data_dir / "text" / "train").unlink()
    assert counts(finished(start(file, "--units")))[1] == 0
    finished(start(file))
    check_finished(config, done)
