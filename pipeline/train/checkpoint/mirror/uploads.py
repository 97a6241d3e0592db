"""The uploads of one rank: its files of a checkpoint, with the hashes that the checkpoint's `COMMIT` has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import xxhash

from pipeline.common.objects.writing import FileChanged, Pace, put_file
from pipeline.train.checkpoint.committed import COMMIT, Checkpoint, Files, damage_named, record_of, step_of
from pipeline.train.checkpoint.mirror.bucket import Mirror

Notes = dict[str, tuple[int, str, str]]
"""File name -> (bytes, xxh3 in hexadecimal, version of the object)."""


class Uploads:
    """Uploads of a rank, each file once.

    Args:
        mirror: where to.
        most: bytes per second; None for no bound.
    """

    def __init__(self, mirror: Mirror, most: float | None) -> None:
        self._mirror = mirror
        self._pace = Pace(most)
        self._done: tuple[int, str, Notes] = (0, "", {})
        """Step, upload and notes of the last checkpoint: a try that failed continues where it was."""

    def put(
        self, folder: Path, step: int, upload: str, files: Files, names: Iterable[str], abandoned: threading.Event
    ) -> Notes:
        """Upload files of a checkpoint.

        Args:
            folder: of the checkpoint.
            step: of it.
            upload: name of the folder in the mirror.
            files: all files of the checkpoint.
            names: of those to upload.
            abandoned: set when nobody waits for them any more.

        Raises:
            UserError: one of them cannot be read or written, or has changed since it was committed.
            Abandoned: nobody waits any more.
        """
        if self._done[:2] != (step, upload):
            self._done = (step, upload, {})
        notes = self._done[2]
        where = self._mirror.files_url(step, upload)
        for name in names:
            if name in notes:
                continue
            size, digest = files[name]
            stored, found = put_file(
                folder / name,
                where.below(name),
                self._mirror.access,
                new_hash=xxhash.xxh3_64,
                expected=digest,
                pace=self._pace,
                abandoned=abandoned,
            )
            if stored.size != size:
                raise FileChanged(f"{folder / name} has {stored.size:,} bytes instead of {size:,}")
            notes[name] = (size, found, stored.version)
        return notes

    def put_run_files(
        self, folder: Path, step: int, upload: str, names: Iterable[str], abandoned: threading.Event
    ) -> Files:
        """Upload files of the run folder as they are now. Those that are not there, and links, are left out.

        Raises:
            UserError: one of them cannot be written.
            Abandoned: nobody waits any more.
        """
        found: Files = {}
        where = self._mirror.files_url(step, upload)
        for name in names:
            if (folder / name).is_symlink():  # by which others could have a file of this user's uploaded
                continue
            try:
                stored, digest = put_file(
                    folder / name,
                    where.below(f"run/{name}"),
                    self._mirror.access,
                    new_hash=xxhash.xxh3_64,
                    pace=self._pace,
                    abandoned=abandoned,
                )
            except FileNotFoundError:
                continue
            found[name] = (stored.size, digest)
        return found


def failure_text(error: Exception) -> str:
    """The reason of a failed upload, in words."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


def files_to_mirror(folder: Path) -> Files:
    """The files of a committed checkpoint, `COMMIT` among them.

    Raises:
        OSError: they are not there any more.
        UserError: `COMMIT` is damaged.
    """
    step = step_of(folder.name)
    assert step is not None
    checkpoint = Checkpoint(folder, step)
    with damage_named(checkpoint):
        return {**checkpoint.files(), COMMIT: record_of(folder / COMMIT)}
