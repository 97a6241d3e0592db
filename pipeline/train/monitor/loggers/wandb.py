"""Weights & Biases: one W&B run per run folder, over all attempts."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from pipeline.config.trackers import WandbConfig
from pipeline.train.monitor.loggers.background import BatchLogger, NumberedRow
from pipeline.train.monitor.loggers.base import RunInfo, flat
from pipeline.train.monitor.loggers.params import nested_params

_INIT_S, _FINISH_S = 30.0, 10.0
"""Seconds for W&B to begin a run, and to upload what is left at its end."""


class WandbLogger(BatchLogger):
    """Weights & Biases, by its client, which sends from a process of its own."""

    def __init__(self, config: WandbConfig, run: RunInfo) -> None:
        """Begin or resume the run.

        Raises:
            Exception: of the client, whatever it may be, if the server cannot be reached or refuses.
        """
        import wandb

        with suppress(BaseException):  # it exits, too
            # Its process may have been killed. Without this, `init` returns the run before, which never works again.
            wandb.teardown()
        self._online = config.mode == "online"
        if self._online:
            _reach(wandb.setup().settings.base_url)
            if not wandb.login(prompt=False):
                raise ConnectionError("no API key: set WANDB_API_KEY, or run `wandb login`")
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            group=config.group,
            tags=config.tags or None,
            mode=config.mode,
            dir=str(run.folder),
            id=run.id,
            resume="allow",
            config=nested_params(run),
            settings=wandb.Settings(init_timeout=_INIT_S, finish_timeout=_FINISH_S),
        )
        # W&B's own count of rows only rises. Steps fall where a run goes back, and a save tells of its step later.
        self._run.define_metric("*", step_metric="step")

    def sent(self) -> int | None:
        """Rows that the server has. Offline nobody knows, and the rows of this attempt are logged."""
        return self._run.starting_step if self._online else None

    def send(self, rows: Sequence[NumberedRow]) -> None:
        for number, row in rows:
            # `_step` of a row is its place in metrics.jsonl: parts of a run that are synced later do not overlap.
            values = {**flat(row), "step": row["step"], "attempt": row.get("attempt", 0)}
            self._run.log(values, step=number - 1, commit=True)

    def rewind(self, step: int) -> None:
        """Nothing is forgotten: `attempt` tells the values of a step apart."""

    def close(self) -> None:
        self._run.finish()


def _reach(address: str) -> None:
    """Ask a server for any answer. Without one, each attempt of W&B's to begin a run would leave a folder.

    Raises:
        OSError: there is none.
    """
    try:
        with urlopen(Request(address, method="HEAD"), timeout=_INIT_S):
            pass
    except HTTPError:
        pass
    except URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # W&B has its own certificates
            raise
