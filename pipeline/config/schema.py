"""The keys of the run file, read off the pydantic models: for error messages, the reference page and tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from pipeline.config.base import Section, Value

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Key:
    """One key: its dotted path (`data.sources.N.weight`), where it is declared, and its declaration."""

    path: str
    section: type[Section]
    name: str
    field: FieldInfo


def subsection(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a key holds, if it holds one, and whether it is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (None, False) if issubclass(annotation, Value) else (annotation, False)
    for argument in get_args(annotation):
        found, _ = subsection(argument)
        if found is not None:
            return found, get_origin(annotation) is list
    return None, False


def keys(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key of `section` and of the sections below it, in the order of declaration, sections themselves too."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield Key(path, section, name, field)
        below, many = subsection(field.annotation)
        if below is not None:
            yield from keys(below, f"{path}.N." if many else f"{path}.")


def section_at(root: type[Section], path: KeyPath) -> type[Section] | None:
    """The section class at `path`, list indices included; None if there is no section."""
    section: type[Section] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        if section is None or part not in section.model_fields:
            return None
        section, _ = subsection(section.model_fields[part].annotation)
    return section


def dotted(path: KeyPath) -> str:
    """`("data", "sources", 0)` -> `data.sources.0`."""
    return ".".join(str(part) for part in path)
