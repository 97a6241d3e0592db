"""Keys of run files that the pages for users of other frameworks name exist, and take the values beside them.

Each text in code in the column `here` of a table with the columns `there` and `here` is a command, or a key with or
without a value: `train.schedule.type: wsd`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from pipeline.config.parsing.schema import keys
from pipeline.config.root import Config

FOLDER = Path(__file__).parents[2] / "docs" / "coming-from"
KEYS = {key.path: key.field.annotation for key in keys(Config)}


def _here(text: str) -> Iterator[str]:
    """What stands in code in the column `here` of the tables of a page."""
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        inside = cells == ["there", "here"] or (inside and len(cells) == 2)
        assert not inside or all(cells), line
        if inside:
            yield from re.findall(r"`([^`]+)`", cells[1])


def _choices(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return {str(choice).lower() for choice in get_args(annotation)}
    return {choice for argument in get_args(annotation) for choice in _choices(argument)}


def _mistake(code: str) -> str:
    if code.startswith("pipeline "):
        return ""
    key, _, value = code.partition(": ")
    if key not in KEYS:
        return f"{code}: unknown key"
    choices = _choices(KEYS[key])
    return f"{code}: not one of {sorted(choices)}" if value and choices and value not in choices else ""


@pytest.mark.parametrize("page", sorted(set(FOLDER.glob("*.md")) - {FOLDER / "README.md"}), ids=lambda page: page.stem)
def test_keys_of_the_tables_exist(page: Path) -> None:
    found = list(_here(page.read_text()))
    assert len(found) > 40
    assert [mistake for code in found if (mistake := _mistake(code))] == []


def test_a_wrong_key_or_value_is_found() -> None:
    table = "| there | here |\n|---|---|\n| `--lr` | `train.lr`, or `train.schedule.type: step` |\n\n| a | `b` |\n"
    assert [_mistake(code).split(": ")[-1][:11] for code in _here(table)] == ["unknown key", "not one of "]
