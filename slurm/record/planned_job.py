"""Job as it is planned: its command, its resources, and the jobs that it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.slurm import ResourcesConfig
from slurm.jobs import Stage

Chain = Literal["requeue", "singleton", "afterany", "none"]


@dataclass(frozen=True, eq=False)
class JobShape:
    """The command and the resources of a job."""

    stage: Stage
    command: tuple[str, ...]
    """Words after `pipeline`, like ("train",) or ("eval", "--step", "100"); the run file follows the first one."""
    resources: ResourcesConfig
    """Resources of this stage: run file over profile."""
    nodes: int = 1
    processes_per_node: int = 1
    spare_nodes: int = 0
    chain: Chain = "none"
    """Way in which a stopped job resumes; `none`: it does not."""
    links: int = 1
    """Jobs of the chain."""

    @property
    def processes(self) -> int:
        """Processes of the stage, on all nodes of one job."""
        return self.nodes * self.processes_per_node


@dataclass(frozen=True)
class Dependency:
    """A job that is waited for."""

    job: PlannedJob
    kind: Literal["afterok", "afterany"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedJob(JobShape):
    """A job, an array of them, or a chain."""

    name: str
    gpus_per_node: int = 0
    tasks: int = 1
    """Tasks of an array."""
    after: tuple[Dependency, ...] = field(default=())
    step: int | None = None

    @property
    def minutes(self) -> int:
        """Time limit of one job."""
        assert self.resources.time is not None, "`plan` sets it"
        return self.resources.time
