"""Meanings of keys: the docstrings below the fields of the sections, read from their source when they are asked for.

Pydantic itself would read them while a section is defined, which every command would wait for.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, get_args

from pipeline.config.base import Section


def meaning(section: type[Section], name: str) -> str:
    """The docstring of a field, inherited or not; empty if there is none."""
    for each in section.__mro__:
        if issubclass(each, Section) and name in (found := _docstrings(each)):
            return found[name]
    return ""


def add_meanings(schema: dict[str, Any], section: type[Section]) -> None:
    """Add the meanings of a section's keys, and of those below it, to its JSON schema, in place."""
    definitions = schema["$defs"]
    for each in set(_sections(section)):
        properties = (schema if each is section else definitions[each.__name__]).get("properties", {})
        for name, field in each.model_fields.items():
            key, text = field.alias or name, meaning(each, name)
            if text and key in properties:
                below = definitions.get(properties[key].get("$ref", "").rpartition("/")[2], {})
                if text != below.get("description"):  # the definition says it already
                    properties[key] = dict(sorted({**properties[key], "description": text}.items()))


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that values of a type have in them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _sections(field.annotation)
    for argument in get_args(annotation):
        yield from _sections(argument)


@cache
def _docstrings(section: type[Section]) -> dict[str, str]:
    """Docstrings of the fields that a class itself declares."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
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
