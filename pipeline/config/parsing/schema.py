"""The keys of the run file, read off the pydantic models: for error messages, the reference page and tests."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from pipeline.config.base import KeyMark, Section, Value

KeyPath = tuple[str | int, ...]

_ENTRIES: dict[Any, str] = {list: "N", dict: "NAME"}
_SHORT = 5
"""Letters of a name that is like too many others."""


@dataclass(frozen=True)
class Key:
    """One key: its dotted path (`data.sources.N.weight`), where it is declared, and its declaration."""

    path: str
    section: type[Section]
    name: str
    field: FieldInfo


def subsection(annotation: Any) -> tuple[type[Section] | None, str]:
    """The section that a key holds, if it holds one, and what stands for an entry in paths, if it holds several.

    That is `N` in a list, and `NAME` where they have names.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (None, "") if issubclass(annotation, Value) else (annotation, "")
    for argument in get_args(annotation):
        found, _ = subsection(argument)
        if found is not None:
            return found, _ENTRIES.get(get_origin(annotation), "")
    return None, ""


def written_keys(section: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """The keys of `section` as a run file has them, each with the name of its field and its declaration.

    They are the same but where the key is a word of Python: `from` is the field `from_`.
    """
    return {field.alias or name: (name, field) for name, field in section.model_fields.items()}


def keys(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key of `section` and of the sections below it, in the order of declaration, sections themselves too."""
    for key, (name, field) in written_keys(section).items():
        path = f"{prefix}{key}"
        yield Key(path, section, name, field)
        below, entry = subsection(field.annotation)
        if below is not None:
            yield from keys(below, f"{path}.{entry}." if entry else f"{path}.")


def mark_of(field: FieldInfo) -> KeyMark | None:
    """The mark of a key; None of one that has none, such as a number.

    Raises:
        ValueError: It has two that differ.
    """
    marks = {*_marks(field.metadata), *_marks([field.annotation])}
    if len(marks) > 1:
        raise ValueError(f"a key is either data or code, and this one has both marks: {field}")
    return marks.pop() if marks else None


def _marks(parts: Iterable[Any]) -> Iterator[KeyMark]:
    for part in parts:
        if isinstance(part, KeyMark):
            yield part
        yield from _marks(get_args(part))


def meaning(section: type[Section], name: str) -> str:
    """The docstring of a field, inherited or not; empty if there is none.

    It is read from the source when it is asked for: pydantic would read all while the sections are defined, which every
    command would wait for.
    """
    for each in section.__mro__:
        if issubclass(each, Section) and name in (found := _docstrings(each)):
            return found[name]
    return ""


def keys_like(section: type[Section], name: str) -> list[str]:
    """Paths of up to three keys whose last part is the name, or near to it if the name is not short."""
    last: dict[str, list[str]] = {}
    # Keys near the root first: they are what is meant more often.
    for key in sorted(keys(section), key=lambda key: key.path.count(".")):
        last.setdefault(key.path.split(".")[-1], []).append(key.path)
    name = name.rsplit(".", maxsplit=1)[-1]
    if name in last:
        return last[name][:3]
    near = difflib.get_close_matches(name, last, n=1, cutoff=0.75) if len(name) > _SHORT else []
    return last[near[0]][:3] if near else []


def section_at(root: type[Section], path: KeyPath) -> type[Section] | None:
    """The section class at `path`, indices and names of entries included; None if there is no section."""
    section: type[Section] | None = root
    entry = ""
    for part in path:
        if isinstance(part, int) or entry == "NAME":
            entry = ""
            continue
        known = {} if section is None else written_keys(section)
        if part not in known:
            return None
        section, entry = subsection(known[part][1].annotation)
    return section


def dotted(path: KeyPath) -> str:
    """`("data", "sources", 0)` -> `data.sources.0`."""
    return ".".join(str(part) for part in path)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Values that are not sections, by dotted key.

    Args:
        value: of a document, a section or a key.
        path: dotted key of it.
    """
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {
        key: leaf
        for name, below in value.items()
        for key, leaf in flat(below, f"{path}.{name}" if path else str(name)).items()
    }


@cache
def _docstrings(section: type[Section]) -> dict[str, str]:
    """Docstrings of the fields that a class itself declares."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    except OSError:  # options of a plug-in that is installed without its source
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
