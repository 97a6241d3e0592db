"""Values that are executed (keys marked `CODE`), and the one check that nobody else has written them.

Every place that executes such a value calls `refuse_code_of_others` before, and so does every preview of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from pipeline.common.trust import refuse_untrusted
from pipeline.config.base import KeyMark, Section
from pipeline.config.parsing.document import ParsedFile, Place
from pipeline.config.parsing.problems import place_of, show
from pipeline.config.parsing.schema import KeyPath, dotted, mark_of, subsection, written_keys
from pipeline.config.root import Config

REMOTE_KEYS = ("data.dir", "data.sources", "data.heldout_sources", "data.remote", "tokenizer.path")
"""Keys of objects, which are asked for with the credentials of this user."""
MIRROR_KEYS = ("train.checkpoint.mirror", "resume.from_mirror", "data.remote")
"""Keys of mirrors of checkpoints, which are written and read with the credentials of this user."""
TASK_KEYS = ("eval.harness", "data.curate.decontaminate.tasks")
"""Keys of tasks of lm-evaluation-harness, which are executed where they are files."""
CHECKED = "PIPELINE_CHECKED"
"""Environment variable with digests of values that the command or job which has started this process has checked."""


@dataclass(frozen=True)
class CodeValue:
    """A value of a config that is executed, or that names files which are."""

    path: KeyPath
    value: Any
    mark: KeyMark
    without: str
    """Override that leaves it out."""

    @property
    def files(self) -> list[Path] | None:
        """Files that it names, with what they execute; None of a value that is executed itself."""
        return None if self.mark.files is None else list(self.mark.files(self.value))

    @property
    def digest(self) -> str:
        """Digest of key and value."""
        return hashlib.sha256(json.dumps([dotted(self.path), self.value], default=str).encode()).hexdigest()


def code_values(config: Config, *sections: str) -> Iterator[CodeValue]:
    """Values of keys that are marked as code, where they are not the defaults.

    Args:
        config: a run file.
        sections: keys or sections to look at; by default all.
    """
    for found in _below(config, (), ""):
        key = f"{dotted(found.path)}."
        if not sections or any(key.startswith(f"{section}.") for section in sections):
            yield found


def _below(value: Any, path: KeyPath, without: str) -> Iterator[CodeValue]:
    if isinstance(value, Section):
        for entry in _entries(type(value)):
            # Not as an attribute: this reads every key, and uses none.
            inner, here = vars(value)[entry.name], (*path, entry.key)
            reset = _override(here, entry.default, without)
            if entry.mark is None:
                yield from _below(inner, here, reset)
            elif inner is not None and _written(inner) != entry.default and _applies(entry.mark, inner):
                yield CodeValue(here, inner, entry.mark, reset)
    elif isinstance(value, list | dict):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _below(inner, (*path, part), without)


def _applies(mark: KeyMark, value: Any) -> bool:
    return mark.applies is None or mark.applies(value)


def _override(path: KeyPath, default: str | None, above: str) -> str:
    """The override that leaves a value out: of the nearest key that may be null, else of the nearest with a default."""
    if (
        default is None
        or any(isinstance(part, int) for part in path)
        or (default != "null" and above.endswith("=null"))
    ):
        return above
    return f"{dotted(path)}={default}"


@dataclass(frozen=True)
class _Entry:
    """A key that is code, or may have such keys below it."""

    key: str
    name: str
    mark: KeyMark | None
    default: str | None
    """As an override has it; None of a required key and of sections."""


@cache
def _entries(section: type[Section]) -> list[_Entry]:
    found = []
    for key, (name, field) in written_keys(section).items():
        mark = mark_of(field)
        if mark is not None and mark.kind != "data":
            found.append(_Entry(key, name, mark, _default(field)))
        elif subsection(field.annotation)[0] is not None or field.annotation is Any:  # options of a plug-in
            found.append(_Entry(key, name, None, _default(field)))
    return found


def _default(field: FieldInfo) -> str | None:
    value = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    return None if field.is_required() or isinstance(value, Section) else _written(value)


def _written(value: Any) -> str:
    """A value as an override has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def note_origins(
    config: Config, documents: Sequence[ParsedFile], places: Mapping[KeyPath, Place], interpolated: Sequence[KeyPath]
) -> None:
    """Keep in a config which files name the values that are executed; what the command line names is the user's own.

    Args:
        config: as it was loaded.
        documents: the files of it.
        places: the place of each value.
        interpolated: values that were put together from others, which may be in any of the files.
    """
    files = {document.source: Path(os.path.abspath(document.source)) for document in documents}
    origins = {}
    for found in code_values(config):
        path, depth = found.path, len(found.path)
        sources = {place.source for below, place in places.items() if below[:depth] == path}
        sources = sources or {place_of(path, places).source}
        if any(each[:depth] == path or path[: len(each)] == each for each in interpolated):
            sources |= set(files)
        origins[dotted(path)] = tuple(files[source] for source in files if source in sources)
    config.note_origins(origins)


def refuse_code_of_others(config: Config, *sections: str) -> None:
    """Refuse to execute what others may have written: the file that names it, the file that is named, what it imports.

    Names of what is installed pass. Consent is given by `--trust-files-of`, never by a file of the run; whose files are
    trusted is said.

    Args:
        config: a run file.
        sections: keys or sections that are about to be used; by default all.

    Raises:
        UserError: somebody else may have written a value or a file.
    """
    checked = os.environ.get(CHECKED, "").split(",")
    for found in code_values(config, *sections):
        files = found.files
        if found.digest not in checked and files != []:
            key = dotted(found.path)
            todo = f"name files that only you may write to, in a run file of yours, or override it: {found.without}"
            sends = found.mark.kind == "credentials"
            if sends:
                todo = "name the objects in a run file of yours, or override the key"
            refuse_untrusted(f"{key} ({show(found.value)})", [*config.origins(key), *(files or ())], todo, sends=sends)


def refuse_mirrors_of_others(config: Config) -> None:
    """Refuse to write to or read from mirrors of checkpoints that somebody else may have named.

    Raises:
        UserError: somebody else may have written one of `MIRROR_KEYS`.
    """
    if config.train.checkpoint.mirror is not None or config.resume.from_mirror is not None:
        refuse_code_of_others(config, *MIRROR_KEYS)


@contextmanager
def vouch_for(config: Config, *sections: str) -> Iterator[None]:
    """Let processes that are started inside take the values as checked: their file of the config is a copy.

    Args:
        config: whose values were checked.
        sections: as for `refuse_code_of_others`.
    """
    before = os.environ.get(CHECKED)
    os.environ[CHECKED] = ",".join(found.digest for found in code_values(config, *sections))
    try:
        yield
    finally:
        if before is None:
            del os.environ[CHECKED]
        else:
            os.environ[CHECKED] = before
