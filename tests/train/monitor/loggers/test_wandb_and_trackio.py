"""Runs that W&B in its offline mode and Trackio have recorded, read back from their files."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.run_files import RunFiles
from pipeline.common.storage import read_json_lines
from pipeline.config.load import load
from pipeline.config.trackers import WandbConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.monitor.loggers import background
from pipeline.train.monitor.loggers.background import BackgroundLogger
from pipeline.train.monitor.loggers.base import RunInfo, flat
from pipeline.train.monitor.loggers.json_lines import MetricsFile
from pipeline.train.monitor.loggers.wandb import WandbLogger
from pipeline.train.monitor.metrics import Metrics
from tests import tiny
from tests.train.distributed.faulty import Start
from tests.train.distributed.ranks import free_port
from tests.waiting import until

_BLOCK, _HEAD = 32768, 7


def records_of(file: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: those of a log of LevelDB, after a header of 7 bytes, each a message of protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record = file.read_bytes(), _HEAD, b""
    while place + _HEAD <= len(data):
        if _BLOCK - place % _BLOCK < _HEAD:
            place += _BLOCK - place % _BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + _HEAD : place + _HEAD + size]
        place += _HEAD + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    """Rows of a W&B run."""
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts: 4 steps, then 4 more from step 3 on."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    folder = tmp_path_factory.mktemp("trackers")
    wandb = {"project": "p", "entity": "e", "name": "n", "group": "g", "tags": ["a", "b"], "mode": "offline"}
    file = tiny.write_run(
        folder,
        {
            "train.metrics.wandb": wandb,
            "train.metrics.trackio": {"project": "p", "name": "n", "group": "g"},
            "generate.prompt": "password=hunter2",
        },
    )
    preprocess(load(file))
    variables = {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_API_KEY": "hunter2hunter2"}
    for steps in (4, 8):
        with Start(file, folder / "run", 1, [f"train.duration={steps} steps"], variables=variables) as attempt:
            assert attempt.wait() == [0], attempt.said()
        assert "were not sent" not in attempt.text(), attempt.said()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.guard
def test_wandb_has_the_rows_of_every_attempt(run: Path) -> None:
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    rows: list[dict[str, Any]] = []
    for folder in folders:
        (file,) = folder.glob("*.wandb")
        records = list(records_of(file))
        begun = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        assert begun.run_id == RunFiles(run).run_id.read_text().strip()
        assert (begun.project, begun.entity, begun.display_name, begun.run_group) == ("p", "e", "n", "g")
        assert list(begun.tags) == ["a", "b"]
        config = {item.key: json.loads(item.value_json) for item in begun.config.update}
        assert config["model"]["dim"] == 32 and config["generate"]["prompt"] == "password=***"
        assert b"hunter2" not in file.read_bytes()
        rows += history_of(records)
    expected = read_json_lines(RunFiles(run).metrics)
    assert [row["_step"] for row in rows] == list(range(len(expected)))
    for row, of_the_file in zip(rows, expected, strict=True):
        values = {**flat(of_the_file), "step": of_the_file["step"], "attempt": of_the_file["attempt"]}
        assert {name: value for name, value in row.items() if not name.startswith("_")} == values


@pytest.mark.guard
def test_trackio_has_the_rows_of_every_attempt_in_one_run(run: Path) -> None:
    with sqlite3.connect(run.parent / "trackio" / "p.db") as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        (config,) = database.execute("SELECT config FROM configs").fetchall()[-1:]
    assert {name for name, _, _ in found} == {f"n-{RunFiles(run).run_id.read_text()[:6]}"}
    curves, expected = defaultdict(list), defaultdict(list)
    for _, step, metrics in found:
        for name, value in json.loads(metrics).items():
            curves[name].append((step, value))
    for row in read_json_lines(RunFiles(run).metrics):
        for name, value in {**flat(row), "attempt": row["attempt"]}.items():
            expected[name].append((row["step"], value))
    assert curves == expected
    assert "hunter2" not in str(config) and "password=***" in str(config)


@pytest.mark.guard
def test_a_wandb_server_that_is_away_is_a_warning_and_leaves_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(background, "_LONGEST_PAUSE", 0.0)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    wandb.teardown()
    rows = tmp_path / "metrics.jsonl"
    run = RunInfo(tmp_path, {}, "run", "00112233445566aa", None, 0, 2, 1)
    tries = list[int]()

    def opened() -> WandbLogger:
        tries.append(1)
        return WandbLogger(WandbConfig(project="p"), run)

    file = MetricsFile(rows)
    with Metrics([("metrics.jsonl", file), ("W&B", BackgroundLogger("W&B", rows, opened))]) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
        until(lambda: len(tries) > 2)
    ours = [each.getMessage() for each in caplog.records if each.name.startswith("pipeline.")]
    assert len(ours) == 2 and "refused" in ours[0] and "were not sent: 1" in ours[1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    wandb.teardown()


@pytest.mark.guard
def test_rows_arrive_again_after_the_process_of_wandb_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(background, "_INTERVAL", 0.0)
    monkeypatch.setattr(background, "_LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(background, "_CLOSE", 300.0)
    wandb.teardown()
    rows = tmp_path / "metrics.jsonl"
    run = RunInfo(tmp_path, {}, "run", "00112233445566aa", None, 0, 2, 1)
    begun = list[WandbLogger]()

    def opened() -> WandbLogger:
        begun.append(WandbLogger(WandbConfig(project="p", mode="offline"), run))
        return begun[-1]

    step = 0
    with Metrics([("metrics.jsonl", MetricsFile(rows)), ("W&B", BackgroundLogger("W&B", rows, opened))]) as metrics:
        until(lambda: begun)
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text().startswith("wandb"):
                    os.kill(int(child), signal.SIGKILL)

        def arrives() -> bool:
            nonlocal step
            step += 1
            metrics.write({"step": step, "loss": 1.0, "attempt": 1})
            return len(begun) == 2

        until(arrives, pause=0.2)
    wandb.teardown()
    (file,) = max(tmp_path.glob("wandb/offline-run-*")).glob("*.wandb")
    found = [row["step"] for row in history_of(list(records_of(file)))]
    assert len(begun) == 2 and found == list(range(found[0], step + 1))
