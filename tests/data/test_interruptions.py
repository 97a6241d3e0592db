"""What was committed stays: the stage killed, interrupted, out of disk, or without the right to write."""

import os
import random
import secrets
import signal
import subprocess
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import yaml

from pipeline.data.manifest import verify
from pipeline.data.preprocess import preprocess
from pipeline.data.workers import WorkerDied, Workers
from tests.data.runs import datasets, make_config, tree, write_jsonl, write_text
from tests.tiny import command

UNITS = 40


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    write_text(root / "text", 60, words=400)
    write_jsonl(root / "lines.jsonl", 400, seed=1, words=400)
    return root


def sources(corpus):
    return [
        {"name": "t", "paths": [f"{corpus}/text/**/*.txt"]},
        {"name": "j", "type": "jsonl", "paths": [f"{corpus}/lines.jsonl"]},
    ]


def config_of(root, corpus, **data):
    size = (corpus / "lines.jsonl").stat().st_size // UNITS
    return make_config(root, sources(corpus), preprocess={"workers": 2, "unit_bytes": size}, **data)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A run that nothing disturbed."""
    config = config_of(tmp_path_factory.mktemp("done"), corpus)
    preprocess(config)
    return config


@pytest.fixture
def run_file(corpus, tmp_path, done):
    """(config, run file) of a run with the tokenizer of `done`."""
    config = config_of(tmp_path, corpus, tokenizer={"path": str(done.data_dir / "tokenizer")})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return config, file


def start(file):
    return subprocess.Popen(
        command("preprocess", file), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def receipts(config):
    return sum(1 for _ in config.data_dir.glob("*/receipts/*/*.json"))


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.002)


def temporaries(config):
    return [path for path in config.data_dir.rglob("*") if path.name.endswith(".tmp")]


def gone(pids):
    """Wait until processes that are not our children have ended (a zombie has)."""

    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.01)


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_at_random_instants(run_file, done):
    """SIGKILL of the stage again and again, then left alone: the same bytes, and nothing lies around."""
    config, file = run_file
    seed = int(os.environ.get("KILL_SEED", secrets.randbits(32)))
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed)
    at = 0
    for _ in range(4):
        process = start(file)
        at = max(at, receipts(config)) + chance.randint(0, UNITS // 6)
        wait_for(lambda: receipts(config) >= at or receipts(config) == UNITS, process)  # noqa: B023
        time.sleep(chance.random() * 0.05)
        workers = children(process.pid)
        process.kill()
        process.wait()
        gone(workers)  # they notice that nobody is left to work for
    finished = subprocess.run(command("preprocess", file), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert datasets(config) == datasets(done)
    assert temporaries(config) == []
    assert verify(config.data_dir).problems == []


def test_interrupt_ends_the_workers(run_file, done):
    config, file = run_file
    process = start(file)
    wait_for(lambda: receipts(config) >= 2, process)
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    gone(workers)
    assert temporaries(config) == []
    assert 2 <= receipts(config) <= UNITS + 10
    preprocess(config)
    assert datasets(config) == datasets(done)


def test_interrupt_while_the_workers_start(run_file, done):
    config, file = run_file
    process = start(file)
    wait_for(lambda: children(process.pid), process)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert temporaries(config) == []


def test_a_worker_that_dies_is_reported_with_its_unit(run_file, done):
    config, file = run_file
    process = start(file)
    wait_for(lambda: receipts(config) >= 2, process)
    worker = next(pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(worker, signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert f"worker process {worker} died by SIGKILL" in said.replace("\n", " ")
    assert "while it held unit" in said.replace("\n", " ")
    assert "Traceback" not in said
    preprocess(config)
    assert datasets(config) == datasets(done)


@pytest.fixture
def small_disk(tmp_path):
    """mount(KiB, read_only) makes a small disk; skips where this process may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(options):
        known = (
            ["-o", f"remount,{options}", str(folder)]
            if mounted
            else ["-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        )
        result = subprocess.run(["mount", *known], capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"mounting a tmpfs is not possible here: {result.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(small_disk, corpus, done):
    """One message that names the folder, nothing half-written; with more space the same command goes on."""
    disk = small_disk("size=400k")
    config = config_of(disk, corpus, tokenizer={"path": str(done.data_dir / "tokenizer")})
    with pytest.raises(OSError, match="No space left on device") as error:
        preprocess(config)
    assert str(config.data_dir) in str(error.value.filename)
    assert temporaries(config) == []
    kept = {name for name in tree(config.data_dir) if "/receipts/" in name}
    assert 0 < len(kept) < UNITS
    small_disk("size=20m")
    report = preprocess(config)
    assert report.units_done == report.sources[0].units + report.sources[1].units - len(kept)
    assert datasets(config) == datasets(done)


def test_read_only_folder(small_disk, corpus, done):
    disk = small_disk("size=20m")
    config = config_of(disk, corpus, tokenizer={"path": str(done.data_dir / "tokenizer")})
    small_disk("ro")
    with pytest.raises(OSError, match="Read-only file system") as error:
        preprocess(config)
    assert str(disk) in str(error.value.filename)
    small_disk("rw")
    preprocess(config)
    small_disk("ro")
    assert preprocess(config).units_done == 0  # what is done can be used from there


def make_doubler(base):
    return lambda job, progress: doubled(job, progress, base)


def doubled(job, progress, base):
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "leave":
        os._exit(3)
    if job == "fail":
        raise OSError(28, "No space left on device", "somewhere")
    progress(1)
    return base + 2 * job


class TestWorkers:
    def test_results_and_progress(self):
        with Workers(make_doubler, (100,), 3) as workers:
            events = list(workers.run(list(range(20))))
        assert sorted((job, result) for job, _, result in events if result is not None) == [
            (job, 100 + 2 * job) for job in range(20)
        ]
        assert sum(amount for _, amount, _ in events if amount is not None) == 20

    @pytest.mark.parametrize(("job", "how"), [("die", "SIGKILL"), ("leave", "exit code 3")])
    def test_a_death_is_reported(self, job, how):
        with (
            pytest.raises(WorkerDied, match=f"died by {how}.*while it held {job}"),
            Workers(make_doubler, (0,), 2) as w,
        ):
            list(w.run([1, 2, job, 3]))

    def test_an_error_keeps_its_kind_and_path(self):
        with pytest.raises(OSError) as error, Workers(make_doubler, (0,), 1) as workers:
            list(workers.run(["fail"]))
        assert (error.value.errno, error.value.filename) == (28, "somewhere")

    def test_an_interrupt_between_two_starts_is_not_lost(self, monkeypatch):
        started = []
        real = SpawnProcess.start

        def interrupted(self):
            os.kill(os.getpid(), signal.SIGINT)
            real(self)
            started.append(self)

        monkeypatch.setattr(SpawnProcess, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Workers(make_doubler, (0,), 2)
        assert len(started) == 2  # they are all known when it comes, so that all of them are ended
        assert all(process.exitcode is not None for process in started)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()

    def test_workers_leave_interrupts_to_the_parent(self):
        with Workers(make_doubler, (0,), 2) as workers:
            for process in workers._processes.values():
                os.kill(process.pid, signal.SIGINT)
            assert len([result for _, _, result in workers.run(list(range(8))) if result is not None]) == 8
            for process in workers._processes.values():
                os.kill(process.pid, signal.SIGINT)
            assert len([result for _, _, result in workers.run(list(range(8))) if result is not None]) == 8

    def test_leaving_early_ends_the_processes(self):
        with Workers(make_doubler, (0,), 2) as workers:
            next(workers.run(list(range(1000))))
            processes = list(workers._processes.values())
        assert all(process.exitcode is not None for process in processes)
