"""Pydantic's errors as sentences for the author of a run file: where, which key, what value, what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.common.redaction import has_address, masked, secret_in
from pipeline.config.base import Section
from pipeline.config.parsing.document import Place, Problem
from pipeline.config.parsing.schema import KeyPath, dotted, keys, keys_like, meaning, section_at, written_keys
from pipeline.config.plugins import PluginOptions

_ALLOWED = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "model_type": "must be a section with keys",
    "model_attributes_type": "must be a section with keys",
}


def translate(
    error: ValidationError, root: type[Section], plain: Any, places: Mapping[KeyPath, Place]
) -> list[Problem]:
    """One problem for each of pydantic's errors.

    Args:
        error: What validation raised.
        root: The section that was validated.
        plain: The values that were validated.
        places: Where they were written.
    """
    return [_problem(details, root, plain, places) for details in error.errors()]


def misspelled(error: ValidationError, root: type[Section], plain: Any) -> set[KeyPath]:
    """The keys that unknown ones beside them are near to: where one is required, it is missing only by that name."""
    unknown = [details["loc"] for details in error.errors() if details["type"] == "extra_forbidden"]
    meant = []
    for path in unknown:
        above, section, below = _within_options(path, root, plain)
        meant.append((path, (*path[:-1], _near_sibling(below, section)), _suggestion(below, section, above)))
    return {near for _, near, suggestion in meant if suggestion == f"; did you mean {dotted(near)}?"}


def place_of(path: KeyPath, places: Mapping[KeyPath, Place]) -> Place:
    """The place of `path`, or of the nearest section above it that was written."""
    while path not in places:
        path = path[:-1]
    return places[path]


def secrets_of(leaves: Iterable[tuple[KeyPath, Any]], places: Mapping[KeyPath, Place]) -> Iterator[Problem]:
    """Find values that are secrets, which the files of a run would keep.

    Args:
        leaves: values by the paths of their keys.
        places: where they were written.
    """
    for path, value in leaves:
        if isinstance(value, str) and (what := secret_in(value)) is not None:
            yield Problem(
                place_of(path, places),
                f"{dotted(path)} = {show(value)}: has what looks like a secret ({what}), and every value is written "
                "into the run folder, the logs and the report; take it out, and leave it in the environment, where the "
                "libraries that need it look for it",
            )


def show(value: Any) -> str:
    """A value as it could stand in a run file, shortened."""
    text = masked(json.dumps(value, ensure_ascii=False, default=str))
    text = "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in text)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _problem(details: ErrorDetails, root: type[Section], plain: Any, places: Mapping[KeyPath, Place]) -> Problem:
    path, kind, context = details["loc"], details["type"], details.get("ctx", {})
    above, section, below = _within_options(path, root, plain)
    if kind == "extra_forbidden":
        return Problem(place_of(path, places), f"{dotted(path)}: unknown key{_suggestion(below, section, above)}")
    if kind == "missing" and isinstance(path[-1], int):
        return Problem(place_of(path, places), f"{dotted(path[:-1])}: the list needs another entry")
    if kind == "missing":
        return Problem(place_of(path, places), f"{dotted(path)}: required key is missing{_meaning(below, section)}")
    # Pydantic goes on into values that are one scalar in the file (a duration's count): report what was written.
    path, value = _written(path, plain)
    message = re.sub(r"^(Input|String) should", "must", str(context.get("error") or details["msg"]))
    if kind in _ALLOWED:
        message = _ALLOWED[kind]
    elif kind == "literal_error":
        message = f"must be one of {context['expected'].replace(' or ', ', ')}"
    elif kind in ("too_short", "too_long"):
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        message = f"must have {bound} entries"
    hidden = isinstance(value, dict) or (isinstance(value, list) and kind == "value_error")
    # The address of a webhook is a secret.
    hidden = hidden or (path[:1] == ("notify",) and has_address(show(value)))
    shown = "" if hidden else f" = {show(value)}"
    if not path:
        return Problem(_place_of_keys(path, message, places), message)
    place = _place_of_keys(path, message, places) if isinstance(value, dict) else place_of(path, places)
    return Problem(place, f"{dotted(path)}{shown}: {message}")


def _place_of_keys(section: KeyPath, message: str, places: Mapping[KeyPath, Place]) -> Place:
    """For a check across the keys of a section, which its message names.

    The place of the first one that the command line has, which is what was changed last; or else of the first one that
    was written.
    """
    words = re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", message)
    named = [(*section, *(int(part) if part.isdecimal() else part for part in word.split("."))) for word in words]
    named = [path for path in named if path in places]
    for path in named:
        for written, place in places.items():
            if place.line is None and written[: len(path)] == path:
                return place
    return place_of(named[0] if named else section, places)


def _written(path: KeyPath, plain: Any) -> tuple[KeyPath, Any]:
    for depth, part in enumerate(path):
        try:
            plain = plain[part]
        except (KeyError, IndexError, TypeError):
            return path[:depth], plain
    return path, plain


def _within_options(path: KeyPath, root: type[Section], plain: Any) -> tuple[KeyPath, type[Section], KeyPath]:
    """A path below the options of a plug-in: the path of these, their section, and the path in it.

    Any other path is returned with the root.
    """
    for depth in range(1, len(path)):
        section = section_at(root, path[: depth - 1])
        _, field = written_keys(section).get(str(path[depth - 1]), ("", None)) if section else ("", None)
        for entry in field.metadata if field else ():
            if isinstance(entry, PluginOptions):
                _, beside = _written(path[: depth - 1], plain)
                options = entry.section(beside.get(entry.named_by))
                return (path[:depth], options, path[depth:]) if options else ((), root, path)
    return (), root, path


def _meaning(path: KeyPath, root: type[Section]) -> str:
    section = section_at(root, path[:-1])
    name, _ = written_keys(section).get(str(path[-1]), ("", None)) if section else ("", None)
    text = meaning(section, name) if section else ""
    return f" ({' '.join(text.split())})" if text else ""


def _suggestion(path: KeyPath, root: type[Section], outer: KeyPath = ()) -> str:
    """Keys that may have been meant by an unknown one below a root, which is the section at the path `outer`."""
    *parents, name = path
    name = str(name)
    known = {key.path for key in keys(root)}
    if "." in name and re.sub(r"\b\d+\b", "N", dotted(path)) in known:
        return "; in a file, write nested sections (dots are for the command line)"
    section = section_at(root, tuple(parents))
    siblings = list(written_keys(section)) if section else []
    here = dotted((*outer, *parents))
    above, before = f"{here}." if here else "", f"{dotted(outer)}." if outer else ""
    if longer := [other for other in siblings if other.startswith(f"{name}_")]:
        return f"; did you mean {' or '.join(above + each for each in longer[:3])}?"
    if any(other.split(".")[-1] == name for other in known):
        return f"; did you mean {' or '.join(before + each for each in keys_like(root, name))}?"
    if near := _near_sibling(path, root):
        return f"; did you mean {above}{near}?"
    if elsewhere := keys_like(root, name):
        return f"; did you mean {before}{elsewhere[0]}?"
    return f"; {here or 'a run file'} has the keys {', '.join(siblings)}"


def _near_sibling(path: KeyPath, root: type[Section]) -> str:
    """The key of the same section whose name is nearest; empty if none is near."""
    section = section_at(root, path[:-1])
    near = difflib.get_close_matches(str(path[-1]), list(written_keys(section)) if section else [], n=1, cutoff=0.6)
    return near[0] if near else ""
