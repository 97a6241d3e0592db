"""`api.Run` beside the files of the run folder."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline import api


def test_metrics_as_rows_and_columns(windows: Path) -> None:
    metrics = api.Run(str(windows)).metrics()
    lines = [json.loads(line) for line in (windows / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert metrics["step"].tolist() == list(losses) == list(range(1, 9)) and metrics["step"].dtype == np.int64
    assert metrics["loss"].tolist() == list(losses.values()) and metrics["loss"].dtype == np.float64
    sea = {line["step"]: line["loss_by_source"]["sea"] for line in lines if "loss" in line}
    assert metrics["loss_by_source/sea"].tolist() == list(sea.values())
    steps, values = metrics.series("validation_loss")
    held = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == held
    assert np.isnan(metrics["validation_loss"]).sum() == 8 - len(held)
    assert metrics["data_hash"].tolist() == [line["data_hash"] for line in lines if "loss" in line]
    assert len(metrics.series("data_hash")[1]) == 8
    assert set(metrics.columns()) == set(metrics.names) and {len(each) for each in metrics.columns().values()} == {8}
    with pytest.raises(api.UserError, match="no column 'los'; did you mean 'loss'"):
        metrics["los"]


def test_losses_of_samples_are_those_of_the_model(windows: Path) -> None:
    run = api.Run(windows)
    losses = run.losses()
    assert losses.step.tolist() == [step for step in range(1, 9) for _ in range(4)]
    assert losses.sample.tolist() == list(range(32))
    batch, model = run.batch(5), api.load_model(run, 4)
    with torch.no_grad():
        each = F.cross_entropy(model(batch.ids).transpose(1, 2), batch.targets, reduction="none").mean(dim=1)
    part = run.losses(5, 6)
    assert part.sample.tolist() == batch.samples.tolist() and part.source.tolist() == batch.sources
    np.testing.assert_allclose(part.loss, each.numpy(), rtol=1e-3)
    assert len(run.losses(8).loss) == 4 and len(run.losses(9).loss) == 0


def test_what_a_run_folder_has(windows: Path) -> None:
    run = api.Run(windows)
    assert repr(run) == f"Run('{windows}': 8 steps trained, checkpoints: 4, 8)"
    assert (run.steps, run.done, run.config.train.sequence_length) == (8, 8, 32)
    assert run.journal() == json.loads((windows / "journal.json").read_text())
    assert run.ledger() == [json.loads(line) for line in (windows / "ledger.jsonl").read_text().splitlines()]
    saved = run.checkpoints()
    metrics = run.metrics()
    assert [each.step for each in saved] == [4, 8]
    assert [each.tokens for each in saved] == [metrics.rows[3]["tokens"], metrics.rows[7]["tokens"]]
    assert [each.validation_loss for each in saved] == metrics.series("validation_loss")[1].tolist()
    assert run.best_step() == min(saved, key=lambda each: each.validation_loss or 0).step
    assert run.evaluations() == []
    assert run.tokenizer.decode(run.batch(1).ids[0].tolist())
    shown = run.where(3)
    batch = run.batch(3)
    assert [each["source"] for each in shown["samples"]] == batch.sources
    assert [[doc["document"] for doc in each["documents"]] for each in shown["samples"]] == [
        [span.document for span in spans] for spans in batch.documents
    ]


def test_a_run_that_is_being_written(windows: Path, tmp_path: Path) -> None:
    """What the next call sees is what is there by then; a line that is being written is left out."""
    run = tmp_path / "run"
    shutil.copytree(windows, run)
    shutil.rmtree(run / "checkpoints")
    lines = (windows / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    metrics = [line for line in lines if b'"loss"' in line]
    (run / "metrics.jsonl").write_bytes(b"".join(metrics[:3]) + metrics[3][:20])
    opened = api.Run(run)
    assert (opened.done, len(opened.metrics()), opened.steps) == (3, 3, 8)
    assert repr(opened).endswith("3 steps trained, no checkpoints)")
    first = opened.batch(6)
    for load in (lambda: api.load_model(run), lambda: api.load_model(run, "best"), lambda: api.evaluate(run)):
        with pytest.raises(api.UserError, match="does not have a checkpoint .*train first"):
            load()
    (run / "metrics.jsonl").write_bytes(b"".join(metrics[:6]))
    assert (opened.done, len(opened.metrics())) == (6, 6)
    assert opened.batch(6).data_hash == first.data_hash == opened.metrics().rows[5]["data_hash"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "attempt": 1, "save_seconds": 1.5}\n')  # a save that ended after later steps
    assert (opened.done, len(opened.metrics())) == (6, 6)
    shutil.copytree(windows / "checkpoints", run / "checkpoints")
    assert [each.step for each in opened.checkpoints()] == [4, 8]
    assert api.load_model(opened, 4).origin.step == 4
    # From step 4 another attempt has trained one step: those behind it are no longer of the run.
    again = {**json.loads(metrics[4]), "attempt": 2}
    shutil.rmtree(run / "checkpoints/step-00000008")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    assert (opened.done, opened.metrics()["step"].tolist()) == (5, [1, 2, 3, 4, 5])


def test_data_that_was_made_again_is_said(windows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(windows, run)
    for folder in (run / "checkpoints").glob("step-*"):
        state = json.loads((folder / "state.json").read_text())
        state["fingerprints"]["data"]["sea"] = "another"
        (folder / "state.json").write_text(json.dumps(state))
    with pytest.warns(UserWarning, match="was made again"):
        api.Run(run).batch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.Run(windows).batch(1)


def test_what_is_not_a_run(windows: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nowhere", "no run file or run folder .*nowhere"),
        (tmp_path, "is not a run folder"),
        (windows / "checkpoints", f"name the run folder, {windows}"),
    ):
        with pytest.raises(api.UserError, match=message):
            api.Run(path)
    planned = api.Run.plan(windows.parent / "run.yaml", {"run.dir": tmp_path / "new"})
    assert repr(planned) == f"Run('{tmp_path / 'new'}': not begun, no checkpoints)"
    for ask in (planned.journal, planned.losses, planned.best_step, lambda: planned.metrics()["loss"]):
        with pytest.raises(api.UserError, match="not begun|does not exist|train first|nothing is trained"):
            ask()
    with pytest.raises(api.UserError, match="unknown key; did you mean train.batch_size"):
        api.Run(windows, {"train.batchsize": 3})


def test_settings_are_values_as_python_has_them(windows: Path) -> None:
    stop = ["a: b", "#", "\U0001f600\x7f\x85", "null", "007"]
    changes = {"train.optimizer.lr": 1e-05, "eval.samples": None, "generate.stop": stop, "run.seed": np.int64(3)}
    config = api.Run(windows, changes).config
    assert (config.train.optimizer.lr, config.eval.samples, config.run.seed) == (1e-05, None, 3)
    assert config.generate.stop == stop
    for wrong in (["eval.samples=3"], {"eval.samples": {3}}):
        with pytest.raises(api.UserError, match=r"eval.samples.*(give values by key|not a value)"):
            api.Run(windows, wrong)  # type: ignore[arg-type]


def test_copies_of_a_run_read_the_same(windows: Path) -> None:
    run = api.Run(windows)
    hashes = run.batch(3).data_hash, len(run.tokenizer.encode("the sea"))
    for copied in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert (copied.batch(3).data_hash, len(copied.tokenizer.encode("the sea"))) == hashes
    model = api.load_model(run)
    assert copy.deepcopy(model)(run.batch(3).ids).equal(model(run.batch(3).ids))
