"""From a config and stages to the jobs that have to be sent, on paper: nothing is asked of a scheduler here.

curate (an array per pass) -> decide -> preprocess (array) -> finish -> train (chain) -> eval
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.slurm import ResourcesConfig, SiteConfig
from pipeline.train.distributed.layout import degrees_text, fixed_processes, given_degrees, resolve
from slurm.jobs import Backend, Stage, StageName, resources_key
from slurm.record.planned_job import Chain, Dependency, PlannedJob

_DEFAULT_TIME = 60
"""Minutes, where neither the run file nor the profile has a time."""


def plan(
    config: Config, site: SiteConfig, stages: Sequence[StageName], backend: Backend, *, units: int | None = None
) -> list[PlannedJob]:
    """The jobs of some stages in the order in which they are sent.

    Args:
        config: the run.
        site: where it runs.
        stages: which, in their order.
        backend: on a cluster or on this machine.
        units: of the preprocessing, where that is known: an array has no more tasks than these.

    Raises:
        UserError: nodes and processes do not fit the layout.
    """
    found: list[PlannedJob] = []
    for stage in stages:
        found += _of_stage(config, site, stage, backend, units, found[-1] if found else None)
    return found


def eval_job(
    config: Config, site: SiteConfig, step: int | None, after: tuple[Dependency, ...] = (), backend: Backend = "slurm"
) -> PlannedJob:
    """The evaluation of a checkpoint, of the newest one when it starts if no step is named.

    Raises:
        UserError: its processes cannot be dealt to nodes evenly.
    """
    command = ("eval",) if step is None else ("eval", "--step", str(step))
    name = job_name(config, "eval") + ("" if step is None else f"-{step}")
    resources = resources_of(config, site, "eval")
    nodes, here = _eval_processes(config, site, backend)
    return PlannedJob(
        "eval",
        command,
        resources,
        name=name,
        nodes=nodes,
        processes_per_node=here,
        gpus_per_node=min(here, site.gpus_per_node),
        chain=_repeats(site),
        after=after,
        step=step,
    )


def _eval_processes(config: Config, site: SiteConfig, backend: Backend) -> tuple[int, int]:
    """Nodes of an evaluation, as few as possible, and processes on each."""
    total = config.eval.processes
    if backend == "local":
        return 1, total
    most = site.gpus_per_node or config.slurm.processes_per_node or 1
    if total <= most:
        return 1, total
    if total % most:
        below = total // most * most
        why = gpus_key(config) if site.gpus_per_node else _why(config, site)
        raise UserError(
            f"eval.processes={total} cannot be divided evenly over nodes of {most} processes each ({why}); set "
            f"eval.processes={below} or {below + most}"
        )
    return total // most, most


def train_processes(config: Config, site: SiteConfig, backend: Backend) -> tuple[int, int]:
    """Nodes of the training, and processes on each.

    Raises:
        UserError: they do not fit `launch.processes` or the layout.
    """
    if backend == "local":
        return 1, config.launch.processes or fixed_processes(config.parallel)
    nodes, here = config.slurm.nodes, config.slurm.processes_per_node or site.gpus_per_node or 1
    total = nodes * here
    each = f"{here} process{'es' if here > 1 else ''} on each node"
    text = f"slurm.nodes={nodes} with {each} ({_why(config, site)}) are {total} in all"
    if config.launch.processes not in (None, total):
        raise UserError(f"launch.processes is {config.launch.processes}, but {text}; leave launch.processes out")
    try:
        resolve(config.parallel, total)
    except UserError:
        needed, asked = fixed_processes(config.parallel), given_degrees(config.parallel)
        rest = -1 in asked.values()
        raise UserError(
            f"{text}, but parallel ({degrees_text(asked) or 'no axis above 1'}) needs "
            + (f"a multiple of {needed}; " if rest else f"{needed}; ")
            + f"change slurm.nodes, slurm.processes_per_node (by default {gpus_key(config)}) or parallel"
            + ("" if rest else " (dp_shard: -1 takes all there are)")
        ) from None
    return nodes, here


def resources_of(config: Config, site: SiteConfig, stage: Stage) -> ResourcesConfig:
    """Resources of a stage's job: run file over the profile's stage over its defaults."""
    key = resources_key(stage)
    merged: dict[str, object] = {"time": _DEFAULT_TIME}
    options: dict[str, str] = {}
    layers: tuple[ResourcesConfig, ...] = (site.defaults, getattr(site, key), getattr(config.slurm, key))
    for layer in layers:
        values = layer.model_dump(exclude_none=True)
        options |= values.pop("options", {})
        merged |= values
    return ResourcesConfig.model_validate(merged | {"options": options})


def job_name(config: Config, stage: Stage) -> str:
    """As the queue shows it: the same for all jobs of a chain, and for no other run in a folder of this name."""
    from pipeline.common.hashing import value_hash

    return f"{config.run.dir.name}-{value_hash(str(config.run.dir))[:6]}-{stage}"


def _of_stage(
    config: Config, site: SiteConfig, stage: StageName, backend: Backend, units: int | None, before: PlannedJob | None
) -> list[PlannedJob]:
    after = (Dependency(before, "afterok" if before.links == 1 else "afterany"),) if before else ()
    if stage == "eval":
        return [eval_job(config, site, None, after, backend)]
    if stage == "curate":
        return _curation(config, site, backend, units, after)
    if stage == "preprocess":
        resources = resources_of(config, site, "preprocess")
        if backend == "local":
            return [PlannedJob("finish", ("preprocess",), resources, name=job_name(config, "preprocess"), after=after)]
        tasks = config.slurm.array.tasks if units is None else max(1, min(config.slurm.array.tasks, units))
        chain = _repeats(site)
        array = PlannedJob(
            "preprocess",
            ("preprocess", "--units"),
            resources,
            name=job_name(config, "preprocess"),
            tasks=tasks,
            chain=chain,
            after=after,
        )
        # After any end of the array: what its tasks have lost is made here.
        last = (Dependency(array, "afterany"),)
        name = f"{job_name(config, 'preprocess')}-end"
        finish = PlannedJob("finish", ("preprocess",), resources, name=name, chain=chain, after=last)
        return [array, finish]
    slurm = config.slurm
    chained = slurm.chain if backend == "slurm" else "requeue"
    if chained == "requeue" and not site.has_requeue and backend == "slurm":
        raise UserError(
            f"slurm.chain is requeue, which this site does not allow (has_requeue: false in the profile "
            f"{slurm.profile}); set slurm.chain=singleton, or afterany"
        )
    links = 1 if chained == "requeue" else slurm.links
    nodes, processes = train_processes(config, site, backend)
    return [
        PlannedJob(
            "train",
            ("train",),
            resources_of(config, site, "train"),
            name=job_name(config, "train"),
            nodes=nodes,
            processes_per_node=processes,
            spare_nodes=slurm.spare_nodes if backend == "slurm" else 0,
            gpus_per_node=site.gpus_per_node,
            chain=chained,
            links=links,
            after=after,
        )
    ]


def _curation(
    config: Config, site: SiteConfig, backend: Backend, units: int | None, after: tuple[Dependency, ...]
) -> list[PlannedJob]:
    """A job for each pass, and one that ends the stage."""
    from pipeline.data.curate.passes.names import ONE_JOB, pass_names

    assert config.data.curate is not None, "the command refuses a run without it"
    # Not `decide`: that is the last one of the passes.
    resources, name = resources_of(config, site, "curate"), f"{job_name(config, 'curate')}-end"
    if backend == "local":
        return [PlannedJob("decide", ("curate",), resources, name=name, after=after)]
    tasks = config.slurm.array.tasks if units is None else max(1, min(config.slurm.array.tasks, units))
    found: list[PlannedJob] = []
    for each in pass_names(config.data.curate):
        # After any end of the one before: whatever it has left, the tasks of this one make first.
        waits = (Dependency(found[-1], "afterany"),) if found else after
        found.append(
            PlannedJob(
                "curate",
                ("curate", "--units"),
                resources,
                name=f"{job_name(config, 'curate')}-{each}",
                tasks=1 if each in ONE_JOB else tasks,
                chain=_repeats(site),
                after=waits,
            )
        )
    last = (Dependency(found[-1], "afterany"),)
    return [*found, PlannedJob("decide", ("curate",), resources, name=name, chain=_repeats(site), after=last)]


def _repeats(site: SiteConfig) -> Chain:
    """Chain of a short stage, for a time limit that was too short or a node that was lost."""
    return "requeue" if site.has_requeue else "none"


def _why(config: Config, site: SiteConfig) -> str:
    if config.slurm.processes_per_node:
        return "slurm.processes_per_node"
    return gpus_key(config) if site.gpus_per_node else "one per node without GPUs"


def gpus_key(config: Config) -> str:
    """The key that decides the number of GPUs on a node."""
    if config.slurm.gpus_per_node is not None:
        return "slurm.gpus_per_node"
    return f"gpus_per_node of the profile {config.slurm.profile}"
