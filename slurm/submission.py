"""What a job of a run is: all that its batch process needs to know, in a file of the run folder.

A job may start days after it was sent, on another machine, and again after each requeue. So nothing of it is in a
pickle but the path of this file; it names the resolved run file and the snapshot of the code it was sent with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from pipeline.config import Config
from pipeline.config.load import load_written
from pipeline.config.slurm import ResourcesConfig, SiteConfig
from pipeline.data import store
from pipeline.errors import UserError
from slurm.jobs import Stage, Where

Chain = Literal["requeue", "singleton", "afterany", "none"]


@dataclass(frozen=True)
class Submission:
    """A job of one stage of a run. Paths are absolute; `run` may not be moved while jobs of it wait."""

    run: Path
    """Run folder."""
    stage: Stage
    where: Where
    command: tuple[str, ...]
    """Words after `pipeline`, like ("train",) or ("eval", "--step", "100"); the run file follows the first one."""
    run_file: Path
    """The resolved config that the stage reads, in the run folder."""
    code: Path | None
    """Snapshot of the packages, which the job puts before all others; None: those that are installed."""
    site: SiteConfig
    resources: ResourcesConfig
    """Of this stage: run file over profile."""
    nodes: int = 1
    processes_per_node: int = 1
    spare_nodes: int = 0
    chain: Chain = "none"
    """How it goes on when it is stopped; `none`: by nobody."""
    links: int = 1
    max_restarts: int = 0
    doctor: bool = False
    every_checkpoint: bool = False
    """Whether evaluation jobs are sent for permanent checkpoints while this one trains."""
    then: tuple[str, ...] = ()
    """Files of submissions that the same job runs after a good end of this one, in this order."""
    others: tuple[str, ...] = ()
    """Files of submissions that the same job runs after all that, however it ended: the next runs of a sweep, on a
    machine without a queue."""

    @property
    def processes(self) -> int:
        """Of the stage, on all nodes."""
        return self.nodes * self.processes_per_node

    def config(self) -> Config:
        """What the stage runs with."""
        return load_written(self.run_file)

    def save(self, file: Path) -> None:
        """Write it down."""
        file.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(self) | {"site": self.site.model_dump(), "resources": self.resources.model_dump()}
        store.put_json(file, {key: str(value) if isinstance(value, Path) else value for key, value in values.items()})


def read_submission(file: Path) -> Submission:
    """What `save` wrote.

    Raises:
        UserError: the file is not there or damaged.
    """
    try:
        values: dict[str, Any] = orjson.loads(file.read_bytes())
        paths = {key: Path(values[key]) for key in ("run", "run_file")}
        code = Path(values["code"]) if values["code"] else None
        site, resources = SiteConfig(**values["site"]), ResourcesConfig(**values["resources"])
        more = {
            "command": tuple(values["command"]),
            "then": tuple(values["then"]),
            "others": tuple(values["others"]),
            "code": code,
            "site": site,
            "resources": resources,
        }
        return Submission(**{**values, **paths, **more})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} does not say what to run ({error}); submit the run again") from error
