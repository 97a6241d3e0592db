"""The model in the harness against the harness's own backend on the exported model; reports; tasks without network."""

from __future__ import annotations

import builtins
import io
import json
import os
import random
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.common.trust import TRUSTED
from pipeline.config import Config
from pipeline.config.eval import HarnessConfig
from pipeline.config.load import load
from pipeline.eval.benchmarks import benchmarks_are_made
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.reports import read_evaluations
from pipeline.eval.scoring import Request, Scored
from pipeline.eval.tasks import harness as harness_module
from pipeline.eval.tasks.builtin import run_tasks, tasks_are_made
from pipeline.eval.tasks.harness import (
    _files,
    _load,
    _made_with,
    _manager,
    harness_is_made,
    prefetch,
    run_harness,
)
from tests import tiny
from tests.eval import small
from tests.train.distributed.ranks import Ranks

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


def ours(engine: GenerationEngine) -> dict[str, Any]:
    from pipeline.eval.tasks.harness_model import HarnessModel

    return answers(HarnessModel(engine, 3))


def ours_on_rank(file: Path, layout: str) -> dict[str, Any]:
    return ours(small.engine_of_rank(file, layout))


def report_on_rank(root: Path, layout: str, names: list[str]) -> dict[str, Any]:
    overrides = values(root, tasks=names, batch_size=3)
    return run_harness(small.engine_of_rank(root / "run.yaml", layout, overrides), Console(quiet=True), keep=False)


def letters_model(monkeypatch: pytest.MonkeyPatch, max_length: int = 32) -> tuple[Any, list[Request]]:
    """A model whose tokens are letters, but for "12", which is one; and a list of the requests that it will score."""
    from pipeline.eval.tasks import harness_model

    asked: list[Request] = []

    def score(_: Any, requests: list[Request], **__: Any) -> list[Scored]:
        asked.extend(requests)
        return [Scored(7.0, False) for _ in requests]

    def encode(text: str) -> list[int]:
        return [12 if letter == "_" else ord(letter) for letter in text.replace("12", "_")]

    monkeypatch.setattr(harness_model, "score", score)
    engine: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode, end_of_document=0), max_length=max_length)
    return harness_model.HarnessModel(engine, 3), asked


def pairs_as_tokens(monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[str, str]]) -> tuple[list[Request], list[Any]]:
    """What is scored of pairs, and the answers."""
    model, asked = letters_model(monkeypatch)
    return asked, model.loglikelihood(instances("loglikelihood", pairs))


def test_contexts_that_are_truncated_are_counted_by_task(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = letters_model(monkeypatch, max_length=4)
    requests = instances("loglikelihood", [("abc", "de"), ("abcd", "de"), ("abcdef", "g"), ("abcdefg", "")])
    for request, name in zip(requests, ("one", "one", "two", "two"), strict=True):
        request.task_name = name
    model.loglikelihood(requests)
    assert [each.is_truncated for each in asked] == [False, True, True]
    assert +model.truncated == {"one": 1, "two": 1}


def test_a_token_over_the_border_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = pairs_as_tokens(monkeypatch, [("1", "2"), ("a1", "2"), ("1", "3"), ("1", "23")])
    one, two, three, a = ord("1"), 12, ord("3"), ord("a")
    expected = [Request([0, two], 1), Request([a, two], 1), Request([one, three], 1), Request([one, three], 1)]
    assert [Request([*each.tokens], each.scored) for each in asked[:3]] == expected[:3]
    # "1|23" has a token after those of the context alone.
    assert asked[3].scored == 1 and asked[3].tokens[-1] == three
    assert found == [(-7.0, False)] * 4


def test_texts_of_nothing_and_of_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("", ""), ("a", ""), ("  ", "b"), ("", "b"), (" ", ""), ("a ", "")]
    asked, found = pairs_as_tokens(monkeypatch, pairs)
    space, a, b = ord(" "), ord("a"), ord("b")
    assert found == [(0.0, True)] * 2 + [(-7.0, False)] * 4
    tokens = [[0, space, space, b], [0, b], [0, space], [a, space]]
    assert [[*each.tokens] for each in asked] == tokens
    assert [each.scored for each in asked] == [3, 1, 1, 1]


def write_task(folder: Path, name: str = "mine", **keys: Any) -> Path:
    """A task with code and data beside it; the documents are shuffled."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": f"{n} a"}) + "\n" for n in range(20)))
    (folder / "utils.py").write_text(
        "import random, numpy, torch\n"
        "def docs(dataset):\n"
        "    order = list(range(len(dataset)))\n"
        "    random.shuffle(order)\n"
        "    numpy.random.shuffle(order)\n"
        "    return dataset.select([order[n] for n in torch.randperm(len(order)).tolist()])\n"
    )
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": 0,
        "doc_to_choice": ["a", "b"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        **keys,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(task) + "process_docs: !function utils.docs\n")
    return file


def asked_by(run: Any) -> list[str]:
    """The contexts of the requests that a run of the harness makes, in order."""
    asked: list[str] = []

    def answer(requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        asked.extend(request.args[0] for request in requests)
        return [(0.0, True)] * len(requests)

    run(answer)
    return asked


@pytest.mark.guard
def test_shuffled_documents_are_those_of_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    from pipeline.eval.tasks import harness_model

    write_task(tmp_path)

    def theirs(answer: Any) -> None:
        model = type("Model", (LM,), {"loglikelihood": lambda _, requests, **__: answer(requests)})
        monkeypatch.setattr(model, "__abstractmethods__", frozenset())
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        simple_evaluate(model=model(), tasks=["mine"], task_manager=manager, limit=5, log_samples=False)

    def ours(answer: Any) -> None:
        monkeypatch.setattr(harness_model.HarnessModel, "loglikelihood", lambda _, requests, **__: answer(requests))
        harness = HarnessConfig(tasks=["mine"], include_path=tmp_path, limit=5, batch_size=1)
        engine: Any = SimpleNamespace(config=None, is_first=True)
        harness_module._evaluate(engine, harness, Console(quiet=True), lambda: None)

    expected = asked_by(theirs)
    assert len(set(expected)) == 5
    for seed in (5, 6):  # whatever was drawn before
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        assert asked_by(ours) == expected


def test_there_are_signs_of_life_wherever_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the result of rank 0, and for those that load tasks or make requests for longer."""
    beats: list[str] = []
    now = ["loading"]

    def wait(name: str) -> None:
        now[0] = name
        end = time.monotonic() + 60
        while beats.count(name) < 6:
            assert time.monotonic() < end, f"no sign of life while waiting for {name}"
            time.sleep(0.01)

    def broadcast(make: Any) -> Any:
        if make is not harness_module._require:  # which comes before all that takes long
            wait("the result")
        return make()

    def evaluated(model: Any, **_: Any) -> dict[str, Any]:
        with model.progress("likelihoods", 1):
            now[0] = "computing"
            time.sleep(0.2)
        return {"results": {}}

    monkeypatch.setattr(harness_module, "_BEAT", 0.01)
    monkeypatch.setattr(harness_module, "broadcast_from_rank0", broadcast)
    monkeypatch.setattr(harness_module, "barrier", lambda: wait("the others"))
    monkeypatch.setattr(harness_module, "_load", lambda *_: {"tasks": {}})
    monkeypatch.setattr(harness_module, "_manager", lambda *_: None)
    monkeypatch.setattr("lm_eval.simple_evaluate", evaluated)
    monkeypatch.setattr(
        "pipeline.eval.tasks.harness_model.HarnessModel",
        lambda engine, batch_size, progress, chat: SimpleNamespace(progress=progress, truncated=Counter()),
    )
    engine: Any = SimpleNamespace(config=None, is_first=False)
    harness = HarnessConfig(tasks=["a"], batch_size=1)
    found = harness_module._evaluate(engine, harness, Console(quiet=True), lambda: beats.append(now[0]))
    assert found == {"results": {}, "truncated": {}}
    assert {"the result", "the others"} <= set(beats)
    assert beats.count("computing") <= 1, "a collective that is stuck has to be noticed"


def test_tasks_that_are_none_for_this_model_are_named(tmp_path: Path) -> None:
    for keys, message in (
        ({"unsafe_code": True}, "eval.harness.tasks: mine runs code .*unsafe_code"),
        ({"doc_to_image": ["image"]}, "eval.harness.tasks: mine needs image or audio input"),
    ):
        write_task(tmp_path, **keys)
        harness = HarnessConfig(tasks=["mine"], include_path=tmp_path)
        with pytest.raises(UserError, match=message):
            _load(_manager(load(tiny.write_run(tmp_path)), harness), harness)


@pytest.mark.slow
@pytest.mark.guard
def test_what_is_beside_a_task_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_task(tmp_path / "tasks")
    harness = HarnessConfig(tasks=[str(file)])
    before = sorted(_files(harness))
    assert {Path(str(name)).name for name, *_ in before} == {"mine.yaml", "utils.py", "documents.jsonl"}
    (file.parent / "utils.py").write_text("def docs(dataset):\n    return dataset\n")
    assert sorted(_files(harness)) != before
    after = sorted(_files(harness))
    monkeypatch.chdir(tmp_path)
    relative = HarnessConfig(tasks=["tasks/mine.yaml"])
    assert sorted(_files(relative)) == after
    assert list(_load(_manager(load(tiny.write_run(tmp_path)), relative), relative)["tasks"]) == ["mine"]


@pytest.mark.slow
def test_results_of_other_tasks_of_a_checkpoint_stay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(title: str) -> str:
        return f"eval.tasks={json.dumps([{'type': 'lambada', 'path': str(root / 'lambada.jsonl'), 'name': title}])}"

    for title in "ab":
        run_tasks(small.engine_alone(root / "run.yaml", [of(title)]), Console(quiet=True))
    assert all(tasks_are_made(load(root / "run.yaml", [of(title)]), 12) for title in "ab")

    monkeypatch.setattr(harness_module, "_evaluate", lambda _, harness, *__: {"results": {harness.tasks[0]: {}}})
    for name in ("local_choice", "local_lambada"):
        engine = small.engine_alone(root / "run.yaml", values(root, tasks=[name]))
        run_harness(engine, Console(quiet=True))
    assert all(harness_is_made(config(root, tasks=[name]), 12) for name in ("local_choice", "local_lambada"))
    engine = small.engine_alone(root / "run.yaml", values(root, tasks=["local_choice"]))
    assert run_harness(engine, Console(quiet=True))["results"] == {"local_choice": {}}
    file = engine.config.run.dir / "eval" / "harness-step-00000012.json"

    # What has been made anew, of other files, takes the place of what was.
    assert engine.source is not None
    real = _made_with(engine.config, engine.source)
    with monkeypatch.context() as patch:
        patch.setattr(harness_module, "_made_with", lambda *_: real | {"files": "x"})
        run_harness(engine, Console(quiet=True))
    kept = json.loads(file.read_text())
    assert [each["made_with"]["tasks"] for each in (kept, *kept["others"])] == [["local_choice"], ["local_lambada"]]
    file.unlink()


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

    monkeypatch.setattr("pipeline.eval.tasks.harness._evaluate", None)
    out = io.StringIO()
    assert run_harness(engine, Console(file=out, width=200)) == first
    assert out.getvalue() == table
    assert benchmarks_are_made(wanted, 12)
    for other in ({"limit": 6}, {"num_fewshot": 1}, {"tasks": ["local_choice", "local_lambada"]}):
        assert not harness_is_made(config(root, **keys | other), 12)
    assert not harness_is_made(config(root, "eval.max_length=16", **keys), 12)
    assert first["truncated"] == {} and "truncated" not in table
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
        ({"max_gen_toks": 0}, "0 new tokens .max_gen_toks.; set 1 or more"),
        ({"max_gen_toks": 32}, "32 new tokens .max_gen_toks., .* into 32 tokens"),
        ({"do_sample": True, "temperature": 0.5}, ".do_sample, temperature., .*do_sample: false"),
    ):
        file.write_text(yaml.safe_dump(task | {"generation_kwargs": {"until": ["."], **options}}))
        fails(message, tasks=["local_generate"], include_path=str(tasks))


def test_git_is_not_asked_about_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Outside of a checkout it says "fatal: not a git repository" on the terminal."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    monkeypatch.chdir(tmp_path)
    before = evaluator.get_git_commit_hash
    with harness_module._quiet():
        evaluator.get_git_commit_hash()
    assert capfd.readouterr().err == ""
    assert evaluator.get_git_commit_hash is before


@pytest.mark.guard
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root may")
def test_tasks_of_another_user_are_executed_by_consent_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUSTED, raising=False)
    folder = root / "theirs"
    folder.mkdir()
    leaves = f"open({str(folder / 'left')!r}, 'w').close()"
    (folder / "helper.py").write_text(f"def text(doc):\n    {leaves}\n    return doc['text']\n")
    task = {**yaml.safe_load((root / "tasks" / "local_choice.yaml").read_text()), "task": "theirs"}
    del task["doc_to_text"]
    (folder / "task.yaml").write_text(yaml.safe_dump(task) + "doc_to_text: !function helper.text\n")
    os.chown(folder / "helper.py", 65534, -1)
    engine = small.engine_alone(root / "run.yaml", [f"eval.harness={{tasks: ['{folder}/task.yaml'], limit: 2}}"])
    with pytest.raises(UserError, match=r"eval\.harness\.tasks .*helper\.py belongs to .*--trust-files-of"):
        run_harness(engine, Console(quiet=True), keep=False)
    assert not (folder / "left").exists()
    monkeypatch.setenv(TRUSTED, "65534")
    assert set(run_harness(engine, Console(quiet=True), keep=False)["results"]) == {"theirs"}
    assert (folder / "left").exists()


def test_prefetch_has_to_know_where_and_what(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path)
    with pytest.raises(UserError, match="eval.harness is not set, so there is nothing to fetch"):
        prefetch(load(file), Console(quiet=True))
    with pytest.raises(UserError, match="eval.harness.include_path is not set"):
        prefetch(load(file, ["eval.harness={tasks: [a]}"]), Console(quiet=True))
    task = write_task(tmp_path / "mine")
    keys = json.dumps({"tasks": [str(task)], "include_path": str(tmp_path / "tasks")})
    with pytest.raises(UserError, match=r"mine.yaml is a file .*eval.harness.include_path .*leave it out"):
        prefetch(load(file, [f"eval.harness={keys}"]), Console(quiet=True))


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
