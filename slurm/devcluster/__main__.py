"""The command line of the development cluster."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pipeline.common.console import Console, alarm, echo, say
from pipeline.common.errors import UserError
from slurm.devcluster import machine
from slurm.devcluster.cluster import DevCluster
from slurm.devcluster.settings import DEFAULT_PORT

app = typer.Typer(
    help="A real SLURM on this machine: a controller, accounting and several nodes, for tests and first tries.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def _default_folder() -> Path:
    return Path("/var/lib/pipeline-devcluster" if os.geteuid() == 0 else "~/.pipeline-devcluster").expanduser()


Folder = Annotated[
    Path,
    typer.Option(
        "--dir",
        help="The cluster's folder; by default /var/lib/pipeline-devcluster, or ~/.pipeline-devcluster without root.",
        default_factory=_default_folder,
        show_default=False,
    ),
]
Node = Annotated[str, typer.Argument(metavar="NAME", help="A node, as `status` lists them.")]


def _command(name: str, folder: Path) -> str:
    """A command of this program, for a shell."""
    return shlex.join([sys.executable, "-m", "slurm.devcluster", name, "--dir", str(folder)])


@app.command()
def up(
    folder: Folder,
    nodes: Annotated[int, typer.Option(help="Number of nodes; each claims 16 processors.")] = 3,
    port: Annotated[
        int,
        typer.Option(
            help="First of the cluster's ports on 127.0.0.1. Each cluster needs its own, 100 apart; its name and those "
            f"of its nodes follow from it (n1 n2 n3 with {DEFAULT_PORT}, else c<port>n1 ...)."
        ),
    ] = DEFAULT_PORT,
    split_hosts: Annotated[
        bool, typer.Option("--split-hosts", help="Give each node its own host name and boot id; needs root.")
    ] = False,
    private_jobs: Annotated[
        bool, typer.Option("--private-jobs", help="Show users no jobs but their own (PrivateData=jobs).")
    ] = False,
    install: Annotated[bool, typer.Option("--install", help="Install what is missing with apt; needs root.")] = False,
) -> None:
    """Start the cluster, or what is missing of it; may be repeated.

    Partitions: train (the default), short (5 minutes at most), eval; grace, whose jobs have 10 seconds to leave when
    they are preempted; cancel, whose jobs are not requeued then; urgent, whose jobs preempt those of the others but
    eval. Accounts: dev (yours) and other (not yours). QOS: normal, and tiny (one job of at most 2 processors).
    """
    console, begin = Console(), time.monotonic()
    if install and machine.missing_programs():
        machine.install()
    modes = {"split_hosts": split_hosts, "private_jobs": private_jobs}
    DevCluster.up(folder, nodes=nodes, port=port, **modes, report=lambda line: say(console, line))
    say(console, f"up after {time.monotonic() - begin:.1f} s. To use it in this shell:")
    # The full path: where `python` is not found, eval of nothing would succeed.
    say(console, f'    eval "$({_command("env", folder)})"')


@app.command()
def down(
    folder: Folder,
    purge: Annotated[bool, typer.Option("--purge", help="Remove the folder, too, with logs and accounting.")] = False,
) -> None:
    """End the cluster with all its jobs; the folder stays, and `up` starts it again from there."""
    DevCluster.at(folder).down(purge=purge)
    left = "is removed" if purge else f"is kept; to remove it: {_command('down', folder)} --purge"
    say(Console(), f"down; {folder} {left}")


@app.command()
def status(folder: Folder) -> None:
    """Show daemons and nodes; the exit code is 1 unless the cluster is up and all nodes take jobs."""
    console, cluster = Console(), DevCluster.at(folder)
    for daemon, pid in cluster.daemons().items():
        say(console, f"{daemon:<16} {f'running, process {pid}' if pid else 'not running'}")
    if cluster.is_up:
        for node, state in cluster.node_states().items():
            say(console, f"{node:<16} {state}")
    if not cluster.usable():
        raise typer.Exit(1)


@app.command()
def env(folder: Folder) -> None:
    """Print what a shell needs to use the cluster, for `eval`."""
    for key, value in DevCluster.at(folder).environment.items():
        echo(f"export {key}={shlex.quote(value)}")


@app.command()
def kill_node(name: Node, folder: Folder) -> None:
    """Kill a node and all that runs on it, as a loss of power would."""
    DevCluster.at(folder).kill_node(name)
    say(Console(), f"{name} is dead; the controller notices within half a minute")


@app.command()
def start_node(name: Node, folder: Folder) -> None:
    """Start a killed node again and wait until it takes jobs."""
    DevCluster.at(folder).start_node(name)
    say(Console(), f"{name} takes jobs")


def main() -> None:
    """Entry point of `python -m slurm.devcluster`."""
    try:
        app(prog_name="python -m slurm.devcluster")
    except UserError as error:
        alarm("error:", str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
