"""`pipeline plan RUN.yaml`: what a training takes, estimated from the run file alone. Starts and writes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.common.console import Console, echo, progress, say, verbatim
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.train.distributed.layout import resolve
from pipeline.train.distributed.process_group import visible_gpus
from pipeline.train.host.devices import Device, device_of_gres, find_device
from pipeline.train.planning.plan import ResourcePlan, plan
from pipeline.train.planning.show import device_json, plan_lines, suggestion_lines, suggestions_json, to_json
from pipeline.train.planning.suggest import MOST_PLANS
from pipeline.train.planning.suggest import suggest as suggested
from pipeline.train.rules.layout_check import world_size
from slurm.site.site_profile import shipped, site_of
from slurm.submit.course import in_steps, job_seconds
from slurm.submit.job_plan import resources_of

_DEVICE = "h100"


def estimate(
    config: Config,
    console: Console,
    *,
    nodes: int | None = None,
    device: str | None = None,
    suggest: bool = False,
    as_json: bool = False,
    verbose: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Print the plan of a training.

    Args:
        config: the run.
        console: where to.
        nodes: how many, each full of devices; by default `processes_of` says.
        device: the name of one; by default that of the profile, or an H100, which is said.
        suggest: look for layouts that fit, too.
        as_json: one JSON object.
        verbose: list what is assumed.
        environment: asked for `WORLD_SIZE` where the run file names no number of processes.

    Returns:
        Whether it fits.

    Raises:
        UserError: the device is not known, or the layout is refused and no other is asked for.
    """
    config = in_steps(config)
    name, of_profile = _default_device(config) if device is None else (device, False)
    chosen = device_of(config, name)
    processes = processes_of(config, chosen, nodes, environment)
    found: ResourcePlan | None = None
    seconds, default_time = _job_seconds(config)
    values: dict[str, Any] = {}
    lines: list[str] = []
    try:
        if nodes is not None:
            resolve(config.parallel, processes, processes=f"the processes (--nodes x {chosen.node_devices})")
        found = plan(config, chosen, processes, seconds)
    except UserError as error:
        if not suggest:
            raise
        about = device_json(chosen, config.train.precision.compute)
        values, lines = {"refused": str(error), "device": about}, [f"refused: {error}"]
    else:
        values, lines = to_json(found), list(plan_lines(found, nodes is not None, default_time, verbose))
    if not as_json:
        if device is None:
            why = f"gpu_type of profile {config.slurm.profile}" if of_profile else "assumed"
            say(console, f"device: {name} ({why}; --device NAME for another)")
            if "slurm" not in config.model_fields_set and not visible_gpus():
                say(
                    console,
                    f"this machine has no GPU: the figures are those of a machine with {name}; how long a run takes "
                    "here is known when it has made some steps (`pipeline status`)",
                )
        _print_lines(console, lines)
    if suggest:
        try:
            suggestions = _suggestions(config, chosen, processes)
        except UserError as error:
            values |= {"suggestions": [], "nothing_fits": str(error)}
            lines = [f"no suggestions: {error}"]
        else:
            values |= {"suggestions": suggestions_json(suggestions)}
            lines = list(suggestion_lines(suggestions))
        if not as_json:
            _print_lines(console, lines)
    if as_json:
        echo(json.dumps(values))
    return found is not None and found.fits


def _suggestions(config: Config, device: Device, processes: int) -> list[tuple[dict[str, Any], ResourcePlan]]:
    errors = Console(stderr=True)
    if not errors.is_terminal:
        say(errors, f"looking for layouts: up to {MOST_PLANS} estimates of memory, seconds each")
    with progress(errors, "looking for layouts", MOST_PLANS) as advance:
        return suggested(config, device, processes, advance=advance)


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        (verbatim if line.startswith("  ") else say)(console, line)  # the indented ones are rows of tables


def _default_device(config: Config) -> tuple[str, bool]:
    """Name of the device where the command names none; True if it is that of the cluster's profile."""
    if "slurm" in config.model_fields_set and (known := device_of_gres(site_of(config).gpu_type)) is not None:
        return known.name, True
    return _DEVICE, False


def device_of(config: Config, name: str) -> Device:
    """A device, in nodes as the cluster of the run has them; where nothing says how many a node has, as is usual.

    Raises:
        UserError: it is not known.
    """
    device = find_device(name)
    if "slurm" not in config.model_fields_set:
        return device
    wanted = config.slurm.processes_per_node or site_of(config).gpus_per_node
    return replace(device, node_devices=wanted) if wanted else device


def processes_of(config: Config, device: Device, nodes: int | None, environment: Mapping[str, str]) -> int:
    """Processes of a run on full nodes.

    Those of `nodes`; or `launch.processes`; or with a `slurm` section those of its nodes; or what the layout names.
    """
    if nodes is not None:
        return nodes * device.node_devices
    if config.launch.processes is None and "slurm" in config.model_fields_set:
        return config.slurm.nodes * device.node_devices
    return world_size(config, environment)


def _job_seconds(config: Config) -> tuple[float | None, bool]:
    """Seconds of a job for steps, without start and stop; True if the time limit is the default.

    None where the run file says nothing of jobs.
    """
    if "slurm" not in config.model_fields_set:
        return None, False
    site = site_of(config)
    minutes = resources_of(config, site, "train").time
    assert minutes is not None, "there is a default"
    own = [config.slurm.train.time]
    given = own if config.slurm.profile in shipped() else [*own, site.train.time, site.defaults.time]
    return job_seconds(config, minutes), all(time is None for time in given)
