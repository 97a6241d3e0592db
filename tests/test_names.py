"""Dotted names and paths of this repository name what exists, wherever a text spells one.

A name in a string does not follow a module that moves: `sys.modules.get("...")`, `python -m ...`, a patch in a test, a
page of the documentation. It turns false without an error.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from pipeline.config import Config
from pipeline.config.parsing.schema import keys
from pipeline.config.plugins import Kind
from pipeline.config.slurm import SiteConfig
from tests.repository import files

ROOT = Path(__file__).parents[1]
# Modules and what is in them, or `package.module:Class.method`. A `\\.` of a regular expression counts as a dot.
NAME = re.compile(r"(?<![\w./\\{-])(?:pipeline|slurm|tests)(?:\\?\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*(?:\.\w+)*)?")
FILE = re.compile(
    r"(?<![\w./-])(?:pipeline|slurm|tests|benchmarks|docs|requirements)/(?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|css|html)\b"
)
IMPORT = re.compile(r"\bfrom ((?:pipeline|slurm|tests)(?:\.\w+)*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)")
# Files that runs write, keys of `parallel:` without their section, and what stands for anything in tests.
OTHERS = re.compile(
    r"slurm\.(conf|err|out)|pipeline\.(def|sif|sqsh)|slurm/submissions/.*|pipeline\.(counts|layers_per_stage|schedule|stages_per_rank)"
    r"|pipeline/configs/.*|pipeline/page\.html|pipeline[.]py|benchmarks/evidence/toys\.py|benchmarks/[\w-]+_torchtitan\.md"
)


def _texts() -> Iterator[tuple[str, str]]:
    """Every tracked text of the repository, with its path."""
    for name in files():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".css", ".html", ".in", "", ".run"):
            yield name, path.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _names(folder: Path, module: str) -> set[str] | None:
    """What a module spells at its top level and in its classes (`Class.method`); None if there is no such module."""
    path = folder / module
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return {"*"} if path.is_dir() else None
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@functools.cache
def _exists(name: str) -> bool:
    """Whether a module has this name, or an attribute of a module, or of a class in one."""
    first, *rest = name.replace("\\", "").replace(":", ".").split(".")
    folder, module = ROOT, first
    while rest and (folder / module).is_dir() and _names(folder / module, rest[0]) is not None:
        folder, module = folder / module, rest.pop(0)
    # What stands behind the attribute of an instance or of an imported module is not looked at.
    known = (_names(folder, module) or set()) | {"__file__"}
    return all(each in known for each in (rest if rest and rest[0][0].isupper() else rest[:1]))


@pytest.mark.guard
def test_every_dotted_name_and_path_of_ours_exists() -> None:
    known = {key.path for key in keys(Config)} | {f"slurm.{key.path}" for key in keys(SiteConfig)}
    known |= {f"pipeline.{kind}" for kind in get_args(Kind)}  # groups of entry points
    for key in tuple(known):
        parts = key.split(".")
        known |= {".".join(parts[:length]) for length in range(2, len(parts))}
    stale = []
    for file, text in _texts():
        for found in NAME.findall(text):
            # Below a mapping of the run file, all is free; `slurm.doctor` is a key, and a package.
            ours = (ROOT / "/".join(found.split(".")[:2])).is_dir()
            free = any(found == key or (found.startswith(f"{key}.") and not ours) for key in known)
            if not free and not OTHERS.fullmatch(found) and not _exists(found):
                stale.append(f"{file}: {found}")
        for module, names in IMPORT.findall(text):
            for found in (f"{module}.{name.split(' as ')[0]}" for name in names.split(", ")):
                if not _exists(found):
                    stale.append(f"{file}: {found}")
        for found in FILE.findall(text):
            if not OTHERS.fullmatch(found) and not (ROOT / found).exists():
                stale.append(f"{file}: {found}")
    assert not stale, "\n".join(stale)


def test_a_stale_name_is_found() -> None:
    assert _exists("pipeline.data.order.sampler") and _exists(r"pipeline\.common\.storage\.put")
    for stale in ("data.sampler", "common.storage.nothing", "nowhere.storage"):
        assert not _exists(f"pipeline.{stale}")


def test_a_public_class_has_a_name_of_its_own() -> None:
    """A name means one thing in the whole package, so that a search for it finds that."""
    found: dict[str, list[str]] = {}
    for name, text in _texts():
        if name.startswith(("pipeline/", "slurm/")) and name.endswith(".py"):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(name)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
