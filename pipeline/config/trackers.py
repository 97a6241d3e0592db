"""Sections of the trackers of a run. Secrets come from the environment, never from a run file."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from pipeline.common.redaction import masked
from pipeline.config.base import DATA, LineByName, Section, TextLine
from pipeline.config.plugins import LoggerOptions, NamedPlugin

Name = Annotated[TextLine, Field(min_length=1, max_length=500)]


class WandbConfig(Section):
    """Weights & Biases. The API key comes from the environment, never from here."""

    project: Name
    """Project to log to."""
    entity: Name | None = None
    """Team or user that the project belongs to. By default that of the API key."""
    name: Name | None = None
    """Name of the run. By default that of the run folder."""
    group: Name | None = None
    """Group of the run."""
    tags: list[Annotated[TextLine, Field(min_length=1, max_length=64)]] = Field(default=[])
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run folder only; `wandb sync` uploads it later."""


def _address(value: str) -> str:
    if masked(value) != value:
        raise ValueError(
            "must have no user, password or query, which would stay in the run folder: set them by "
            "MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN, or leave the key out and set "
            "MLFLOW_TRACKING_URI"
        )
    relative = value.startswith(("sqlite:", "file:")) and not value.startswith(("sqlite:////", "file:///"))
    if relative or not re.match(r"[a-z][a-z0-9+.-]*:|databricks$", value):
        raise ValueError("must be an address: https://HOST, or sqlite:////ABSOLUTE/FILE.db, with four slashes")
    return value


class MlflowConfig(Section):
    """MLflow. Users, passwords and tokens come from the environment, never from here."""

    tracking_uri: Annotated[TextLine, AfterValidator(_address)] | None = None
    """Address of the server (`https://HOST`) or of a database (`sqlite:////ABSOLUTE/FILE.db`). By default
    MLFLOW_TRACKING_URI of the environment, which may have a password in it."""
    experiment: Name
    """Experiment to log to; it is created if there is none."""
    name: Name | None = None
    """Name of the run. By default that of the run folder."""
    tags: Annotated[LineByName, DATA] = Field(default={})
    """Tags of the run, by name."""

    @field_validator("tags")
    @classmethod
    def _free(cls, tags: dict[str, str]) -> dict[str, str]:
        for name in tags:
            if name.startswith(("mlflow.", "pretraining.", "config.")):
                raise ValueError(f"{name}: names that begin with mlflow., pretraining. or config. are taken")
        return tags


class TrackioConfig(Section):
    """Trackio. The write token of a server comes from the environment, never from here."""

    project: Name
    """Project to log to."""
    name: Name | None = None
    """Name of the run, to which part of the run's id is added. By default that of the run folder."""
    group: Name | None = None
    """Group of the run."""


class LoggerConfig(Section):
    """A plug-in that gets each line of the metrics."""

    type: Annotated[str, NamedPlugin("loggers"), DATA]
    """Name of an installed plug-in, see `docs/plugins.md`."""
    options: LoggerOptions = None
    """Options of the plug-in."""
