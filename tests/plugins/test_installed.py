"""The example package, installed by pip, in commands: preprocessing, a training of two processes, and its resumes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.plugins.installed import EXAMPLE
from tests.plugins.test_source import write

USED: dict[str, Any] = {
    "data.splits": {"heldout": 0.2},
    "data.preprocess.workers": 2,
    "model.heads": None,
    "model.mixer": "example.short_conv",
    "model.mlp": "example.signed_relu2",
    "train.duration": "4 steps",
    "train.checkpoint.every_steps": 2,
    "train.objective": {"type": "example.some_documents", "options": {"rate": 0.3}},
    "train.metrics": {
        "tensorboard": False,
        "loggers": [{"type": "example.lines", "options": {"names": ["loss", "grad_norm"]}}],
    },
}


def install(folder: Path) -> Path:
    """Install the package as a user would, into a folder for PYTHONPATH."""
    copy = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "installed"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(copy)], check=True, timeout=300)
    return target


def write_file(root: Path) -> Path:
    write(root / "dumps" / "a.xml", 150, 1)
    write(root / "dumps" / "b.xml", 80, 2)
    dumps = {
        "name": "dumps",
        "type": "example.xml",
        "paths": [str(root / "dumps" / "*.xml")],
        "options": {"tag": "page"},
    }
    return tiny.write_run(root, {**USED, "data.sources": [dumps]})


def become_version(target: Path, version: str) -> None:
    """What an upgrade changes that is not code."""
    (about,) = target.glob("example_plugins-*.dist-info")
    text = (about / "METADATA").read_text()
    old = about.name.removeprefix("example_plugins-").removesuffix(".dist-info")
    (about / "METADATA").write_text(text.replace(f"Version: {old}", f"Version: {version}"))
    about.rename(target / f"example_plugins-{version}.dist-info")


@pytest.mark.guard
def test_a_run_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, file = install(tmp_path), write_file(tmp_path)
    without = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(target), without])))

    def run(*arguments: object, code: int = 0) -> str:
        done = tiny.pipeline(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("preprocess", file)
    run("train", file, "launch.processes=2")
    one, two = tmp_path / "one", tmp_path / "run"
    run("train", file, f"run.dir={one}")
    rows = {folder: [row for row in read_metrics(folder) if "loss" in row] for folder in (one, two)}
    assert [row["data_hash"] for row in rows[one]] == [row["data_hash"] for row in rows[two]]
    assert [row["loss"] for row in rows[one]] == pytest.approx([row["loss"] for row in rows[two]], rel=1e-4)
    assert all(0 < row["loss"] < 10 for row in rows[one])

    def logged(folder: Path) -> list[str]:
        numbers = [row for row in read_metrics(folder) if "loss" in row]
        return [f"{row['step']} loss={row['loss']} grad_norm={row['grad_norm']}" for row in numbers]

    assert (two / "lines.txt").read_text().splitlines() == logged(two) and len(logged(two)) == 4

    # Another version is another objective and model, unless the user says that it is not.
    become_version(target, "1.1")
    longer = ["train.duration=6 steps", "launch.processes=2"]
    refused = run("train", file, *longer, code=2)
    for key in ("train.objective.plugin.version", "model.plugins.mixers.example.short_conv.version"):
        assert f"{key}: 1.0 -> 1.1" in refused
    assert "resume.allow=[objective] accepts this" in refused
    monkeypatch.setenv("PYTHONPATH", without)
    assert "no installed package has this plug-in" in run("train", file, *longer, code=2)
    assert json.loads(run("status", two, "--json"))  # needs none of them
    monkeypatch.setenv("PYTHONPATH", str(target))
    run("train", file, *longer, "resume.allow=[objective,model,schedule]")
    assert (two / "lines.txt").read_text().splitlines() == logged(two) and len(logged(two)) == 6
