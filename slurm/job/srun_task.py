"""A process of a step, as srun starts it: `python -m slurm.job.srun_task train RUN.yaml`, one for each process.

It takes its place among the ranks from SLURM's variables and then is the `pipeline` command of its words, or with
`doctor` the check of its node.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from types import FrameType

from pipeline.common.errors import EXIT_STOPPED, Stopped, UserError

LOGS = "PIPELINE_LOGS"
"""Folder in which processes leave what they know of their failure."""
_PLACE = (("PROCID", "0"), ("NTASKS", "1"), ("STEP_NUM_NODES", "1"))
_STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
_UNTIL = {
    "train": "training began",
    "preprocess": "preprocessing began",
    "curate": "curation began",
    "doctor": "the check of this node ended",
}
"""By the first word: when what follows no longer is for `_exit_on_stop_signals`."""


def ranks_environment(given: dict[str, str]) -> dict[str, str]:
    """RANK and so on from what srun has set; MASTER_ADDR, if it is set, is the node of rank 0.

    Raises:
        UserError: it was not srun that started this process.
    """
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    missing = [name for name in (*names.values(), "SLURM_STEP_NUM_NODES") if name not in given]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not set: `python -m slurm.job.srun_task` is for srun, which the job calls"
        )
    found = {name: given[source] for name, source in names.items()}
    found["LOCAL_WORLD_SIZE"] = str(int(given["SLURM_NTASKS"]) // int(given["SLURM_STEP_NUM_NODES"]))
    # The step decides the order of its nodes: since 26.05 by the topology, so rank 0 may be on another one than the
    # first of the job.
    if "MASTER_ADDR" in given and (nodes := given.get("SLURM_STEP_NODELIST")):
        found["MASTER_ADDR"] = first_node(nodes)
    return found


def first_node(nodes: str) -> str:
    """The first of nodes as SLURM writes them: `n3` of `n[3-5,9],gpu1`, `rack1n04` of `rack[1-2]n[04-05]`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first.group() if first else "")


def main() -> None:
    """Run the command."""
    # The modules that a handler needs take a while to import: until then signals wait. Only until then, since processes
    # that are started later would inherit the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    words = sys.argv[1:]
    # An evaluation in one process is none of several.
    if words[:1] == ["train"] or (words[:1] == ["eval"] and os.environ.get("SLURM_NTASKS", "1") != "1"):
        os.environ.update(ranks_environment(dict(os.environ)))
    if LOGS in os.environ:
        _set_log_files(os.environ[LOGS], os.environ)
    if words[:1] == ["eval"]:
        # Sent ahead of the end of the time; there is nothing to save, and what is left may be enough.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    else:
        _exit_on_stop_signals(_UNTIL[words[0]])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if words[:1] == ["doctor"]:
        from slurm.doctor.command import main as doctor

        doctor(words[1:])
        return
    import runpy

    # By its name, as `python -m pipeline` finds it: the command line stands above this package.
    sys.argv = ["pipeline", *words]
    runpy.run_module("pipeline", run_name="__main__")


def _set_log_files(folder: str, given: Mapping[str, str]) -> None:
    """Set the files for this process's output and its error record."""
    from pathlib import Path

    from pipeline.common import storage
    from pipeline.train.distributed.rank import NODE_ERRORS
    from slurm.record.rank_logs import log_file, node_errors

    logs = Path(folder)
    rank, number, nodes = (int(given.get(f"SLURM_{name}", default)) for name, default in _PLACE)
    per_node = number // nodes
    os.environ[NODE_ERRORS] = str(node_errors(logs, rank // per_node))
    if rank == 0 and per_node > 1:
        # Once the disk was full, SLURM writes no more to the log of a node. What tells how the run gets on goes on.
        storage.log_to(log_file(logs, rank))


def _exit_on_stop_signals(until: str) -> None:
    """Let a signal to stop end this process at once, until the stage puts its own handlers in place of this one.

    Not by an exception, which the code that is being imported may catch.
    """
    from pipeline.common.console import echo, on_stop
    from pipeline.common.signals import stop_signals
    from pipeline.train.distributed.rank import record_error

    def leave(number: int, frame: FrameType | None) -> None:
        try:
            on_stop(number)
            stop = Stopped(f"received {signal.Signals(number).name} before {until}")
            record_error(stop)
            echo(f"stopped: {stop}", error=True, flush=True)
        finally:
            os._exit(EXIT_STOPPED)

    for number in stop_signals():
        signal.signal(number, leave)


if __name__ == "__main__":
    main()
