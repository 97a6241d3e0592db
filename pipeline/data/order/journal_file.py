"""The journal in a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.data.order.journal import Journal


def read_journal(run: Path) -> Journal:
    """The journal that a run has written when it last started or went back.

    Raises:
        FileNotFoundError: it has not.
        UserError: the file is damaged.
    """
    path = RunFiles(run).journal
    value = storage.get_json(path)
    try:
        return Journal.from_json(value)
    except UserError as error:
        raise UserError(f"{path}: {error}; the next start of training writes it again") from None


def saved_journal(run: Path, of_checkpoint: Any, step: int) -> Journal:
    """The plan that a run has had so far, as a checkpoint of `step` steps has it.

    Skips that were decided after the checkpoint was written are in `journal.json` alone. Without a readable
    one, the checkpoint's is all that is known.

    Raises:
        UserError: the checkpoint's is damaged.
    """
    journal = Journal.from_json(of_checkpoint)
    try:
        return journal.with_faults(read_journal(run), step)
    except (OSError, UserError):
        return journal
