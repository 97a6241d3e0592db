"""Proof that a job executes what was submitted: digests in its script, which SLURM has copied and nobody can change.

The script compares the snapshot of the code with them before Python starts; Python from there compares the rest.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.common.errors import EXIT_REFUSED, UserError


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
[ -f "$pipeline_code" ] && [ ! -L "$pipeline_code" ] || pipeline_refuses "$pipeline_code is not there, or is not a file"
# Without a digest nothing was compared: the job is being cancelled, or the file cannot be read.
pipeline_found=$(sha256sum < "$pipeline_code") || {
  echo "the digest of $pipeline_code could not be computed, so nothing of it was run" >&2
  exit 1
}
[ "$pipeline_found" = "$pipeline_digest  -" ] || pipeline_refuses "$pipeline_code is not the code that was submitted"
"""
_OWNED = """\
pipeline_open=$(find "$pipeline_code" \\( ! -uid "$UID" -o -perm /022 \\) -print -quit)
[ -z "$pipeline_open" ] || pipeline_refuses "other users than $UID may write to $pipeline_open"
"""


def check_lines(code: Path, digest: str, *, owned: bool) -> list[str]:
    """Lines of bash that end the job, for good, unless the archive is what was submitted; with 1 if nobody can tell.

    bash, coreutils and findutils are all they need.

    Args:
        code: the archive.
        digest: of it.
        owned: refuse one, too, that other users may write to.
    """
    lines = ["# What is run is what was submitted.", _REFUSES]
    lines += [f"pipeline_code={shlex.quote(str(code))}", f"pipeline_digest={digest}"]
    return [line for part in [*lines, _CHECK, _OWNED if owned else ""] for line in part.splitlines()]
