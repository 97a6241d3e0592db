"""`RunFiles`: no other module spells the name of a file of a run folder, and a file that cannot be read is none."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from pipeline.common import run_files
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles

ROOT = Path(__file__).parents[2]
NAMES = {value for name in vars(RunFiles) if isinstance(value := getattr(RunFiles, name), str) and name[0] != "_"} | {
    value for name, value in vars(run_files).items() if name.isupper()
}
# Hugging Face's datasets have a file of this name, too.
OTHERS = {(f"pipeline/data/sources/{name}.py", "state.json") for name in ("arrow", "globs", "hub_stream")}


def spelled(code: str) -> Iterator[str]:
    """Names of files of a run folder in a module: with an ending anywhere, plain words where a path is made of them."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and node.value in NAMES and "." in str(node.value):
            yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            name = node.right.value if isinstance(node.right, ast.Constant) else None
            if name in NAMES and "." not in str(name):
                yield str(name)


def test_each_name_of_a_run_folder_is_in_one_module() -> None:
    found = [
        f"{file}: {name}"
        for package in ("pipeline", "slurm")
        for path in sorted((ROOT / package).rglob("*.py"))
        if (file := path.relative_to(ROOT).as_posix()) != "pipeline/common/run_files.py"
        for name in spelled(path.read_text(encoding="utf-8"))
        if (file, name) not in OTHERS
    ]
    assert not found, "\n".join(found)


def test_a_name_that_is_spelled_again_is_found() -> None:
    assert {"exit.json", "metrics.jsonl", "lock", "logs", "state.json", "slurm/jobs.jsonl"} <= NAMES
    assert [*spelled('a = run / "stop"\nb = "stop"\nc = open("exit.json")')] == ["stop", "exit.json"]


def test_a_name_on_the_class_is_a_path_on_an_instance(tmp_path: Path) -> None:
    assert RunFiles.metrics == "metrics.jsonl"
    assert RunFiles(tmp_path).metrics == tmp_path / "metrics.jsonl"


def test_the_end_of_a_run_where_it_cannot_be_read(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert files.read_exit() == files.exit_state() == {}
    for damaged in (b"", b'{"code": ', b"[1]"):
        files.exit.write_bytes(damaged)
        assert files.exit_state() == {}
        with pytest.raises(ValueError):
            files.read_exit()
    files.exit.unlink()
    os.mkfifo(files.exit)
    assert files.exit_state() == {}
    with pytest.raises(UserError, match="not a regular file"):
        files.read_exit()


def test_the_end_of_an_earlier_start_is_not_that_of_this_one(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.exit.write_bytes(orjson.dumps({"code": 0}))
    os.utime(files.exit, (100.0, 100.0))
    assert files.exit_state(since=100.0) == files.exit_state() == files.read_exit() == {"code": 0}
    assert files.exit_state(since=100.5) == {}
