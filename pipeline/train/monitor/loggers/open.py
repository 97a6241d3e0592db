"""All loggers of a run, as its run file asks for them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import UserError, install_extra
from pipeline.common.redaction import without_secrets
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.plugins import find_plugin
from pipeline.train.monitor.loggers.background import BackgroundLogger, BatchLogger
from pipeline.train.monitor.loggers.base import Logger, ParentRun, RunInfo
from pipeline.train.monitor.loggers.json_lines import MetricsFile
from pipeline.train.monitor.loggers.mlflow import MlflowLogger
from pipeline.train.monitor.loggers.tensorboard import TensorBoard
from pipeline.train.monitor.loggers.terminal import Terminal
from pipeline.train.monitor.loggers.trackio import TrackioLogger
from pipeline.train.monitor.loggers.wandb import WandbLogger
from pipeline.train.run.folder import RunFolder

_ID = re.compile(r"[0-9a-f]{16}")


def open_loggers(
    config: Config, folder: RunFolder, console: Console, total: int, origin: dict[str, Any]
) -> list[tuple[str, Logger]]:
    """Loggers of a run, with their names for messages. metrics.jsonl is the first one: others read it.

    Args:
        config: of the run.
        folder: of the run, with this attempt and the steps that are done.
        console: for the progress.
        total: steps of the run.
        origin: of the run, as checkpoints have it.

    Raises:
        UserError: the package of a tracker is not installed.
    """
    metrics, files = config.train.metrics, RunFiles(folder.path)
    loggers: list[tuple[str, Logger]] = [(RunFiles.metrics, MetricsFile(files.metrics))]
    if metrics.tensorboard:
        loggers.append(("TensorBoard", TensorBoard(files.tensorboard, folder.step)))
    if trackers := _trackers(config):
        run = run_info(config, folder, total, origin)
        for name, open_tracker in trackers:
            loggers.append((name, BackgroundLogger(name, files.metrics, partial(open_tracker, run))))
    return [*loggers, ("terminal", Terminal(console, folder.step, total, metrics.log_every_steps))]


def check_loggers(config: Config) -> None:
    """Check that the loggers of a run file can be opened; nothing is sent.

    Raises:
        UserError: as `open_loggers`.
    """
    _trackers(config)


_Opener = Callable[[RunInfo], Logger | BatchLogger]


def _trackers(config: Config) -> list[tuple[str, _Opener]]:
    """Names of the trackers that a run file asks for, and how each is opened."""
    wandb, mlflow, trackio = (getattr(config.train.metrics, name) for name in ("wandb", "mlflow", "trackio"))
    trackers: list[tuple[str, _Opener]] = []
    if wandb is not None:
        _need("wandb", install_extra("wandb"))
        trackers.append(("W&B", lambda run: WandbLogger(wandb, run)))
    if mlflow is not None:
        _need("mlflow", install_extra("mlflow"))
        _check_address(mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", ""))
        trackers.append(("MLflow", lambda run: MlflowLogger(mlflow, run)))
    if trackio is not None:
        _need("trackio", install_extra("trackio"))
        trackers.append(("Trackio", lambda run: TrackioLogger(trackio, run)))
    for each in config.train.metrics.loggers:
        plugin = find_plugin("loggers", each.type)
        found: Any = plugin.load()
        if not callable(getattr(found, "open", None)):
            raise UserError(
                f"the plug-in {plugin}: the class has no classmethod open(options, run), see docs/plugins.md"
            )
        trackers.append((each.type, partial(found.open, each.options)))
    return trackers


def _need(package: str, how: str) -> None:
    if find_spec(package) is None:
        raise UserError(f"train.metrics.{package} is set, but {package} is not installed: {how}")


def _check_address(address: str) -> None:
    """Refuse what MLflow would make of no address: a database in the working folder."""
    if not address:
        raise UserError(
            "train.metrics.mlflow has no tracking_uri: set it to https://HOST or sqlite:////ABSOLUTE/FILE.db, or set "
            "MLFLOW_TRACKING_URI in the environment"
        )
    if not address.startswith(("http", "databricks")) and find_spec("sqlalchemy") is None:
        raise UserError(
            "train.metrics.mlflow logs to a database, for which the client is not enough: pip install mlflow, or set "
            "tracking_uri to a server, https://HOST"
        )


def run_info(config: Config, folder: RunFolder, total: int, origin: dict[str, Any]) -> RunInfo:
    """A run, as its loggers need it; gives it an id, if it has none. Arguments as those of `open_loggers`."""
    parent = None
    if origin.get("kind") == "fork":
        parent_run = Path(origin["run"])
        parent = ParentRun(parent_run, origin["step"], _id_in(parent_run))
    id = _id_in(folder.path)
    if id is None:
        id = secrets.token_hex(8)
        storage.put(RunFiles(folder.path).run_id, f"{id}\n".encode())
    return RunInfo(
        folder=folder.path,
        config=without_secrets(config.model_dump(mode="json")),
        name=folder.path.name,
        id=id,
        parent=parent,
        first_step=folder.step,
        total_steps=total,
        attempt=folder.attempt,
    )


def _id_in(run: Path) -> str | None:
    """The id that a run folder has."""
    for path in (RunFiles(run).run_id, RunFiles(run).wandb_id):
        with suppress(OSError, UserError, UnicodeDecodeError), storage.open_regular(path) as file:
            text = file.read(64).decode().strip()
            if _ID.fullmatch(text):
                return text
    return None
