"""The command `pipeline curate`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.arguments import Local, Overrides, RunOrFolder, Slurm, TrustFilesOf, Verbose
from pipeline.cli.submitted import submitted
from pipeline.common.console import Console
from pipeline.common.errors import UserError


def curate(
    run: RunOrFolder,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show passes, jobs and bytes, and exit.")] = False,
    slurm: Slurm = False,
    local: Local = False,
    units: Annotated[
        bool,
        typer.Option("--units", help="Process unclaimed jobs of the first open pass, then exit (used by array tasks)."),
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="KEY=VALUE",
            help="Show what another bound would keep, beside the active decisions; may be repeated. Changes nothing.",
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            "--compare",
            metavar="DIR",
            help="Compare decisions by document: those in a folder (SOURCE/curate/decisions/HASH) with the active "
            "ones; or, given twice, with each other.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="With --what-if or --compare: list all documents that differ, as JSON Lines.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the kept documents, edits applied, to files in a folder.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="jsonl|parquet", help="With --export: format of the files.")
    ] = "jsonl",
    verbose: Verbose = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Decide which documents are kept (data.curate); `pipeline preprocess` leaves out the others. Rerun to resume.

    Measures every document once, compares them, decides by the bounds of the run file, and writes verdicts and a
    report below DATA_DIR/SOURCE/curate. Other bounds are decided again without reading the text.
    """
    # As for `pipeline preprocess`: with one thread, it can fork its workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from pipeline.config.load import load_run

    config = load_run(run, overrides or (), of_data=True)
    words = shlex.join([str(run), *(overrides or ())])
    if status:
        from pipeline.data.curate.results.status import print_status

        print_status(Console(), config, words)
    elif what_if:
        from pipeline.data.curate.results.what_if import what_if as show
        from pipeline.data.provenance.excerpts import ExcerptReader

        changed = load_run(run, [*(overrides or ()), *_full_keys(what_if)], of_data=True)
        show(config, changed, Console(), ExcerptReader(config.data.curate), listed=listed)
    elif compare:
        from pipeline.data.curate.results.differences import compare as show_differences
        from pipeline.data.provenance.excerpts import ExcerptReader

        show_differences(_two(compare), Console(), ExcerptReader(config.data.curate), listed=listed)
    elif export is not None:
        from pipeline.data.curate.results.export import export as write

        write(config, export, _format(form), Console())
    else:
        if submitted(config, ["curate"], slurm, local, dry_run):
            return
        from slurm.local.stages import curate as stage

        stage(config, dry_run=dry_run, units=units)


def _full_keys(changes: list[str]) -> list[str]:
    """Overrides as the run file takes them; `data.curate.` may be left out."""
    return [each if each.startswith("data.") else f"data.curate.{each}" for each in changes]


def _two(folders: list[Path]) -> tuple[Path, Path]:
    """Folders of the decisions to compare; of one folder, the active ones come first."""
    if len(folders) > 2:
        raise UserError("--compare: name one folder, or two")
    if len(folders) == 2:
        return folders[0], folders[1]
    folder = folders[0].absolute()
    if folder.parent.name != "decisions":
        raise UserError(f"--compare: {folder} has no decisions; name SOURCE/curate/decisions/HASH, or two folders")
    return folder.parent.parent, folder


def _format(name: str) -> Literal["jsonl", "parquet"]:
    if name == "jsonl":
        return "jsonl"
    if name == "parquet":
        return "parquet"
    raise UserError(f"--format: {name!r} is not jsonl or parquet")
