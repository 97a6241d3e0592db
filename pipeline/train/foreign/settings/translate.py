"""`pipeline convert config`: settings of another suite become a run file; every setting is accounted for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.common import storage
from pipeline.common.console import alarm, echo
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config.load import load
from pipeline.config.parsing.schema import keys as keys_of
from pipeline.config.root import Config
from pipeline.train.foreign.settings.megatron_rules import MEGATRON
from pipeline.train.foreign.settings.other_rules import OTHERS
from pipeline.train.foreign.settings.rows import SettingRow, Suite, SuiteName, read_suite
from pipeline.train.foreign.settings.rules import COMMON, Given, Left, Of, Rule, Settings
from pipeline.train.foreign.settings.values import read_values

_TO_SET = {
    "run.dir": "runs/converted",
    "data.sources": "???",
    "tokenizer.path": "???",
    "model.layers": "???",
    "model.dim": "???",
    "train.duration": "???",
}
"""Keys that every run needs, with what stands for a value that nobody gave."""
_ORDER = ("run", "tokenizer", "data", "model", "parallel", "train", "launch")
_SHOWN = 80


@dataclass
class Translation:
    """A run file, and what became of each setting.

    Attributes:
        values: by key of the run file, each with a comment.
        left: settings that nothing here does, each with why.
        unknown: settings that no row is about.
        notes: for the user.
    """

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def convert_config(suite: SuiteName, given: Sequence[str], to: Path | None) -> None:
    """Print the run file for a run of another suite, or write it, and say what is still to be done.

    Args:
        suite: that the run is of.
        given: its file, or arguments of Megatron-LM.
        to: run file to write, which must not be there; None to print it.

    Raises:
        UserError: the settings cannot be read, or the file is there already.
    """
    if to is not None and to.exists():
        raise UserError(f"{to} is there already; choose another name, or remove it")
    values, notes = read_values(suite, given)
    found = translate(suite, values)
    found.notes += notes
    text = written(found, read_suite(suite))
    if to is None:
        echo(text, end="")
    else:
        storage.write_new(to, text.encode())
        echo(
            f"{to}: {counted(len(found.values), 'key')} set, and {len(found.left) + len(found.unknown)} settings not "
            "translated; read the comments at its end"
        )
    if problem := _problem(text, to):
        alarm("to be done:", problem)


def rules_of(name: SuiteName) -> dict[str, Rule]:
    """Rules of a suite, by the name that its rows have for them."""
    return {**COMMON, **(MEGATRON if name == "megatron" else OTHERS[name])}


def translate(name: SuiteName, values: dict[str, Any]) -> Translation:
    """Translate settings.

    Args:
        name: of the suite that they are of.
        values: by their names there.
    """
    suite, rules = read_suite(name), rules_of(name)
    given, found = Given(values, suite.defaults), Translation()
    for row in suite.rows():
        names = [each for key in row.keys if given.is_given(key) and (each := given.find(key))]
        if row.rule is None:
            found.left += [
                f"{_named(suite, each)}{_short(given.get(each))}: here {row.here.replace('`', '')}"
                for each in names
                if each not in given.used and given.is_other(each)
            ]
            continue
        try:
            made = _made(rules[row.rule], given, row)
        except Left as error:
            given.look_at(row.keys)
            found.left.append(f"{', '.join(_named(suite, key) for key in names or row.keys)}: {error}")
            if error.to_set:
                found.values[error.to_set] = ("???", "to be chosen, see below")
            continue
        for path, value in made.items():
            if isinstance(value, Of):
                _set(found, suite, given, path, value.value, [value.key])
            elif row.rule == "model":
                _set(found, suite, given, path, value, _keys_of(suite, path))
            else:
                _set(found, suite, given, path, value, row.keys)
    unknown = [each for each in values if not (each in given.used or each in suite.ignored) and given.is_other(each)]
    found.unknown += [f"{_named(suite, each)}{_short(values[each])}" for each in unknown if values[each] is not False]
    if off := [_named(suite, each) for each in unknown if values[each] is False]:
        found.unknown.append(f"false: {', '.join(off)}")
    found.notes += given.notes
    for path, value in _TO_SET.items():
        if path not in found.values:
            found.values[path] = (value, "to be set")
    return found


def _made(rule: Rule, given: Given, row: SettingRow) -> Settings:
    """Values of a rule, whatever is given to it."""
    try:
        return rule(given, row)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise Left(f"it cannot be read ({type(error).__name__})") from error


def _set(found: Translation, suite: Suite, given: Given, path: str, value: Any, keys: Sequence[str]) -> None:
    """Set a key that is not set yet; not if neither they nor we have another value by default."""
    default = _defaults().get(path, Left)
    is_default = value == (list(default) if isinstance(default, tuple) else default)
    if path in found.values or (is_default and not any(map(given.is_other, keys))):
        return
    names = [_named(suite, each) for key in keys if given.is_given(key) and (each := given.find(key))]
    found.values[path] = (value, ", ".join(names) or f"default of {suite.title}; another here")


@cache
def _defaults() -> dict[str, Any]:
    """Our default of each key."""
    return {key.path: key.field.default for key in keys_of(Config)}


def _keys_of(suite: Suite, path: str) -> list[str]:
    """The settings that by the cells of a row decide a key."""
    if path == "model.experts":
        return [key for row in suite.rows() if "`model.experts." in row.here for key in row.keys]
    return [key for row in suite.rows() if f"`{path}`" in row.here or f"`{path}:" in row.here for key in row.keys]


def _named(suite: Suite, name: str) -> str:
    return f"--{name.replace('_', '-')}" if suite.title == "Megatron-LM" else name


def _short(value: Any) -> str:
    text = "" if value is True else f" {value}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def written(found: Translation, suite: Suite) -> str:
    """The text of the run file."""
    tree: dict[str, Any] = {}
    for path, leaf in found.values.items():
        *above, last = path.split(".")
        place = tree
        for name in above:
            inner = place.setdefault(name, {})
            assert isinstance(inner, dict), f"{path} is within a value"
            place = inner
        place[last] = leaf
    lines = [
        f"# Made of settings of {suite.title} by `pipeline convert config`. Read it before you start, comments too.",
        f"# What behaves differently all the same: docs/coming-from/{suite.page}",
        "",
    ]
    for section in sorted(tree, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)):
        lines += [*_lines(section, tree[section], 0), ""]
    lines += _section("To be done", found.notes)
    lines += _section("Not translated", found.left)
    lines += _section(
        f"Not known here ({suite.title} has many settings; look whether one of these matters)", found.unknown
    )
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"# {title}:", *(f"#   {_line(line)}" for line in lines), ""] if lines else []


def _lines(name: str, value: Any, depth: int) -> Iterator[str]:
    space = "  " * depth
    if isinstance(value, dict):
        yield f"{space}{name}:"
        for inner, each in value.items():
            yield from _lines(inner, each, depth + 1)
        return
    leaf, comment = value
    if isinstance(leaf, list) and leaf and isinstance(leaf[0], dict):
        yield f"{space}{name}:  # {_line(comment)}"
        for each in leaf:
            yield f"{space}  - {_flow(each)}"
    else:
        yield f"{space}{name}: {_flow(leaf)}  # {_line(comment)}"


def _line(text: str) -> str:
    """A text of a stranger for a comment, which ends with its line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _flow(value: Any) -> str:
    """A value on one line."""
    if value == "???":
        return str(value)
    return yaml.safe_dump([value], default_flow_style=True, width=2**31, sort_keys=False, allow_unicode=True)[1:-2]


def _problem(text: str, to: Path | None) -> str | None:
    """The error that loading the run file gives; None if it can train."""
    with tempfile.TemporaryDirectory(dir=None if to is None else to.parent, prefix=".convert-") as folder:
        path = Path(folder, "run.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            load(path)
        except UserError as error:
            return str(error).replace(str(path), "the run file").replace(f"{folder}{os.sep}", "")
    return None
