"""`pipeline data pull`: datasets of a bucket are written to a disk, each as a whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

from pipeline.common import links, storage
from pipeline.common.console import Console, byte_progress, echo
from pipeline.common.errors import UserError
from pipeline.common.format import counted, size
from pipeline.common.hashing import check_seal, file_hash
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.listing import list_objects
from pipeline.common.objects.retries import Abandoned
from pipeline.common.objects.stored import StoredObject
from pipeline.common.objects.stream import ObjectStream
from pipeline.common.objects.urls import ObjectUrl
from pipeline.common.objects.writing import read_small
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE
from pipeline.data.datasets.in_threads import in_threads
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.datasets.manifest import Manifest, read_manifest, read_parts
from pipeline.data.datasets.merge import check_space
from pipeline.data.datasets.packing.files import INDEX_FILE, PACKS, packs_folder
from pipeline.data.datasets.remote.layout import (
    file_url,
    manifest_url,
    pack_file_hashes,
    part_file_hashes,
    tokenizer_hashes,
)

_FILES_AT_ONCE = 8
_DEPTH = 2
"""Folders between a data folder and the manifest of a dataset: its source and its split."""
_READ_BYTES = 2**20


def pull(url: ObjectUrl, folder: Path, access: RemoteAccess, console: Console, *, dry_run: bool = False) -> None:
    """Write the datasets below a URL to a folder, below names that they have there.

    What an earlier attempt has written is compared by its hashes, and left as it is.

    Args:
        url: of a dataset, or of a folder with several.
        folder: for the dataset, or for all of them; it is made.
        access: settings of requests.
        console: for the progress bar.
        dry_run: only say what there is to fetch.

    Raises:
        UserError: there is no dataset, or an object of one is missing or damaged; or another dataset is in the folder.
        StoreError: the bucket cannot be read.
        OSError: the disk is full, say.
    """
    found = sorted(_datasets_at(url, access))
    if not found:
        raise UserError(
            f"{url} has no dataset: a dataset has a {MANIFEST_FILE}, which `pipeline data push` writes last"
        )
    for below in found:
        _Pull(url.below(below) if below else url, folder / below, access).run(console, dry_run)


def _datasets_at(url: ObjectUrl, access: RemoteAccess) -> Iterator[str]:
    """Names of the datasets below a URL; empty for one at the URL itself."""
    if read_small(manifest_url(url), access) is not None:
        yield ""
        return
    for each in list_objects(url, access):
        name = each.url.key.removeprefix(f"{url.key}/")
        if name.endswith(f"/{MANIFEST_FILE}") and name.count("/") <= _DEPTH:
            yield name.removesuffix(f"/{MANIFEST_FILE}")


@dataclass(frozen=True)
class _File:
    """A file of a dataset, and the object that it is made of."""

    path: Path
    stored: StoredObject
    hash: str


class _Pull:
    """A dataset on its way to a disk."""

    def __init__(self, url: ObjectUrl, folder: Path, access: RemoteAccess) -> None:
        self._url, self._folder, self._access = url, folder, access
        self._stop = Event()

    def run(self, console: Console, dry_run: bool) -> None:
        """Fetch what is not there; the manifest comes last."""
        found = read_small(manifest_url(self._url), self._access)
        if found is None:
            raise UserError(f"{self._url} has no {MANIFEST_FILE} any more")
        # What names the files is read before any of them is in its place.
        with tempfile.TemporaryDirectory(prefix="pull-") as head:
            self._read_head(Path(head), found[0])
            groups = self._groups(Path(head))
            due = [file for group in groups for file in group if not self._has_size(file)]
            total = sum(file.stored.size for file in due)
            requests = sum(-(-file.stored.size // self._access.request_bytes) for file in due)
            echo(
                f"{self._url}: {counted(len(due), 'file')} with {size(total)} to fetch into {self._folder}, "
                f"{requests:,} requests or more"
            )
            if dry_run:
                return
            self._make_folders(groups)
            check_space(self._folder, total)
            with byte_progress(console, f"reading {self._url}", total) as advance:
                for group in groups:
                    self._fetch_all(group, advance)
            storage.put(self._folder / PARTS_FILE, storage.read_bytes(Path(head, PARTS_FILE)))
            storage.put(self._folder / MANIFEST_FILE, found[0])
        echo(f"{self._folder}: {counted(self._manifest.documents, 'document')}, complete")

    def _read_head(self, head: Path, manifest: bytes) -> None:
        """Manifest and `parts.bin`, from which the names of all files follow, and the list of objects."""
        storage.put(head / MANIFEST_FILE, manifest)
        self._manifest = read_manifest(head)
        check_seal(Path(str(manifest_url(self._url))), manifest, Manifest.model_fields)
        fingerprint = self._manifest.fingerprint
        if (self._folder / MANIFEST_FILE).exists() and read_manifest(self._folder).fingerprint != fingerprint:
            raise UserError(f"{self._folder} has another dataset than {self._url}; choose another folder")
        base = file_url(self._url, fingerprint, "")
        self._there = {
            each.url.key.removeprefix(base.key): each
            for each in list_objects(self._url.below(fingerprint), self._access)
        }
        storage.put(head / PARTS_FILE, self._small(PARTS_FILE))
        self._parts = read_parts(head, self._manifest)

    def _groups(self, head: Path) -> list[list[_File]]:
        """The files, in groups of which each waits for the one before."""
        files = tokenizer_hashes(self._manifest, head / MANIFEST_FILE)
        files |= part_file_hashes(self._manifest, self._parts)
        groups = [self._listed(files)]
        fingerprints = [each.fingerprint for each in self._manifest.lineage]
        for name in self._there:
            place, _, file = name.rpartition("/")
            length = place.removeprefix(f"{PACKS}/")
            if file == INDEX_FILE and length.isascii() and length.isdecimal() and length[0] != "0" and len(length) < 10:
                links.make_folder(head / PACKS)
                links.make_folder(packs_folder(head, int(length)))
                storage.put(packs_folder(head, int(length)) / INDEX_FILE, self._small(name))
                packs = self._listed(pack_file_hashes(head, fingerprints, int(length)))
                groups += [packs[:-1], packs[-1:]]  # the index makes packs count
        return groups

    def _small(self, name: str) -> bytes:
        found = read_small(file_url(self._url, self._manifest.fingerprint, name), self._access)
        if found is None:
            raise UserError(f"{self._url} lacks {name}; push the dataset again")
        return found[0]

    def _listed(self, hashes: dict[str, str]) -> list[_File]:
        if missing := [name for name in hashes if name not in self._there]:
            raise UserError(
                f"{self._url} lacks {counted(len(missing), 'object')} ({missing[0]}): somebody has removed them; push "
                "the dataset again"
            )
        return [_File(self._folder / name, self._there[name], listed) for name, listed in hashes.items()]

    def _has_size(self, file: _File) -> bool:
        return storage.have_sizes({file.path: file.stored.size})

    def _make_folders(self, groups: list[list[_File]]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in {file.path.parent for group in groups for file in group}:
            storage.make_below(self._folder, folder)
        for left in self._folder.rglob(f".*{storage.TEMPORARY_SUFFIX}"):
            storage.remove_if_stale(left)

    def _fetch_all(self, files: list[_File], advance: Callable[[int], None]) -> None:
        """Fetch files that are not there, several at a time."""
        fetch = partial(self._fetch_one, advance=advance)
        for _ in in_threads(fetch, files, _FILES_AT_ONCE, "pull", self._stop.set):
            pass

    def _fetch_one(self, file: _File, advance: Callable[[int], None]) -> None:
        if self._has_size(file) and f"{file_hash(file.path):016x}" == file.hash:
            return
        # A second answer tells whether the first one or the object is damaged.
        if not self._fetch(file, advance) and not self._fetch(file, advance):
            raise UserError(
                f"{file.stored.url} is damaged: its bytes differ from those that were written (other xxh3); remove it, "
                "and push the dataset again"
            )

    def _fetch(self, file: _File, advance: Callable[[int], None]) -> bool:
        """Fetch a file; it gets its place if its bytes are right."""
        with ObjectStream(file.stored) as source, HashedFile(file.path) as copy:
            while data := source.read(_READ_BYTES):
                if self._stop.is_set():
                    raise Abandoned
                copy.write(data)
                advance(len(data))
            if f"{copy.hash:016x}" != file.hash:
                advance(-copy.size)
                return False
            copy.commit()
        return True
