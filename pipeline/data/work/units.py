"""Units of a source: its files, and how they are cut into pieces of work. Whatever reads a source cuts it like this.

A document is known by its unit and its row there, so stages that read the same files name it in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import key, value_hash
from pipeline.common.objects.urls import is_url
from pipeline.common.problems import Problems
from pipeline.config.data import HeldOutSourceConfig, InputConfig, PreprocessConfig
from pipeline.config.parsing.code_keys import REMOTE_KEYS, refuse_code_of_others
from pipeline.config.root import Config
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.sources.compression import MAX_ZSTD_WINDOW
from pipeline.data.sources.damage import damaged_error, find_damaged_ends
from pipeline.data.sources.formats import source_format
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import Unit

SMALLEST_UNIT = 16 * 2**20
UNITS_AT_LEAST = 64
CHUNK_RECORDS = 2**20
"""Most records of a chunk, however short they are: memory grows with their number."""


def unit_size(total_bytes: int, unit_bytes: int) -> int:
    """Size of a source's units: `unit_bytes`, but a small source is cut finer, so that it keeps all workers busy."""
    count = max(-(-total_bytes // unit_bytes), min(UNITS_AT_LEAST, -(-total_bytes // SMALLEST_UNIT)), 1)
    return max(1, -(-total_bytes // count))


@dataclass(frozen=True)
class SourceFiles:
    """A source's files, found but not yet planned."""

    source: InputConfig
    reader: Reader
    files: list[File]
    earlier: tuple[tuple[str, ...], ...] = ()
    """Names of the files of each earlier generation of the source's plan; the last one has all others."""
    grows: bool = False
    """True if the last generation is new: it is to be appended to the plan that is there."""

    @property
    def generations(self) -> list[list[File]]:
        """The files of each generation."""
        if not self.earlier:
            return [self.files]
        by_name = {file.name: file for file in self.files}
        parts = [[by_name.pop(name) for name in names if name in by_name] for names in self.earlier]
        return [*parts, list(by_name.values())]

    def generation(self, number: int) -> SourceFiles:
        """The files of one generation as a source of their own."""
        return replace(self, files=self.generations[number], earlier=(), grows=False)

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
    limits: dict[str, Any] = {
        "max_expansion": preprocess.max_expansion,
        "max_record_bytes": preprocess.max_record_bytes,
    }
    if preprocess.on_damaged_file == "salvage":
        limits["salvage"] = True
    if preprocess.max_zstd_window != MAX_ZSTD_WINDOW:  # readers of other packages may not know it
        limits["max_zstd_window"] = preprocess.max_zstd_window
    access = config.data.remote.access
    if any(is_url(path) for path in source.paths):
        limits["remote"] = access
    if source.chat is not None:  # readers of other packages may not know it
        limits["tokenizer"] = config.tokenizer
    return source_format(source.type).from_config(source, **limits)


def find_source_files(
    config: Config, problems: Problems | None = None, *, held_out: bool = True, grow: bool = False
) -> list[SourceFiles]:
    """Look for the files of all sources that have `paths` or `hub`.

    Args:
        config: the run.
        problems: gets those of each source, which is then left out; by default the problems of all are raised.
        held_out: of the sources that are never trained on, too, as the last ones.
        grow: files that are new to a source that was begun are a generation of their own.

    Raises:
        UserError: a source has no files, or files that cannot be read as its `type`.
        MachineError: files may not be read.
    """
    own = Problems() if problems is None else problems
    found: list[SourceFiles] = []
    try:
        refuse_code_of_others(config, *REMOTE_KEYS)  # before anything is asked for with the credentials of this user
    except UserError as error:
        if problems is None:
            raise
        problems.problem(str(error))
        return found
    for place, source in config.data.inputs.items():
        if source.dataset is None and (held_out or not isinstance(source, HeldOutSourceConfig)):
            with own.collecting():
                try:
                    found.append(_find(config, source, place, grow))
                except PermissionError as error:
                    raise may_not_be_read(f"{place}.{source_format(source.type).key}", error) from error
    if problems is None:
        own.raise_problems()
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
        if isinstance(config.tokenizer.path, Path) and path.is_relative_to(config.tokenizer.path):
            raise may_not_be_read("tokenizer.path", error) from error
        raise


def may_not_be_read(key: str, error: PermissionError) -> MachineError:
    """Error about input that the system refuses to read."""
    others = "; or leave it out with exclude" if key.endswith(".paths") else ""
    return MachineError(
        f"{key}: {error.filename} cannot be read ({error.strerror}): make it readable for the user who runs this "
        f"(`chmod u+r FILE` and `chmod u+rx` for each folder above it, or ask its owner){others}"
    )


def _find(config: Config, source: InputConfig, key: str, grow: bool) -> SourceFiles:
    # Another command may write the plan just now; settings and files are of one.
    plan = None
    with suppress(NotADirectoryError):  # of which the checks of the stage tell
        plan = storage.find_json(config.data_dir / source.name / PLAN_FILE, *PLAN_KEYS)

    def planned() -> Any:
        """Settings of the plan that is there; none if it cannot be read."""
        return plan["settings"] if plan else {}

    reader, files = reader_of(source, config).find(source.paths, source.exclude, key, planned)
    if (most := _most_bad(reader, files, config.data.preprocess)) is not None:
        reader = replace(reader, most_bad=most)
    found = SourceFiles(source, reader, files)
    return found if plan is None else _in_generations(found, plan, grow)


def _most_bad(reader: Reader, files: list[File], settings: PreprocessConfig) -> int | None:
    """Bad records after which `max_error_rate` refuses a source for certain; None if there are no such."""
    rate = settings.bad_share
    if rate == 1 or settings.on_damaged_file == "drop":  # which forgets the bad records of damaged files
        return None
    good = 0
    for file in files:
        if (most := reader.most_records(file)) is None:
            return None
        good += most
    # Of fewer, all are read and listed.
    return max(int(good * rate / (1 - rate)) + 1, CHUNK_RECORDS)


def _in_generations(found: SourceFiles, plan: Any, grow: bool) -> SourceFiles:
    """The files as the plan of the source has grown by them; with `grow`, new ones are appended."""
    if not (grow or "generations" in plan):
        return found
    names = [name for name, _, _ in plan["files"]]
    ends = [each["files"] for each in plan.get("generations", [])]
    sizes = {file.name: file.size for file in found.files}
    grows = grow and len(sizes) > len(names) and all(sizes.get(name) == size for name, _, size in plan["files"])
    ends += [len(names)] if grows else []
    earlier = tuple(tuple(names[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    return replace(found, earlier=earlier, grows=grows)


def cut_units(found: SourceFiles, seed: int, unit_bytes: int) -> list[Unit]:
    """The units of a source, in the order of a keyed hash of their identity, which is the order of the parts.

    Those of a later generation follow those of the generations before.
    """
    units: list[Unit] = []
    for number in range(len(found.earlier) + 1):
        part = found.generation(number)
        size = unit_size(part.text_bytes, unit_bytes)
        groups = [Unit(0, found.source.name, pieces) for pieces in found.reader.cut(part.files, size)]
        hashed = sorted(((key(seed, "parts", identity(unit)), unit) for unit in groups), key=lambda pair: pair[0])
        units += [Unit(len(units) + index, unit.source, unit.pieces) for index, (_, unit) in enumerate(hashed)]
    return units


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
    """Hash of names, sizes and times (of objects, versions) of a unit's files: equal input need not be read again."""
    return value_hash([[p.file.name, p.file.size, p.file.changed_at, p.start, p.end] for p in unit.pieces])


def check_files(config: Config, sources: Iterable[tuple[SourceFiles, bool]], found: Problems) -> None:
    """Check the columns of tables; of new sources also first and last bytes, where damage is to end the stage.

    Args:
        config: the run.
        sources: each with True if it is new: then all of its files are looked at, else one.
        found: gets the problems of each source.
    """
    refuses = config.data.preprocess.on_damaged_file == "fail"
    for source, is_new in sources:
        with found.collecting(), reading(config, [source]):
            if stored := next((file for file in source.files if file.is_object), None):
                stored.stored(source.reader.remote).check()  # to list and to read are two permissions
            source.reader.check_columns(source.files, every=is_new)
            if refuses and is_new and (damaged := find_damaged_ends(source.files, source.reader)):
                raise damaged_error(source.source.name, damaged, source.bytes)
