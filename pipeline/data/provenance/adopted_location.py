"""Origins of documents of datasets that were adopted; which origins a dataset has; ids that nobody has to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import part_files, part_prefix
from pipeline.data.datasets.manifest import Manifest
from pipeline.data.provenance.document_search import hash_of_id
from pipeline.data.provenance.source_location import Key, Origin, Origins, UnknownFile, some_of


class AdoptedOrigins:
    """The places of documents of .bin/.idx files that were adopted.

    Args:
        folder: of the dataset.
        manifest: of it.
    """

    id_key = None

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._names: list[str] = manifest.settings["adopted"]

    def file_of(self, unit: int, row: int) -> str:
        """Prefix of the .bin and .idx that a document is from."""
        return self._prefix(unit)

    def places(
        self, keys: Iterable[Key], *, read: bool = False, report: Callable[[str], None] = lambda _: None
    ) -> dict[Key, Origin]:
        """Prefix of the .bin and .idx, and the document's number in it."""
        return {
            (unit, row): Origin(self._prefix(unit), "document", row, id=f"{self._names[unit]}#{row}")
            for unit, row in keys
        }

    def find(self, file: str, number: int | None) -> Key:
        """The document at a place.

        Raises:
            UserError: no such file was adopted.
        """
        name = file.removesuffix(".bin").removesuffix(".idx")
        found = [unit for unit, own in enumerate(self._names) if name in (own, self._prefix(unit))]
        if len(found) != 1:
            raise UnknownFile(
                f"--row: {file} is not one of the files that {self._folder} adopted: {some_of(self._names)}"
            )
        if number is None:
            raise UserError(f"--row: say which document of {file}, as in {file}:7; they are counted from 0")
        return found[0], number

    def rejected(self, key: Key) -> str | None:
        """None: what was adopted has no rejected records."""
        return None

    def _prefix(self, unit: int) -> str:
        path = part_files(part_prefix(self._folder, unit))[0]
        return str(path.resolve().with_suffix("")) if path.is_symlink() else self._names[unit]


def open_origins(folder: Path, manifest: Manifest) -> Origins | AdoptedOrigins | None:
    """Origins of the documents of a dataset; None if nothing beside it says so.

    Args:
        folder: of the dataset.
        manifest: of it.
    """
    if "adopted" in manifest.settings:
        return AdoptedOrigins(folder, manifest)
    try:
        origins = Origins(folder.parent)
        return origins if origins.is_of(manifest) else None
    except (FileNotFoundError, UserError):
        return None


def known_id(
    dataset: Dataset, origins: Origins | AdoptedOrigins | None, document: int, place: Origin | None, id_hash: int
) -> str | None:
    """The id that has this hash: what the place or the kept metadata say; None if neither does.

    Args:
        dataset: of the document.
        origins: of the dataset.
        document: its number.
        place: of the document.
        id_hash: as `.prov` has it.
    """
    if place is not None and place.id is not None and hash_of_id(place.id) == id_hash:
        return place.id
    if origins is None or origins.id_key is None or origins.id_key not in dataset.manifest.settings["metadata"]:
        return None
    kept = dataset.metadata(document).get(origins.id_key)
    return str(kept) if type(kept) in (str, int) and hash_of_id(str(kept)) == id_hash else None
