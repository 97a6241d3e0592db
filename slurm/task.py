"""A process of a stage, as srun starts it: `python -m slurm.task train RUN.yaml`, one for each process of the step.

It takes its place among the ranks from SLURM's variables and then is the `pipeline` command of its words.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pipeline.errors import UserError
from slurm.failures import error_file

LOGS = "PIPELINE_LOGS"
"""Folder in which processes leave what they know of their failure."""


def ranks_environment(given: dict[str, str]) -> dict[str, str]:
    """RANK and so on from what srun has set.

    Raises:
        UserError: it was not srun that started this process.
    """
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    missing = [name for name in (*names.values(), "SLURM_STEP_NUM_NODES") if name not in given]
    if missing:
        raise UserError(f"{', '.join(missing)} is not set: `python -m slurm.task` is for srun, which the job calls")
    found = {name: given[source] for name, source in names.items()}
    return found | {"LOCAL_WORLD_SIZE": str(int(given["SLURM_NTASKS"]) // int(given["SLURM_STEP_NUM_NODES"]))}


def main() -> None:
    """Be the command."""
    words = sys.argv[1:]
    # An evaluation in one process is none of several.
    if words[:1] == ["train"] or (words[:1] == ["eval"] and os.environ.get("SLURM_NTASKS", "1") != "1"):
        os.environ.update(ranks_environment(dict(os.environ)))
    if words[:1] == ["eval"]:
        # Sent ahead of the end of the time; there is nothing to save, and what is left may be enough.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    if LOGS in os.environ:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file(Path(os.environ[LOGS]), rank))
    from pipeline.cli import main as pipeline

    sys.argv = ["pipeline", *words]
    pipeline()


if __name__ == "__main__":
    main()
