"""MLflow: one MLflow run per run folder, over all attempts."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.common.format import cut
from pipeline.config.trackers import MlflowConfig
from pipeline.train.monitor.loggers.background import BatchLogger, NumberedRow, shown
from pipeline.train.monitor.loggers.base import RunInfo, flat
from pipeline.train.monitor.loggers.params import flat_params

_METRICS, _PARAMS = 1000, 100
"""Metrics, and params or tags, of one request at most."""
_KEY, _PARAM, _TAG = 250, 6000, 5000
"""Characters of a key, of the value of a param, and of that of a tag at most."""
_NOT_OF_A_KEY = re.compile(r"[^\w\-. /]", re.ASCII)
_ID, _ROWS, _FOLDER = "pretraining.run_id", "pretraining.rows", "pretraining.run_dir"
_PARENT, _PARENT_STEP = "pretraining.parent", "pretraining.parent_step"
"""Tags of our runs."""
_TIMEOUT_S = "20"
_REFUSED = 400
"""HTTP status of a request that is wrong in itself. All others may pass: logins are renewed, servers come back."""


class MlflowLogger(BatchLogger):
    """MLflow, by its client.

    The run is found by a tag with the id of ours, so that it is the same one after a resume and after a request whose
    answer got lost. Another tag counts the rows that have arrived.
    """

    def __init__(self, config: MlflowConfig, run: RunInfo) -> None:
        """Find the run, or begin it.

        Raises:
            Exception: of the client, whatever it may be, if the server cannot be reached or refuses.
        """
        # Its own retries take minutes. We try again, too, and less is at stake in a request that takes long.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _TIMEOUT_S)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._kinds: tuple[Any, ...] = Metric, Param, RunTag
        self._error: Any = MlflowException
        self._left_out = set[tuple[type, str]]()
        self._client = MlflowClient(tracking_uri=config.tracking_uri)
        self._total, self._last = run.total_steps, 0
        found = self._client.get_experiment_by_name(config.experiment)
        self._experiment = found.experiment_id if found else self._client.create_experiment(config.experiment)
        name = config.name or run.name
        mlflow_run = self._run_of(run.id)
        if mlflow_run is None:
            mlflow_run = self._client.create_run(self._experiment, run_name=name, tags={_ID: run.id})
        self._id, self._our_id = mlflow_run.info.run_id, run.id
        self._client.update_run(self._id, status="RUNNING", name=name)
        tags = {**config.tags, _FOLDER: str(run.folder), **self._parent(run)}
        params = {_key(key): cut(value, _PARAM) for key, value in flat_params(run.config).items()}
        self._describe(params, tags, mlflow_run.data)
        self._sent = int(mlflow_run.data.tags.get(_ROWS, 0))

    def _run_of(self, id: str) -> Any:
        found = self._client.search_runs([self._experiment], f"tags.`{_ID}` = '{id}'", max_results=1)
        return found[0] if found else None

    def _parent(self, run: RunInfo) -> dict[str, str]:
        """Tags of a fork; the page of the experiment shows it below its parent, if that is there."""
        if run.parent is None:
            return {}
        tags = {_PARENT: str(run.parent.folder), _PARENT_STEP: str(run.parent.step)}
        if run.parent.id is not None and (parent := self._run_of(run.parent.id)):
            tags["mlflow.parentRunId"] = parent.info.run_id
        return tags

    def _describe(self, params: Mapping[str, str], tags: dict[str, str], known: Any) -> None:
        """Log params and tags. A param never changes: a value that another attempt has is a tag, `config.KEY`."""
        for key, value in params.items():
            tag = cut(f"config.{key}", _KEY)
            if tag in known.tags or known.params.get(key, value) != value:
                tags[tag] = value
        new = [self._param(key, value) for key, value in params.items() if key not in known.params]
        for some in _pieces(new, _PARAMS):
            self._send(some)
        for some in _pieces([self._tag(_key(key), cut(value, _TAG)) for key, value in tags.items()], _PARAMS):
            self._send(some)

    def sent(self) -> int:
        return self._sent

    def send(self, rows: Sequence[NumberedRow]) -> None:
        batch: list[Any] = []
        number = rows[0].number - 1
        for row in rows:
            metrics = list(self._metrics(row.row))
            if batch and len(batch) + len(metrics) > _METRICS:
                self._log(batch, number)
                batch = []
            batch, number, self._last = batch + metrics, row.number, row.row["step"]
        self._log(batch, number)

    def _metrics(self, row: dict[str, Any]) -> Iterator[Any]:
        # The times tell the rows of a step that was trained again from those before: the latest one counts.
        time = int(1000 * row.get("time", 0))
        for name, value in flat(row).items():
            yield self._metric(_key(name), float(value), time, row["step"])

    def _log(self, metrics: list[Any], number: int) -> None:
        """Log metrics, and with the last ones of them the number of the row that they end with."""
        *first, last = _pieces(metrics, _METRICS) or [[]]
        for some in first:
            self._send(some)
        self._send([*last, self._tag(_ROWS, str(number))])

    def _send(self, values: Iterable[Any]) -> None:
        """Send metrics, params and tags. What the server refuses for good is left out, so that it blocks no others."""
        if values := [each for each in values if (type(each), each.key) not in self._left_out]:
            self._send_all(values)

    def _send_all(self, values: list[Any]) -> None:
        metrics, params, tags = ([each for each in values if isinstance(each, kind)] for kind in self._kinds)
        try:
            self._client.log_batch(self._id, metrics=metrics, params=params, tags=tags)
        except self._error as error:
            if error.get_http_status_code() != _REFUSED:
                raise
            if len(values) > 1:  # the one that is refused is looked for; the number of rows stays the last
                self._send_all(values[: len(values) // 2])
                self._send_all(values[len(values) // 2 :])
            else:
                self._leave_out(values[0], error)

    def _leave_out(self, value: Any, error: Exception) -> None:
        """Send no more values of a name that is refused.

        Raises:
            Exception: the run, or everything, is refused, so that it is not the value: it comes again.
        """
        self._client.set_tag(self._id, _ID, self._our_id)
        if not self._left_out:
            logging.getLogger(__name__).warning(
                "MLflow: the server refuses %s (%s); this is left out from now on, and so is all else that it refuses. "
                "metrics.jsonl has all metrics",
                value.key,
                shown(error),
            )
        self._left_out.add((type(value), value.key))

    def rewind(self, step: int) -> None:
        """Nothing is forgotten: of several values of a step the latest one counts."""

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._last >= self._total else "KILLED")


def _key(name: str) -> str:
    """A name that MLflow takes."""
    return _NOT_OF_A_KEY.sub("_", name[:_KEY])


def _pieces(values: Iterable[Any], size: int) -> list[list[Any]]:
    """Values in lists of at most `size`."""
    values = iter(values)
    return list(iter(lambda: list(itertools.islice(values, size)), []))
