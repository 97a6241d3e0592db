"""`--watch`: new checkpoints of a run that trains, damaged ones, and ones that are gone."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.eval.generation.generate import generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.server import watch
from pipeline.eval.server.watch import load_served
from pipeline.train.checkpoint.manager import Checkpoints
from tests import tiny
from tests.eval.server.running import Running, running

QUICK = ["serve.port=0", "serve.slots=2", "serve.max_length=256", "serve.watch=true"]
GREEDY = {"prompt": "the sea ", "max_tokens": 30, "temperature": 0}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.05)


@pytest.fixture
def copied(run_file: Path, tmp_path: Path) -> Iterator[Config]:
    """The trained run, of which `latest` is an earlier checkpoint than the last one."""
    shutil.copytree(load(run_file).run.dir, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    steps = sorted(folder.glob("step-*"))
    for later in steps[1:]:
        later.rename(tmp_path / later.name)
    (folder / "latest").write_text(f"{steps[0].name}\n")
    return load(run_file, [*QUICK, f"run.dir={tmp_path / 'run'}"])


def _last(config: Config) -> Path:
    return sorted(config.run.dir.parent.glob("step-*"))[-1]


def _commit(config: Config, path: Path) -> None:
    path.rename(config.run.dir / "checkpoints" / path.name)
    (config.run.dir / "checkpoints" / "latest").write_text(f"{path.name}\n")


def _expected(config: Config, step: int) -> str:
    served = load_served(config, step)
    return generate(served.model, served.tokenizer, ["the sea "], Sampling(max_tokens=30, temperature=0))[0].text


def test_running_texts_end_on_the_model_that_began_them(copied: Config) -> None:
    last = _last(copied)
    new = int(last.name.removeprefix("step-"))
    with running(copied) as server:
        old = server.health()["step"]
        client = server.openai()
        how: Any = {"model": "run", "prompt": "the", "max_tokens": 250, "temperature": 0, "stream": True}
        stream = client.completions.create(**how)
        models = {next(iter(stream)).model}
        _commit(copied, last)
        models |= {chunk.model for chunk in stream}
        assert models == {f"run@step-{old}"}
        health = server.until(step=new)
        assert health["tokens"] > 0
        assert health["watch"] == {"error": None}
        assert server.post("/v1/completions", GREEDY).json()["choices"][0]["text"] == _expected(copied, new)
        gone = server.post("/v1/completions", {**GREEDY, "model": f"run@step-{old}"})
        assert gone.status_code == 404
        assert f"run@step-{new}" in gone.json()["error"]["message"]
    assert f"now serves step {new}" in server.log.getvalue()


def test_a_damaged_checkpoint_is_said_and_the_old_one_stays(copied: Config) -> None:
    last = _last(copied)
    victim = max((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with running(copied) as server:
        old = server.health()["step"]
        _commit(copied, last)
        error = _watch_error(server)
        assert f"{last.name} is damaged" in error
        assert victim.name in error
        health = server.health()
        assert (health["step"], health["status"]) == (old, "ok")
        assert server.post("/v1/completions", GREEDY).status_code == 200
        # The checkpoints go away, as when somebody cleans up.
        shutil.rmtree(copied.run.dir / "checkpoints")
        while "has no checkpoint any more" not in _watch_error(server):
            pass
        assert server.post("/v1/completions", GREEDY).status_code == 200
    assert server.log.getvalue().count("is damaged") == 1


def _watch_error(server: Running) -> str:
    while not (error := server.health()["watch"]["error"]):
        pass
    return str(error)


def test_a_step_is_not_watched(copied: Config) -> None:
    with pytest.raises(UserError, match="--step or --watch"), running(copied, step=3):
        pass


@pytest.mark.parallel
@pytest.mark.slow
def test_a_run_is_watched_while_it_trains(tmp_path: Path) -> None:
    """Real training in a process of its own; requests all the time; each answer is that of the step it names."""
    file = tiny.write_run(tmp_path, {"train.duration": "3 steps", "train.checkpoint": {"every_steps": 3, "keep": 100}})
    done = tiny.pipeline("run", file)
    assert done.returncode == 0, done.stderr
    config = load(file, QUICK)
    answers: dict[str, set[str]] = {}
    with running(config) as server:
        training = subprocess.Popen(
            tiny.command("train", file, "train.duration=150 steps"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            while training.poll() is None:
                answer = server.post("/v1/completions", GREEDY)
                assert answer.status_code == 200
                answers.setdefault(answer.json()["model"], set()).add(answer.json()["choices"][0]["text"])
                assert server.health()["watch"] == {"error": None}
        finally:
            training.kill()
            output, _ = training.communicate()
        assert training.returncode == 0, output.decode()
        server.until(step=150)
    assert len(answers) > 3
    steps = {checkpoint.step for checkpoint in Checkpoints.of_run(config.run.dir).all()}
    for model, texts in answers.items():
        assert len(texts) == 1
        step = int(model.rpartition("-")[2])
        assert step in steps
        assert texts == {_expected(config, step)}, json.dumps(sorted(answers))
