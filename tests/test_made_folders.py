"""Folders are made below one that exists; the places that make a root, which may lie anywhere, are listed with why."""

from __future__ import annotations

import ast
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.common import storage

_ROOT = Path(__file__).parents[1]
_ROOTS = {
    "pipeline/common/paths.py: check_once": "the cache of the user",
    "pipeline/config/starter.py: write_new": "a file that the user names, in a new folder",
    "pipeline/data/datasets/adoption.py: run": "--to of the command, which a person starts",
    "pipeline/data/datasets/merge.py: _output_paths": "the prefix that a person gives",
    "pipeline/data/datasets/remote/pull.py: _make_folders": "the folder of the command, which a person starts",
    "pipeline/data/preprocess/run_tokenizer.py: _copied": "the cache of the user",
    "pipeline/data/tokenization/engine_check.py: prove": "the cache of the user",
    "pipeline/data/work/document_files.py: claim_folder": "the folder of an export, which a person names",
    "pipeline/data/work/frozen_plan.py: make_data_dir": "data.dir, not in a job",
    "pipeline/eval/tasks/harness.py: prefetch": "eval.harness.include_path, by a command that fetches",
    "pipeline/train/checkpoint/mirror/copies.py: _made": "the cache of the user",
    "pipeline/train/checkpoint/export.py: made_folder": "--to of the command, which a person starts",
    "pipeline/train/run/folder.py: make_writable": "run.dir, not in a job",
    "pipeline/train/planning/stage_memory.py: keep": "the cache of the user",
    "slurm/devcluster/settings.py: write": "the folder of a development cluster",
    "slurm/submit/code_snapshot.py: _archive": "the cache of the user",
    "slurm/sweep/table.py: note_members": "the folder of a sweep, by the command that begins it",
}
"""By file and function. What a worker, a rank or a job calls has no place here: what it works in was made before."""


def _makers() -> Iterator[str]:
    """Functions that make a folder with all that is missing above it."""
    for package in ("pipeline", "slurm"):
        for file in sorted((_ROOT / package).rglob("*.py")):
            text = file.read_text()
            for function in ast.walk(ast.parse(text)) if "mkdir" in text or "makedirs" in text else ():
                if isinstance(function, ast.FunctionDef) and any(map(_makes_parents, ast.walk(function))):
                    yield f"{file.relative_to(_ROOT)}: {function.name}"


def _is_true(values: list[ast.expr]) -> bool:
    return any(isinstance(each, ast.Constant) and each.value is True for each in values)


def _makes_parents(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Attribute, ast.Name)):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    parents = any(
        key.arg == "parents" and not (isinstance(key.value, ast.Constant) and not key.value.value)
        for key in node.keywords
    )
    return name == "makedirs" or (name == "mkdir" and (parents or _is_true(node.args[1:])))


def test_a_root_is_made_only_where_it_is_listed() -> None:
    """A run folder or dataset that vanishes must not be made anew by what works in it: see `storage.make_below`."""
    assert sorted(set(_makers())) == sorted(_ROOTS)


def test_folders_are_made_below_a_root_that_exists(tmp_path: Path) -> None:
    storage.make_below(tmp_path, tmp_path)
    storage.make_below(tmp_path, tmp_path / "a" / "b" / "c")
    storage.make_below(tmp_path, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    for below in ("", "a", "a/b"):
        with pytest.raises(FileNotFoundError) as caught:
            storage.make_below(tmp_path / "gone", tmp_path / "gone" / below)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "gone"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    with pytest.raises(ValueError):
        storage.make_below(tmp_path / "a", tmp_path / "b")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        storage.make_below(tmp_path, tmp_path / "file")
