"""Exports beside a training: the bytes of `pipeline convert to-hf`, one at a time, and nothing that a run waits for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import storage
from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.export import exporter
from pipeline.train.export.exporter import Exporter
from pipeline.train.export.folders import ExportFolders
from pipeline.train.huggingface.convert import to_hf
from pipeline.train.rules.layout import check_layout
from pipeline.train.run.folder import RunFolder, read_metrics
from tests import tiny
from tests.train.runs import start, train
from tests.waiting import until

QUICK = """
import os, pathlib, sys, time
checkpoint, to, weights, dtype, parent = sys.argv[1:]
to, gate = pathlib.Path(to), pathlib.Path({gate!r})
tmp = to.with_name(f".{{to.name}}.host.{{os.getpid()}}.01234567.tmp")
tmp.mkdir(parents=True)
while not (gate / to.name).exists():
    time.sleep(0.01)
if (gate / to.name).read_text():
    tmp.rmdir()
    print((gate / to.name).read_text())
    sys.exit(1)
(tmp / "weights").write_text(f"{{weights}} {{dtype}} of {{pathlib.Path(checkpoint).name}}")
tmp.rename(to)
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Exports whose processes wait for a call with their step, and fail if it names a reason."""
    folder, script = tmp_path / "gate", tmp_path / "export.py"
    folder.mkdir()
    script.write_text(QUICK.format(gate=str(folder)))
    monkeypatch.setattr(exporter, "module_command", lambda name: [sys.executable, "-S", str(script)])

    def opened(*steps: int, reason: str = "") -> None:
        for step in steps:
            (folder / f"step-{step:08d}").write_text(reason)

    return opened


def make(tmp_path: Path, steps: list[int], *, begun: int = 0, total: int = 100, **export: Any) -> Exporter:
    """An exporter of a run whose checkpoints are names alone."""
    run = tmp_path / "run"
    for step in steps:
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    config = load(tiny.write_run(tmp_path, {"run.dir": str(run), "train.checkpoint.export": export}))
    return Exporter(config, RunFolder(run, 1, begun), total)


def ended(found: Exporter) -> list[tuple[int, bool]]:
    """Steps that were exported, in order, and whether that failed."""
    until(lambda: not found.held)
    return [(report.step, report.failed) for report in found.reports()]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.guard
def test_an_export_has_the_bytes_of_convert_and_is_made_once(root: Path, tmp_path: Path) -> None:
    keys = ("train.checkpoint.export={every_steps: 8, dtype: bf16}", "train.checkpoint.keep=9")
    run = train(root, "exported", *keys)
    folders = ExportFolders.of_run(run)
    assert (folders.steps(), folders.unfinished()) == ([8], {})
    # The title of the model card is the name of the folder.
    to_hf(run, tmp_path / "step-00000008", dtype="bf16", console=Console(quiet=True))
    assert contents(folders.path(8)) == contents(tmp_path / "step-00000008")
    assert [row["exported_step"] for row in read_metrics(run) if "exported_step" in row] == [8]
    train(root, "exported", *keys)
    (row,) = storage.read_json_lines(RunFiles(run).exports)
    assert (row["step"], row["attempt"], row["failed"]) == (8, 1, None)


def test_a_checkpoint_stays_until_it_was_exported(tmp_path: Path, gate: Callable[..., None]) -> None:
    found = make(tmp_path, [10, 20], every_steps=10)
    checkpoints = Checkpoints.of_run(tmp_path / "run")
    rules = load(tmp_path / "run.yaml").train.checkpoint.model_copy(update={"keep": 1})
    found.add(10)
    until(lambda: ExportFolders.of_run(tmp_path / "run").unfinished())
    assert found.held == [10]
    (checkpoints.folder / "latest").write_text("step-00000020\n")
    assert checkpoints.prune(rules, found.held, dry_run=True) == []
    gate(10)
    assert ended(found) == [(10, False)]
    assert [each.step for each in checkpoints.prune(rules, found.held, dry_run=True)] == [10]


def test_old_exports_go_and_missing_ones_are_made_at_the_start(tmp_path: Path, gate: Callable[..., None]) -> None:
    gate(10, 20, 30, 40)
    found = make(tmp_path, [10, 20, 25, 30], begun=30, every_steps=10, keep=2, weights="model", dtype="fp16")
    found.begin(Console(quiet=True))
    assert ended(found) == [(20, False), (30, False)]
    folders = ExportFolders.of_run(tmp_path / "run")
    assert (folders.path(30) / "weights").read_text() == "model fp16 of step-00000030"
    make(tmp_path, [40], every_steps=10)
    found.add(40)
    assert (ended(found), folders.steps()) == ([(40, False)], [30, 40])
    found.begin(Console(quiet=True))  # at step 30
    assert (folders.steps(), [path.name for path in (folders.folder / "abandoned").iterdir()]) == (
        [30],
        ["step-00000040"],
    )
    assert ended(found) == [(20, False)]


def test_exports_that_are_slower_than_the_steps_between_are_left_out(tmp_path: Path, gate: Callable[..., None]) -> None:
    found = make(tmp_path, [10, 20, 30, 40], every_steps=10)
    found.add(10)
    until(lambda: ExportFolders.of_run(tmp_path / "run").unfinished())
    for step in (15, 20, 30, 40):
        found.add(step)
    assert found.held == [10, 40]
    gate(10, 40)
    assert ended(found) == [(20, True), (30, True), (10, False), (40, False)]


def test_what_is_not_done_at_a_stop_leaves_no_trace(tmp_path: Path, gate: Callable[..., None]) -> None:
    found = make(tmp_path, [10, 20], every_steps=10)
    found.add(10)
    found.add(20)
    folders = ExportFolders.of_run(tmp_path / "run")
    until(folders.unfinished)
    found.close()
    assert (folders.steps(), folders.unfinished(), found.held, found.reports()) == ([], {}, [], [])
    gate(10)
    found.add(10)
    assert ended(found) == [(10, False)]


def test_an_export_that_fails_is_told_and_the_run_ends_well(
    root: Path, tmp_path: Path, gate: Callable[..., None]
) -> None:
    gate(8, reason="No space left on device")
    code, out = start(root, "failed", "train.checkpoint.export.every_steps=8")
    assert code == 0
    assert "warning: step 8 was not exported: No space left on device; training continues" in out
    assert [row["exports_failed"] for row in read_metrics(root / "failed") if "exports_failed" in row] == [1]
    assert [row["failed"] for row in storage.read_json_lines(root / "failed" / "exports.jsonl")] == [
        "No space left on device"
    ]


def test_a_model_of_no_family_is_refused_before_the_start(tmp_path: Path) -> None:
    file, keys = tiny.write_run(tmp_path), ["model.init={scheme: mup, mup_base_dim: 32}"]
    check_layout(load(file, keys), 1)
    with pytest.raises(UserError, match=r"checkpoint\.export is set, and model\.init\.scheme is 'mup'") as error:
        check_layout(load(file, [*keys, "train.checkpoint.export.every_steps=5"]), 1)
    assert error.value.exit_code == 2


def test_the_average_must_be_there(tmp_path: Path) -> None:
    file, key = tiny.write_run(tmp_path), "train.checkpoint.export={every_steps: 5, weights: ema}"
    with pytest.raises(UserError, match="checkpoint.export.weights is ema"):
        load(file, [key])
    assert isinstance(load(file, [key, "train.ema={}"]), Config)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to somebody else")
def test_nothing_is_removed_behind_a_link_of_somebody_else(tmp_path: Path) -> None:
    other = ExportFolders.of_run(tmp_path / "other")
    unfinished = other.folder / f".step-00000002{storage.TEMPORARY_SUFFIX}"
    for folder in (other.path(1), unfinished):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("")
    run = tmp_path / "shared" / "run"
    run.mkdir(parents=True)
    RunFiles(run).hf.symlink_to(other.folder)
    os.lchown(RunFiles(run).hf, 65534, 65534)
    folders = ExportFolders.of_run(run)
    folders.clean()
    folders.remove([1])
    assert other.steps() == [1] and unfinished.exists()
    other.remove([1])
    other.clean()
    assert not other.steps() and not unfinished.exists()


def test_a_checkpoint_that_has_gone_ends_no_other_export(tmp_path: Path, gate: Callable[..., None]) -> None:
    gate(10)
    found = make(tmp_path, [10], every_steps=10)
    found.add(20)
    assert ended(found) == [(20, True)]
    found.add(10)
    assert ended(found) == [(10, False)]


def test_an_export_that_is_killed_leaves_no_trace(tmp_path: Path, gate: Callable[..., None]) -> None:
    found = make(tmp_path, [10], every_steps=10)
    found.add(10)
    folders = ExportFolders.of_run(tmp_path / "run")
    until(folders.unfinished)
    assert found._process is not None
    found._process.kill()
    assert ended(found) == [(10, True)] and folders.unfinished() == {}


def test_exports_of_an_abandoned_line_go_though_none_are_made_now(tmp_path: Path, gate: Callable[..., None]) -> None:
    gate(10, 20)
    found = make(tmp_path, [10, 20], begun=20, every_steps=10)
    found.begin(Console(quiet=True))
    assert ended(found) == [(10, False), (20, False)]
    without = Exporter(
        load(tmp_path / "run.yaml", ["train.checkpoint.export=null"]), RunFolder(tmp_path / "run", 2, 10), 100
    )
    without.begin(Console(quiet=True))
    assert ExportFolders.of_run(tmp_path / "run").steps() == [10] and not without.held
