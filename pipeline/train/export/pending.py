"""The exports that a run has yet to make, as another process can see them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pipeline.common import storage
from pipeline.common.run_files import RunFiles
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.train.checkpoint.policy import to_export
from pipeline.train.export.folders import ExportFolders
from pipeline.train.run.lock import last_attempt


def pending_exports(run: Path, config: CheckpointConfig, steps: Collection[int]) -> list[int]:
    """Steps of the checkpoints that a run still exports, now or at its next start, ascending.

    The queue of a run that trains is in its memory. It follows from the checkpoints and exports that are there, and
    from `exports.jsonl`, which has what the newest attempt has given up. The next attempt tries that again.

    Args:
        run: folder.
        config: which ones are exported.
        steps: of the checkpoints. The last one of the run is exported, too, but not known here: it is the one that the
            run resumes from, which stays in any case.
    """
    attempt = last_attempt(run)
    given_up = {
        row.get("step")
        for row in storage.read_json_lines(RunFiles(run).exports)
        if row.get("failed") and row.get("attempt") == attempt
    }
    missing = to_export(config, steps, ExportFolders.of_run(run).steps(), total=0)
    return [step for step in missing if step not in given_up]
