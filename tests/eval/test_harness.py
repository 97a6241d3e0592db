"""The model in the harness against the harness's own backend on the exported model; reports; tasks without network."""

from __future__ import annotations

import builtins
import io
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.errors import UserError
from pipeline.eval.benchmarks import benchmarks_are_made
from pipeline.eval.engine import Engine
from pipeline.eval.harness import harness_is_made, prefetch, run_harness
from pipeline.eval.reports import read_evaluations
from tests import tiny
from tests.eval import small
from tests.parallel.ranks import Ranks

NAMES = ["local_wikitext", "local_lambada", "local_generate", "local_choice"]
PAIRS = [
    ("the sea ", "boat"),
    ("", "wind and rope"),
    ("the old", " keeper"),
    ("the old", " harbour tower"),
    ("under  ", " a sea"),
    ("north " * 60, "wind"),
    ("a", ". b"),
    ("a", ". c"),
]
TEXTS = ["", "a", "the sea boat wind sails " * 9, "ü\n\n tower"]
PROMPTS = [("the old sea", 7, ["."]), ("north " * 60, 9, ["a", "th"]), ("x", 5, [])]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, files, tasks that read them, and the model as transformers has it."""
    folder = tmp_path_factory.mktemp("harness")
    file = small.trained(folder)
    small.write_lambada(folder / "lambada.jsonl", engine=small.engine_alone(file))
    small.write_wikitext(folder / "wiki.txt")
    small.write_tasks(folder / "tasks", folder)
    small.exported(load(file), folder / "hf")
    return folder


def config(root: Path, *overrides: str, **keys: Any) -> Config:
    return load(root / "run.yaml", [*values(root, **keys), *overrides])


def values(root: Path, **keys: Any) -> list[str]:
    harness = {"tasks": NAMES, "include_path": str(root / "tasks"), **keys}
    return [f"eval.harness={json.dumps(harness)}"]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number)  # type: ignore[arg-type]
        for number, each in enumerate(arguments)
    ]


def answers(lm: Any) -> dict[str, Any]:
    """What a model says to some requests of each kind."""
    options = [{"until": stops, "max_gen_toks": most, "do_sample": False} for _, most, stops in PROMPTS]
    prompts = [(prompt, each) for (prompt, _, _), each in zip(PROMPTS, options, strict=True)]
    return {
        "pairs": lm.loglikelihood(instances("loglikelihood", PAIRS)),  # type: ignore[arg-type]
        "texts": lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in TEXTS])),
        "new": lm.generate_until(instances("generate_until", prompts)),
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [each[0] for each in found["pairs"]] == pytest.approx([each[0] for each in expected["pairs"]], abs=1e-4)
    assert [each[1] for each in found["pairs"]] == [each[1] for each in expected["pairs"]]
    assert found["texts"] == pytest.approx(expected["texts"], rel=1e-5, abs=1e-4)
    assert found["new"] == expected["new"]


@pytest.fixture(scope="module")
def theirs(root: Path) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    return answers(HFLM(pretrained=str(root / "hf"), device="cpu", batch_size=1, dtype="float32"))


def ours(engine: Engine) -> dict[str, Any]:
    from pipeline.eval.harness_model import HarnessModel

    return answers(HarnessModel(engine, 3))


def ours_on_rank(file: Path, layout: str) -> dict[str, Any]:
    return ours(small.engine_of_rank(file, layout))


def report_on_rank(root: Path, layout: str, names: list[str]) -> dict[str, Any]:
    overrides = values(root, tasks=names, batch_size=3)
    return run_harness(small.engine_of_rank(root / "run.yaml", layout, overrides), Console(quiet=True), keep=False)


@pytest.mark.slow
def test_answers_equal_those_of_the_hf_backend(root: Path, theirs: dict[str, Any]) -> None:
    assert len(set(theirs["new"])) > 1
    same(ours(small.engine_alone(root / "run.yaml")), theirs)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("layout", small.LAYOUTS)
def test_so_do_those_of_every_layout(root: Path, theirs: dict[str, Any], layout: str) -> None:
    with Ranks(2, connect=False) as these:
        for found in these.call(ours_on_rank, root / "run.yaml", layout):
            same(found, theirs)


@pytest.mark.slow
@pytest.mark.parallel
def test_results_equal_those_of_the_hf_backend(root: Path, tmp_path: Path) -> None:
    expected = small.harness_figures(root / "hf", root, tmp_path, NAMES)
    alone = run_harness(small.engine_alone(root / "run.yaml", values(root)), Console(quiet=True), keep=False)
    assert alone["results"].keys() == expected.keys()
    for task, figures in expected.items():
        for key, value in figures.items():
            if isinstance(value, float) and not key.startswith("perplexity_stderr"):  # that is drawn by lot
                assert alone["results"][task][key] == pytest.approx(value, rel=1e-4)
    with Ranks(2, connect=False) as these:
        for found in these.call(report_on_rank, root, "pp2", NAMES):
            for task, figures in alone["results"].items():
                for key, value in figures.items():
                    same_value = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
                    assert found["results"][task][key] == same_value


@pytest.mark.slow
def test_a_report_is_kept_shown_and_not_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"tasks": ["local_choice"], "num_fewshot": 2, "limit": 5}
    wanted = config(root, **keys)
    engine = small.engine_alone(root / "run.yaml", values(root, **keys))
    assert not harness_is_made(wanted, 12)
    out = io.StringIO()
    first = run_harness(engine, Console(file=out, width=200))
    assert first["n-shot"] == {"local_choice": 2} and first["n-samples"]["local_choice"]["effective"] == 5
    table = out.getvalue()
    assert "local_choice" in table and "2-shot, 5 documents" in table and "stderr" in table
    assert (wanted.run.dir / "eval" / "harness-step-00000012.json").is_file()
    assert read_evaluations(wanted.run.dir) == ([], [])  # no report of held-out loss, and no damaged one

    monkeypatch.setattr("pipeline.eval.harness._evaluate", None)
    out = io.StringIO()
    assert run_harness(engine, Console(file=out, width=200)) == first
    assert out.getvalue() == table
    assert benchmarks_are_made(wanted, 12)
    for other in ({"limit": 6}, {"num_fewshot": 1}, {"tasks": ["local_choice", "local_lambada"]}):
        assert not harness_is_made(config(root, **keys | other), 12)
    assert not harness_is_made(config(root, "eval.max_length=16", **keys), 12)
    file = root / "tasks" / "local_choice.yaml"
    file.write_text(file.read_text() + "\n")
    assert not harness_is_made(wanted, 12)


@pytest.mark.slow
def test_prefetched_tasks_need_nothing_else(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, data = tmp_path / "tasks", tmp_path / "data"
    data.mkdir()
    shutil.copy(root / "lambada.jsonl", data)
    small.write_tasks(tasks, data)
    shutil.copy(root / "wiki.txt", data)
    wanted = load(
        root / "run.yaml", values(root, tasks=["local_choice", "local_lambada"], include_path=str(tasks), num_fewshot=1)
    )
    out = io.StringIO()
    prefetch(wanted, Console(file=out, width=300))
    made = tasks / "prefetched" / "local_choice"
    assert f"local_choice: written to {made}" in out.getvalue()
    assert {path.name for path in made.iterdir()} == {"local_choice.yaml", "test.parquet", "train.parquet"}
    assert yaml.safe_load((made / "local_choice.yaml").read_text())["dataset_path"] == "parquet"

    expected = run_harness(
        small.engine_alone(root / "run.yaml", values(root, tasks=["local_choice", "local_lambada"], num_fewshot=1)),
        Console(quiet=True),
        keep=False,
    )
    shutil.rmtree(data)

    def no_network(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    engine = small.engine_alone(
        root / "run.yaml", values(root, tasks=["local_choice", "local_lambada"], include_path=str(tasks), num_fewshot=1)
    )
    found = run_harness(engine, Console(quiet=True), keep=False)
    assert found["results"] == expected["results"]

    out = io.StringIO()
    prefetch(wanted, Console(file=out, width=300))
    assert "local_choice: is in" in out.getvalue() and "written" not in out.getvalue()


@pytest.mark.slow
def test_what_cannot_be_done_is_said(root: Path, tmp_path: Path) -> None:
    def fails(message: str, **keys: Any) -> None:
        engine = small.engine_alone(root / "run.yaml", values(root, **keys))
        with pytest.raises(UserError, match=message):
            run_harness(engine, Console(quiet=True), keep=False)

    fails("has no task 'local_lambda'; did you mean 'local_lambada'", tasks=["local_lambda"])
    tasks = small.write_tasks(tmp_path, tmp_path)  # whose data is not there
    fails(
        r"local_lambada cannot be loaded: FileNotFoundError: .*call `pipeline eval prefetch RUN.yaml` first",
        tasks=["local_lambada"],
        include_path=str(tasks),
    )
    shutil.copy(root / "lambada.jsonl", tmp_path)
    file = tmp_path / "local_generate.yaml"
    task = yaml.safe_load(file.read_text())
    for options, message in (
        ({"max_gen_toks": 32}, "a task wants 32 new tokens .max_gen_toks., which with the context .* into 32 tokens"),
        ({"do_sample": True, "temperature": 0.5}, "a task draws its continuations at random"),
    ):
        file.write_text(yaml.safe_dump(task | {"generation_kwargs": {"until": ["."], **options}}))
        fails(message, tasks=["local_generate"], include_path=str(tasks))


def test_prefetch_has_to_know_where_and_what(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path)
    with pytest.raises(UserError, match="eval.harness is not set, so there is nothing to fetch"):
        prefetch(load(file), Console(quiet=True))
    with pytest.raises(UserError, match="eval.harness.include_path is not set"):
        prefetch(load(file, ["eval.harness={tasks: [a]}"]), Console(quiet=True))


def test_without_the_package_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'")
        return real(name, *rest, **more)

    engine = small.engine_alone(root / "run.yaml", values(root))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"No module named 'lm_eval'.: pip install 'pretraining-pipeline\[eval\]'"):
        run_harness(engine, Console(quiet=True))


@pytest.mark.slow
@pytest.mark.parallel
def test_the_command_makes_everything_once(root: Path) -> None:
    tasks = [{"type": "lambada", "path": str(root / "lambada.jsonl")}]
    arguments = [root / "run.yaml", f"eval.tasks={json.dumps(tasks)}", *values(root, tasks=["local_lambada"])]
    layout = ["eval.processes=2", "eval.parallel={tp: 2}"]
    first = tiny.pipeline("eval", *arguments, *layout, timeout=400)
    assert first.returncode == 0, first.stdout + first.stderr
    folder = root / "run" / "eval"
    made = json.loads((folder / "tasks-step-00000012.json").read_text())["tasks"]["lambada"]["results"]
    harness = json.loads((folder / "harness-step-00000012.json").read_text())["results"]["local_lambada"]
    assert made["perplexity"] == pytest.approx(harness["perplexity,none"], rel=1e-5)
    assert made["accuracy"] == harness["acc,none"]
    table = tiny.pipeline("eval", root / "run.yaml", "--table")
    assert table.returncode == 0 and "damaged" not in table.stdout + table.stderr
    assert benchmarks_are_made(load(root / "run.yaml", [str(each) for each in arguments[1:]]), 12)
    missing = tiny.pipeline("eval", "prefetch", root / "run.yaml")
    assert missing.returncode == 2 and "eval.harness is not set" in missing.stderr
