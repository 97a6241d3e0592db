"""What `--status` says, from folders whose receipts, plans and leases are written here by hand."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from pipeline.common import process_identity, storage
from pipeline.config import Config
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE, receipt_path
from pipeline.data.preprocess.status import print_status, read_state
from pipeline.data.work.leases import LeaseWatch, lease_path, take

SIZE = 1000
"""Bytes of every unit."""
ENGINE = "gigatoken 0.10.0"


def config_of(root, *names):
    return Config.model_validate(
        {
            "run": {"dir": str(root / "run")},
            "tokenizer": {"train": {"vocab_size": 400}},
            "data": {
                "dir": str(root / "data"),
                "sources": [{"name": name, "paths": [f"{root}/{name}/*.txt"]} for name in names],
            },
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": "1 steps", "sequence_length": 8},
        }
    )


def write_plan(folder, units, age=0.0):
    folder.mkdir(parents=True)
    plan = {
        "config_hash": "abc",
        "settings": {},
        "splits": ["train", "heldout"],
        "files": [["a.txt", "/a.txt", SIZE * units]],
        "units": [
            [[0, unit * SIZE, unit * SIZE + 400], [0, unit * SIZE + 400, (unit + 1) * SIZE]] for unit in range(units)
        ],
    }
    storage.put_json(folder / "plan.json", plan)
    os.utime(folder / "plan.json", (time.time() - age,) * 2)


def write_receipt(folder, unit, link=0, age=0.0, **values):
    """A receipt of 10 training and 1 held-out documents of 100 and 7 tokens."""

    def split(documents, tokens):
        file = {"size": 10, "xxh3": "00" * 8}
        files = dict.fromkeys(("bin", "idx", "prov"), file)
        return {"documents": documents, "tokens": tokens, "text_bytes": 5 * tokens, "files": files}

    receipt = {
        "unit": unit,
        "link": link,
        "last": True,
        "start": [0, -1, 0, 0],
        "next": None,
        "input": {"hash": "00", "stat": "00", "read": SIZE},
        "config_hash": "abc",
        "engine": ENGINE,
        "pieces": {"0": [12, 12]},
        "records": 12,
        "rejected": {"empty": 1},
        "checked": 3,
        "splits": {"train": split(10, 100), "heldout": split(1, 7)},
    } | values
    path = receipt_path(folder, unit, link)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(receipt))
    os.utime(path, (time.time() - age,) * 2)
    return path


def write_lease(folder, unit, beat_age=0.0, **values):
    """A lease of this process, but for what is given."""
    lease = take(folder, unit, LeaseWatch())
    path = lease_path(folder, unit)
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | values))
    os.utime(path, (time.time() - beat_age,) * 2)
    return lease


def shown(config, width=200, terminal=False):
    text = io.StringIO()
    print_status(Console(file=text, width=width, force_terminal=terminal, no_color=True), config, "my.yaml")
    return text.getvalue()


def snapshot(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in folder.rglob("*")}


def test_not_begun(tmp_path):
    config = config_of(tmp_path, "sea", "land")
    assert [(state.name, state.state, state.units) for state in read_state(config)] == [
        ("sea", "not begun", 0),
        ("land", "not begun", 0),
    ]
    said = shown(config)
    assert "tokenizer: not there yet" in said
    assert "no process works on it; run `pipeline preprocess my.yaml` to start" in said
    assert not (tmp_path / "data").exists()


def test_counts(tmp_path):
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 10, age=1000)
    for unit in range(4):
        write_receipt(folder, unit, age=500)
    write_receipt(folder, 7, age=300, rejected={"empty": 2, "not JSON": 3}, engine="tokenizers 0.23.3")
    [state] = read_state(config)
    assert (state.state, state.units, state.done, state.in_work, state.failed) == ("stopped", 10, 5, 0, 0)
    assert (state.bytes, state.bytes_done) == (10 * SIZE, 5 * SIZE)
    assert (state.documents, state.tokens, state.records) == (55, 535, 60)
    assert vars(state.splits["heldout"]) == {"documents": 5, "tokens": 35, "text_bytes": 175, "trained_tokens": None}
    assert state.rejected == {"empty": 6, "not JSON": 3}
    assert state.engines == {ENGINE: 4, "tokenizers 0.23.3": 1}
    assert state.rate == pytest.approx(5 * SIZE / 700, rel=0.05)  # from the plan to the last receipt
    assert state.eta_s is None
    before = snapshot(config.data_dir)
    said = shown(config)
    assert snapshot(config.data_dir) == before
    assert "sea: stopped; 5 of 10 units done; 5.0 kB of 10.0 kB (50 %)" in said
    assert "train: 50 documents, 500 tokens" in said
    assert "rejected: 9 of 60 records: 6 empty, 3 not JSON" in said
    assert "no process works on it; run `pipeline preprocess my.yaml` to resume" in said


def test_links(tmp_path):
    """A unit is done when its links are there without a gap and the last one says so."""
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 4)
    third = {"input": {"hash": "", "stat": "", "read": 300}}
    for link in range(3):
        write_receipt(folder, 0, link, last=link == 2, **third)
        write_receipt(folder, 1, link, last=False, **third)
        if link != 1:
            write_receipt(folder, 2, link, last=link == 2, **third)
    write_receipt(folder, 0, 3, **third)  # behind the last: not of this unit any more
    [state] = read_state(config)
    assert (state.done, state.bytes_done) == (1, SIZE + 900 + 300)
    assert state.documents == 11 * (3 + 3 + 1)


def test_who_works(tmp_path):
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 10, age=1000)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    now = time.time()
    # Here for 100 s: two units are done and 500 bytes are on their way.
    write_receipt(folder, 0, age=60)
    write_receipt(folder, 1, age=20)
    write_receipt(folder, 9, age=900)  # by a command before
    write_lease(folder, 2, began=now - 100, since=now - 20, done=400)
    write_lease(folder, 3, began=now - 90, since=now - 60, done=100)
    write_lease(folder, 4, pid=gone.pid, done=900)
    write_lease(folder, 5, beat_age=500, boot="far", host="node7", done=300)
    write_lease(folder, 6, beat_age=5, boot="far", host="node8", pid=77, began=now - 50, since=now - 10, done=0)
    write_lease(folder, 1, done=SIZE)  # committed, and about to be given back
    lease_path(folder, 7).write_bytes(b"")
    [state] = read_state(config)
    assert {worker.what: worker.state for worker in state.workers} == {
        1: "works",
        2: "works",
        3: "works",
        4: "gone",
        5: "silent",
        6: "works",
    }
    assert (state.state, state.done, state.in_work) == ("working", 3, 3)
    assert state.bytes_done == 3 * SIZE + 500
    assert state.rate == pytest.approx((2 * SIZE + 500) / 100, rel=0.05)
    assert state.eta_s == pytest.approx((10 * SIZE - state.bytes_done) / state.rate)
    said = shown(config)
    assert f"process {os.getpid()} on {socket.gethostname()}: unit 2, 400 B done, for 20 s" in said
    assert "process 77 on node8: unit 6" in said
    assert "on node7: unit 5" in said and "it is silent; its unit will be taken over\n" in said
    assert "pipeline preprocess" not in said


def test_a_stopped_worker(tmp_path):
    """It has all of its unit but the receipt: no time is left to be estimated, and what helps is said."""
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 1, age=1000)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        worker.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        started = process_identity.process(worker.pid)[1]
        write_lease(folder, 0, beat_age=30, pid=worker.pid, started=started, done=SIZE)
        [state] = read_state(config)
        said = shown(config)
    finally:
        worker.kill()
        worker.wait()
    assert (state.state, state.in_work, state.eta_s, state.workers[0].state) == ("stopped", 0, None, "stopped")
    assert " left" not in said
    assert f"process {worker.pid} on {socket.gethostname()}: unit 0" in said
    assert (
        "last sign of life 30 s ago; it is stopped; its unit will be taken over by the next command, 2 min after"
        in said
    )
    assert f"`kill -CONT {worker.pid}` continues it" in said


def test_rate_of_a_long_run(tmp_path):
    """Of two processes that both make a unit in 100 s, offset by 50: the truth is 20 bytes a second."""
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 200, age=5000)
    now = time.time()
    for number in range(98):
        write_receipt(folder, number, age=25 + 50 * number)
    write_lease(folder, 150, began=now - 4900, since=now - 25, done=250)
    write_lease(folder, 151, began=now - 4900, since=now - 75, done=750)
    [state] = read_state(config)
    assert state.rate == pytest.approx(20, rel=0.05)


def test_a_source_that_waits_for_another(tmp_path):
    config = config_of(tmp_path, "sea", "land")
    for name in ("sea", "land"):
        write_plan(config.data_dir / name, 10, age=100)
    now = time.time()
    with write_lease(config.data_dir / "sea", 3, began=now - 10, since=now - 10, done=500):
        assert [state.state for state in read_state(config)] == ["working", "waiting"]
        assert re.search("all sources: 50 B/s, [67] min left", shown(config))
    assert [state.state for state in read_state(config)] == ["stopped", "stopped"]


def test_failures(tmp_path):
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 10)
    write_receipt(folder, 1)
    journal = storage.JsonLines(folder / "failures.jsonl")
    for unit, attempts in ((0, 3), (1, 2), (2, 1), (3, 3), (99, 3)):
        for attempt in range(1, attempts + 1):
            how = f"died by SIGKILL, {attempt}"
            journal.write(
                {"unit": unit, "attempt": attempt, "how": how, "host": "n", "pid": 5, "time": time.time() - 90}
            )
    journal.write({"unit": "no"})
    journal.close()
    with (folder / "failures.jsonl").open("ab") as file:
        file.write(b'{"unit": 4, "att')
    with write_lease(folder, 3):
        [state] = read_state(config)
        said = shown(config)
    assert "units in work: 1, failed: 1" in said
    assert [(f.unit, f.attempts, f.how, f.is_final) for f in state.failures] == [
        (0, 3, "died by SIGKILL, 3", True),
        (2, 1, "died by SIGKILL, 1", False),
        (3, 3, "died by SIGKILL, 3", True),
    ]
    assert state.failed == 1  # unit 3 is being tried again
    said = shown(config)
    assert "unit 0 failed, attempt 3 of 3, 2 min ago (process 5 on n): died by SIGKILL, 3" in said
    assert "units that failed are tried again" in said


def test_a_condemned_engine(tmp_path):
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 3)
    write_receipt(folder, 0)
    write_receipt(folder, 1, engine="tokenizers 0.23.3")
    (config.data_dir / "tokenizer").mkdir()
    storage.put_json(config.data_dir / "tokenizer" / "condemned.json", {ENGINE: "document r5, token 7"})
    [state] = read_state(config)
    assert (state.done, state.redo, state.tokens, state.bytes_done) == (1, 1, 107, SIZE)
    said = shown(config)
    assert f"{ENGINE} gave other ids" in said and "document r5, token 7" in said
    assert "to be made again: 1" in said


@pytest.mark.parametrize("damage", [b"", b"[", b"[]", b"null", b"7", b'"x"', b"[" * 10**5, b"\xff\xfe", b"{}"])
def test_damaged_receipts(tmp_path, damage):
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 4)
    write_receipt(folder, 0).write_bytes(damage)
    write_receipt(folder, 1)
    [state] = read_state(config)
    assert (state.done, state.unreadable, state.tokens) == (1, 1, 107)
    assert "1 receipt cannot be read" in shown(config)


def test_hostile_receipts(tmp_path):
    """Values of other types and of other plans count for nothing."""
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 20)
    for unit, values in enumerate(
        [
            {"records": -1},
            {"records": "many"},
            {"records": 1e300},
            {"records": True},
            {"rejected": [1]},
            {"rejected": {"empty": None}},
            {"splits": {"train": 7}},
            {"splits": {"train": {"documents": 1, "tokens": 2**80, "text_bytes": 0}}},
            {"input": "x"},
            {"unit": 3},
            {"link": 1},
        ]
    ):
        path = write_receipt(folder, unit)
        text = path.read_bytes()
        for name, value in values.items():
            # Python's JSON writes numbers that are too large for 64 bits.
            text = json.dumps(orjson.loads(text) | {name: value}).encode()
        path.write_bytes(text)
    write_receipt(folder, 12, config_hash="of another plan")
    write_receipt(folder, 500)
    (folder / "receipts" / "00000" / "00000013.rejected.jsonl").write_bytes(b"{}\n")
    (folder / "receipts" / "00000" / ".00000014.json.host.1.ab.tmp").write_bytes(b"{}")
    (folder / "receipts" / "00000" / "00000015.json").mkdir()
    (folder / "receipts" / "README").write_text("hello")
    write_receipt(folder, 19)
    [state] = read_state(config)
    assert (state.done, state.tokens, state.records) == (1, 107, 12)
    assert state.unreadable == 13


@pytest.mark.parametrize("units", ["7", '[["a"]]', "[[[0, 9, 3]]]", "[[[0, 1.5, 3]]]"])
def test_a_damaged_plan(tmp_path, units):
    config = config_of(tmp_path, "sea", "land")
    folder = config.data_dir / "sea"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{")
    assert read_state(config)[0].state == "damaged"
    (folder / "plan.json").write_text(
        f'{{"config_hash": "a", "settings": {{}}, "splits": [], "files": [], "units": {units}}}'
    )
    sea, land = read_state(config)
    assert (sea.state, land.state) == ("damaged", "not begun")
    assert f"{folder / 'plan.json'} is damaged" in shown(config)


@pytest.mark.parametrize("splits", ["null", "3", "[3]"])
def test_a_plan_whose_splits_are_none(tmp_path, splits):
    config = config_of(tmp_path, "sea")
    (folder := config.data_dir / "sea").mkdir(parents=True)
    plan = f'"config_hash": "a", "settings": {{}}, "splits": {splits}, "files": [], "units": []'
    (folder / "plan.json").write_text(f"{{{plan}}}")
    (state,) = read_state(config)
    assert state.state == "damaged" and str(folder / "plan.json") in state.problem


def test_finished(tmp_path):
    config = config_of(tmp_path, "sea", "land")
    for name in ("sea", "land"):
        folder = config.data_dir / name
        write_plan(folder, 2)
        write_receipt(folder, 0)
        write_receipt(folder, 1)
    assert [state.state for state in read_state(config)] == ["tokenized", "tokenized"]
    said = shown(config)
    assert "to resume" in said
    assert "sea: tokenized, not finished; 2 of 2 units done" in said and "/s" not in said
    for name in ("sea", "land"):
        for split in ("train", "heldout"):
            (config.data_dir / name / split).mkdir()
            storage.put_json(config.data_dir / name / split / MANIFEST_FILE, {"config_hash": "a"})
            (config.data_dir / name / split / PARTS_FILE).touch()
    assert [state.state for state in read_state(config)] == ["finished", "finished"]
    said = shown(config)
    assert said.endswith("finished\n") and "/s" not in said
    shutil.rmtree(config.data_dir / "sea" / "receipts")
    assert [state.state for state in read_state(config)] == ["stopped", "finished"]


def test_the_tokenizer(tmp_path):
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "tokenizer"
    folder.mkdir(parents=True)
    with take(folder, "train", LeaseWatch()):
        said = shown(config)
        assert f"tokenizer: being made by process {os.getpid()} on" in said
        assert "pipeline preprocess" not in said
    storage.put_json(folder / "origin.json", {})
    assert "tokenizer: there" in shown(config)


def test_a_tokenizer_that_is_given(tmp_path):
    config = config_of(tmp_path, "sea")
    path = tmp_path / "t.json"
    given = config.tokenizer.model_copy(update={"train": None, "path": path})
    config = config.model_copy(update={"tokenizer": given})
    assert f"tokenizer: {path}, which does not exist\n" in shown(config)
    path.write_text("{}")
    assert f"tokenizer: {path}\n" in shown(config)


def test_before_there_is_a_plan(tmp_path):
    """Documents are counted, say."""
    config = config_of(tmp_path, "sea", "land")
    (config.data_dir / "sea").mkdir(parents=True)
    with take(config.data_dir / "sea", "counting", LeaseWatch()):
        assert [state.state for state in read_state(config)] == ["starting", "not begun"]
        said = shown(config)
    assert f"sea: starting\n  process {os.getpid()} on {socket.gethostname()}: counting, for 0" in said
    assert "no process works" not in said
    assert "no process works on it" in shown(config)


def test_on_a_terminal(tmp_path):
    """A table where it fits, lines elsewhere."""
    config = config_of(tmp_path, "sea")
    write_plan(config.data_dir / "sea", 10)
    write_receipt(config.data_dir / "sea", 0)
    wide, narrow = shown(config, 130, terminal=True), shown(config, 80, terminal=True)
    assert "preprocess: status" in wide and "1/10" in wide and "107" in wide
    assert "sea: stopped; 1 of 10 units done" in narrow
    assert "┃" not in shown(config, 130)


def test_many_receipts(tmp_path):
    """Several folders of a thousand units each are summed up."""
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    units = 2_500
    write_plan(folder, units)
    template = orjson.loads(write_receipt(folder, 0).read_bytes())
    for unit in range(units):
        path = receipt_path(folder, unit)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(orjson.dumps(template | {"unit": unit}))
    [state] = read_state(config)
    assert (state.done, state.tokens, state.bytes_done) == (units, 107 * units, SIZE * units)


def test_reading_stays_light():
    """No torch and no `datasets`: the command answers at once."""
    program = (
        "import sys, pipeline.data.preprocess.status; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_a_running_command_is_seen(tmp_path):
    """Another process that beats: its progress shows from here."""
    config = config_of(tmp_path, "sea")
    folder = config.data_dir / "sea"
    write_plan(folder, 2, age=100)
    program = (
        "import sys; from pathlib import Path; from pipeline.data.work import leases; leases.HEARTBEAT_S = 0.0\n"
        "lease = leases.take(Path(sys.argv[1]), 1, leases.LeaseWatch()); lease.beat(640); print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    [state] = read_state(config)
    assert [(worker.pid, worker.what, worker.done, worker.state) for worker in state.workers] == [
        (process.pid, 1, 640, "works")
    ]
    assert (state.state, state.bytes_done) == ("working", 640)
    process.kill()
    process.communicate()
    [state] = read_state(config)
    assert (state.state, state.workers[0].state, state.bytes_done) == ("stopped", "gone", 0)
    assert "it is gone; its unit will be taken over by the next command" in shown(config)
    assert Path(lease_path(folder, 1)).exists()
