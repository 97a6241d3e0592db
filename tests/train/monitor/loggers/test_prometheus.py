"""The file for node_exporter, read with Prometheus's own parser, and what is drawn and documented of it."""

from __future__ import annotations

import io
import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pipeline.common.console import Console
from pipeline.config.load import load, packaged_configs
from pipeline.config.parsing.document import parse
from pipeline.train.monitor.loggers import prometheus
from pipeline.train.monitor.loggers.prometheus import METRICS, PrometheusFile, file_name
from pipeline.train.run.folder import RunFolder, read_metrics
from pipeline.train.run.unsaved import Saves
from tests import tiny
from tests.waiting import until

ROOT = Path(__file__).parents[4]
SAVES = Saves(attempt=3, limit_minutes=60, since=1000.5, step=40, failed=2)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run waits until the file is removed, however slow the machine is."""
    monkeypatch.setattr(prometheus, "_LEAVING", 300.0)


def parsed(text: str) -> dict[str, tuple[str, dict[str, str], float]]:
    """Type, labels and value by name; a metric that stands twice or has a timestamp is an error of node_exporter."""
    found: dict[str, tuple[str, dict[str, str], float]] = {}
    for family in text_string_to_metric_families(text):
        (sample,) = family.samples
        assert sample.name not in found and sample.timestamp is None
        assert family.documentation
        found[sample.name] = family.type, sample.labels, sample.value
    return found


def made(folder: Path, run: Path, said: io.StringIO, seconds: float = 0.01) -> PrometheusFile:
    return PrometheusFile(folder, RunFolder(run, 3, step=40), 90, seconds, lambda: SAVES, Console(file=said, width=500))


def test_the_file_as_prometheus_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / 'a "run" \\ n'
    file = made(tmp_path, run, io.StringIO(), seconds=3600)
    row = {"step": 41, "tokens": 410, "loss": math.nan, "grad_norm": math.inf, "skipped": True, "lr": 1e-5}
    file.write({**row, "tokens_per_second": 30.0, "step_seconds": 1 / 3, "loss_by_source": {"a": 1.0}})
    file.write({"step": 42, "tokens": 420, "loss": 2.5, "tokens_per_second": 3.0, "step_seconds": 10 / 3})
    file.write({"step": 41, "save_seconds": 7.5})
    found = parsed(file.text(2000.25))
    values = {name: value for name, (_, _, value) in found.items()}
    assert values.pop("pipeline_grad_norm") == math.inf
    assert values == {
        "pipeline_run_info": 1,
        "pipeline_heartbeat_timestamp_seconds": 2000.25,
        "pipeline_attempt": 3,
        "pipeline_job_restarts": 2,
        "pipeline_step": 42,
        "pipeline_target_steps": 90,
        "pipeline_trained_tokens": 420,
        "pipeline_tokens_total": 20,
        "pipeline_loss": 2.5,
        "pipeline_learning_rate": 1e-5,
        "pipeline_tokens_per_second": 3,
        "pipeline_step_seconds": 10 / 3,
        "pipeline_skipped_steps_total": 1,
        "pipeline_hardware_errors_total": 0,
        "pipeline_rewinds_total": 0,
        "pipeline_last_checkpoint_step": 40,
        "pipeline_last_save_seconds": 7.5,
        "pipeline_unsaved_since_timestamp_seconds": 1000.5,
        "pipeline_save_failures": 2,
    }
    assert {name: kind for name, (kind, _, _) in found.items() if name.endswith("_total")} == {
        metric.name: "counter" for metric in METRICS if metric.kind == "counter"
    }
    labels = {"run": run.name, "run_id": file_name(run)[-13:-5]}
    assert all(each == labels for name, (_, each, _) in found.items() if name != "pipeline_run_info")
    info = {"run_dir": str(run), "job_id": "78", "attempt": "3"}
    assert found["pipeline_run_info"][1] == {**labels, **info}
    file.rewind(40)
    assert [parsed(file.text(0))[f"pipeline_{name}"][2] for name in ("step", "rewinds_total")] == [40, 1]
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written when the folder is there; readable for node_exporter, whatever the umask."""
    said, folder, tries, text = io.StringIO(), tmp_path / "textfile", list[float](), PrometheusFile.text

    def tried(self: PrometheusFile, now: float) -> str:
        tries.append(now)
        return text(self, now)

    monkeypatch.setattr(PrometheusFile, "text", tried)
    before = os.umask(0o077)
    try:
        file = made(folder, tmp_path / "run", said)
        until(lambda: len(tries) > 3)
        folder.mkdir()
        until(file.file.exists)
        assert file.file.stat().st_mode & 0o777 == 0o644
        assert parsed(file.file.read_text())["pipeline_step"][2] == 40
        file.close()
    finally:
        os.umask(before)
    assert said.getvalue().count("train.metrics.prometheus: ") == 1 and "No such file" in said.getvalue()
    assert list(folder.iterdir()) == []


def test_runs_of_one_name_have_a_file_each_and_attempts_of_a_run_have_one(tmp_path: Path) -> None:
    names = {file_name(tmp_path / folder / "my run") for folder in ("a", "b", "a")}
    assert len(names) == 2 and all(re.fullmatch(r"pipeline-my_run-[0-9a-f]{8}\.prom", name) for name in names)


@pytest.mark.guard
def test_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last content of the file is that of the last rows of metrics.jsonl."""
    from slurm.local.stages import preprocess, train

    texts: list[str] = []
    close = PrometheusFile.close

    def closing(self: PrometheusFile) -> None:
        until(self.file.exists)
        texts.append(self.text(0))
        close(self)

    monkeypatch.setattr(PrometheusFile, "close", closing)
    textfile = tmp_path / "textfile"
    textfile.mkdir()
    config = load(tiny.write_run(tmp_path, {"train.metrics.prometheus": str(textfile)}))
    preprocess(config)
    train(config)
    (text,) = texts
    values = {name: value for name, (_, _, value) in parsed(text).items()}
    rows = read_metrics(config.run.dir)
    assert (values["pipeline_step"], values["pipeline_target_steps"]) == (8, 8)
    assert values["pipeline_loss"] == rows[-1]["loss"]
    assert values["pipeline_trained_tokens"] == values["pipeline_tokens_total"] == rows[-1]["tokens"] == 8 * 4 * 32
    assert values["pipeline_last_checkpoint_step"] == 8
    assert list(textfile.iterdir()) == []


def monitoring(name: str) -> Path:
    return packaged_configs() / "monitoring" / name


def test_the_dashboard_and_the_alerts_use_metrics_that_there_are() -> None:
    known = {metric.name for metric in METRICS}
    dashboard = json.loads(monitoring("grafana.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    (group,) = yaml.safe_load(monitoring("alerts.yaml").read_text())["groups"]
    rules = group["rules"]
    queries = [variable["query"]["query"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    for text in [*targets, *queries, *(rule["expr"] for rule in rules)]:
        used = set(re.findall(r"\bpipeline_\w+", text))
        assert used and used <= known, text
    used = set(re.findall(r"\bpipeline_\w+", " ".join(targets)))
    assert used == known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert {"PipelineStalled", "PipelineSavesFail"} <= {rule["alert"] for rule in rules}


def test_the_page_lists_the_metrics_and_its_run_files_are_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    rows = re.findall(r"^\| `(pipeline_\w+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(metric.name, metric.kind, metric.help) for metric in METRICS]
    parts = [parse(block, "page").value for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    values = {key: value for part in parts for key, value in part.items()}
    changes = {"train.metrics": values["train"]["metrics"], "notify": values["notify"]}
    config = load(tiny.write_run(tmp_path, changes))
    assert config.train.metrics.prometheus == Path("/var/lib/node_exporter/textfile") and len(config.notify) == 2
