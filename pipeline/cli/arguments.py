"""Arguments and options that several commands have."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from pipeline.common.console import VERBOSE
from pipeline.common.errors import UserError
from pipeline.common.objects.urls import url_of_path
from pipeline.common.trust import trust


def _trust(names: list[str] | None) -> list[str] | None:
    """Trust the files of users from here on."""
    trust(names or ())
    return names


def _be_verbose(wanted: bool) -> bool:
    """Print details from here on, here and in processes that this one starts."""
    if wanted:
        os.environ[VERBOSE] = "1"
    return wanted


def on_a_disk(path: Path) -> Path:
    """A path of a disk.

    Raises:
        UserError: it is the URL of a bucket.
    """
    if (url := url_of_path(path)) is not None:
        raise UserError(f"{url} is in a bucket; write it to a disk first: `pipeline data pull {url} FOLDER`")
    return path


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.PATH=VALUE", help="Values that override the run file.", show_default=False),
]
RunOrFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run file (quickstart.yaml is included), or folder of a trained run."),
]
Step = Annotated[int | None, typer.Option(help="Checkpoint step; default: the latest.", min=0)]
WeightsFolder = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        help="Folder of weights in place of a checkpoint, from `checkpoint export`, `checkpoint average` or `convert "
        "from-hf`.",
        show_default=False,
    ),
]
Slurm = Annotated[
    bool,
    typer.Option("--slurm", help="Submit to SLURM, with the settings of `slurm:` in the run file. Preview: --dry-run."),
]
Local = Annotated[
    bool,
    typer.Option("--local", help="Run in the background on this machine, with the same run folder and logs."),
]
InAllocation = Annotated[
    bool,
    typer.Option(
        "--in-allocation", help="Run on the nodes of the SLURM allocation that this shell is in (salloc). Sends no job."
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Start although another process may train in the run folder, of which nobody can say whether it runs: you "
        "know that it is gone. Refused while it gives signs of life.",
    ),
]
TrustFilesOf = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-files-of",
        metavar="USER",
        help="Execute files and commands that this user (or group:NAME) may have written; may be repeated. "
        "See SECURITY.md.",
        callback=_trust,
        show_default=False,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Also print start-up details: threads, kernels, compilation. Logs of jobs have them. With --dry-run: also "
        "the scripts of jobs.",
        callback=_be_verbose,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def shard_bytes(text: str | None) -> int | None:
    """Bytes of --max-shard; a `UserError` if it is not a size."""
    if text is None:
        return None
    from pipeline.config.base import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--max-shard is {text!r}: {error}") from None
    if size < 1:
        raise UserError(f"--max-shard is {text!r}; it must be at least one byte")
    return int(size)


def special_ids(entries: Iterable[str]) -> dict[str, int]:
    """Special tokens with their ids, of --special TOKEN=ID; a `UserError` if an entry is not of this form."""
    found: dict[str, int] = {}
    for entry in entries:
        token, _, number = entry.rpartition("=")
        if not token or not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise UserError(f"--special is {entry!r}; write TOKEN=ID, like '<|endoftext|>=50256'")
        if token in found:
            raise UserError(f"--special gives {token!r} twice")
        found[token] = int(number)
    return found
