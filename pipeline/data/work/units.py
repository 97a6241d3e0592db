"""Units of a source: its files, and how they are cut into pieces of work. Whatever reads a source cuts it like this.

A document is known by its unit and its row there, so stages that read the same files name it in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import MachineError
from pipeline.common.hashing import key, value_hash
from pipeline.config.data import HeldOutSourceConfig, InputConfig
from pipeline.config.root import Config
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Reader, unit_size
from pipeline.data.sources.records import Unit

CHUNK_RECORDS = 2**20
"""Most records of a chunk, however short they are: memory grows with their number."""


@dataclass(frozen=True)
class SourceFiles:
    """A source's files, found but not yet planned."""

    source: InputConfig
    reader: Reader
    files: list[File]

    @property
    def held_out(self) -> bool:
        """True if no document is trained on."""
        return isinstance(self.source, HeldOutSourceConfig)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def text_bytes(self) -> int:
        """About how much text they hold: compressed files have more than their size."""
        return sum(self.reader.expected_text_bytes(file) for file in self.files)


def reader_of(source: InputConfig, config: Config) -> Reader:
    """Reader of a source, by the run file."""
    preprocess = config.data.preprocess
    limits = {"max_expansion": preprocess.max_expansion, "max_record_bytes": preprocess.max_record_bytes}
    return SOURCE_FORMATS[source.type].from_config(source, **limits)


def find_source_files(config: Config, *, held_out: bool = True) -> list[SourceFiles]:
    """Look for the files of all sources that have `paths` or `hub`.

    Args:
        config: the run.
        held_out: of the sources that are never trained on, too, as the last ones.
    """
    found = []
    for place, source in config.data.inputs.items():
        if source.dataset is None and (held_out or not isinstance(source, HeldOutSourceConfig)):
            try:
                found.append(_find(config, source, place))
            except PermissionError as error:
                raise may_not_be_read(f"{place}.{SOURCE_FORMATS[source.type].key}", error) from error
    return found


@contextmanager
def reading(config: Config, sources: list[SourceFiles]) -> Iterator[None]:
    """Name the key of input that may not be read.

    Raises:
        MachineError: there is such input.
    """
    try:
        yield
    except PermissionError as error:
        keys = {
            file.path: f"{place}.{found.reader.key}"
            for place, source in config.data.inputs.items()
            for found in sources
            if found.source.name == source.name
            for file in found.files
        }
        path = Path(str(error.filename))
        if str(path) in keys:
            raise may_not_be_read(keys[str(path)], error) from error
        if config.tokenizer.path is not None and path.is_relative_to(config.tokenizer.path):
            raise may_not_be_read("tokenizer.path", error) from error
        raise


def may_not_be_read(key: str, error: PermissionError) -> MachineError:
    """Error about input that the system refuses to read."""
    others = "; or leave it out with exclude" if key.endswith(".paths") else ""
    return MachineError(
        f"{key}: {error.filename} cannot be read ({error.strerror}): make it readable for the user who runs this "
        f"(`chmod u+r FILE` and `chmod u+rx` for each folder above it, or ask its owner){others}"
    )


def _find(config: Config, source: InputConfig, key: str) -> SourceFiles:
    def planned() -> Any:
        """Settings of the plan that is there; none if it cannot be read."""
        plan = storage.find_json(config.data_dir / source.name / PLAN_FILE, *PLAN_KEYS)
        return plan["settings"] if plan else {}

    reader, files = reader_of(source, config).find(source.paths, source.exclude, key, planned)
    return SourceFiles(source, reader, files)


def cut_units(found: SourceFiles, seed: int, unit_bytes: int) -> list[Unit]:
    """The units of a source, in the order of a keyed hash of their identity, which is the order of the parts."""
    size = unit_size(found.text_bytes, unit_bytes)
    groups = [Unit(0, found.source.name, pieces) for pieces in found.reader.cut(found.files, size)]
    hashed = sorted(((key(seed, "parts", identity(unit)), unit) for unit in groups), key=lambda pair: pair[0])
    return [Unit(index, unit.source, unit.pieces) for index, (_, unit) in enumerate(hashed)]


def chunk_order(seed: int, unit: Unit, chunk: int) -> int:
    """Key that parts are ordered by: the first chunks as their units, the others among them."""
    return key(seed, "parts", identity(unit), chunk) if chunk else key(seed, "parts", identity(unit))


def identity(unit: Unit) -> str:
    """Identity of a unit on any machine: source, names and byte ranges."""
    return value_hash([unit.source, [[piece.file.name, piece.start, piece.end] for piece in unit.pieces]])


def order_key(seed: int, unit: Unit) -> int:
    """Key of the order of a unit's documents."""
    return key(seed, "documents", identity(unit))


def input_stat(unit: Unit) -> str:
    """Hash of names, sizes and times of a unit's files: equal means that the input need not be read again."""
    return value_hash([[p.file.name, p.file.size, p.file.mtime_ns, p.start, p.end] for p in unit.pieces])
