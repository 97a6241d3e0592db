"""`pipeline data push`: datasets of a disk are written to a bucket, each as a whole or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

import orjson
from pydantic import ValidationError

from pipeline.common import storage
from pipeline.common.console import Console, byte_progress, echo
from pipeline.common.errors import UserError
from pipeline.common.format import counted, size
from pipeline.common.hashing import check_seal
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.listing import list_objects
from pipeline.common.objects.retries import Abandoned
from pipeline.common.objects.urls import ObjectUrl
from pipeline.common.objects.writing import FileChanged, check_writing, create_object, put_file, put_object, read_small
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE
from pipeline.data.datasets.in_threads import in_threads
from pipeline.data.datasets.manifest import Manifest, datasets_below, read_parts
from pipeline.data.datasets.packing.files import INDEX_FILE, lengths_there, packs_folder
from pipeline.data.datasets.remote.layout import (
    file_url,
    manifest_url,
    pack_file_hashes,
    part_file_hashes,
    sums_url,
    tokenizer_hashes,
)
from pipeline.data.datasets.remote.sums import SumWriter
from pipeline.data.datasets.validate import file_sizes

_FILES_AT_ONCE = 8
_PIECE_BYTES = 2**24


@dataclass(frozen=True)
class _File:
    """A file of a dataset, and the object that it becomes."""

    path: Path
    url: ObjectUrl
    size: int
    hash: str


def push(folder: Path, to: ObjectUrl, access: RemoteAccess, console: Console, *, dry_run: bool = False) -> None:
    """Write the datasets in a folder to a bucket, below names that they have in the folder.

    What an earlier attempt has written is compared by its hashes, and left as it is.

    Args:
        folder: a dataset's, or one of several.
        to: URL of the dataset, or of the folder.
        access: settings of requests.
        console: for the progress bar.
        dry_run: only say what there is to send.

    Raises:
        UserError: there is no dataset, or a file of one is missing or damaged; or another dataset is at the URL.
        StoreError: the bucket cannot be written, or cannot refuse a second writer.
    """
    datasets = datasets_below(folder)
    if not dry_run:
        check_writing(to, access)
    for path in datasets:
        below = path.relative_to(folder).as_posix()
        _Push(Dataset.open(path), to if below == "." else to.below(below), access).run(console, dry_run)


class _Push:
    """A dataset on its way to a bucket."""

    def __init__(self, dataset: Dataset, to: ObjectUrl, access: RemoteAccess) -> None:
        self._dataset, self._to = dataset, to
        self._access = replace(access, request_bytes=max(access.request_bytes, _PIECE_BYTES))
        self._stop = Event()

    def run(self, console: Console, dry_run: bool) -> None:
        """Send what is not there; the manifest comes last."""
        path = self._dataset.folder / MANIFEST_FILE
        manifest = storage.read_bytes(path)
        check_seal(path, manifest, Manifest.model_fields)
        self._check_manifest(manifest)
        is_there = self._is_there()
        files, packs = self._files(), self._packs()
        everything = [*files, *itertools.chain(*packs)]
        there = self._sizes_there()
        due = [file for file in everything if not self._may_be_there(file, there)]
        total = sum(file.size for file in due)
        pieces = sum(-(-file.size // self._access.request_bytes) + 1 for file in due)
        echo(
            f"{self._to}: {counted(len(due), 'file')} with {size(total)} to send, {pieces:,} requests or more; "
            f"{len(everything) - len(due):,} there already"
        )
        if dry_run:
            return
        with byte_progress(console, f"writing {self._to}", total) as advance:
            self._send(files, there, advance)
            parts = read_parts(self._dataset.folder, self._dataset.whole).tobytes()
            put_object(file_url(self._to, self._dataset.whole.fingerprint, PARTS_FILE), parts, self._access)
            for each in packs:
                # Their index makes packs count, and is the last file.
                self._send(each[:-1], there, advance)
                self._send(each[-1:], there, advance)
        self._check_sizes(everything)
        if not is_there:
            self._check_manifest(create_object(manifest_url(self._to), manifest, self._access))
        echo(f"{self._to}: {counted(self._dataset.whole.documents, 'document')}, complete")

    def _is_there(self) -> bool:
        """Tell whether the dataset has its manifest in the bucket; another one is an error."""
        found = read_small(manifest_url(self._to), self._access)
        if found is None:
            return False
        self._check_manifest(found[0])
        return True

    def _check_manifest(self, data: bytes) -> None:
        try:
            found = Manifest.model_validate(orjson.loads(data))
        except (ValueError, ValidationError):
            raise UserError(f"{manifest_url(self._to)} cannot be read; choose another URL") from None
        ours = self._dataset.whole
        if found.fingerprint != ours.fingerprint:
            raise UserError(
                f"{self._to} has another dataset (fingerprint {found.fingerprint}; {self._dataset.folder} has "
                f"{ours.fingerprint}): choose another URL. Datasets in a bucket never change, as runs may read them"
            )
        if found.files != ours.files:
            raise UserError(
                f"{self._to} has the same dataset, with the same tokenizer in files of other bytes, as another version "
                "of the program writes them. Nothing is sent; use what is there, or choose another URL"
            )

    def _files(self) -> list[_File]:
        """The files of the dataset but for manifest and `parts.bin`."""
        whole, folder = self._dataset.whole, self._dataset.folder
        if not whole.files:
            raise UserError(
                f"{folder / MANIFEST_FILE} is of an earlier version and has no hashes of the tokenizer's files; run "
                "`pipeline preprocess` with its run file once more, which writes them"
            )
        hashes = tokenizer_hashes(whole, folder / MANIFEST_FILE)
        return self._listed(hashes | part_file_hashes(whole, read_parts(folder, whole)))

    def _packs(self) -> list[list[_File]]:
        """The files of the packs of each length."""
        folder = self._dataset.folder
        return [
            self._listed(pack_file_hashes(folder, self._dataset.newer, length))
            for length in lengths_there(folder)
            if (packs_folder(folder, length) / INDEX_FILE).exists()
        ]

    def _listed(self, hashes: dict[str, str]) -> list[_File]:
        folder, fingerprint = self._dataset.folder, self._dataset.whole.fingerprint
        sizes = file_sizes([f"{folder}/{name}" for name in hashes]).tolist()
        for name, length in zip(hashes, sizes, strict=True):
            if length < 0:
                raise UserError(f"{folder / name} is missing; `pipeline data verify {folder}` says what to do")
        return [
            _File(folder / name, file_url(self._to, fingerprint, name), length, listed)
            for (name, listed), length in zip(hashes.items(), sizes, strict=True)
        ]

    def _sizes_there(self) -> dict[str, int]:
        """Sizes of the objects of this dataset that are there, by key."""
        found = list_objects(self._to.below(self._dataset.whole.fingerprint), self._access)
        return {each.url.key: each.size for each in found}

    def _may_be_there(self, file: _File, there: dict[str, int]) -> bool:
        # The hashes come behind the file, so where they are it was whole.
        return there.get(file.url.key) == file.size and sums_url(file.url).key in there

    def _send(self, files: list[_File], there: dict[str, int], advance: Callable[[int], None]) -> None:
        """Send files that are not there, several at a time."""
        send = partial(self._send_one, there=there, advance=advance)
        for _ in in_threads(send, files, _FILES_AT_ONCE, "push", self._stop.set):
            pass

    def _send_one(self, file: _File, there: dict[str, int], advance: Callable[[int], None]) -> None:
        if self._may_be_there(file, there):
            writer = SumWriter()
            with storage.open_regular(file.path) as opened:
                while data := opened.read(2**20):
                    if self._stop.is_set():
                        raise Abandoned
                    writer.update(data)
            found = read_small(sums_url(file.url), self._access)
            if writer.hexdigest() == file.hash and found is not None and found[0] == writer.sums():
                return
        writers: list[SumWriter] = []

        def new_writer() -> SumWriter:
            writers.append(SumWriter())
            return writers[-1]

        try:
            put_file(
                file.path,
                file.url,
                self._access,
                new_hash=new_writer,
                expected=file.hash,
                abandoned=self._stop,
                advance=advance,
            )
        except FileChanged as error:
            raise UserError(f"{error}; `pipeline data verify {self._dataset.folder}` says what to do") from None
        put_object(sums_url(file.url), writers[-1].sums(), self._access)

    def _check_sizes(self, files: list[_File]) -> None:
        there = self._sizes_there()
        for file in files:
            if there.get(file.url.key) != file.size or sums_url(file.url).key not in there:
                raise UserError(
                    f"{file.url} is not there as it was written ({file.size:,} bytes): somebody removes objects there, "
                    "or the bucket's rules do; run the same command again"
                )
