"""The run that a user names: by its run file, or by its folder, which may hold nothing but jobs that wait."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.common.run_files import RunFiles
from pipeline.config.load import load_run, no_run_folder


def run_folder(run: Path) -> Path:
    """The folder of a run.

    Args:
        run: its run file or its folder.

    Raises:
        UserError: it is neither, or the run file has problems.
    """
    if not run.is_dir():
        return load_run(run).run.dir
    path = Path(os.path.abspath(run))
    files = RunFiles(path)
    signs = (files.config, files.slurm, files.ledger, files.lock)
    if not any(sign.exists() for sign in signs):
        raise no_run_folder(run)
    return path
