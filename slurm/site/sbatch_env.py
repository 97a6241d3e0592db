"""Variables of the shell from which sbatch takes options.

`submitit_backend` removes them, as sbatch would prefer them to what the script says. So who pays and where a job runs
becomes part of the plan here, under run file and profile; other variables are refused, or warned of, unless the run
file or the profile has the same option. sbatch itself sets none of them inside a job: those that are found there are of
the user's own shell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from pipeline.common.errors import UserError
from pipeline.common.problems import Problems
from pipeline.config.slurm import ResourcesConfig, SiteConfig, SlurmConfig
from slurm.jobs import ARRAYS, LAST_OF_ARRAYS, resources_key
from slurm.record.planned_job import PlannedJob

_TAKEN = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
    "time": "SBATCH_TIMELIMIT",
}
"""By keys of `ResourcesConfig`, which mean the same."""
_REFUSED = {
    "SBATCH_BATCH": "options.batch",
    "SBATCH_CLUSTERS": None,
    "SBATCH_CONTAINER": "options.container",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_GPUS": "gpus_per_node",
    "SBATCH_GPUS_PER_NODE": "gpus_per_node",
    "SBATCH_GPUS_PER_TASK": "gpus_per_node",
    "SBATCH_GRES": "options.gres",
    "SBATCH_MEM_PER_CPU": "options.mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "options.mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem_gb",
    "SBATCH_RESERVATION": "options.reservation",
    "SBATCH_WCKEY": "wckey",
    "SLURM_CLUSTERS": None,
}
"""Variables that change what jobs get or cost, and the key for it. None: there is no key."""
_WARNED = {
    "SBATCH_CORE_SPEC": "options.core-spec",
    "SBATCH_CPUS_PER_GPU": "cpus_per_task",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_GPU_BIND": "options.gpu-bind",
    "SBATCH_GPU_FREQ": "options.gpu-freq",
    "SBATCH_GRES_FLAGS": "options.gres-flags",
    "SBATCH_HINT": "options.hint",
    "SBATCH_MEM_BIND": "options.mem-bind",
    "SBATCH_NETWORK": "options.network",
    "SBATCH_OVERCOMMIT": "options.overcommit",
    "SBATCH_REQ_SWITCH": "options.switches",
    "SBATCH_SPREAD_JOB": "options.spread-job",
    "SBATCH_THREADS_PER_CORE": "options.threads-per-core",
    "SBATCH_THREAD_SPEC": "options.thread-spec",
    "SBATCH_USE_MIN_NODES": "options.use-min-nodes",
}
"""Variables that change how jobs run, and the key for it."""
_FLAGS = ("SBATCH_EXCLUSIVE", "SBATCH_OVERCOMMIT", "SBATCH_SPREAD_JOB", "SBATCH_USE_MIN_NODES")
"""An empty value sets these, and 0 or `no` does not."""
_MEMORY = ("mem-per-cpu", "mem-per-gpu")


def variable(key: str, environment: Mapping[str, str]) -> str | None:
    """The variable that sets a key of `ResourcesConfig`, if there is one with a value."""
    name = _TAKEN.get(key, "")
    return name if environment.get(name) else None


def resources(environment: Mapping[str, str], site: SiteConfig, run: SlurmConfig) -> dict[str, object]:
    """Values of the shell for keys that the profile does not set for all stages, nor profile or run file for each.

    Raises:
        UserError: one cannot be used.
    """
    found: dict[str, object] = {}
    for key in _TAKEN:
        name = variable(key, environment)
        if name is None or getattr(site.defaults, key) is not None:
            continue
        of_stages = ((getattr(site, stage), getattr(run, stage)) for stage in ("preprocess", "train", "eval"))
        if all(any(getattr(each, key) is not None for each in given) for given in of_stages):
            continue
        try:
            found[key] = getattr(ResourcesConfig.model_validate({key: environment[name]}), key)
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(
                f"{name}={environment[name]!a} in this shell: {why}; set {key} in the profile, or unset {name}"
            ) from None
    return found


def check(environment: Mapping[str, str], site: SiteConfig, planned: Sequence[PlannedJob], found: Problems) -> None:
    """Find variables that sbatch would obey, and that jobs of this plan do not get.

    Args:
        environment: of the shell that submits.
        site: where the jobs run.
        planned: the jobs.
        found: gets what is wrong.
    """
    for table, report in ((_REFUSED, found.problem), (_WARNED, found.warn)):
        for name, key in table.items():
            value = environment.get(name)
            if value is None or (value in ("0", "no") if name in _FLAGS else not value):
                continue
            if name == "SBATCH_GRES" and value.startswith("gpu"):
                key = "gpus_per_node"  # noqa: PLW2901 - the key of this value
            stages = dict.fromkeys(
                f"slurm.{resources_key(job.stage)}" for job in planned if not _is_decided(key, job, site)
            )
            if stages:
                text = f"{name}={value} is set in this shell, but jobs do not get it; "
                report(text + _todo(key, list(stages)) + f"unset {name}")


def _todo(key: str | None, stages: Sequence[str]) -> str:
    if key is None:
        return ""
    if key == "gpus_per_node":
        return "set slurm.gpus_per_node (or gpus_per_node in the profile), or "
    if key in ("wckey", "distribution"):
        return f"set {key} in the profile, or "
    return f"set {' and '.join(f'{stage}.{key}' for stage in stages)} (or {key} in the profile), or "


def _is_decided(key: str | None, job: PlannedJob, site: SiteConfig) -> bool:
    """True if a job has the option anyway, or has no use for it."""
    options = job.resources.options
    if key is None:
        return False
    if key == "gpus_per_node":
        return job.gpus_per_node > 0 or job.stage in (*ARRAYS, *LAST_OF_ARRAYS)
    if key in ("wckey", "distribution"):
        return getattr(site, key) is not None
    name = key.removeprefix("options.")
    if name in ("mem_gb", *_MEMORY):
        return job.resources.mem_gb is not None or any(each in options for each in ("mem", *_MEMORY))
    return name in options or getattr(job.resources, name, None) is not None
