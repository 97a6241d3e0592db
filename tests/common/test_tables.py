"""Tables: nothing in them is cut, in files and on terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from pipeline.common import console as module
from pipeline.common.console import Console, print_table

SOURCE = "a-source-with-a-rather-long-name"
CELLS = [SOURCE, "2,279,123,456", "98,765,432,109", "", "12.5 %"]


def table() -> Table:
    made = Table("source", "documents", "tokens", "removed", "share of the blend", title="preprocess")
    made.add_row(*CELLS)
    made.add_row("b", "1", "2", "-", "87.5 %")
    return made


def printed(monkeypatch: pytest.MonkeyPatch, width: int, *, terminal: bool) -> str:
    file = io.StringIO()
    monkeypatch.setattr(module, "is_screen", lambda _: terminal)
    print_table(Console(file=file, width=width), table())
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 80])
def test_a_file_gets_the_whole_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = printed(monkeypatch, width, terminal=False).splitlines()
    (row,) = [line for line in lines if SOURCE in line]
    assert all(cell in row for cell in CELLS) and "removed" in "".join(lines)
    assert len(lines) == 7


def test_a_terminal_with_too_few_columns_gets_none_that_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = printed(monkeypatch, 200, terminal=True).splitlines()
    width = max(map(len, whole))
    narrower = printed(monkeypatch, width - 1, terminal=True)
    (row,) = [line for line in narrower.splitlines() if SOURCE in line]
    assert "removed" not in narrower and all(cell in row for cell in CELLS)
    assert max(map(len, narrower.splitlines())) < width


@pytest.mark.parametrize("width", [30, 60])
def test_a_narrow_terminal_gets_a_line_for_each_cell(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = printed(monkeypatch, width, terminal=True).splitlines()
    assert lines[:3] == ["preprocess", SOURCE, "  documents           2,279,123,456"]
    assert lines[-2:] == ["  tokens              2", "  share of the blend  87.5 %"]


def test_the_first_column_stays_and_a_table_without_rows_has_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_screen", lambda _: True)
    for rows in ([], [["", "1,000,000", "x" * 30]]):
        made, file = Table("a", "until\nthen", "c"), io.StringIO()
        for row in rows:
            made.add_row(*row)
        print_table(Console(file=file, width=20), made)
        assert [str(column.header) for column in made.columns] == ["a", "until\nthen", "c"]
        assert not rows or file.getvalue().splitlines() == ["", "  until then  1,000,000", f"  c           {'x' * 30}"]
