"""Several commands started on one data folder: they share the units, and take over what a killed one held."""

import contextlib
import os
import signal
import threading
import time

import pytest

from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
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


@pytest.fixture(scope="module", params=["unit", "global"])
def done(request, corpus, tmp_path_factory):
    config = config_of(tmp_path_factory.mktemp("done"), corpus, request.param)
    preprocess(config)
    return config


@pytest.fixture
def run(corpus, tmp_path, done):
    """(config, run file) of a run that trains its own tokenizer."""
    config = config_of(tmp_path, corpus, done.data.preprocess.shuffle)
    return config, write_run_file(config, tmp_path / "run.yaml")


class Watched:
    """Sees every receipt that is written, also those that replace another."""

    def __init__(self, config):
        self._config = config
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.seen = set()

    def _look(self):
        while not self._end.wait(0.005):
            for path in self._config.data_dir.glob("*/receipts/**/*.json"):
                with contextlib.suppress(FileNotFoundError):
                    self.seen.add((str(path), path.stat().st_ino, path.stat().st_mtime_ns))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


@pytest.mark.parametrize(
    ("done", "count"),
    [*(pytest.param("unit", count, marks=pytest.mark.slow) for count in (2, 3)), ("global", 2)],
    indirect=["done"],
)
@pytest.mark.slow
def test_started_at_once(run, done, count):
    config, file = run
    with Watched(config) as watched:
        processes = [start(file) for _ in range(count)]
        said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, said
    assert datasets(config) == datasets(done)
    assert verify(config.data_dir).problems == []
    assert left_behind(config) == []
    links = receipts(config)
    assert links <= len(watched.seen) <= links + 2 * count  # each was made once, but for a rare race
    assert not any("Traceback" in text for text in said), said


@pytest.mark.parametrize("done", ["unit"], indirect=True)
@pytest.mark.slow
def test_one_is_killed_and_the_other_does_its_units(run, done):
    config, file = run
    first, second = start(file), start(file)
    wait_for(lambda: receipts(config) >= receipts(done) // 4, first)
    held = workers(first.pid)
    os.killpg(first.pid, signal.SIGKILL)  # as the end of a job does
    killed = time.monotonic()
    gone(held)
    said, _ = second.communicate(timeout=100)  # far less than the patience with other machines
    assert second.returncode == 0, said
    assert time.monotonic() - killed < 60
    first.communicate()
    assert datasets(config) == datasets(done)
    assert verify(config.data_dir).problems == []
    assert left_behind(config) == []
