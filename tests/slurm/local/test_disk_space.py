"""Before a stage starts on this machine, its disk is looked at."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pipeline.common.capacity import free_space, nearest
from pipeline.common.console import Console
from pipeline.common.errors import EXIT_OTHER, MachineError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.preprocess import prepare
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.parallel.footprint import checkpoint_bytes
from slurm.local import stages
from slurm.submit import course
from slurm.submit.disk_space import check_room
from tests import tiny


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    run = load(tiny.write_run(tmp_path_factory.mktemp("room")))
    preprocess(run)
    return run


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Sets the bytes that disks have free."""

    def set_free(count: int) -> None:
        monkeypatch.setattr(prepare, "free_space", lambda path: (count, None))
        monkeypatch.setattr(course, "free_space", lambda path: (count, None))

    return set_free


def test_training_without_room_for_a_checkpoint_is_refused(config: Config, free) -> None:  # type: ignore[no-untyped-def]
    free(10_000)
    with pytest.raises(MachineError, match=r"run\.dir=.* has 10\.0 kB free, and a checkpoint needs ") as refused:
        stages.train(config, Console(file=io.StringIO()))
    assert refused.value.exit_code == EXIT_OTHER


def test_room_for_some_checkpoints_is_a_warning_and_for_all_none(config: Config, free) -> None:  # type: ignore[no-untyped-def]
    spec = decoder_spec(config.model, 300, config.max_positions)
    free(checkpoint_bytes(config, spec))
    (line,) = check_room(config)
    assert "lower train.checkpoint.keep" in line
    free(2**40)
    assert check_room(config) == []


def test_the_disk_is_that_of_the_checkpoints_where_they_are_a_link(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    (run / "checkpoints").symlink_to(other)
    full = {run: 10_000, other: 2**40}
    monkeypatch.setattr(course, "free_space", lambda path: (full[nearest(path).resolve()], None))
    linked = config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    assert check_room(linked) == []
    full.update({run: 2**40, other: 10_000})
    with pytest.raises(MachineError) as refused:
        check_room(linked)
    assert f"{run}/checkpoints -> {other} has 10.0 kB free" in str(refused.value)


def test_datasets_that_will_hardly_fit_are_a_warning(
    tmp_path: Path,
    free,  # type: ignore[no-untyped-def]
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load(tiny.write_run(tmp_path))
    free(1000)
    stages.preprocess(config)
    assert "warning: data.dir=" in capsys.readouterr().out.replace("\n", "")
    stages.preprocess(config)  # all is there
    assert "warning" not in capsys.readouterr().out


def test_a_file_that_is_there_stands_for_the_disk(tmp_path: Path) -> None:
    assert nearest(tmp_path / "a" / "b") == tmp_path
    assert free_space(tmp_path / "a" / "b")[0] > 0
