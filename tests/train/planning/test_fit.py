"""A model that this machine has no memory for is refused before it is built, and one that may be too large is told."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from pipeline.common.capacity import HostMemory
from pipeline.common.console import Console
from pipeline.common.errors import EXIT_REFUSED, MachineError, UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.parallel.footprint import rank_footprints
from pipeline.train.planning import fit
from pipeline.train.rules.layout import check_layout
from slurm.local import stages
from tests import tiny

HUGE = ("model={layers: 400, dim: 65536, heads: 512}", "launch.device=cpu")
"""Some 20 trillion parameters: no machine has the memory."""
GIB = 2**30


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_run(tmp_path_factory.mktemp("fit"))


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sets what the machine has."""

    def set_memory(free: int, total: int = 0) -> None:
        monkeypatch.setattr(fit, "host_memory", lambda: HostMemory(free, total or free, limited=False))

    return set_memory


def _config(run_file: Path, *overrides: str) -> Config:
    return load(run_file, ["launch.device=cpu", *overrides])


@pytest.mark.parametrize("processes", [1, 2])
def test_check_refuses_a_model_that_does_not_fit(
    run_file: Path, capsys: pytest.CaptureFixture[str], processes: int
) -> None:
    with pytest.raises(UserError, match="weights, moments and gradients alone need") as refused:
        stages.check_layout(load(run_file, [*HUGE, f"launch.processes={processes}"]))
    assert refused.value.exit_code == EXIT_REFUSED
    assert ("per process x 2 processes on this machine" in str(refused.value)) == (processes == 2)
    assert "parameters: " in capsys.readouterr().out  # what it costs is shown all the same


@pytest.mark.parametrize("processes", [1, 2])
def test_training_refuses_it_before_anything_is_built(run_file: Path, tmp_path: Path, processes: int) -> None:
    config = load(run_file, [*HUGE, f"launch.processes={processes}", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match=r"the model does not fit .*parallel\.dp_shard") as refused:
        stages.train(config, Console(file=io.StringIO()))
    assert refused.value.exit_code == EXIT_REFUSED


def test_the_bound_is_what_states_take(run_file: Path, has) -> None:  # type: ignore[no-untyped-def]
    """16 bytes per parameter, by as many processes as there are on this machine, to the byte."""
    config = _config(run_file, "model.vocab_size=304")
    (states,) = [each.states for each in rank_footprints(config, check_layout(config, 1), _spec(config))]
    parameters = 2 * (4 * 32 * 32 + 3 * 32 * 128 + 2 * 32) + 2 * 304 * 32 + 32
    assert states == 16 * parameters
    for processes, replicate in ((1, 1), (3, 3)):
        many = _config(run_file, "model.vocab_size=304", f"parallel.dp_replicate={replicate}", "parallel.dp_shard=1")
        has(processes * states)
        fit.check_memory(many, processes)
        has(processes * states - 1)
        with pytest.raises(UserError, match="does not fit"):
            fit.check_memory(many, processes)


def _spec(config: Config):  # type: ignore[no-untyped-def]
    return decoder_spec(config.model, 304, config.max_positions)


def test_activations_are_a_warning(run_file: Path, has) -> None:  # type: ignore[no-untyped-def]
    config = _config(run_file, "train.micro_batch_size=4", "train.sequence_length=512", "train.batch_size=4")
    has(GIB)
    assert fit.check_memory(config) == []
    has(4 * 2**20)
    (line,) = fit.check_memory(config)
    assert "train.micro_batch_size (4)" in line and "train.recompute.mode=full" in line


def test_a_rank_that_others_leave_no_memory_may_be_started_again(
    run_file: Path,
    has,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a job's own processes: GPUs and nodes may still hold what the last launch had."""
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    config = _config(run_file)
    has(1, GIB)
    with pytest.raises(MachineError, match=r"2 processes on this machine.*other programs"):
        fit.check_memory(config)
    has(1)
    with pytest.raises(UserError, match="does not fit") as refused:
        fit.check_memory(config)
    assert refused.value.exit_code == EXIT_REFUSED
    monkeypatch.setenv(fit.LAUNCHER, "1")  # which has looked already
    assert fit.check_memory(config) == []


def test_a_gpu_is_asked_for_its_own_memory(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device + 1, GIB))
    config = load(run_file, [])
    with pytest.raises(UserError, match="does not fit into GPU 0 of "):
        fit.check_memory(config)
    assert fit.check_memory(config, 2) == []  # a launcher takes no memory there
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match="does not fit into GPU 1 of "):
        fit.check_memory(config)


def test_layouts_for_other_machines_are_not_compared(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ("launch.processes=4096", "slurm.nodes=2"):
        stages.check_layout(load(run_file, [*HUGE, more, "train.batch_size=4096"]))
        assert "the memory of this machine is not compared" in capsys.readouterr().out
