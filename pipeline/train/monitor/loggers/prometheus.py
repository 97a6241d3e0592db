"""The state of a run in a file for Prometheus, in the format of the textfile collector of its node_exporter.

Rank 0 writes the file from a thread of its own, so that neither training nor the heartbeat waits for its disk. However
training ends, the file is removed; one that stays behind, with an old heartbeat, is that of a process that was killed.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from pipeline.common import links, storage
from pipeline.common.console import warn
from pipeline.train.monitor.loggers.base import Logger
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.lock_holder import job
from pipeline.train.run.unsaved import Saves

_LEAVING = 5.0
"""Seconds that training waits, when it ends, for the file to be removed."""
_MODE = 0o644
"""Permissions of the file: node_exporter runs as another user, whatever the umask of this one."""
_NAME = 100
"""Characters of a run's name that are in the name of its file."""


@dataclass(frozen=True)
class PrometheusMetric:
    """A metric, with the unit in its name where it has one."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    """Its meaning; node_exporter wants the same text in all files, so a change of it is one of the format."""


def _gauge(name: str, text: str) -> PrometheusMetric:
    return PrometheusMetric(f"pipeline_{name}", "gauge", text)


def _counter(name: str, text: str) -> PrometheusMetric:
    return PrometheusMetric(f"pipeline_{name}_total", "counter", text)


METRICS = (
    _gauge("run_info", "Always 1; its labels are the run folder, the job and the attempt."),
    _gauge("heartbeat_timestamp_seconds", "Time of the last heartbeat of rank 0, in seconds since 1970."),
    _gauge("attempt", "Number of the attempt at the run."),
    _gauge("job_restarts", "Number of times that the scheduler has started the job again."),
    _gauge("step", "Last step that was trained."),
    _gauge("target_steps", "Steps of the whole run."),
    _gauge("trained_tokens", "Target tokens of the run up to this step; less after a rewind."),
    _counter("tokens", "Target tokens that this process has trained on, repeated steps included."),
    _gauge("loss", "Training loss of the last step, in nats per token."),
    _gauge("validation_loss", "Validation loss, in nats per token."),
    _gauge("teacher_divergence", "Divergence from the teacher in the last step, in nats per token."),
    _gauge("teacher_loss", "Loss of the teacher in the last step, in nats per token."),
    _gauge("preference_loss", "Loss of the last step, per pair of conversations."),
    _gauge("preference_accuracy_ratio", "Share of pairs in the last step that the model orders as the data does."),
    _gauge("grad_norm", "Norm of the gradient before clipping."),
    _gauge("learning_rate", "Learning rate of the last step."),
    _gauge("tokens_per_second", "Target tokens per second in the last step, over all processes."),
    _gauge("step_seconds", "Duration of the last step."),
    _gauge("data_wait_seconds", "Time that the last step waited for its data."),
    _gauge("mfu_ratio", "Model FLOPs utilization of the last step, attention counted whole; 1 is the peak."),
    _counter("skipped_steps", "Steps of this process whose update was withheld."),
    _counter("hardware_errors", "Hardware errors of the nodes of the run that this process has seen."),
    _counter("rewinds", "Number of times that this process went back to a checkpoint."),
    _gauge("last_checkpoint_step", "Step of the newest checkpoint; 0 without one."),
    _gauge("last_save_seconds", "Duration of the last save, from the copy to the commit."),
    _gauge("unsaved_since_timestamp_seconds", "Time since which work is unsaved, in seconds since 1970."),
    _gauge("save_failures", "Saves that have failed since the last good one."),
)
"""All metrics, in the order of the file."""
_OF_ROW = {
    "tokens": "pipeline_trained_tokens",
    "loss": "pipeline_loss",
    "validation_loss": "pipeline_validation_loss",
    "teacher_divergence": "pipeline_teacher_divergence",
    "teacher_loss": "pipeline_teacher_loss",
    "preference_loss": "pipeline_preference_loss",
    "preference_accuracy": "pipeline_preference_accuracy_ratio",
    "grad_norm": "pipeline_grad_norm",
    "lr": "pipeline_learning_rate",
    "tokens_per_second": "pipeline_tokens_per_second",
    "step_seconds": "pipeline_step_seconds",
    "data_wait": "pipeline_data_wait_seconds",
    "mfu": "pipeline_mfu_ratio",
    "save_seconds": "pipeline_last_save_seconds",
}
"""Keys of a row of metrics, and the metrics that they are."""


class PrometheusFile(Logger):
    """A logger that shows the last ones, and that the run lives.

    A disk that is full, a folder that is missing or not writable: one warning, and the file is tried again.

    Args:
        folder: of node_exporter's textfile collector.
        run: the run, for its name and the number of the attempt.
        steps: of the whole run.
        seconds: from one heartbeat to the next.
        saves: returns the saves of now.
        console: for the warning.
    """

    def __init__(
        self,
        folder: Path,
        run: RunFolder,
        steps: int,
        seconds: float,
        saves: Callable[[], Saves],
        console: Console,
    ) -> None:
        self.file = folder / file_name(run.path)
        self._run, self._seconds, self._saves, self._console = run, seconds, saves, console
        self._job: dict[str, Any] = job()
        self._labels = {"run": run.path.name, "run_id": run_id(run.path)}
        counters: dict[str, float] = {metric.name: 0 for metric in METRICS if metric.kind == "counter"}
        self._values = {**counters, "pipeline_step": run.step, "pipeline_target_steps": steps}
        self._lock = threading.Lock()
        self._warned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, row: dict[str, Any]) -> None:
        """Keep the values of a row for the next heartbeat; writes nothing itself."""
        with self._lock:
            values = self._values
            values |= {name: row[key] for key, name in _OF_ROW.items() if isinstance(row.get(key), (int, float))}
            if "tokens" in row:  # of a step, which those of saves and validations are not
                values["pipeline_step"] = row["step"]
            if "tokens_per_second" in row:
                values["pipeline_tokens_total"] += round(row["tokens_per_second"] * row["step_seconds"])
            values["pipeline_skipped_steps_total"] += bool(row.get("skipped"))
            values["pipeline_hardware_errors_total"] += row.get("hardware_errors", 0)

    def rewind(self, step: int) -> None:
        """The run resumes from an earlier step."""
        with self._lock:
            self._values["pipeline_step"] = step
            self._values["pipeline_rewinds_total"] += 1

    def close(self) -> None:
        """Remove the file: the run has ended, or the next process writes its own."""
        self._ended.set()
        self._thread.join(_LEAVING)

    def text(self, now: float) -> str:
        """The content of the file.

        Args:
            now: seconds since 1970.
        """
        saves = self._saves()
        with self._lock:
            values = dict(self._values)
        values |= {
            "pipeline_run_info": 1,
            "pipeline_heartbeat_timestamp_seconds": now,
            "pipeline_attempt": self._run.attempt,
            "pipeline_job_restarts": self._job.get("restarts", 0),
            "pipeline_last_checkpoint_step": saves.step,
            "pipeline_unsaved_since_timestamp_seconds": saves.since,
            "pipeline_save_failures": saves.failed,
        }
        info = {"run_dir": str(self._run.path), "job_id": str(self._job.get("job") or "")}
        lines: list[str] = []
        for metric in METRICS:
            if metric.name not in values:
                continue
            labels = self._labels
            if metric.name == "pipeline_run_info":
                labels = {**labels, **info, "attempt": str(self._run.attempt)}
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            lines.append(f"{metric.name}{_labels(labels)} {_number(values[metric.name])}")
        return "\n".join(lines) + "\n"

    def _beat(self) -> None:
        with suppress(OSError):
            for tmp in self.file.parent.glob(f".{self.file.name}.*{storage.TEMPORARY_SUFFIX}"):
                storage.remove_if_stale(tmp)  # of a process that was killed while it wrote
        while True:
            self._put()
            if self._ended.wait(self._seconds):
                with suppress(OSError):
                    links.remove(self.file, missing_ok=True)
                return

    def _put(self) -> None:
        try:
            storage.put(self.file, self.text(time.time()).encode(), mode=_MODE)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warn(
                    self._console,
                    f"train.metrics.prometheus: {self.file} cannot be written ({error.strerror or error}); training "
                    "continues, and the file is written as soon as it can be. The folder must exist on the node of "
                    "rank 0, and this user must be able to write to it",
                )


def run_id(run: Path) -> str:
    """Label of a run that no other run has: its folder's path, hashed."""
    return hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:8]


def file_name(run: Path) -> str:
    """Name of the file of a run, the same for all its attempts, so that the next one replaces what was left behind."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", run.name)[:_NAME]
    return f"pipeline-{name}-{run_id(run)}.prom"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
