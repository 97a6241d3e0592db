"""What a training is said to cost, against sums by hand, the policy of checkpoints itself, and a run that was made."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.common.format import duration, rounded
from pipeline.common.problems import Problems
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.load import load
from pipeline.config.slurm import ResourcesConfig, SiteConfig
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.policy import due, to_prune
from pipeline.train.distributed.process_group import destroy
from pipeline.train.host import shares
from pipeline.train.host.devices import DEVICES
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.planning import plan as planning
from pipeline.train.planning.jobs import jobs_needed
from slurm.local import stages
from slurm.record.planned_job import PlannedJob
from slurm.submit.course import forecast, measured_rate, most_checkpoints
from slurm.submit.dry_run import cost, show
from slurm.submit.job_plan import plan
from slurm.submit.stop_lead_time import signal_seconds
from tests import tiny

PLENTY_OF_TIME = 24 * 60


def job(**values: Any) -> PlannedJob:
    return PlannedJob("train", ("train",), ResourcesConfig(time=PLENTY_OF_TIME), name="run-train", **values)


@pytest.fixture
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any device."""
    file = tmp_path / "measured.json"
    file.write_text("{}")
    monkeypatch.setattr(shares, "FILE", file)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a finished training of eight steps."""
    file = tiny.write_run(tmp_path_factory.mktemp("paper"))
    config = load(file)
    stages.preprocess(config)
    stages.train(config, Console(file=io.StringIO()))
    return file


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("keep_every", [None, 1, 4, 7, 12])
def test_most_checkpoints_are_those_of_the_policy(keep: int, keep_every: int | None) -> None:
    for every in (1, 3, 5, 100):
        rules = CheckpointConfig(every_steps=every, keep=keep, keep_every=keep_every)
        for steps in range(1, 50):
            there: set[int] = set()
            most = 0
            for step in range(1, steps + 1):
                if due(rules, step, steps):
                    there.add(step)
                    most = max(most, len(there))
                    there -= set(to_prune(rules, sorted(there), step))
            assert most_checkpoints(rules, steps) == most, (every, steps)


def test_links_share_the_steps_and_each_has_its_start_and_stop() -> None:
    assert jobs_needed(10_000, 3300) == 4  # 3 x 3,300 are not enough
    assert jobs_needed(9_900, 3300) == 3
    assert jobs_needed(0, 3300) == 0
    assert jobs_needed(10, 0) is None


def test_the_stop_before_the_end_is_the_given_one_or_at_most_a_quarter(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path)

    def seconds(*overrides: str, minutes: int = 120) -> int:
        return signal_seconds(load(file, overrides), minutes)

    key = "launch.stop_before_end_seconds"
    assert (seconds(), seconds(minutes=4)) == (120, 60)
    assert (seconds(f"{key}=29.5"), seconds(f"{key}=0"), seconds(f"{key}=2000")) == (30, 1, 2000)
    assert seconds(f"{key}=2000", minutes=10) == 300  # a stage that is shorter than training


def test_the_rate_is_the_median_with_saves_and_validation_on_top() -> None:
    rows = [{"step": 9, "validation_seconds": 1.0}, {"step": 9, "save_blocked": 2.0, "save_seconds": 50.0}]
    rows += [{"step": step, "step_seconds": 2.0, "tokens_per_second": 1000.0} for step in range(2, 10)]
    rows += [{"step": 1, "step_seconds": 14.0, "tokens_per_second": 140.0}]
    assert measured_rate(rows) == pytest.approx(1000 / (1 + 3 / 30))
    assert measured_rate(rows[:2]) is None


def test_the_cost_counts_spare_nodes() -> None:
    assert cost(job(nodes=4, spare_nodes=1, processes_per_node=8, gpus_per_node=8), 7200) == (80, "GPU-hours")
    assert cost(job(nodes=2, processes_per_node=4), 1800) == (1, "node-hours")
    cores = PlannedJob("train", ("train",), ResourcesConfig(cpus_per_task=6), name="t", nodes=2, processes_per_node=4)
    assert cost(cores, 3600) == (48, "core-hours")


def test_words() -> None:
    assert [duration(value) for value in (0.25, 45, 600, 11_100, 372_000)] == [
        *("0.25 s", "45 s", "10 min", "3 h 05 min", "4 d 7 h")
    ]
    assert [rounded(value) for value in (999, 512_000, 2_100_000, 41_900_000_000)] == [
        "999",
        "512,000",
        "2.1M",
        "41.9B",
    ]


@pytest.mark.usefixtures("nothing_measured")
def test_a_run_without_data_is_planned_from_flops(tmp_path: Path) -> None:
    changes = ["train.duration=100_000 tokens", "train.batch_ramp={start: 2, increment: 2, tokens: 6400}"]
    config = load(tiny.write_run(tmp_path), [*changes, "model.tie_embeddings=false"])
    site = SiteConfig(gpus_per_node=8, gpu_type="h100")
    ahead = forecast(config, site, job(nodes=2, processes_per_node=8, gpus_per_node=8))
    assert ahead.course is not None and ahead.course.assumed and ahead.course.done_steps == 0
    # 100 steps of 2 windows of 32 tokens, then 4.
    assert ahead.course.steps == 100 + 732 and ahead.course.tokens == 6400 + 732 * 128
    spec = decoder_spec(config.model, 300, config.max_positions)
    assert ahead.course.flops == pytest.approx(ahead.course.tokens * flops_per_token(spec, 32, causal=False))
    assert ahead.disk is not None and ahead.disk.each == 12 * num_parameters(spec)
    assert not config.run.dir.exists() and not config.data_dir.exists()


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("ramp", [False, True])
def test_a_forecast_is_that_of_the_plan(tmp_path: Path, ramp: bool) -> None:
    changes = ["train.duration=100_000 tokens", "parallel={tp: 2, dp_shard: -1}", "train.batch_size=16"]
    config = load(
        tiny.write_run(tmp_path), [*changes, "train.batch_ramp={start: 8, increment: 8, tokens: 6400}"][: 3 + ramp]
    )
    site = SiteConfig(gpus_per_node=8, gpu_type="h100")
    ahead = forecast(config, site, job(nodes=1, processes_per_node=8, gpus_per_node=8))
    destroy()  # of a training in this process
    time = planning.plan(config, DEVICES["h100"], 8).expected
    assert ahead.seconds == pytest.approx(time.seconds) and ahead.bounds == pytest.approx((time.least, time.most))
    assert time.least <= time.seconds <= time.most


@pytest.mark.guard
@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("name", ["bert-base", "t5-v1.1-base"])
def test_a_forecast_counts_what_the_objective_makes_of_windows(tmp_path: Path, name: str) -> None:
    file = Path(__file__).parents[3] / "configs" / "models" / f"{name}.yaml"
    config = load(file, [f"run.dir={tmp_path / 'run'}", "train.duration=1000 steps", "train.schedule.warmup=10 steps"])
    ahead = forecast(config, SiteConfig(gpus_per_node=8, gpu_type="h100"), job(processes_per_node=8, gpus_per_node=8))
    destroy()
    assert ahead.seconds == pytest.approx(planning.plan(config, DEVICES["h100"], 8).expected.seconds)


def test_a_run_on_cpus_or_with_an_unknown_gpu_is_not_guessed(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path))
    for site, gpus in ((SiteConfig(), 0), (SiteConfig(gpus_per_node=8, gpu_type="tpu"), 8)):
        ahead = forecast(config, site, job(gpus_per_node=gpus))
        assert ahead.seconds is None and "unknown until" in ahead.how


def test_a_run_that_has_begun_is_measured_and_what_remains_is_told(run: Path) -> None:
    config = load(run, ["train.duration=24 steps"])
    ahead = forecast(config, SiteConfig(), job())
    assert ahead.course is not None and not ahead.course.assumed
    assert (ahead.course.done_steps, ahead.course.steps_left, ahead.course.tokens_left) == (8, 16, 16 * 128)
    assert ahead.how == "measured in the last steps of this run"
    assert ahead.seconds is not None and ahead.seconds > 0
    twice = forecast(config, SiteConfig(), job(processes_per_node=2))
    assert twice.seconds == pytest.approx(ahead.seconds / 2) and "on 1 process, taken as" in twice.how
    newest = Checkpoints.of_run(config.run.dir).latest()
    assert newest is not None and ahead.disk is not None
    assert (ahead.disk.each, ahead.disk.there, ahead.disk.most) == (newest.size, 2, 3)


def printed(config: Any, site: SiteConfig, where: Any, warnings: list[str]) -> str:
    out = io.StringIO()
    jobs, found = plan(config, site, ["preprocess", "train", "eval"], where), Problems()
    found.warn(*warnings)
    show(Console(file=out), config, site, jobs, where, lambda each: f"#SBATCH --job-name={each.name} [x]\n", found)
    return out.getvalue()


@pytest.mark.usefixtures("nothing_measured")
def test_the_dry_run_has_jobs_costs_scripts_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["slurm.nodes=4", "slurm.spare_nodes=1", "slurm.train={time: 12h, account: me}", "train.batch_size=64"]
    config = load(tiny.write_run(tmp_path), [*overrides, "train.duration=1T tokens", "slurm.array.tasks=3"])
    before = sorted(tmp_path.rglob("*"))
    text = printed(config, SiteConfig(gpus_per_node=8, gpu_type="a100"), "slurm", ["[odd] something"])
    for part in (
        "4 + 1 spare",
        "-train also asks for: account me",
        "1 (any end)",
        "2 (done)",
        "1T tokens (train.duration: 1,000,000,000,000 tokens; there are no datasets yet",
        "cost of a job that takes all its time: 480.0 GPU-hours",
        "(planned for 32 x a100 at ",
        " of 312 TFLOP/s, times 1.24 as in published runs)",
        "free",
        "warning: [odd] something\nno problem was found; nothing was sent",
    ):
        assert part in text, part
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert [row[3:10] for row in rows] == [
        ["3", "1", "1", "-", "-", "-", "1 h"],
        ["-", "1", "1", "-", "-", "-", "1 h"],
        ["-", "4 + 1 spare", "8", "-", "8", "-", "12 h"],
        ["-", "1", "1", "-", "1", "-", "1 h"],
    ]
    assert "#SBATCH" not in text
    monkeypatch.setenv("PIPELINE_VERBOSE", "1")
    text = printed(config, SiteConfig(gpus_per_node=8, gpu_type="a100"), "slurm", [])
    assert text.count("#SBATCH --job-name=") == text.count("[x]") == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_the_dry_run_of_a_finished_run_on_this_machine(run: Path) -> None:
    text = printed(load(run), SiteConfig(), "local", [])
    assert "left: nothing" in text and "cost" not in text and "partition" not in text
    assert "(2 are there)" in text
