"""Settings of other suites and ours: rows of data, which the command and the tables of the documentation read.

A suite is a TOML file. Each row has the cells of a table (`there`, `here`); `to`, the key of a run file, and `rule`, by
which the value is made; and `keys`, the names of settings where those in `there` are written in another way. A row
without a rule is for people: its setting is listed with the text of `here`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.common.format import table

SuiteName = Literal["megatron", "nemo", "torchtitan", "nanotron", "olmo"]
_CODE = re.compile(r"`([^`]+)`")
_KEY = re.compile(r"[\w.\[\]]+")


@dataclass(frozen=True)
class SettingRow:
    """A row of a table.

    Attributes:
        there: cell of the other suite.
        here: cell of ours.
        keys: settings of the other suite that it is about.
        to: key of the run file that the value goes to; None if the rule says where.
        rule: name of what makes the value; None if nothing does.
    """

    there: str
    here: str
    keys: tuple[str, ...]
    to: str | None
    rule: str | None


@dataclass(frozen=True)
class Suite:
    """Settings of a suite.

    Attributes:
        title: name of the suite.
        page: of the documentation.
        tables: rows by the name of their table.
        defaults: values that the suite takes where a setting is not given, as far as they matter here.
        ignored: settings that need nothing here, each with why.
    """

    title: str
    page: str
    tables: dict[str, tuple[SettingRow, ...]]
    defaults: dict[str, Any]
    ignored: dict[str, str]

    def rows(self) -> Iterator[SettingRow]:
        """All rows."""
        for rows in self.tables.values():
            yield from rows

    def written(self) -> dict[str, str]:
        """The tables in Markdown, by name."""
        return {
            name: table(("there", "here"), ((row.there, row.here) for row in rows))
            for name, rows in self.tables.items()
        }


@cache
def read_suite(name: SuiteName) -> Suite:
    """The settings of a suite, from its file."""
    found = tomllib.loads(resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    tables = {each["name"]: tuple(_row(row, name) for row in each["row"]) for each in found["table"]}
    return Suite(found["title"], found["page"], tables, found.get("defaults", {}), found.get("ignored", {}))


def _row(row: dict[str, Any], suite: SuiteName) -> SettingRow:
    keys = row.get("keys", [_key(code, suite) for code in _CODE.findall(row["there"])])
    rule = row.get("rule", "same" if "to" in row else None)
    return SettingRow(row["there"], row["here"], tuple(filter(None, keys)), row.get("to"), rule)


def _key(code: str, suite: SuiteName) -> str:
    """The setting that some code in a cell names."""
    if suite == "megatron":
        first = code.split(maxsplit=1)[0]
        return first.removeprefix("--").replace("-", "_") if first.startswith("--") else ""
    found = _KEY.match(code.removeprefix("main: "))
    return found[0] if found else ""
