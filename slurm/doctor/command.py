"""Is this node fit for training? `pipeline doctor`; and the same before every launch on a cluster, on all its nodes.

A launch starts `python -m slurm.job.srun_task doctor` once on each node. Each writes what it finds into a folder;
`compare` says from them which nodes are unfit. One that hangs ends itself, and its report says where it was.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.common import storage
from pipeline.common.console import alarm, echo, print_table, say, warn
from pipeline.common.errors import EXIT_OK, EXIT_UNHEALTHY, NodeUnhealthy, UserError
from pipeline.common.process_identity import node_name
from pipeline.config.load import load_run, load_written
from slurm.doctor.health import health_check
from slurm.doctor.image import LONGEST, image_checks
from slurm.doctor.node import NodeRank, disks, host_name, memory, mirror, objects, shared_memory, software
from slurm.doctor.report import Network, NodeCheck, NodeVerdict, Report, compare, parse_report, report_file

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.config.slurm import SiteConfig
    from slurm.doctor.network import Rendezvous

TOTAL_SECONDS = 120.0
"""A check that takes longer hangs: a file system, or a GPU."""
_NETWORK = "all-reduce with the other nodes"


@dataclass(frozen=True)
class NodeRequirements:
    """Requirements of a run on a node."""

    gpus: int = 0
    run: Path | None = None
    data: Path | None = None
    data_now: bool = False
    """The data must be there already."""
    health: str = ""
    """The site's own check, where it runs here; a job runs it outside of its container."""
    sources: Config | None = None
    """Config whose objects have to be readable here."""


def _data_folder(config: Config) -> Path | None:
    """Folder of the datasets of a run; None if they are in a bucket."""
    return None if config.data_url is not None else config.data_dir


def doctor_command(run_file: Path, folder: Path, gpus: int) -> list[str]:
    """Words after the interpreter, for one process on each node; it leaves with 78 where the node is unfit by itself.

    Args:
        run_file: resolved config of the run.
        folder: where each node writes its report; new for every launch, as `read_reports` believes what it finds there.
        gpus: that each node must have.
    """
    return ["-m", "slurm.job.srun_task", "doctor", "--run", str(run_file), "--out", str(folder), "--gpus", str(gpus)]


def doctor(run: Path | None, overrides: Sequence[str], console: Console, *, as_json: bool, image: bool = False) -> None:
    """Check this node and print what was found; under torchrun or srun, with one process on each node, all of them.

    Args:
        run: run file whose folders are looked at, too.
        overrides: of the run file.
        console: for the table.
        as_json: one JSON object instead.
        image: also look at what the image has, of the container that this is started in.

    Raises:
        NodeUnhealthy: something is wrong that training would fail by, or suffer from.
        UserError: the run file has a mistake, or the variables of a launcher are wrong.
    """
    node_rank = NodeRank.of_environment()
    needs = NodeRequirements()
    if run is not None:
        config = load_run(run, overrides)
        health = _site(config).health_command
        needs = NodeRequirements(_gpus(config), config.run.dir, _data_folder(config), health=health, sources=config)
    with _limited(TOTAL_SECONDS + LONGEST if image else TOTAL_SECONDS):
        examination = Examination(node_rank)
        with examination.surviving():
            examination.node(needs)
        if image:
            with examination.surviving():
                examination.image(needs)
        reports = examination.network()
    if node_rank.size > 1:
        # Where it is loaded the command line leaves as ranks do, without joining the threads of gloo and NCCL.
        from pipeline.train.distributed import process_group

        if node_rank.rank:  # rank 0 tells
            process_group.leave(EXIT_OK)
    found = compare(reports)
    if as_json:
        nodes = {node: report and asdict(report) for node, report in reports.items()}
        values = {"ok": not found.unhealthy, **asdict(found), "nodes": nodes}
        echo(orjson.dumps(values, option=orjson.OPT_INDENT_2).decode())
    else:
        _show(console, reports, found)
    if found.unhealthy:
        problems = [f"{node}: {problem}" for node, why in found.unhealthy.items() for problem in why]
        raise NodeUnhealthy("\n".join(["not fit for training:", *problems]) if problems[1:] else problems[0])


class Examination:
    """The checks of this node, in their order; what is known is written down at each step.

    Args:
        node_rank: of this node among others.
        folder: for its report.
    """

    def __init__(self, node_rank: NodeRank, folder: Path | None = None) -> None:
        self._node_rank = node_rank
        self._folder = folder
        self._rendezvous: Rendezvous | None = None
        self.report = Report(node_name())
        self.written = True
        """False once the folder could not be written to."""

    def node(self, needs: NodeRequirements) -> None:
        """All that this node can find out by itself."""
        self.begin("import of torch")
        import torch

        from slurm.doctor import gpu

        self.begin("nvidia-smi")
        views, checks = gpu.driver_views()
        self._add(*checks)
        self.begin("GPUs")
        self._add(gpu.devices(needs.gpus, len(views)))
        self.begin("matrix product")
        checks, times = gpu.products()
        self._add(*checks)
        self.begin("versions")
        facts = {**software(views[0].driver if views else ""), "gpu": gpu.kind()}
        self.report = replace(self.report, products=times, facts=facts)
        self._add(memory(), *([shared_memory()] if torch.cuda.device_count() else []), host_name())
        self.begin(f"disks ({', '.join(map(str, filter(None, (needs.run, needs.data, 'tmp'))))})")
        self._add(*disks(needs.run, needs.data, data_needed=needs.data_now))
        if needs.sources is not None:
            self.begin("object storage")
            self._add(*objects(needs.sources), *mirror(needs.sources))
        if needs.health:
            self.begin("health_command")
            self._add(health_check(needs.health))

    def image(self, needs: NodeRequirements) -> None:
        """Contents of the image, and what does not fit this node."""
        self.begin("image")
        folders = {"run.dir": needs.run, "data.dir": needs.data}
        self._add(*image_checks({name: path for name, path in folders.items() if path is not None}))

    def network(self) -> dict[str, Report | None]:
        """Meet the other nodes; at rank 0 the reports of those that came, by node, else only this one."""
        if self._node_rank.size > 1:
            self._all_reduce()
        self.begin("")
        everybody = self._rendezvous.gather(orjson.dumps(self.report)) if self._rendezvous else []
        if not everybody:
            return {self.report.node: self.report}
        found = {report.network.rank: report for report in map(parse_report, everybody)}
        names = {rank: report.node for rank, report in found.items()}
        if len(set(names.values())) < len(names):
            names = {rank: f"{name}, rank {rank}" for rank, name in names.items()}
        return {names.get(rank, f"node of rank {rank}"): found.get(rank) for rank in range(self._node_rank.size)}

    def begin(self, what: str) -> None:
        """Note what comes next; "" is the end."""
        self.report = replace(self.report, at=what)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            storage.put_json(report_file(self._folder, self.report.node), asdict(self.report))
            self.written = True
        except OSError as error:
            self.written = False
            echo(f"{self.report.node}: {error.filename} cannot be written ({error.strerror})", error=True)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Turn an exception inside into a failed check; the other nodes wait for this one all the same."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, (OSError, UserError)):
                echo(traceback.format_exc(), end="", error=True)
            at = self.report.at
            self._add(NodeCheck(at, False, "failed", f"{at}: {str(error) or type(error).__name__}"))
            self.begin("")

    def _add(self, *checks: NodeCheck) -> None:
        self.report = replace(self.report, checks=(*self.report.checks, *checks))

    def _all_reduce(self) -> None:
        import torch

        from slurm.doctor.network import RendezvousFailed, rendezvous

        self.report = replace(self.report, network=Network("pending", rank=self._node_rank.rank))
        self.begin(_NETWORK)
        try:
            self._rendezvous = rendezvous(self._node_rank, gpus=torch.cuda.device_count())
            network = self._rendezvous.all_reduce()
        except RendezvousFailed as error:
            network = error.network
        self.report = replace(self.report, network=network)


def main(words: Sequence[str]) -> None:
    """`python -m slurm.job.srun_task doctor`: check this node among others, report, and leave with 0 or 78."""
    parser = argparse.ArgumentParser(prog="python -m slurm.job.srun_task doctor", description="Check a node.")
    parser.add_argument("--run", type=Path, required=True, help="the resolved run file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--gpus", type=int, default=0, help="that the node must have")
    given = parser.parse_args(words)
    with _limited():
        try:
            code = _examine(given.run, given.out, given.gpus)
        except UserError as error:
            alarm("error:", str(error))
            code = error.exit_code
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        # The ordinary way joins the threads of gloo and NCCL, which now and then aborts or hangs.
        os._exit(code)


def _examine(run_file: Path, folder: Path, gpus: int) -> int:
    """Exit code of one node of several."""
    examination = Examination(NodeRank.of_environment(), folder)
    with examination.surviving():
        examination.begin(f"run file {run_file}")
        config = load_written(run_file)
        examination.node(NodeRequirements(gpus, config.run.dir, _data_folder(config), data_now=True))
    with examination.surviving():
        examination.network()
    for problem in examination.report.errors:
        echo(f"{examination.report.node}: {problem}", flush=True)
    return EXIT_UNHEALTHY if examination.report.errors or not examination.written else EXIT_OK


def _gpus(config: Config) -> int:
    """GPUs that a run needs of the node that this is."""
    least = 1 if config.launch.device == "cuda" else 0
    if "SLURM_JOB_ID" not in os.environ:
        return least
    return max(least, _site(config).gpus_per_node)


def _site(config: Config) -> SiteConfig:
    from slurm.site.site_profile import site_of

    return site_of(config)


@contextmanager
def _limited(seconds: float = TOTAL_SECONDS) -> Iterator[None]:
    """End this process if it hangs, whatever in."""

    def end() -> None:
        echo(f"the check of this node did not end within {seconds:.0f} s, so it hangs", error=True, flush=True)
        os._exit(EXIT_UNHEALTHY)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    with suppress(RuntimeError, OSError, ValueError):  # a stderr that is closed
        # Where a call to the driver never gives Python back, this shows where, and ends the process with code 1.
        faulthandler.dump_traceback_later(seconds + 5, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _show(console: Console, reports: dict[str, Report | None], found: NodeVerdict) -> None:
    """A table of all checks, and the warnings."""
    table = Table(box=None, pad_edge=False)
    several = len(reports) > 1
    for column in [*(["node"] if several else []), "check", "", "found"]:
        table.add_column(column, overflow="fold")
    for node, report in reports.items():
        for check in _rows(report) if report else []:
            mark = Text("ok") if check.ok else Text(check.severity, style="bold red")
            table.add_row(*([node] if several else []), check.name, mark, check.value)
    print_table(console, table)
    for warning in found.warnings:
        warn(console, warning)
    if not found.unhealthy:
        say(console, "fit for training" if not several else f"{len(reports)} nodes, all fit for training")


def _rows(report: Report) -> list[NodeCheck]:
    rows = [
        *report.checks,
        NodeCheck("versions", True, ", ".join(f"{key} {value}" for key, value in report.facts.items())),
    ]
    if report.network.state != "alone":
        rows.append(NodeCheck("all-reduce", report.network.state == "ok", report.network.value()))
    return rows
