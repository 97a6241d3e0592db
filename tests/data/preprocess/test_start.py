"""The start of the preprocess command: what it imports, and how its workers begin."""

import subprocess
import sys

import pytest

from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.stage import preprocess
from tests import tiers
from tests.data.runs import datasets, make_config, write_jsonl
from tests.data.stage import write_run_file

_COMMAND = """
import sys
from multiprocessing.context import ForkProcess, SpawnProcess
from pipeline.cli.main import main

def noting(kind):
    start = kind.start
    def noted(self):
        print("started", kind.__name__)
        start(self)
    kind.start = noted

noting(ForkProcess)
noting(SpawnProcess)
sys.argv = ["pipeline", "preprocess", *sys.argv[1:]]
try:
    main()
finally:
    print("imported", *sys.modules)
"""


def _lines(file, *words):
    done = subprocess.run([sys.executable, "-c", _COMMAND, file, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def config(tmp_path):
    """A finished run with a trained tokenizer."""
    write_jsonl(tmp_path / "a.jsonl", 400)
    source = {"name": "s", "type": "jsonl", "paths": [f"{tmp_path}/a.jsonl"]}
    config = make_config(tmp_path, [source], preprocess={"workers": 2})
    preprocess(config)
    return config


@pytest.mark.parametrize("engine", tiers.first(1, ["tokenizers", "auto"], rest="guard"))
def test_workers_of_the_command_are_forked_and_write_what_spawned_ones_do(config, tmp_path, engine):
    path = config.data_dir / "tokenizer" / "tokenizer.json"
    again = config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": tmp_path / "again"}),
            "tokenizer": config.tokenizer.model_copy(update={"train": None, "path": path}),
            "data": config.data.model_copy(
                update={"preprocess": config.data.preprocess.model_copy(update={"engine": engine})}
            ),
        }
    )
    lines = _lines(write_run_file(again, tmp_path / "again.yaml"))
    assert [line for line in lines if line.startswith("started")] == ["started ForkProcess"] * 2
    assert datasets(again) == datasets(config)
    assert run_tokenizer(again).fingerprint == run_tokenizer(config).fingerprint


@pytest.mark.guard
def test_a_process_with_more_threads_spawns_its_workers(config, tmp_path):
    """Training the tokenizer leaves some."""
    again = config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path / "again"})})
    lines = _lines(write_run_file(again, tmp_path / "again.yaml"))
    assert [line for line in lines if line.startswith("started")] == ["started SpawnProcess"] * 2
    assert datasets(again) == datasets(config)


def test_nothing_heavy_is_imported(config, tmp_path):
    (imported,) = [
        line for line in _lines(write_run_file(config, tmp_path / "run.yaml")) if line.startswith("imported")
    ]
    packages = {name.split(".")[0] for name in imported.split()}
    assert not packages & {"torch", "pyarrow", "datasets", "transformers", "huggingface_hub", "requests", "pandas"}
