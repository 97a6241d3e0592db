"""`slurm:` in a run file, and the profile of a site: what jobs ask the scheduler for."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from pipeline.config.base import (
    CODE,
    DATA,
    MAX_LOCAL,
    MAX_NODES,
    AbsLinePath,
    KeyMark,
    Line,
    LineByName,
    Lines,
    Section,
    Text,
    TextLine,
    Variables,
    absolute,
)

_CLOCK = re.compile(r"^(?:(\d+)-)?(\d+):(\d{2})(?::(\d{2}))?$")
_UNITS = {"s": Fraction(1, 60), "m": Fraction(1), "min": Fraction(1), "h": Fraction(60), "d": Fraction(24 * 60)}


def parse_minutes(value: Any) -> Any:
    """`90`, `90min`, `1.5h`, `2d`, `90s`, `1-12:00:00`, `12:00:00` -> whole minutes, rounded up.

    Other types are left to pydantic.

    Raises:
        ValueError: it is not a time, or has no end.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if found := _CLOCK.match(text):
        days, first, second, third = (int(part or 0) for part in found.groups())
        # As sbatch reads it: D-HH:MM[:SS] with days, HH:MM:SS with seconds, else MM:SS.
        if found[1] is not None or found[4] is not None:
            return days * 24 * 60 + first * 60 + second + (third > 0)
        return first + (second > 0)
    if found_days := re.match(r"^(\d+)-(\d+)$", text):  # D-HH
        return int(found_days[1]) * 24 * 60 + int(found_days[2]) * 60
    found_unit = re.match(r"^(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?$", text)
    if found_unit is None:
        if text.upper() in ("UNLIMITED", "INFINITE"):
            raise ValueError(f"must be a time with an end, not {text}: name the longest that the partition allows")
        raise ValueError("must be a time, like 90 (minutes), 90min, 1.5h, 2d or 1-12:00:00")
    # A decimal fraction is exact here, so that 0.1h is 6 minutes and not a little more.
    return math.ceil(Fraction(found_unit[1]) * _UNITS[found_unit[2] or "m"])


Minutes = Annotated[int, BeforeValidator(parse_minutes, json_schema_input_type=int | str)]
"""A time in whole minutes; `12h` and `1-12:00:00` are understood."""


def is_profile_file(profile: str) -> bool:
    """True if a profile is a file, and not the name of one that ships."""
    return "/" in profile or profile.endswith((".yaml", ".yml"))


def _absolute_file(profile: str) -> str:
    """A profile that is a file must not depend on the working directory; a name is left alone."""
    return str(absolute(Path(profile))) if is_profile_file(profile) else profile


def _profile_files(profile: str) -> list[Path]:
    """The file of a profile; none of one that ships."""
    return [Path(profile).expanduser()] if is_profile_file(profile) else []


def _by_nodes(distribution: str) -> str:
    """Ranks are counted node by node, whatever happens inside of one."""
    if re.split("[:,]", distribution)[0] not in ("block", "*"):
        raise ValueError("must begin with block, as in block:cyclic: ranks are counted node by node")
    return distribution


class ResourcesConfig(Section):
    """Resources of a job. A key that is not set is taken from the profile's stage, then from its `defaults`."""

    partition: TextLine | None = None
    """Partition, or several, separated by commas."""
    account: TextLine | None = None
    """Account that pays."""
    qos: TextLine | None = None
    """Quality of service."""
    constraint: TextLine | None = None
    """Features that nodes must have."""
    exclude: TextLine | None = None
    """Nodes that must not be used, like `n[17,42]`."""
    time: Minutes | None = Field(default=None, ge=1)
    """Time limit of a job. Training resumes in the next job after it (`slurm.chain`)."""
    cpus_per_task: int | None = Field(default=None, ge=1, le=2**16)
    """CPUs of each process; passed to srun, too."""
    mem_gb: float | None = Field(default=None, ge=0)
    """Memory per node, in GB; 0: all memory of the node. By default the site's setting."""
    exclusive: bool | None = None
    """Whole nodes."""
    options: Annotated[LineByName, CODE] = Field(default_factory=dict)
    """Further options of sbatch, by long names without dashes, like `{reservation: night}`."""


class SiteConfig(Section):
    """A profile: what is the same for all runs at a site. Files of it are in `slurm/profiles/`."""

    description: Text = ""
    """Description of the site."""
    defaults: ResourcesConfig = ResourcesConfig()
    """For all stages."""
    preprocess: ResourcesConfig = ResourcesConfig()
    """For preprocessing."""
    train: ResourcesConfig = ResourcesConfig()
    """For training."""
    eval: ResourcesConfig = ResourcesConfig()
    """For evaluation."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs per node; training has a process for each. 0: nodes without GPUs."""
    gpus_by: Literal["gres", "gpus-per-node"] = "gres"
    """Option that asks for GPUs."""
    gpu_type: TextLine | None = None
    """Type of the GPUs, if the site requires it: `gres=gpu:TYPE:N`."""
    modules: Annotated[list[Line], CODE] = Field(default_factory=list)
    """Modules to load, after `before_modules` and before `setup`."""
    before_modules: Annotated[list[Lines], CODE] = Field(default_factory=list)
    """Lines of shell in the job's script before anything else, like `module use /shared/modules`, or a line that
    defines `module` if it is not in one of the usual files."""
    environment: Annotated[Variables, CODE] = Field(default_factory=dict)
    """Variables for all processes. No secrets: they are written into the run folder."""
    setup: Annotated[list[Lines], CODE] = Field(default_factory=list)
    """Lines of shell in the job's script after the modules."""
    container_prefix: Annotated[Line, CODE] = ""
    """Words before every `python` of a step, like `apptainer exec --nv /images/torch.sif`."""
    python: Annotated[Line | None, CODE] = None
    """Interpreter of the jobs; by default the one that submits. In a container often `python3`."""
    distribution: Annotated[TextLine, AfterValidator(_by_nodes)] | None = None
    """Distribution of the processes of a training by srun to nodes, sockets and cores (`--distribution`), like
    `block:cyclic`. The first word is `block`, which is also the default: ranks are counted node by node."""
    cpu_bind: TextLine | None = None
    """Binding of the processes of a training by srun to cores (`--cpu-bind`), like `cores` or `rank_ldom`."""
    srun_options: Annotated[list[Line], CODE] = Field(default_factory=list)
    """Further options of every srun, like `--container-image=...` or `--mpi=none`."""
    network_interface: TextLine | None = None
    """For NCCL and gloo, like `ib0`."""
    health_command: Annotated[Line, CODE] = ""
    """The site's own check of a node, a bash command like `/usr/sbin/nhc`. It runs once on each node, outside of any
    container, before every launch of a training and in `pipeline doctor RUN.yaml`. A node is unfit if the command ends
    with a code other than 0, or not within 60 s."""
    health_minutes: float | None = Field(default=None, ge=1)
    """Minutes from one `health_command` to the next while a training runs. A node that fails is named in the job's log
    and not used for the next launch; the training continues."""
    has_sacct: bool = True
    """True if `sacct` works here."""
    has_requeue: bool = True
    """True if users may requeue their jobs (`JobRequeue` and the partition allow it)."""
    wckey: TextLine | None = None
    """Workload characterization key, if the site requires one."""


class ArrayConfig(Section):
    """Preprocessing as an array of tasks, which take units from one list."""

    tasks: int = Field(default=4, ge=1, le=MAX_NODES)
    """Array tasks, each on one node; at most one per unit is sent."""


class SlurmConfig(Section):
    """Jobs of a run on a cluster."""

    profile: Annotated[Line, AfterValidator(_absolute_file), KeyMark("code", _profile_files)] = "generic"
    """Site profile: the name of one that ships, or a file (`./site.yaml`). A relative path in a run file is resolved
    against the working directory, then against the folder of the run file."""
    nodes: int = Field(default=1, ge=1, le=MAX_NODES)
    """Nodes of the training."""
    processes_per_node: int | None = Field(default=None, ge=1, le=MAX_LOCAL)
    """Processes of the training on each node; by default one for each GPU (`gpus_per_node`)."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=MAX_LOCAL)
    """GPUs that jobs ask for on each node; by default `gpus_per_node` of the profile."""
    spare_nodes: int = Field(default=0, ge=0, le=MAX_NODES)
    """Additional nodes of a job, which replace those that fail."""
    chain: Literal["requeue", "singleton", "afterany"] = "requeue"
    """How training continues after a job's time limit. `requeue`: in the same job. For sites without requeue: in the
    next of `links` jobs, which wait for each other by name (`singleton`) or by dependency (`afterany`)."""
    links: int = Field(default=4, ge=1, le=1000)
    """Number of chain jobs that are queued at once with `singleton` and `afterany`."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts in a row after a crash, a hang or a lost node without a newer checkpoint; then the chain ends."""
    doctor: bool = True
    """Check every node before training starts on it (`pipeline doctor`)."""
    group: TextLine | None = None
    """Unix group of the run folder, whose members may also manage the run."""
    private_dir: Annotated[AbsLinePath, DATA] | None = None
    """Folder for the code that jobs execute, on a disk that all nodes share; nobody else may write to it or above it.
    By default the run folder, or `~/.pipeline` if `group`, `umask` or the shell's umask lets others write there."""
    umask: Text | None = Field(default=None, pattern=r"^0?[0-7]{3}$")
    """Permissions that new files do not get: `0002` lets the group write, and therefore cancel or resume. By default
    the umask of the submitting shell."""
    array: ArrayConfig = ArrayConfig()
    """Preprocessing."""
    preprocess: ResourcesConfig = ResourcesConfig()
    """Resources of each preprocessing task."""
    train: ResourcesConfig = ResourcesConfig()
    """Resources of each training job."""
    eval: ResourcesConfig = ResourcesConfig()
    """Resources of each evaluation job."""
    _tried: Path | None = PrivateAttr(default=None)

    @property
    def tried(self) -> Path | None:
        """The other place in which a file `profile` was looked for, in vain."""
        return self._tried

    def note_tried(self, file: Path | None) -> None:
        """Keep that for the message of whoever needs the profile."""
        self._tried = file
