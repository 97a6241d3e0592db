"""The pages about the Python interface do what they show: the notebook is executed, and the code of `python.md`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.loop.trainer import train
from tests import tiny

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "python-interface.ipynb"


@pytest.mark.guard
def test_the_notebook_has_no_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), "clear all outputs before the file is committed"
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}, "a notebook of whoever ran it"


@pytest.mark.guard
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "jupyter"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    assert any("image/png" in each.get("data", {}) for each in outputs), "the curves are drawn"
    text = "".join(str(each.get("text", "")) + str(each.get("data", {}).get("text/plain", "")) for each in outputs)
    for shown in ("Dataset('data/sea/train'", "40 steps trained, checkpoints: 10, 20, 30, 40", "sea/"):
        assert shown in text
    assert {path.name for path in tmp_path.iterdir()} - {"ipython", "jupyter"} == {"python-interface-run"}


@pytest.mark.guard
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        "run.dir": "runs/first",
        "data.dir": "data",
        "train.metrics.windows": True,
        "train.precision": {"compute": "fp32"},
        "train.duration": "12 steps",
        "train.checkpoint": {"every_steps": 4, "keep": 9},
    }
    monkeypatch.chdir(tmp_path)
    config = load(tiny.write_run(tmp_path, keys))
    preprocess(config)
    train(config)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "python.md", "exec"), names)
    assert names["result"].loss == names["api"].evaluate("runs/first", settings={"eval.samples": 8}).loss
