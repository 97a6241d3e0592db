"""Imports: no two modules need each other, and no command imports what it does not need.

For circles, those inside of functions and those for types alone count as well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tests.tiny import pipeline, write_run


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("pipeline", "slurm", cache_dir=None)
    circles = []
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            back = graph.find_shortest_chain(importer=imported, imported=module)
            if back is not None:
                circles.append(" -> ".join((module, *back)))
    assert not circles, "\n".join(circles)


HEAVY = (
    "datasets",
    "fastapi",
    "matplotlib",
    "mlflow",
    "obstore",
    "pandas",
    "pyarrow",
    "submitit",
    "tensorboard",
    "trackio",
    "transformers",
    "wandb",
)
"""Packages that take long to import."""
PREPROCESSING = ("pipeline.data.preprocess.source_plan", "pipeline.data.preprocess.tokenize_unit")
NOT_OF_ONE_PROCESS = (
    "pipeline.train.parallel.pipeline_parallel",
    "torch.distributed.pipelining",
    "torch.nn.attention.bias",  # masks on a GPU
    "torch.nn.attention.flex_attention",
)
COMPILER = ("sympy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")


def imported(code: str) -> set[str]:
    """Modules that are imported after a process of its own has run some code."""
    text = f"import sys\n{code}\nprint('imported:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("imported:")[2].split())


def imported_by(*command: object) -> set[str]:
    """Modules that are imported at the end of a command."""
    words = ["pipeline", *map(str, command)]
    return imported(f"from pipeline.cli.main import app\nsys.argv = {words}\napp(standalone_mode=False)")


@pytest.mark.guard
def test_commands_import_only_what_they_need(tmp_path: Path) -> None:
    """What a start takes, in place of its time: nearly all of it is imports."""
    file = write_run(tmp_path, {"train.duration": "1 steps", "train.schedule": {}})
    assert pipeline("preprocess", file).returncode == 0

    train = imported_by("train", file)
    assert "torch" in train
    assert train & {*HEAVY, *PREPROCESSING, *NOT_OF_ONE_PROCESS} == set()

    run = tmp_path / "run"
    for command in (("status", run), ("data", "where", run, "--step", 1), ("config", "show", file)):
        assert imported_by(*command) & {"torch", *HEAVY, *PREPROCESSING} == set(), command
    assert "numpy" not in imported_by("config", "show", file)


def test_launcher_imports_no_compiler() -> None:
    found = imported("import slurm.local.launcher")
    assert "torch" in found
    assert found & {*HEAVY, *COMPILER} == set()
