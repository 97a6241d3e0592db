"""Proof that a job executes what was submitted: digests in its script, which SLURM has copied and nobody can change.

The script compares the snapshot of the code with them before Python starts; Python from there compares the rest.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.common.errors import EXIT_REFUSED, UserError

_SHOWN = 20
"""Lines of differences in a message."""


def listing(contents: Mapping[str, bytes]) -> bytes:
    """List of files in the form of `sha256sum`, sorted by name.

    Args:
        contents: of the files by name, relative and with `/` between folders.
    """
    assert not any("\n" in name or "\\" in name for name in contents), "sha256sum would escape it"
    lines = [f"{sha256(data)}  {name}\n" for name, data in sorted(contents.items())]
    return "".join(lines).encode()


def list_file(folder: Path) -> Path:
    """File with the list of a folder, beside it."""
    return folder.with_name(f"{folder.name}.sha256")


def sha256(data: bytes) -> str:
    """Digest in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def read_checked(file: Path, digest: str | None) -> bytes:
    """Content of a file that belongs to a submission.

    Args:
        file: to read.
        digest: that it had when the job was sent; None where that is not known.

    Raises:
        UserError: it has changed since, or cannot be read.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); submit the run again") from error
    if digest is not None and sha256(data) != digest:
        raise UserError(f"{file} has changed since the job was submitted, so it is not run; submit the run again")
    return data


@contextmanager
def for_owner_alone() -> Iterator[None]:
    """Let nobody but this user write to what is made inside, from the moment when it is made."""
    before = os.umask(0o077)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def others_cannot_write(*paths: Path) -> None:
    """Take from all users but the owner the right to write to files or folders, which an ACL may have given them."""
    for each in paths:
        if not each.is_symlink():
            each.chmod(each.stat().st_mode & 0o7755)


_REFUSES = f"""\
pipeline_refuses() {{
  printf 'refused: %s\\nNothing of it was run. Submit the run again, and find out who changed it\\n' "$1" >&2
  exit {EXIT_REFUSED}
}}"""
_CHECK = """\
pipeline_list=$(cat -- "$pipeline_code.sha256") || pipeline_refuses "$pipeline_code.sha256 cannot be read"
[ "$(printf '%s\\n' "$pipeline_list" | sha256sum)" = "$pipeline_digest  -" ] ||
  pipeline_refuses "$pipeline_code.sha256 is not the list of files that was submitted"
pipeline_names=$(printf '%s\\n' "$pipeline_list" | cut -c 67- | sed 's/^/f /')
pipeline_found=$(cd -- "$pipeline_code" && find . ! -type d -printf '%y %P\\n' | LC_ALL=C sort) ||
  pipeline_refuses "$pipeline_code cannot be read"
[ "$pipeline_found" = "$pipeline_names" ] ||
  pipeline_refuses "other files are in $pipeline_code than were submitted (> added, < missing; f file, l link):
$(diff <(printf '%s\\n' "$pipeline_names") <(printf '%s\\n' "$pipeline_found") | grep '^[<>]' | head -n SHOWN | cat -v)"
pipeline_differs=$(cd -- "$pipeline_code" &&
  printf '%s\\n' "$pipeline_list" | LC_ALL=C sha256sum --check --strict --quiet 2>&1) ||
  pipeline_refuses "files in $pipeline_code are not those that were submitted:
$(printf '%s\\n' "$pipeline_differs" | head -n SHOWN | cat -v)"
""".replace("SHOWN", str(_SHOWN))
_OWNED = """\
pipeline_open=$(find "$pipeline_code" "$pipeline_code.sha256" \\( ! -uid "$UID" -o -perm /022 \\) -print -quit)
[ -z "$pipeline_open" ] || pipeline_refuses "other users than $UID may write to $pipeline_open"
"""


def check_lines(code: Path, digest: str, *, owned: bool) -> list[str]:
    """Lines of bash that end the job, with the code for what is never started again, unless the snapshot is whole.

    bash 4, coreutils, diffutils, findutils, grep and sed are all they need; 350 files take 0.2 s.

    Args:
        code: the snapshot, with its list beside it.
        digest: of the list.
        owned: refuse files, too, that other users may write to.
    """
    lines = ["# What is run is what was submitted.", _REFUSES]
    lines += [f"pipeline_code={shlex.quote(str(code))}", f"pipeline_digest={digest}"]
    return [line for part in [*lines, _CHECK, _OWNED if owned else ""] for line in part.splitlines()]
