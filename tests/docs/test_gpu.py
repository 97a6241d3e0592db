"""The table of docs/gpu.md names every module that has code for GPUs, and files that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = re.compile(r"cuda|nvidia|nccl|pin_memory|flash_attn|transformer_engine", re.IGNORECASE)


def rows() -> dict[str, list[str]]:
    """By module of the table, the tests that rehearse it; none where it says so."""
    found = {}
    for line in (ROOT / "docs/gpu.md").read_text().splitlines():
        if cells := re.fullmatch(r"\| `((?:pipeline|slurm)/\S+\.py)` \|(.*)\|(.*)\|", line):
            tests = re.findall(r"`(tests/\S+\.py)`", cells[3])
            assert tests or cells[3].strip() == "none", line
            assert cells[1] not in found, line
            found[cells[1]] = tests
    return found


def named(source: str) -> Iterator[str]:
    """Names and strings of a module's code: no comments, no docstrings."""
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in docstrings:
                yield text
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
                yield name
            case ast.ImportFrom(module=str(name)):
                yield name


def modules() -> list[str]:
    """Those with code for GPUs."""
    paths = [path for folder in ("pipeline", "slurm") for path in (ROOT / folder).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in paths if any(map(WORDS.search, named(path.read_text()))))


def test_the_table_has_every_module_with_code_for_gpus() -> None:
    missing = set(modules()) - rows().keys()
    assert not missing, "docs/gpu.md has no row for these"


def test_files_of_the_table_are_there() -> None:
    table = rows()
    files = {*table, *(test for tests in table.values() for test in tests)}
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
    assert list(table) == sorted(table)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""CUDA."""\nx = 1  # torch.cuda\n', False),
        ("class A:\n    b: int = 1\n    '''Of a cuda device.'''\n", False),
        ("import torch\ntorch.cuda.synchronize()\n", True),
        ("x = f'on {1} cuda'\n", True),
        ("f(pin_memory=True)\n", True),
        ("from transformer_engine import pytorch\n", True),
        ("import flash_attn.cute\n", True),
    ],
)
def test_docstrings_and_comments_are_no_code(source: str, found: bool) -> None:
    assert any(map(WORDS.search, named(source))) == found
