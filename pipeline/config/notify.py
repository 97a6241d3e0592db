"""`notify:`: whom to tell, and how, when a run has ended, stalls or goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pipeline.common.redaction import has_address
from pipeline.config.base import CODE, Lines, Section, Text

NotifyEvent = Literal[
    "done",
    "failed",
    "stopped",
    "requeued",
    "stalled",
    "spike",
    "saves_failing",
    "export_failed",
    "mirror_failing",
    "hardware",
]


class NotifyConfig(Section):
    """A notification: events, and a command or a webhook to which each is sent."""

    on: list[NotifyEvent] = Field(min_length=1)
    """Events: training is `done`; a stage has `failed` for good; training has `stopped`, and nothing continues it; it
    was interrupted and continues (`requeued`: in the queue, in the next job, or in the same job); it has `stalled` and
    sends no heartbeat; a faulty step (`spike`: a spike or a value that is not finite, and the action taken);
    `saves_failing`; an export while training failed (`export_failed`); checkpoints have not been
    uploaded for 5 minutes (`mirror_failing`); a node has `hardware` errors."""
    command: Annotated[Annotated[list[Lines], Field(min_length=1)] | None, CODE] = None
    """Program and arguments. It gets the event as JSON on its standard input, and as variables like PIPELINE_EVENT and
    PIPELINE_REASON; its output is discarded."""
    webhook_env: Text | None = None
    """Name of the environment variable with the address of a webhook, to which the event is sent by POST, as JSON with
    a `text` that Slack and others show. The address itself is a secret, which a run file must not have."""
    timeout_seconds: float = Field(default=30.0, gt=0, le=600)
    """Seconds after which the command, with the processes that it has started, or the request is killed."""

    @model_validator(mode="after")
    def _one_way(self) -> NotifyConfig:
        if (self.command is None) == (self.webhook_env is None):
            raise ValueError("set either command or webhook_env")
        name = self.webhook_env
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("webhook_env must be the name of an environment variable; use letters, digits and _")
        return self


def _without_addresses(value: Any) -> Any:
    """The value, if no text in it is an address: it may be a secret, which must not get into files and messages."""
    if any(has_address(text) for text in _texts(value)):
        raise ValueError(
            "an address (http://...) in notify would be written into the run folder and the checkpoints, and whoever "
            "has that of a webhook can send messages; put it into an environment variable, and name that one "
            "(webhook_env: SLACK_WEBHOOK, or $SLACK_WEBHOOK in a command of sh -c)"
        )
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, str):
        yield value


Notifications = Annotated[list[NotifyConfig], BeforeValidator(_without_addresses)]
"""Notifications, without secrets."""
