"""Evaluation on several processes: the number of one, under every kind of layout, and one message where it fails."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.slurm import SiteConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.engine import open_engine
from pipeline.eval.perplexity import evaluate, read_report
from pipeline.train.distributed.process_group import of_environment
from pipeline.train.loop.trainer import train
from pipeline.train.rules.layout import check_evaluation_layout, evaluation_parallel
from pipeline.train.start.setup import ALONE
from slurm.local import stages
from slurm.submit.job_plan import eval_job
from slurm.sweep.send import planned_training, refuse_larger_evaluation
from tests import tiny
from tests.train.distributed.ranks import Ranks, kept_ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model.document_attention": True, "model.heads": 4, "model.layers": 4},
    "gpt2": {
        "model.norm": "layernorm",
        "model.mlp": "gelu",
        "model.bias": "all",
        "model.positions": "learned",
        "model.tie_embeddings": True,
        "model.layers": 4,
    },
}
WINDOWS: tuple[tuple[str, ...], ...] = (
    (),
    ("eval.stride=12", "eval.samples=20"),
    ("eval.stride=20", "eval.documents=true", "eval.batch_size=3"),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-no_sp": {"tp": 2, "sequence_parallel": False},
    "pp2": {"pp": 2},
    "pp2-zbv": {"pp": 2, "pipeline": {"schedule": "zbv"}},
    "fsdp2": {"dp_shard": 2},
    "ddp2": {"dp_replicate": 2},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "cp2": {"cp": 2},
    "cp2-ulysses": {"cp": 2, "cp_method": "ulysses"},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "pp2-cp2": {"pp": 2, "cp": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of each family, and what one process says of it."""
    root = tmp_path_factory.mktemp("engine")
    for family, changes in FAMILIES.items():
        common: dict[str, Any] = {"run.dir": str(root / family), "train.duration": "2 steps", "launch.device": "cpu"}
        common |= {"heldout_sets": {"near": {"sources": ["land"], "sequence_length": 24}}}
        file = tiny.write_run(
            root, {**common, "train.precision.compute": "fp32", "train.checkpoint.every_steps": 2, **changes}
        )
        config = load(file)
        preprocess(config)
        train(config)
        file.rename(root / f"{family}.yaml")
    return root


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """So many processes, kept from one test to the next."""
    with kept_ranks() as get:
        yield get


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The reports of one process, by family."""
    return {family: _reports(root / f"{family}.yaml", []) for family in FAMILIES}


def _reports(file: Path, values: list[str]) -> list[dict[str, Any]]:
    """An evaluation for each kind of windows, on as many processes as there are."""
    configs = [load(file, [*values, *windows]) for windows in WINDOWS]
    return [asdict(evaluate(config, ranks=of_environment())) for config in configs]


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "pp2" else pytest.mark.slow) for name in LAYOUTS],
)
def test_every_layout_gives_the_number_of_one_process(
    layout: str, root: Path, ranks: Callable[[int], Ranks], alone: dict[str, list[dict[str, Any]]]
) -> None:
    family = list(FAMILIES)[list(LAYOUTS).index(layout) % len(FAMILIES)]
    parallel = LAYOUTS[layout]
    world = math.prod(parallel.get(axis, 1) for axis in ("pp", "tp", "cp", "dp_replicate", "dp_shard"))
    values = [f"eval.parallel={orjson.dumps(parallel).decode()}", f"eval.processes={world}"]
    by_rank = ranks(world).call(_reports, root / f"{family}.yaml", values)
    for reports in by_rank:
        for windows, report, expected in zip(WINDOWS, reports, alone[family], strict=True):
            assert report["made_with"] == expected["made_with"]
            near = report["sets"]["near"]["blended"]
            for name, score in [*report["sources"].items(), ("all", report["blended"]), ("near", near)]:
                whole = {"all": expected["blended"], "near": expected["sets"]["near"]["blended"]}
                other = {**expected["sources"], **whole}[name]
                assert score["targets"] == other["targets"], (windows, name)
                assert score["loss"] == pytest.approx(other["loss"], rel=1e-6), (windows, name)
                assert score["bits_per_byte"] == pytest.approx(other["bits_per_byte"], rel=1e-6), (windows, name)
                assert score["documents"] == other["documents"]


@pytest.mark.parallel
@pytest.mark.slow
def test_pipeline_eval_on_two_processes(root: Path) -> None:
    file = root / "llama.yaml"
    expected = evaluate(load(file))
    run = load(file).run.dir
    before = {path.name for path in run.iterdir()} - {"logs"}
    (run / "eval" / "step-00000002.json").unlink()
    done = tiny.pipeline("eval", file, "eval.processes=2", timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("held-out loss at step 2") == 1
    assert "eval: starting 2 processes" in done.stdout
    found = read_report(load(file), 2)
    assert found is not None
    assert found.blended.loss == pytest.approx(expected.blended.loss, rel=1e-6)
    assert {path.name for path in run.iterdir()} - {"logs"} == before, "no exit.json of its own, or another trace"


@pytest.mark.parallel
@pytest.mark.slow
def test_processes_that_torchrun_has_started_evaluate(root: Path) -> None:
    file = root / "gpt2.yaml"
    expected = evaluate(load(file))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "pipeline", "eval", str(file), "eval.parallel.tp=2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" at step 2") == 1
    found = read_report(load(file), 2)
    assert found is not None and found.blended.loss == pytest.approx(expected.blended.loss, rel=1e-6)


@pytest.mark.parallel
@pytest.mark.slow
def test_a_rank_that_is_killed_is_one_message(root: Path) -> None:
    file = root / "llama.yaml"
    run = load(file).run.dir
    exit_before = (run / "exit.json").read_bytes()
    command = [sys.executable, "-m", "tests.eval.dying", "eval", str(file), "eval.processes=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1
    assert done.stderr.count("error: rank 1 of 2 was killed by SIGKILL") == 1, done.stderr
    assert "the last words" in done.stderr
    assert "Traceback" not in done.stderr
    assert (run / "exit.json").read_bytes() == exit_before, "it is the training's"


def test_the_engine_of_one_process(root: Path) -> None:
    config = load(root / "gpt2.yaml")
    engine = open_engine(config, None, ALONE)
    assert engine.is_first and engine.source is not None and engine.source.step == 2
    assert engine.max_length == 32
    assert not any(part.training for part in engine.model.parts.values())
    shorter = load(root / "gpt2.yaml", ["eval.max_length=20"])
    assert open_engine(shorter, 2, ALONE).max_length == 20
    with pytest.raises(UserError, match=r"eval.max_length: 33 is more than the 32 learned positions"):
        load(root / "gpt2.yaml", ["eval.max_length=33"])
    longer = load(root / "llama.yaml", ["eval.max_length=100"])
    assert open_engine(longer, 2, ALONE).max_length == 100, "rotary positions have no end"


def refused(config: Config) -> str:
    """What `pipeline eval` says before it starts any process."""
    before = sorted(config.run.dir.rglob("*"))
    with pytest.raises(UserError) as error:
        stages.evaluate(config)
    after = {path for path in config.run.dir.rglob("*") if "ledger" not in path.name}
    assert after <= set(before)
    return str(error.value)


def test_a_layout_that_does_not_fit_is_refused_before_anything_starts(root: Path) -> None:
    file = root / "llama.yaml"
    text = refused(load(file, ["eval.processes=2", "eval.parallel.tp=4"]))
    assert text.startswith("eval.parallel: tp 4") and "set eval.processes=4" in text
    text = refused(load(file, ["eval.processes=3", "eval.parallel.tp=3"]))
    assert "model.heads=4 cannot be cut over eval.parallel.tp=3" in text
    text = refused(load(file, ["eval.processes=2", "parallel.tp=4"]))
    assert text.startswith("parallel: tp 4") and "set eval.processes=4" in text
    text = refused(load(file, ["eval.processes=2", "eval.parallel.tp=2", "eval.max_length=33"]))
    assert "eval.max_length=33 cannot be cut over eval.parallel.tp=2" in text
    (problem,) = {refused(load(file, ["eval.parallel.pp=2"]))}
    assert "eval.parallel: pp 2" in problem and "set eval.processes=2" in problem


def test_a_pipeline_needs_no_number_of_micro_batches(root: Path) -> None:
    """Training over it does, which is not what is asked here."""
    config = load(root / "llama.yaml", ["eval.parallel.pp=2", "eval.processes=2", "train.micro_batch_size=4"])
    assert str(check_evaluation_layout(config, 2)) == "pp 2"


def test_whose_layout_it_is(root: Path) -> None:
    trained = load(root / "llama.yaml", ["parallel.tp=2"])
    assert evaluation_parallel(trained, 1).tp == 1, "one process has all of the model"
    assert evaluation_parallel(trained, 2).tp == 2
    assert evaluation_parallel(load(root / "llama.yaml", ["parallel.tp=2", "eval.parallel.pp=2"]), 2).tp == 1


def test_another_number_of_processes_than_were_started_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="eval.processes is 4, but 2 processes were started"):
        stages.evaluate(load(root / "llama.yaml", ["eval.processes=4"]))


@pytest.mark.parametrize(
    ("processes", "site", "size"),
    [
        (1, {"gpus_per_node": 4}, (1, 1, 1)),
        (4, {"gpus_per_node": 4}, (1, 4, 4)),
        (8, {"gpus_per_node": 4}, (2, 4, 4)),
        (2, {}, (2, 1, 0)),
    ],
)
def test_nodes_of_an_evaluation_job(
    root: Path, processes: int, site: dict[str, Any], size: tuple[int, int, int]
) -> None:
    config = load(root / "llama.yaml", [f"eval.processes={processes}"])
    job = eval_job(config, SiteConfig(**site), 2)
    assert (job.nodes, job.processes_per_node, job.gpus_per_node) == size
    assert eval_job(config, SiteConfig(**site), 2, backend="local").processes == processes
    uneven = load(root / "llama.yaml", ["eval.processes=6"])
    with pytest.raises(UserError, match="eval.processes=6 .* set eval.processes=4 or 8"):
        eval_job(uneven, SiteConfig(gpus_per_node=4), 2)


def test_the_evaluation_of_a_sweeps_run_fits_into_the_job_of_its_training(root: Path) -> None:
    config = load(root / "llama.yaml", ["eval.processes=2", "slurm.profile=devcluster"])
    training = planned_training(config, "slurm")
    with pytest.raises(UserError, match=r"eval.processes=2 \(2 x 1\) do not fit .* set eval.processes=1 or less"):
        refuse_larger_evaluation(config, training, "slurm")
    refuse_larger_evaluation(config, training, "local")
    two = load(root / "llama.yaml", ["eval.processes=2", "slurm.profile=devcluster", "slurm.nodes=2"])
    refuse_larger_evaluation(two, planned_training(two, "slurm"), "slurm")
