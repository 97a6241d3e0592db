"""From a run file on disk to a validated `Config`: includes, overrides, interpolation, validation.

The order: every file of `include:` (depth first), the file itself, then the command line. Sections are merged key by
key; any other value, lists too, replaces the one before it.
Sources that are written by name are a section until then. Interpolation comes after that, so `${run.dir}` sees an
override of `run.dir`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.imports import packaged_folder
from pipeline.common.objects.urls import url_of_path
from pipeline.common.paths import StrPath
from pipeline.common.run_files import EXPORT_ORIGIN, LAUNCHER_LOG, RunFiles
from pipeline.config.parsing.code_keys import note_origins
from pipeline.config.parsing.document import PLACEHOLDER, ParsedFile, Place, Problem, parse, render
from pipeline.config.parsing.interpolation import Interpolation, InterpolationError, escaped, is_plain, parse_text
from pipeline.config.parsing.problems import misspelled, place_of, secrets_of, show, translate
from pipeline.config.parsing.schema import KeyPath, dotted
from pipeline.config.parsing.values import leaves, merged, stand_in
from pipeline.config.root import Config
from pipeline.config.slurm import is_profile_file

COMMAND_LINE = "command line"
RUN_FILE = RunFiles.config
"""Also in an export and beside the logs of a launch."""
_DIGITS: Sequence[KeyPath] = [("slurm", "umask")]
"""Keys whose values are digits, and not a number: a zero before them matters."""
_BESIDE_RUN_FILE = (RunFiles.ledger, RunFiles.metrics, EXPORT_ORIGIN, LAUNCHER_LOG)
"""Files that a run, an export and a launch leave beside the file that they have written."""


def load(
    path: StrPath, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None, *, of_data: bool = False
) -> Config:
    """Load, merge and validate a user's run file.

    The one in a run folder is read as by `load_written`.

    Args:
        path: The run file, or the name of one that ships with the package (`quickstart.yaml`).
        overrides: `key.path=value`, the value in YAML; list entries by index (`data.sources.0.weight=2`).
        values: Values by key path that are taken as they are, after everything else (command line options).
        of_data: The stage makes data and reads neither `model` nor `train`, which may be missing; see `stand_in`.

    Returns:
        The validated config.

    Raises:
        UserError: Everything that is wrong, in one message with a line for each violation.
    """
    path = find(Path(path))
    return _validated(path, list(_documents(path, ())), overrides, values, of_data=of_data)


def load_written(path: Path, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None) -> Config:
    """Load and validate a run file that `dump` has written, whose run may be somebody else's.

    Nothing of the reader's gets into it: no `${...}` is resolved, no file included. Overrides are the reader's own.

    Args:
        path: The file.
        overrides: As for `load`.
        values: As for `load`.

    Raises:
        UserError: As for `load`; also where the file includes others or has something to resolve.
    """
    document = _document(path, own=False)
    document.written = True
    return _validated(path, [document], overrides, values)


def written_values(path: Path) -> dict[str, Any]:
    """The plain values of such a file, which may be of another version: nothing is validated.

    Raises:
        UserError: It is not a mapping in YAML.
    """
    values: dict[str, Any] = _document(path, own=False).value
    return values


def _is_written(path: Path) -> bool:
    """True if a run, an export or a submission has written a file, to judge by its name and what lies beside it."""
    if path.name == RUN_FILE:
        return any((path.parent / name).exists() for name in _BESIDE_RUN_FILE)
    return path.absolute().parent.parts[-2:] == ("slurm", "submissions")


def _validated(
    path: Path,
    documents: Sequence[ParsedFile],
    overrides: Sequence[str],
    values: Mapping[str, Any] | None,
    *,
    of_data: bool = False,
) -> Config:
    failed: set[KeyPath] = set()
    problems = [problem for document in documents for problem in document.problems]
    plain: Any = {}
    places: dict[KeyPath, Place] = {(): Place(_shown(path), 1)}
    for document in documents:
        if document.written:
            problems += _refuse_expressions(document, failed)
        problems += _unparsable_interpolations(document.value, document.places, failed)
        plain = merged(plain, document.value)
        _overlay(places, document)
    for override in overrides:
        problems += _override(plain, places, override, failed)
    interpolated: list[KeyPath] = []
    problems += _interpolate(plain, places, failed, interpolated)
    _take_as_written(plain, places)
    # Files of runs that earlier versions have written stay readable.
    written = {document.places[()].source for document in documents if document.written}
    own = [(key, value) for key, value in leaves(plain) if place_of(key, places).source not in written]
    problems += secrets_of(own, places)
    by_name = isinstance(plain.get("data"), dict) and isinstance(plain["data"].get("sources"), dict)
    problems += _list_sources(plain, places, failed)
    beside = _profile_beside(plain, places)
    for key, value in (values or {}).items():
        places[tuple(key.split("."))] = Place(COMMAND_LINE)
        try:
            _assign(plain, tuple(key.split(".")), value)
        except LookupError as error:
            problems.append(Problem(Place(COMMAND_LINE), f"{key}: {error.args[0]}"))
    for key_path, place in places.items():
        if place.placeholder and key_path not in failed:
            failed.add(key_path)
            problems.append(Problem(place, f"{dotted(key_path)} = {PLACEHOLDER}: fill in a value here"))
    config: Config | None = None
    if of_data:
        stand_in(plain)
    try:
        config = Config.model_validate(plain)
    except ValidationError as error:
        meant = misspelled(error, Config, plain)
        for problem, details in zip(translate(error, Config, plain, places), error.errors(), strict=True):
            if details["type"] == "missing" and details["loc"] in meant:
                continue
            if not any(details["loc"][: len(known)] == known for known in failed):
                problems.append(problem)
    if problems or config is None:
        order = [*(document.source for document in documents), COMMAND_LINE]
        problems.sort(key=lambda problem: (order.index(problem.place.source), problem.place.line or 0))
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in problems)
        if by_name:
            lines = re.sub(r"\bdata\.sources\.(\d+)\b", lambda found: _named(plain, found), lines)
        raise UserError(f"{_shown(path)} has {count}:\n{lines}\nAll keys: `pipeline config keys`.")
    config.slurm.note_tried(beside)
    note_origins(config, documents, places, interpolated)
    return config


def load_run(
    run: StrPath, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None, *, of_data: bool = False
) -> Config:
    """Load a run file, or the one that training has written into a run folder, which may have been moved since.

    Args:
        run: The run file or the run folder.
        overrides: As for `load`.
        values: As for `load`.
        of_data: As for `load`.

    Raises:
        UserError: As for `load`, or the folder has no run file.
    """
    run = Path(run)
    if (url := url_of_path(run)) is not None:
        raise UserError(
            f"{url} is a URL, and this command reads a run file or a run folder. Mirrors of checkpoints are read by "
            "`checkpoint list`, `show`, `verify` and `export`, `convert to-hf`, `eval`, `generate`, `serve`, `report`"
        )
    if not run.is_dir():
        return load(find(run, "run file or run folder"), overrides, values, of_data=of_data)
    if not (run / RUN_FILE).is_file():
        raise no_run_folder(run)
    return load_written(run / RUN_FILE, overrides, {**(values or {}), "run.dir": os.path.abspath(run)})


def no_run_folder(path: Path) -> UserError:
    """The error about a folder that is not a run folder, though it may be inside one."""
    above = [folder for folder in Path(os.path.abspath(path)).parents[:2] if (folder / RUN_FILE).is_file()]
    written = path / "run.yaml"  # by `pipeline init`
    file = f"name the run file{f', {written}' if written.is_file() else ''}"
    todo = f"name the run folder, {above[0]}" if above else file
    return UserError(f"{path} is not a run folder: it has no {RUN_FILE}, which training writes; {todo}")


def dump(config: Config) -> str:
    """The resolved whole as YAML that `load` reads back to an equal config."""
    return dump_values(config.model_dump(mode="json"))


def dump_keys(config: Config, keys: Sequence[str]) -> str:
    """Some keys or sections of `dump`, each at its place.

    Raises:
        UserError: there is no such key in this config.
    """
    values, found = config.model_dump(mode="json"), dict[str, Any]()
    for key in keys:
        source, target = values, found
        *path, last = key.split(".")
        for part in path:
            source, target = _section(source, part, key), target.setdefault(part, {})
        target[last] = _section(source, last, key)
    return dump_values(found)


def _section(values: Any, part: str, key: str) -> Any:
    """The value of a part of a key in a section."""
    if isinstance(values, dict) and part in values:
        return values[part]
    there = f"the section has {', '.join(map(str, values))}" if isinstance(values, dict) else "its section has no keys"
    raise UserError(f"{key}: there is no key {part!r}; {there}")


def dump_values(values: dict[str, Any]) -> str:
    """`dump` of a config's plain values, which may be of another version."""
    return render(escaped(values))


_NAMED = 10
"""Run files of a folder that a message names."""


_INCLUDED = "file to include"
_NO_RUN_FILES = ("corpora", "curation", "monitoring")
"""Folders of files that ship for run files to include."""


def find(path: Path, wanted: str = "run file") -> Path:
    """The run file at `path`, or the one that ships with the package under that name.

    Args:
        path: Of the run file.
        wanted: What might have been there, for the message.

    Raises:
        UserError: There is neither; the message names the ones in the same folder, or those that ship.
    """
    if path.is_dir():
        there = f", like {path / RUN_FILE}" if (path / RUN_FILE).is_file() else " (.yaml)"
        raise UserError(f"{path} is a folder; name a run file{there}")
    if path.exists():
        return path
    names = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    folder = packaged_configs()
    shipped = folder.joinpath(*names)
    # `..` and absolute paths are the user's own files, never ours.
    if names and not path.is_absolute() and ".." not in names and shipped.is_file():
        return shipped
    beside = sorted(str(file) for file in path.parent.glob("*.yaml")) if path.parent != Path() else []
    if beside:
        more = f" and {len(beside) - _NAMED:,} more" if len(beside) > _NAMED else ""
        raise UserError(f"no {wanted} {path}; {path.parent} has {', '.join(beside[:_NAMED])}{more}")
    known = list(_shipped_names(without=("monitoring",) if wanted == _INCLUDED else _NO_RUN_FILES))
    near = difflib.get_close_matches(path.name, known, _NAMED) or difflib.get_close_matches(
        path.stem, known, _NAMED, cutoff=0.3
    )
    like = ", ".join(near or ["quickstart.yaml"])
    raise UserError(
        f"no {wanted} {path}; write one with `pipeline init DIR`, or use a shipped one, like {like} (all: {folder})"
    )


def find_shipped(name: str) -> Path:
    """The run file that ships with the package as `name`: `starter`, `models/llama3-8b`, or the same with `.yaml`.

    Raises:
        UserError: None ships under this name; the message has the nearest name and all others.
    """
    short = name.removeprefix("configs/").removesuffix(".yaml")
    known = [each.removesuffix(".yaml") for each in _shipped_names()]
    if short in known:
        return packaged_configs() / f"{short}.yaml"
    near = difflib.get_close_matches(short, known, n=1)
    hint = f"did you mean {near[0]}? There are" if near else "give one of"
    names = ", ".join(each.removesuffix(".yaml") for each in _shipped_names(without=_NO_RUN_FILES))
    raise UserError(f"--from {name}: no run file of this name ships with the package; {hint}: {names}")


def _shipped_names(without: Sequence[str] = ()) -> list[str]:
    folder = packaged_configs()
    files = sorted(file.relative_to(folder) for file in folder.rglob("*.yaml"))
    return [file.as_posix() for file in files if file.parts[0] not in without]


def packaged_configs() -> Path:
    """The folder of the run files that ship: inside the installed package, or beside it in a checkout."""
    inside = packaged_folder("pipeline/configs")
    return inside if inside.is_dir() else packaged_folder("configs")


def _document(path: Path, *, own: bool = True) -> ParsedFile:
    """One file as it is written.

    The user's `own` may be a pipe (`<(...)`); one of a run folder, which may be a stranger's, is not waited for.
    """
    name = _shown(path)
    try:
        document = parse((path.read_bytes() if own else storage.read_bytes(path, storage.SMALL_BYTES)).decode(), name)
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not a UTF-8 text file (byte {error.start})") from None
    if document.value is None:
        document.value = {}
    if not isinstance(document.value, dict):
        raise UserError(f"{name}:1: a run file is a mapping of sections (run:, data:, model:, ...)")
    document.written = _is_written(path)
    return document


def _documents(path: Path, above: tuple[Path, ...]) -> Iterator[ParsedFile]:
    """The files that `path` includes, depth first, then `path`."""
    document = _document(path)
    include = None if document.written else document.value.pop("include", None)
    here = place_of(("include",), document.places)
    wanted = [include] if isinstance(include, str) else include or []
    if not isinstance(wanted, list) or not all(isinstance(entry, str) for entry in wanted):
        raise UserError(f"{here}: include = {show(include)}: must be a file or a list of files")
    for index, entry in enumerate(wanted):
        place = place_of(("include", index), document.places)
        beside = path.parent / Path(entry).expanduser()
        try:
            target = find(beside if beside.exists() else Path(entry), _INCLUDED)
        except UserError as error:
            raise UserError(f"{place}: include = {show(entry)}: {error}") from None
        chain = (*above, path.resolve())
        if target.resolve() in chain:
            circle = " -> ".join(_shown(file) for file in (*chain[chain.index(target.resolve()) :], target))
            raise UserError(f"{place}: include = {show(entry)}: files include each other: {circle}")
        yield from _documents(target, chain)
    if not document.written:
        for key in [key for key in document.places if key[:1] == ("include",)]:
            del document.places[key]
    yield document


def _shown(path: Path) -> str:
    """Relative where the file is below the working directory."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _overlay(places: dict[KeyPath, Place], document: ParsedFile) -> None:
    """Let the document's places take the place of those whose values it replaced."""
    replaced = {path for path, _ in leaves(document.value) if path in places}
    for old in list(places):
        if any(old[:depth] in replaced for depth in range(1, len(old) + 1)):
            del places[old]
    root = places[()]
    places.update(document.places)
    places[()] = root if root.source != document.places[()].source else document.places[()]


def _unparsable_interpolations(plain: Any, places: Mapping[KeyPath, Place], failed: set[KeyPath]) -> Iterator[Problem]:
    """Find `${` without its end, and take the value out so that merging can go on."""
    for path, value in list(leaves(plain)):
        if isinstance(value, str) and "${" in value:
            try:
                parse_text(value)
            except InterpolationError as error:
                failed.add(path)
                _assign(plain, path, None)
                yield Problem(places[path], f"{dotted(path)} = {show(value)}: {error}")


def _override(plain: Any, places: dict[KeyPath, Place], override: str, failed: set[KeyPath]) -> Iterator[Problem]:
    """Apply `key.path=value` of the command line."""
    place = Place(COMMAND_LINE)
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    if not equals or "" in path:
        yield Problem(place, f"{show(override)}: an override has the form key.path=value")
        return
    try:
        document = parse(text, COMMAND_LINE, lines=False)
    except UserError as error:
        yield Problem(place, f"{key}: {str(error).removeprefix(f'{COMMAND_LINE}: ')}")
        return
    yield from document.problems
    try:
        _assign(plain, path, document.value)
    except LookupError as error:
        yield Problem(place, f"{key}: {error.args[0]}")
        return
    for old in [old for old in places if old[: len(path)] == path]:
        del places[old]
    places.update({(*path, *below): at for below, at in document.places.items()})
    for depth in range(1, len(path)):
        places.setdefault(path[:depth], place)
    yield from _unparsable_interpolations(plain, places, failed)


def _assign(plain: Any, path: KeyPath, value: Any) -> None:
    """Set the value at `path`, making the sections on the way; a `LookupError` says why a list has no such entry."""
    *above, last = path
    for depth, part in enumerate(above):
        if isinstance(plain, list):
            plain = plain[_index(plain, path, depth)]
            continue
        key = str(part)
        if not isinstance(plain.get(key), (dict, list)):
            plain[key] = {}
        plain = plain[key]
    if isinstance(plain, list):
        plain[_index(plain, path, len(above))] = value
    else:
        plain[str(last)] = value


def _index(entries: list[Any], path: KeyPath, depth: int) -> int:
    index = path[depth]
    if not isinstance(index, int) or index >= len(entries):
        raise LookupError(f"{dotted(path[:depth])} is a list with the entries 0 to {len(entries) - 1}, not {index}")
    return index


def _take_as_written(plain: Any, places: Mapping[KeyPath, Place]) -> None:
    """Take the digits of `slurm.umask: 0002` for what they are in the file."""
    for path in _DIGITS:
        if path in places and (digits := places[path].digits) is not None:
            _assign(plain, path, digits)


_SOURCES: KeyPath = ("data", "sources")


def _list_sources(plain: Any, places: dict[KeyPath, Place], failed: set[KeyPath]) -> Iterator[Problem]:
    """Sources written by name as the list that they stand for; one whose value is null is left out."""
    data = plain.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("sources"), dict):
        return
    sources: list[dict[str, Any]] = []
    for name, source in data["sources"].items():
        below = {path: place for path, place in places.items() if path[:3] == (*_SOURCES, name)}
        for path in below:
            del places[path]
        if source is None:
            continue
        if not isinstance(source, dict):
            failed.add(_SOURCES)
            yield Problem(
                place_of((*_SOURCES, name), below | places), f"data.sources.{name}: must be a section with keys"
            )
            continue
        places.update({(*_SOURCES, len(sources), *path[3:]): place for path, place in below.items()})
        sources.append({"name": str(name), **source})
    data["sources"] = sources


def _named(plain: dict[str, Any], found: re.Match[str]) -> str:
    """The key of a source in a message, with its name, by which the file has it, in place of its number."""
    sources = plain["data"]["sources"]
    number = int(found[1])
    return f"data.sources.{sources[number]['name']}" if number < len(sources) else found[0]


def _profile_beside(plain: Any, places: Mapping[KeyPath, Place]) -> Path | None:
    """Find `slurm.profile` beside the file that names it, where the working directory does not have it.

    Returns:
        Where else it was looked for, if it is nowhere.
    """
    path = ("slurm", "profile")
    if path not in places or places[path].source == COMMAND_LINE:
        return None
    name = plain["slurm"]["profile"]
    if not isinstance(name, str) or not is_profile_file(name) or Path(name).expanduser().is_absolute():
        return None
    beside = Path(os.path.abspath(Path(places[path].source).parent / name))
    if Path(name).is_file() or beside == Path(os.path.abspath(name)):
        return None
    if not beside.is_file():
        return beside
    _assign(plain, path, str(beside))
    return None


def _interpolate(
    plain: Any, places: Mapping[KeyPath, Place], failed: set[KeyPath], done: list[KeyPath]
) -> Iterator[Problem]:
    """Replace every `${...}` in place, and collect where there was one."""
    interpolation = Interpolation(plain, places)
    found: list[tuple[KeyPath, Any]] = []
    for path, value in leaves(plain):
        if not isinstance(value, str) or "${" not in value:
            continue
        try:
            found.append((path, interpolation.resolve(path)))
        except InterpolationError as error:
            failed.add(path)
            yield Problem(place_of(path, places), f"{dotted(path)} = {show(value)}: {error}")
    for path, value in found:
        _assign(plain, path, value)
        done.append(path)


def _refuse_expressions(document: ParsedFile, failed: set[KeyPath]) -> Iterator[Problem]:
    """Find what would be resolved or included in a file that a run has written, and take it out."""
    if document.value.pop("include", None) is not None:
        place = place_of(("include",), document.places)
        yield Problem(place, "include: the files of a run are complete and must not include others; remove it")
    for path, value in list(leaves(document.value)):
        if isinstance(value, str) and not is_plain(value):
            failed.add(path)
            _assign(document.value, path, None)
            yield Problem(
                document.places[path],
                f"{dotted(path)} = {show(value)}: a run writes resolved values, and nothing in its files is resolved "
                "again, since they may come from somebody else. Write \\${ for a plain ${, or put the expression into "
                "your own run file",
            )
