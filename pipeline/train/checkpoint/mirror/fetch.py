"""Files that come from a mirror: each is read with its hash, and again where a hash is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import xxhash

from pipeline.common import links
from pipeline.common.objects.failures import ObjectChanged, ObjectMissing
from pipeline.common.objects.stored import StoredObject, find_object
from pipeline.common.objects.stream import ObjectStream
from pipeline.common.objects.urls import ObjectUrl
from pipeline.common.storage import naming
from pipeline.train.checkpoint.mirror.bucket import Mirror
from pipeline.train.checkpoint.mirror.commits import MirrorCommit

_TRIES = 2
"""A second answer tells whether the first one or the object is damaged."""
_READ_BYTES = 2**20


def fetch_files(
    mirror: Mirror,
    commit: MirrorCommit,
    names: Iterable[str],
    folder: Path,
    advance: Callable[[int], object] = lambda count: None,
) -> list[str]:
    """Fetch files of a checkpoint.

    Args:
        mirror: where they are.
        commit: of the checkpoint.
        names: of the files.
        folder: where they go.
        advance: called with bytes that came.

    Returns:
        Problems, in words; none if all of them are there with their hashes.

    Raises:
        UserError: the mirror cannot be read.
        OSError: a file cannot be written.
    """
    where = mirror.files_url(commit.step, commit.upload)
    found = (_fetch(mirror, where.below(name), folder / name, *commit.files[name], advance) for name in names)
    return [problem for problem in found if problem]


def fetch_run_file(mirror: Mirror, commit: MirrorCommit, name: str, path: Path) -> str:
    """Fetch a file of the run folder, as it was when a checkpoint was uploaded; raises and returns as `fetch_files`."""
    url = mirror.files_url(commit.step, commit.upload).below(f"run/{name}")
    return _fetch(mirror, url, path, *commit.run_files[name], lambda count: None)


def check_files(
    mirror: Mirror, commit: MirrorCommit, advance: Callable[[int], object] = lambda count: None
) -> list[str]:
    """Read the files of a checkpoint and compare their hashes; raises and returns as `fetch_files`."""
    where = mirror.files_url(commit.step, commit.upload)
    found = (_fetch(mirror, where.below(name), None, *record, advance) for name, record in commit.files.items())
    return [problem for problem in found if problem]


def _fetch(
    mirror: Mirror, url: ObjectUrl, path: Path | None, size: int, digest: str, advance: Callable[[int], object]
) -> str:
    """Fetch a file, or only read it; the problem, if there is one."""
    for _ in range(_TRIES):
        try:
            stored = find_object(url, mirror.access)
            if stored.size != size:
                return f"{url} has {stored.size:,} bytes instead of {size:,}"
            found = _copied(stored, path, advance)
        except ObjectMissing:
            return f"{url} is missing"
        except ObjectChanged:
            return f"{url} was written again while it was read"
        if found == digest:
            return ""
        advance(-size)
    return f"{url} has changed since it was written (xxh3 differs)"


def _copied(stored: StoredObject, path: Path | None, advance: Callable[[int], object]) -> str:
    """Copy an object into a file, if there is one; returns its hash."""
    found = xxhash.xxh3_64()
    with ExitStack() as stack:
        file = None
        if path is not None:
            stack.enter_context(naming(path))
            file = stack.enter_context(links.create(path))
        stream = stack.enter_context(ObjectStream(stored))
        while data := stream.read(_READ_BYTES):
            found.update(data)
            if file is not None:
                file.write(data)
            advance(len(data))
    return found.hexdigest()
