"""Files for the output and the errors of a launch's processes: few files, however many processes.

On a cluster each node writes one log for all its processes, whose lines begin with the rank. Rank 0, which tells how
the run gets on, has a log of its own. Launches of this machine, and of older versions, have a log for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm.record.tail import Tail, Tails, last_lines

STAMP = "%Y-%m-%d_%H-%M-%S"
"""Local time as the name of the folder of a launch begins with it."""
ERRORS = "errors.jsonl"
"""Error records of the ranks of a launch, a line each; of one node while the launch runs."""


def log_file(folder: Path, rank: int) -> Path:
    """The log of a rank that has one of its own."""
    return folder / f"rank-{rank:04d}.log"


def srun_log(folder: Path) -> Path:
    """Output of srun itself about the tasks of a launch."""
    return folder / "srun.log"


def error_file(folder: Path, rank: int) -> Path:
    """Error record of a rank on this machine; see `pipeline.train.distributed.rank.record_error`."""
    return folder / f"rank-{rank:04d}.error.json"


def node_log(folder: Path, node: int) -> Path:
    """The log of all processes of a node, by its number among the nodes of the launch; `--output=node-%4n.log`."""
    return folder / f"node-{node:04d}.log"


def node_errors(folder: Path, node: int) -> Path:
    """Error records of the ranks of a node."""
    return folder / f"node-{node:04d}.{ERRORS}"


@dataclass(frozen=True)
class RankLog:
    """The output of a rank: a file of its own, its lines in that of its node, or one and then the other."""

    rank: int
    own: Path | None
    shared: Path | None

    @property
    def path(self) -> Path:
        """The file to name to a reader."""
        found = [file for file in (self.own, self.shared) if file is not None]
        return next((file for file in found if file.exists()), found[0])

    def tail(self, lines: int = 0) -> Tails:
        """The output from now on, after the last lines; 0: all of them."""
        own = [Tail(self.own, lines)] if self.own else []
        return Tails([*own, *([Tail(self.shared, lines, self.rank)] if self.shared else [])])

    def last_lines(self, lines: int) -> list[str]:
        """The last lines, or all of them with 0."""
        own = last_lines(self.own, lines) if self.own else []
        found = own + (last_lines(self.shared, lines, self.rank) if self.shared else [])
        return found[-lines:]


def rank_log(folder: Path, rank: int, per_node: int = 1) -> RankLog:
    """The log of a rank, which may not be there yet.

    Args:
        folder: of the launch.
        rank: whose.
        per_node: processes on each node, where SLURM started them; else 1.
    """
    own = log_file(folder, rank)
    if per_node == 1:
        return RankLog(rank, own, None)
    # What came before rank 0 had its own log, and what SLURM says of its end, is in that of the node.
    return RankLog(rank, own if rank == 0 or own.exists() else None, node_log(folder, rank // per_node))
