"""Runs at MLflow's own server, read back by its client."""

from __future__ import annotations

import io
import logging
import socket
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.common.run_files import RunFiles
from pipeline.common.storage import read_json_lines
from pipeline.config.load import load
from pipeline.config.trackers import MlflowConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.loop.trainer import train
from pipeline.train.monitor.loggers import background
from pipeline.train.monitor.loggers.background import BackgroundLogger
from pipeline.train.monitor.loggers.base import RunInfo, flat
from pipeline.train.monitor.loggers.json_lines import MetricsFile
from pipeline.train.monitor.loggers.mlflow import MlflowLogger
from pipeline.train.monitor.metrics import Metrics
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.fork import fork
from tests import tiny
from tests.train.distributed.faulty import KILLED, Fault, Instant, Start
from tests.train.monitor.loggers.mlflow_server import MlflowServer
from tests.waiting import until

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("flask", reason="the server needs the whole of mlflow")

Curves = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
        server.start()
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path / "server") as server:
        yield server


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LONGEST_PAUSE", 1.0)
    monkeypatch.setattr(background, "_CLOSE", 300.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def runs_at(address: str, experiment: str = "e") -> list[Any]:
    client = mlflow.MlflowClient(address)
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id], order_by=["attributes.start_time"]))


def curves_at(address: str, run: Any) -> Curves:
    """All that was logged, in the order of steps and times."""
    client, curves = mlflow.MlflowClient(address), {}
    for name in run.data.metrics:
        values = sorted(client.get_metric_history(run.info.run_id, name), key=lambda each: (each.step, each.timestamp))
        curves[name] = [(each.step, each.value) for each in values]
    return curves


def curves_of(rows: list[dict[str, Any]]) -> Curves:
    """The same, of rows of metrics.jsonl."""
    curves = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["step"], int(1000 * row["time"]))):
        for name, value in flat(row).items():
            curves[name].append((row["step"], float(value)))
    return dict(curves)


def newest(curves: Curves) -> dict[str, dict[int, float]]:
    return {name: dict(values) for name, values in curves.items()}


def info(folder: Path, id: str = "00112233445566aa") -> RunInfo:
    return RunInfo(folder, {"train": {"lr": 1.0}}, "run", id, None, 0, 40, 1)


def opened(folder: Path, address: str) -> Metrics:
    """metrics.jsonl and an MLflow run."""
    config = MlflowConfig(tracking_uri=address, experiment="e")
    rows = folder / "metrics.jsonl"
    logger = BackgroundLogger("MLflow", rows, lambda: MlflowLogger(config, info(folder)))
    return Metrics([("metrics.jsonl", MetricsFile(rows)), ("MLflow", logger)])


def row(step: int) -> dict[str, Any]:
    return {"step": step, "attempt": 1, "time": 1000.0 + step, "loss": 1 / step, "by source": {"a:b": step}}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("pipeline.")]


@pytest.mark.slow
def test_curves_of_a_run_that_was_killed_and_resumed_are_those_of_metrics_jsonl(
    tmp_path: Path, shared: MlflowServer
) -> None:
    settings = {"tracking_uri": shared.address, "experiment": "e", "name": "tiny", "tags": {"team": "sea"}}
    file = tiny.write_run(tmp_path, {"train.metrics.mlflow": settings, "train.checkpoint": {"every_steps": 3}})
    preprocess(load(file))
    run = tmp_path / "run"
    kill = Instant(function="pipeline.train.monitor.metrics:Metrics.write", number=9)
    with Start(file, run, 1, [], {0: Fault(kill)}) as killed:
        assert killed.wait() == [KILLED]
    reached = read_metrics(run)[-1]["step"]
    with Start(file, run, 1, []) as again:
        assert again.wait() == [0], again.said()
    rows = read_json_lines(RunFiles(run).metrics)
    assert {each["attempt"] for each in rows} == {1, 2} and 3 < reached < 8
    (found,) = runs_at(shared.address)
    curves = curves_at(shared.address, found)
    assert curves == curves_of(rows)
    for each in read_metrics(run):
        assert newest(curves)["loss"][each["step"]] == each["loss"]
    assert found.info.run_name == "tiny" and found.info.status == "FINISHED"
    assert found.data.params["model.dim"] == "32" and found.data.params["data.sources.1.name"] == "land"
    assert found.data.tags["team"] == "sea"

    child = tmp_path / "child"
    changed = load(file, [f"run.dir={child}", "train.metrics.mlflow.name=forked"])
    fork(run, 6, changed, Console(file=io.StringIO()))
    train(changed)
    forked = next(each for each in runs_at(shared.address) if each.info.run_name == "forked")
    assert forked.data.tags["mlflow.parentRunId"] == found.info.run_id
    assert forked.data.tags["pretraining.parent"] == str(run) and forked.data.tags["pretraining.parent_step"] == "6"
    assert curves_at(shared.address, forked) == curves_of(read_json_lines(RunFiles(child).metrics))


@pytest.mark.slow
def test_a_server_that_comes_late_and_dies_gets_every_row_once(
    tmp_path: Path, own: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, own.address) as metrics:
        for step in range(1, 11):
            metrics.write(row(step))
        until(lambda: warnings(caplog))
        own.start()
        until(lambda: len(warnings(caplog)) == 2)
        for step in range(11, 21):
            metrics.write(row(step))
        own.kill()
        for step in range(21, 31):
            metrics.write(row(step))
        until(lambda: len(warnings(caplog)) == 3)
        own.start()
        for step in range(31, 41):
            metrics.write(row(step))
        until(lambda: len(warnings(caplog)) == 4)
    (found,) = runs_at(own.address)
    assert curves_at(own.address, found) == {
        "loss": [(step, 1 / step) for step in range(1, 41)],
        "by source/a_b": [(step, float(step)) for step in range(1, 41)],
    }
    assert ["again" in text for text in warnings(caplog)] == [False, True, False, True]


@pytest.mark.slow
def test_rows_that_a_server_has_not_got_at_the_end_come_with_the_next_attempt(
    tmp_path: Path, own: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, own.address) as metrics:
        for step in range(1, 6):
            metrics.write(row(step))
    assert "were not sent: 5" in warnings(caplog)[-1]
    own.start()
    with opened(tmp_path, own.address) as metrics:
        metrics.write(row(40))
    (found,) = runs_at(own.address)
    assert [step for step, _ in curves_at(own.address, found)["loss"]] == [1, 2, 3, 4, 5, 40]


@pytest.mark.guard
def test_training_does_not_wait_for_a_server_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(background, "_CLOSE", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = load(tiny.write_run(tmp_path, {"train.metrics.mlflow": {"tracking_uri": address, "experiment": "e"}}))
        preprocess(config)
        train(config)
    assert [each["step"] for each in read_metrics(config.run.dir)] == list(range(1, 9))
    assert any("were not sent: " in text for text in warnings(caplog))


@pytest.mark.slow
def test_values_that_are_not_finite_and_rows_of_many_metrics_arrive(tmp_path: Path, shared: MlflowServer) -> None:
    config = MlflowConfig(tracking_uri=shared.address, experiment="odd")
    logger = MlflowLogger(config, info(tmp_path, "00112233445566bb"))
    many = {str(number): float(number) for number in range(2500)}
    logger.send([background.NumberedRow(1, {"step": 1, "time": 1.0, "x": float("nan"), "layers": many})])
    logger.close()
    (found,) = runs_at(shared.address, "odd")
    assert len(found.data.metrics) == 2501 and found.data.tags["pretraining.rows"] == "1"
    assert found.info.status == "KILLED"
    changed = replace(info(tmp_path, "00112233445566bb"), config={"train": {"lr": 2.0, "prompt": "x" * 9000}})
    assert MlflowLogger(config, changed).sent() == 1
    (found,) = runs_at(shared.address, "odd")
    assert found.data.params == {"train.lr": "1.0", "train.prompt": "x" * 5999 + "…"}
    assert found.data.tags["config.train.lr"] == "2.0"


@pytest.mark.guard
def test_what_is_refused_for_good_blocks_no_rows_and_a_run_that_was_deleted_is_begun_anew(
    tmp_path: Path, shared: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    config = MlflowConfig(tracking_uri=shared.address, experiment="refused")
    run = replace(info(tmp_path, "00112233445566cc"), config={"good": 1, "bad/": 2})
    rows = [background.NumberedRow(step, {**row(step), "sources": {"web/": step}}) for step in range(1, 7)]
    logger = MlflowLogger(config, run)
    logger.send(rows[:2])
    logger.send(rows[2:])
    (found,) = runs_at(shared.address, "refused")
    assert curves_at(shared.address, found) == curves_of(
        [{**row(step), "by source": {"a_b": step}} for step in range(1, 7)]
    )
    assert found.data.params == {"good": "1"} and found.data.tags["pretraining.rows"] == "6"
    (warning,) = warnings(caplog)
    assert "bad/" in warning
    mlflow.MlflowClient(shared.address).delete_run(found.info.run_id)
    with pytest.raises(mlflow.MlflowException):
        logger.send(rows)
    assert MlflowLogger(config, run).sent() == 0
