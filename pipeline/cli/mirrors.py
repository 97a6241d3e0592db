"""URLs of mirrors in the place of run folders."""

from __future__ import annotations

from pathlib import Path

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.objects.urls import url_of_path


def fetched(run: Path, step: int | None = None) -> Path:
    """A run folder as it is, or of the URL of a mirror one in the cache folder, with the checkpoint of a step."""
    if (url := url_of_path(run)) is None:
        return run
    from pipeline.train.checkpoint.mirror.copies import fetch_run

    return fetch_run(url, step, Console())


def fetched_report(run: Path) -> Path:
    """A run folder or file as it is, or of the URL of a mirror a folder in the cache, with what reports are made of."""
    if (url := url_of_path(run)) is None:
        return run
    from pipeline.train.checkpoint.mirror.copies import fetch_report

    return fetch_report(url, Console())


def refuse_mirror(run: Path, options: str) -> None:
    """Refuse options that need a run folder where the URL of a mirror is named."""
    if (url := url_of_path(run)) is not None:
        raise UserError(f"{url} is a mirror of checkpoints, of which {options} cannot be used; name a run folder")
