"""The reference of all keys, generated from the schema: for a terminal, for `docs/config.md`, and as a JSON schema."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AfterValidator, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.common.errors import UserError
from pipeline.common.format import aligned
from pipeline.common.storage import put
from pipeline.config.base import Duration, Section, Share, Value, absolute_glob, parse_bytes, parse_count, parse_steps
from pipeline.config.blend import Bound, Range
from pipeline.config.parsing.document import render
from pipeline.config.parsing.schema import Key, keys, keys_like, mark_of, meaning, subsection, written_keys
from pipeline.config.plugins import KEYS, OPTION_KEYS, Kind, NamedPlugin, PluginOptions, find_plugin, installed
from pipeline.config.root import Config
from pipeline.config.slurm import parse_minutes

BEGIN = "<!-- Everything below is written by `make docs` from pipeline/config/. -->"

_NAMES: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true, false", Path: "path"}
_VALUES: dict[Any, str] = {
    Duration: "duration",
    Share: "share, or number of documents",
    Bound: "share, or number of documents",
    Range: "whole number or range",
}
_PARSERS: dict[Any, str] = {
    parse_count: "whole number",
    parse_steps: "whole number",
    parse_bytes: "size in bytes",
    absolute_glob: "path or glob",
    parse_minutes: "time",
}
_BOUNDS: dict[Any, str] = {
    Ge: "≥ {0.ge}",
    Gt: "> {0.gt}",
    Le: "≤ {0.le}",
    Lt: "< {0.lt}",
    MinLen: "not empty",
    MaxLen: "at most {0.max_length} long",
}


def json_schema() -> str:
    """JSON schema of run files as they are written, with `include`."""
    schema = Config.model_json_schema(mode="validation")
    _add_meanings(schema, Config)
    schema["title"] = "Run file of the pretraining pipeline"
    schema["properties"]["include"] = {
        "description": "Run files that are merged before this one, relative to it.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def key_lines(name: str | None = None) -> Iterator[str]:
    """Keys with type, default and meaning.

    Args:
        name: a key, a section, the last part of a key's path, or words of names and meanings; None for all sections.

    Raises:
        UserError: There is no such key, and no key with these words.
    """
    known = list(keys(Config))
    if name is None:
        found = [key for key in known if subsection(key.field.annotation)[0] is not None]
    else:
        paths = [key.path for key in known if key.path == name] or [
            key.path for key in known if key.path.endswith(f".{name}")
        ]
        found = [key for key in known if any(f"{key.path}.".startswith(f"{path}.") for path in paths)]
        found = found or _with_words(known, name)
    if not found:
        assert name is not None, "there are sections"
        near = keys_like(Config, name)
        raise UserError(f"there is no key {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    for key in found:
        yield from _entry(key)


def plugin_lines(name: str | None = None) -> Iterator[str]:
    """Installed plug-ins, none of which is imported; or the options of those of a name, which are.

    Raises:
        UserError: There is none of this name, or it cannot be imported.
    """
    found = [plugin for kind in get_args(Kind) for plugin in installed(kind)]
    if name is None:
        rows = [("KEY", "NAME", "PACKAGE", "VERSION")]
        rows += [(KEYS[each.kind], each.name, each.distribution, each.version or "none") for each in found]
        yield from aligned(rows)
        if not found:
            yield "none are installed; docs/plugins.md says how to write one"
        return
    if not (of_name := [each.kind for each in found if each.name == name]):
        known = ", ".join(dict.fromkeys(each.name for each in found)) or "none are installed"
        raise UserError(f"there is no plug-in {name}: {known}")
    for kind in dict.fromkeys(of_name):
        plugin = find_plugin(kind, name)
        section = plugin.options()
        yield f"{KEYS[kind]}: {plugin}"
        yield from textwrap.wrap(" ".join((inspect.getdoc(plugin.load()) or "").split()), 100)
        for key in keys(section, f"{OPTION_KEYS[kind]}.") if section else ():
            yield from _entry(key)


def _with_words(known: list[Key], text: str) -> list[Key]:
    """Keys that have all words of a text in their path and meaning; `batch_size` is two words."""
    words = _words(text)
    return [key for key in known if words and words <= _words(f"{key.path} {_text(key)}")]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def _text(key: Key) -> str:
    """The meaning of a key; of a section without one, its docstring."""
    section, _ = subsection(key.field.annotation)
    return meaning(key.section, key.name) or (inspect.getdoc(section) if section else "") or ""


def _entry(key: Key) -> Iterator[str]:
    """A key of the reference for a terminal."""
    value = default(key.field).strip("*`")
    given = {"required": "required", "see below": ""}.get(value, f"default {value}")
    yield f"{key.path}: {allowed(key.field).replace('`', '')}" + (f"; {given}" if given else "")
    yield from textwrap.wrap(" ".join(_text(key).split()), 96, initial_indent="    ", subsequent_indent="    ")


def markdown(section: type[Section] = Config, path: str = "", seen: dict[type[Section], str] | None = None) -> str:
    """A heading, the docstring and a table of keys for `section`, then the same for the sections below it.

    Args:
        section: what to describe.
        path: its key.
        seen: keys of the sections that were described before, to which a second one refers.
    """
    seen = {} if seen is None else seen
    text = " ".join((inspect.getdoc(section) or "").split())
    first = seen.setdefault(section, path)
    if (described := section.described_at or (first if first != path else None)) is not None:
        names = ", ".join(f"`{key}`" for key in written_keys(section))
        return f"### `{path}`\n\n{text} Keys: {names}. See `{described}`.\n"
    below = []
    for name, (_, field) in written_keys(section).items():
        found, entry = subsection(field.annotation)
        if found is not None:
            below.append(markdown(found, ".".join(part for part in (path, name, entry) if part), seen))
    if not path:
        # The root's rows would say only that there are sections.
        return "\n".join(below)
    return "\n".join([f"### `{path}`\n", f"{text}\n", table(section), "", *below])


def table(section: type[Section]) -> str:
    """A row for each key of `section`."""
    rows = []
    for key, (name, field) in written_keys(section).items():
        cells = [f"`{key}`", allowed(field), default(field), " ".join(meaning(section, name).split())]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def allowed(field: FieldInfo) -> str:
    """The type of a key and the bounds of its value, in words; what is executed is `(code)`."""
    section, entry = subsection(field.annotation)
    if section is not None:
        return {"N": "list of sections", "NAME": "sections by name"}.get(entry, "section")
    mark = mark_of(field)
    return _type(field.annotation, field.metadata) + (" (code)" if mark is not None and mark.kind == "code" else "")


def default(field: FieldInfo) -> str:
    """The default of a key as it would stand in a run file."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    if isinstance(value, Value):
        return f"`{value.model_dump()}`"
    if isinstance(value, Section):
        return "see below"
    if value is None:
        return "none"
    if allowed(field).startswith("size in bytes"):
        unit, name = (2**30, "GiB") if value % 2**30 == 0 else (2**20, "MiB")
        return f"`{value // unit}{name}`"
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{name}: {entry}' for name, entry in value.items())}}}`"
    text = json.dumps(value) if isinstance(value, (list, tuple)) else render(value).split("\n")[0]
    return f"`{text}`"


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0], [*annotation.__metadata__, *metadata])
    if origin in (Union, UnionType):
        return " or ".join(_type(part, metadata) for part in arguments if part is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0], [])}" + _bounds(metadata)
    if origin is tuple:
        return f"list of {len(arguments)}: " + ", ".join(_type(part, []) for part in arguments)
    if origin is dict:
        return f"{_type(arguments[1], [])} by name" + _bounds(metadata)
    if any(isinstance(entry, PluginOptions) for entry in metadata):
        return "section"
    if annotation is str and any(isinstance(entry, NamedPlugin) for entry in metadata):
        return "name of a plug-in"
    if annotation in _VALUES:
        return _VALUES[annotation] + _bounds(metadata)
    parsers = [entry.func for entry in metadata if isinstance(entry, (AfterValidator, BeforeValidator))]
    name = next((_PARSERS[parser] for parser in parsers if parser in _PARSERS), _NAMES.get(annotation))
    # Options of plug-ins may have any type.
    return (name or str(getattr(annotation, "__name__", annotation))) + _bounds(metadata)


def _bounds(metadata: list[Any]) -> str:
    words = []
    for entry in metadata:
        if type(entry) in _BOUNDS:
            words.append(_BOUNDS[type(entry)].format(entry))
        elif pattern := getattr(entry, "pattern", None):
            words.append(f"matches `{pattern}`")
    return f", {', '.join(words)}" if words else ""


def page(text: str) -> str:
    """`docs/config.md` with the generated part replaced."""
    written, marker, _ = text.partition(BEGIN)
    assert marker, f"the page has no line {BEGIN}"
    return f"{written}{BEGIN}\n\n{markdown()}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    put(target, page(target.read_text(encoding="utf-8")).encode())


def _add_meanings(schema: dict[str, Any], section: type[Section]) -> None:
    """Add the meanings of a section's keys, and of those below it, to its JSON schema, in place."""
    definitions = schema["$defs"]
    for each in {key.section for key in keys(section)}:
        properties = (schema if each is section else definitions[each.__name__]).get("properties", {})
        for name, field in each.model_fields.items():
            key, text = field.alias or name, meaning(each, name)
            if text and key in properties:
                below = definitions.get(properties[key].get("$ref", "").rpartition("/")[2], {})
                if text != below.get("description"):  # the definition says it already
                    properties[key] = dict(sorted({**properties[key], "description": text}.items()))
