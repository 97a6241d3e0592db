"""Trackio: a local database, or a server that TRACKIO_SERVER_URL names."""

from __future__ import annotations

from typing import Any

from pipeline.config.trackers import TrackioConfig
from pipeline.train.monitor.loggers.base import Logger, RunInfo, flat
from pipeline.train.monitor.loggers.params import nested_params


class TrackioLogger(Logger):
    """Trackio, by its client, which writes from a thread of its own."""

    def __init__(self, config: TrackioConfig, run: RunInfo) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=config.project,
            name=f"{config.name or run.name}-{run.id[:6]}",  # trackio knows a run by its name
            group=config.group,
            config=nested_params(run),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, row: dict[str, Any]) -> None:
        self._run.log({**flat(row), "attempt": row.get("attempt", 0)}, step=row["step"])

    def close(self) -> None:
        self._run.finish()
