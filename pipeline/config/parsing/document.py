"""YAML files with the line of every value, for messages that say where a mistake is.

The scalars are those of YAML 1.2's core schema: `3e-4` is a number, `yes`, `on` and dates are text, `012` is twelve.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

from pipeline.common.console import visible
from pipeline.common.errors import UserError
from pipeline.config.parsing.schema import KeyPath, dotted

PLACEHOLDER = "???"
"""Stands, unquoted, for a value that whoever uses the file has to fill in."""
MAX_VALUES = 100_000
"""Values in a file; aliases of aliases can make billions out of a few lines."""
MAX_DEPTH = 50
"""Levels of sections and lists inside each other; the schema has 4."""

_CORE: list[tuple[str, str, list[str]]] = [
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


def _quote_where_needed(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # The line ends of Unicode are read back as they were only from escapes.
    escape = text == PLACEHOLDER or any(end in text for end in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if escape else None)


_Dumper.add_representer(str, _quote_where_needed)


@dataclass(frozen=True)
class Place:
    """The place where a value was written: a file and line, or the command line (no line)."""

    source: str
    line: int | None = None
    placeholder: bool = False
    digits: str | None = None
    """A whole number as it was written, like 0022: as a number it has lost its zeros."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One violation in a run file."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass
class ParsedFile:
    """A parsed file: plain values, and the place of each one by key path (the root's is `()`)."""

    source: str
    value: Any = None
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    written: bool = False
    """True if a run has written it: nothing in it is resolved or included."""


def parse(text: str, source: str, *, lines: bool = True) -> ParsedFile:
    """Parse one YAML document.

    Args:
        text: The document.
        source: Its name for messages.
        lines: False where lines mean nothing (a value from the command line).

    Returns:
        The document; duplicate keys, keys that are not text and unknown tags are among its problems.

    Raises:
        UserError: The text is not YAML.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source, mark.line + 1 if mark and lines else None)
        reason = " ".join(str(part) for part in (error.context, error.problem) if part)
        hint = _hint(text, mark.line if mark else 0)
        raise UserError(f"{place}: not readable as YAML: {reason}{hint}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{source}: not readable as YAML: more than {MAX_DEPTH} levels inside each other") from None
    document = ParsedFile(source)
    document.value = None if node is None else _construct(node, (), source, lines, document, [])
    document.places.setdefault((), Place(source, 1 if lines else None))
    return document


def render(value: Any) -> str:
    """Plain values as YAML that `parse` reads back to the same values."""

    def dumped(*, unicode: bool) -> str:
        return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=unicode, width=120))

    text = dumped(unicode=True)
    # Some characters that a terminal obeys are printable to PyYAML. In ASCII all of them are escaped.
    return text if visible(text) == text else dumped(unicode=False)


def _hint(text: str, line: int) -> str:
    rows = text.split("\n")
    row = rows[line] if line < len(rows) else ""
    if "\t" in row[: len(row) - len(row.lstrip())]:
        return " (indent with spaces; this line has a tab)"
    if re.search(r"(?:^|[:\-\[,]\s*)[*&@`%!]", row):
        return " (put text that begins with one of * & @ ` % ! into quotes)"
    return ""


def _construct(
    node: yaml.Node, path: KeyPath, source: str, lines: bool, document: ParsedFile, above: list[yaml.Node]
) -> Any:
    def place_of(node: yaml.Node, **more: Any) -> Place:
        return Place(source, node.start_mark.line + 1 if lines else None, **more)

    if any(node is ancestor for ancestor in above):
        raise UserError(f"{place_of(node)}: {dotted(path)}: the alias contains itself")
    if len(path) > MAX_DEPTH:
        raise UserError(f"{place_of(node)}: not readable as YAML: more than {MAX_DEPTH} levels inside each other")
    if len(document.places) > MAX_VALUES:
        raise UserError(f"{place_of(node)}: not readable as YAML: more than {MAX_VALUES:,} values, aliases included")
    # A value on the lines below its key already has the key's place, which is where a reader would look.
    if isinstance(node, yaml.ScalarNode) or path not in document.places:
        placeholder = isinstance(node, yaml.ScalarNode) and node.value == PLACEHOLDER and not node.style
        digits = node.value if node.tag == "tag:yaml.org,2002:int" else None
        document.places[path] = place_of(node, placeholder=placeholder, digits=digits)
    above = [*above, node]
    if not isinstance(node, yaml.ScalarNode) and node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        problem = f"{dotted(path) or 'the file'}: the YAML tag {node.tag} is not supported"
        document.problems.append(Problem(place_of(node), problem))
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        first: dict[str, Place] = {}
        for key_node, value_node in node.value:
            place = place_of(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in (
                "tag:yaml.org,2002:str",
                "tag:yaml.org,2002:int",
            ):
                document.problems.append(Problem(place, f"a key in {dotted(path) or 'the file'} is not text"))
                continue
            key = str(key_node.value)
            if key in mapping:
                where = dotted((*path, key))
                document.problems.append(Problem(place, f"{where}: the key is given twice, first in {first[key]}"))
                continue
            first[key] = place
            document.places[(*path, key)] = place
            mapping[key] = _construct(value_node, (*path, key), source, lines, document, above)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(item, (*path, index), source, lines, document, above) for index, item in enumerate(node.value)
        ]
    return _scalar(node, path, place_of(node), document)


_LONGEST_INTEGER = 100
"""Characters of a whole number; no key takes one as long."""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_INTEGER else f"{text[:40]}..."


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:  # Python neither reads nor writes those of more than 4,300 digits
        raise ValueError
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _scalar(node: yaml.Node, path: KeyPath, place: Place, document: ParsedFile) -> Any:
    text: str = node.value
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return _integer(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if kind == "str":
            return text
    except (ValueError, KeyError):
        document.problems.append(Problem(place, f"{dotted(path)}: {_cut(text)!r} is not a valid {kind}"))
        return None
    document.problems.append(Problem(place, f"{dotted(path)}: the YAML tag {node.tag} is not supported"))
    return None
