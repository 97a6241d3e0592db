"""Measurements of stages that are kept in the cache folder."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.train.distributed.layout import Layout
from pipeline.train.planning import activations, memory, stage_memory
from pipeline.train.planning.stage_memory import KINDS, Shape, StageMemory, keep, read_kept
from tests.train.planning.steps import case_config, of_case

MEASURED = StageMemory({("forward", kind): 1.5 * place for place, kind in enumerate(KINDS)}, 7.25, 96.0)
ABOUT = ("settings", Layout(dp_shard=2), Shape(2, 256, 1), "whole", (0, 4))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pretraining-pipeline/stage-memory"


def test_a_kept_measurement_is_read_and_another_one_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_kept(ABOUT) is None
    keep(ABOUT, MEASURED)
    assert read_kept(ABOUT) == MEASURED
    assert read_kept((*ABOUT[:-1], (0, 5))) is None
    monkeypatch.setattr(stage_memory, "code_hash", lambda: "other code")
    assert read_kept(ABOUT) is None


@pytest.mark.parametrize(
    "content", ["", "{", '{"points": 3}', '{"points": [["forward", "parameters", 1]], "kept": 1, "count": 1}', "[]"]
)
def test_a_damaged_file_is_none(folder: Path, content: str) -> None:
    keep(ABOUT, MEASURED)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert read_kept(ABOUT) is None


def test_nothing_is_kept_of_plug_ins_nor_where_nothing_can_be_written(folder: Path) -> None:
    @dataclass(frozen=True)
    class Spec:
        dim: int = 2

    keep((*ABOUT, Spec()), MEASURED)
    assert not folder.exists()
    folder.parent.write_text("a file")
    keep(ABOUT, MEASURED)
    assert read_kept(ABOUT) is None


def test_the_older_half_goes_where_there_are_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_memory, "_MOST_KEPT", 4)
    for layers in range(5):
        keep((*ABOUT, layers), MEASURED)
    assert len(list(folder.iterdir())) == 3 and read_kept((*ABOUT, 4)) == MEASURED


def test_an_estimate_of_kept_measurements_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = case_config("one process, bf16")
    layout, spec, shape = of_case(config)
    monkeypatch.setattr(memory, "_measured", {})
    first = memory.memory(config, layout, spec, shape, "cuda")

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(memory, "_measured", {})
    monkeypatch.setattr(activations, "measure", refuse)
    assert memory.memory(config, layout, spec, shape, "cuda") == first
