"""What reaches the loggers, read back by the programs that people use."""

import errno
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from pipeline.common.storage import JsonLines, read_json_lines
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.loop.trainer import train
from pipeline.train.monitor.loggers import retrying
from pipeline.train.monitor.loggers.base import Logger, flat
from pipeline.train.monitor.loggers.tensorboard import TensorBoard
from pipeline.train.monitor.loggers.terminal import Terminal
from pipeline.train.monitor.metrics import Metrics, peak_flops
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.run_log import long_on_cpu, long_step_on_cpu
from tests import tiny
from tests.clock import set_time


@pytest.fixture(autouse=True)
def _files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files of one second in the order of their names, in which the ninth comes after the tenth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))


def test_tensorboard_shows_what_metrics_jsonl_has(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path), ["train.metrics.tensorboard=true", "train.duration=4 steps"])
    preprocess(config)
    train(config)
    events = EventAccumulator(str(config.run.dir / "tensorboard"))
    events.Reload()
    rows = read_metrics(config.run.dir)
    for tag, values in {
        "loss": [row["loss"] for row in rows],
        "loss_by_source/sea": [row["loss_by_source"]["sea"] for row in rows],
        "epochs_by_source/land": [row["epochs_by_source"]["land"] for row in rows],
    }.items():
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3, 4]
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(values)
    assert [event.step for event in events.Scalars("validation_loss")] == [4]


def test_tensorboard_shows_the_last_attempt_of_a_step(tmp_path: Path) -> None:
    for first, loss in ((0, 1.0), (2, 2.0)):
        sink = TensorBoard(tmp_path, first)
        for step in range(first + 1, 5):
            sink.write({"step": step, "loss": loss})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_goes_back_with_a_run_that_does(tmp_path: Path) -> None:
    with Metrics([("TensorBoard", TensorBoard(tmp_path, 0))]) as metrics:
        for step in range(1, 5):
            metrics.write({"step": step, "loss": 1.0})
        metrics.rewind(2)
        for step in range(3, 6):
            metrics.write({"step": step, "loss": 2.0})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss")]
    assert scalars == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_tensorboard_goes_back_though_its_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were not written yet, and are made again, are shown once."""
    monkeypatch.setattr(retrying, "_PAUSE", 0.0)
    sink = TensorBoard(tmp_path, 0)
    with Metrics([("TensorBoard", sink)]) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": 1.0})
        sink._drop()  # as after a write that failed; nothing was flushed for sure
        metrics.rewind(1)
        for step in (2, 3):
            metrics.write({"step": step, "loss": 2.0})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = [(event.step, event.value) for event in events.Scalars("loss")]
    assert [value for value in values if value[0] > 1] == [(2, 2.0), (3, 2.0)]


def test_a_full_disk_is_a_line_for_tensorboard_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread dies of it; another one goes on when there is room."""
    monkeypatch.setattr(retrying, "_PAUSE", 0.0)
    tracebacks: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    full = [True]

    class Writer(event_file_writer.RecordWriter):  # type: ignore[misc]
        def write(self, data: bytes) -> None:
            if full[0] and b"loss" in data:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(data)

    monkeypatch.setattr(event_file_writer, "RecordWriter", Writer)
    sink = TensorBoard(tmp_path, 0)
    with Metrics([("TensorBoard", sink)]) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
        sink._writer._get_file_writer().event_writer._async_writer._worker.join(60)
        metrics.write({"step": 2, "loss": 2.0})
        full[0] = False
        metrics.write({"step": 3, "loss": 3.0})
    assert [text.partition("Errno")[0] for text in caplog.messages] == [
        "TensorBoard: [",
        "TensorBoard: written again; 0 rows were lost",
    ]
    assert tracebacks == []
    steps = set()
    for path in tmp_path.iterdir():
        events = EventAccumulator(str(path))
        events.Reload()
        steps |= {event.step for event in events.Scalars("loss")} if "loss" in events.Tags()["scalars"] else set()
    assert steps == {1, 2, 3}


def test_a_bar_goes_back_with_a_run_that_does() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    bar = Terminal(console, 0, 8, 1)
    row = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_second": 1.0}
    with Metrics([("terminal", bar)]) as metrics:
        metrics.write({"step": 6, **row})
        metrics.rewind(2)
        assert bar._progress is not None and bar._progress.tasks[0].completed == 2


def test_lines_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step at once, and the time left by the steps behind it: 2 s each, after one of 100 s."""
    now = 1000.0
    set_time(monkeypatch, monotonic=lambda: now)
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    lines = Terminal(console, 20, 120, 10)
    row = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_second": 1.0}
    for step in range(21, 32):
        now += 100 if step == 21 else 2
        lines.write({"step": step, **row})
    lines.rewind(25)
    for step in (26, 30):
        lines.write({"step": step, **row})
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in printed] == ["21/120", "30/120", "26/120", "30/120"]
    assert printed[1].endswith("tok/s  3 min left")  # 90 steps
    assert [line.endswith(" tok/s") for line in printed[::2]] == [True, True]


@pytest.mark.parametrize("steps, warned", [(1, False), (1000, True)])
def test_a_model_for_gpus_on_a_cpu(steps: int, warned: bool) -> None:
    """125 M parameters and 2**18 tokens per step are 2e14 FLOP, an hour on 2 threads of 25 GFLOP per second."""
    lines = list(long_on_cpu(6 * 125e6 * 2**18 * steps, threads=2))
    assert [("45 d 12 h" in line, "starter-small" in line) for line in lines] == [(True, True)] * warned


@pytest.mark.parametrize("threads, warned", [(1, True), (1000, False)])
def test_a_step_that_is_silent_for_long_is_announced(threads: int, warned: bool) -> None:
    lines = list(long_step_on_cpu(2.5e10 * 300, threads))
    assert ["a step takes about 5 min" in line and "lower train.batch_size" in line for line in lines] == [
        True
    ] * warned


class Moody(Logger):
    """A logger whose disk is full at some writes."""

    def __init__(self, full: list[bool]) -> None:
        self.full = full
        self.rows: list[int] = []

    def write(self, row: dict[str, Any]) -> None:
        if self.full and self.full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.rows.append(row["step"])

    def close(self) -> None:
        pass


def test_rows_that_meet_a_full_disk_are_written_later_in_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retrying, "_PAUSE", 0.0)
    moody, sound = Moody([False, True, True, False, True]), Moody([])
    with Metrics([("moody", moody), ("sound", sound)]) as metrics:
        for step in range(1, 6):
            metrics.write({"step": step})
            assert sound.rows[-1] == step
    assert moody.rows == sound.rows == [1, 2, 3, 4, 5]
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "[Errno 28] No space left on device; training continues, and metrics are written as soon as they can be",
        "written again; 0 rows were lost",
    ]


def test_only_so_many_rows_are_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(retrying, "_PAUSE", 0.0)
    monkeypatch.setattr(retrying, "_KEPT", 3)
    moody = Moody([True] * 5)
    with Metrics([("moody", moody)]) as metrics:
        for step in range(1, 7):
            metrics.write({"step": step})
    assert moody.rows == [4, 5, 6]
    assert "3 rows were lost" in caplog.messages[-1]


def test_a_line_that_a_full_disk_cut_short_does_not_spoil_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(file)
    lines.write({"step": 1})

    class Full:
        def __init__(self) -> None:
            self.left = 5

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = original.write(data[: self.left])
            self.left -= written
            return int(written)

    original = lines._file
    lines._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        lines.write({"step": 2})
    lines._file = original
    lines.write({"step": 2})
    lines.write({"step": 3})
    lines.close()
    assert file.read_bytes() == b'{"step":1}\n{"ste\n{"step":2}\n{"step":3}\n'
    assert [row["step"] for row in read_json_lines(file)] == [1, 2, 3]


def test_nested_numbers_are_joined_and_texts_left_out() -> None:
    row = {
        "step": 3,
        "attempt": 1,
        "loss": 2.0,
        "order_hash": "00ff",
        "by": {"a": 1, "b": {"c": 2.5}},
        "skipped": False,
    }
    assert flat(row) == {"loss": 2.0, "by/a": 1, "by/b/c": 2.5, "skipped": False}


def test_there_is_no_peak_where_none_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu"), "bf16") is None
    for name, expected in [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GH200 480GB", 989e12),
        ("AMD Instinct MI300X", None),  # a partition may be called so, too
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), "bf16") == expected
        assert peak_flops(torch.device("cuda"), "fp32") is None
