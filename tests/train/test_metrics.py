"""What reaches the sinks, read back by the programs that people use."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.config.load import load
from pipeline.data.preprocess import preprocess
from pipeline.train.metrics import TensorBoard, flat, peak_flops
from pipeline.train.run_folder import read_metrics
from pipeline.train.trainer import train
from tests import tiny


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
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), "bf16") == expected
        assert peak_flops(torch.device("cuda"), "fp32") is None
