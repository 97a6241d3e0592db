"""Items of evaluation tasks for curation: what the evaluation reads, in a file for the index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.curate.decontamination.index import open_index, prepare_index
from pipeline.data.curate.decontamination.items import PIECE, EvalItem, read_items
from pipeline.data.curate.decontamination.matching import open_matcher, texts_batch
from pipeline.eval import curation_items
from pipeline.eval.curation_items import task_problems, write_task_items
from pipeline.eval.tasks.wikitext import read_pages
from tests import tiny
from tests.eval import small

QUESTION = "Which of the old harbours on the northern coast was rebuilt after the great storm of that autumn"
ANSWER = "the one at the mouth of the long river behind the island of birds"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, files of built-in tasks, and a task of the harness with a template around its question."""
    folder = tmp_path_factory.mktemp("items")
    tiny.write_run(folder, small.MODEL)
    small.write_lambada(folder / "lambada.jsonl", 5)
    small.write_wikitext(folder / "wiki.txt")
    tasks = folder / "tasks"
    tasks.mkdir()
    docs = [
        {"question": QUESTION, "choices": ["nothing of it", ANSWER], "answer": 1, "source": "x" * 30},
        {"question": "Short one?", "choices": ["a", "b"], "answer": 0, "source": "y" * 30},
    ]
    (tasks / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "docs.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for name in ("quiz", "riddles"):
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task | {"task": name}))
    (tasks / "both.yaml").write_text(yaml.safe_dump({"group": "both", "task": ["quiz", "riddles"]}))
    return folder


def config(root: Path, *tasks: str, **decontaminate: Any) -> Config:
    section = {"decontaminate": {"tasks": list(tasks), **decontaminate}}
    built_in = [
        {"type": "lambada", "path": str(root / "lambada.jsonl"), "name": "passages"},
        {"type": "wikitext", "path": str(root / "wiki.txt")},
    ]
    harness = {"tasks": ["quiz"], "include_path": str(root / "tasks")}
    values = {"data.curate": section, "eval.tasks": built_in, "eval.harness": harness}
    return load(root / "run.yaml", [f"{key}={json.dumps(value)}" for key, value in values.items()])


def items(path: Path | None) -> list[EvalItem]:
    assert path is not None
    return [item for _, item in read_items(path)]


def test_items_of_built_in_tasks(root: Path, tmp_path: Path) -> None:
    found = items(write_task_items(config(root, "passages", "wikitext"), tmp_path))
    passages = [json.loads(line)["text"] for line in (root / "lambada.jsonl").read_text().splitlines()]
    pages = read_pages(root / "wiki.txt", documents=True)
    expected = [("passages", str(n), text) for n, text in enumerate(passages)]
    assert [(item.task, item.name, item.text) for item in found] == expected + [
        ("wikitext", str(n), text) for n, text in enumerate(pages)
    ]
    # The type of a task will do where only one has it.
    assert [item.task for item in items(write_task_items(config(root, "lambada"), tmp_path))] == ["lambada"] * 5
    assert write_task_items(load(root / "run.yaml"), tmp_path) is None


def test_items_are_written_again_only_where_something_changed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_task_items(config(root, "passages"), tmp_path)
    assert path is not None
    before, data = path.stat().st_mtime_ns, path.read_bytes()
    assert write_task_items(config(root, "passages"), tmp_path) == path
    assert path.stat().st_mtime_ns == before
    path.write_bytes(data[:-10])
    write_task_items(config(root, "passages"), tmp_path)
    assert path.read_bytes() == data
    assert write_task_items(config(root, "wikitext"), tmp_path) == path
    assert path.read_bytes() != data
    monkeypatch.setattr(curation_items, "read_passages", lambda path: [])
    with pytest.raises(UserError, match=r"data\.curate\.decontaminate\.tasks: passages has no items"):
        write_task_items(config(root, "passages"), tmp_path)


@pytest.mark.slow
def test_items_of_the_harness_are_prompts_answers_and_what_is_in_them(root: Path, tmp_path: Path) -> None:
    found = items(write_task_items(config(root, "quiz"), tmp_path))
    assert [(item.task, item.name) for item in found] == [("quiz", "0"), ("quiz", "1")]
    assert found[0].text.split(PIECE) == [f"Question: {QUESTION}\nAnswer: {ANSWER}", QUESTION, ANSWER]
    assert found[1].text == "Question: Short one?\nAnswer: a"
    groups = items(write_task_items(config(root, "both"), tmp_path))
    assert sorted({item.task for item in groups}) == ["both/quiz", "both/riddles"]
    # The index finds the question and the answer alone, without the words of the template.
    index = open_index(prepare_index(config(root, "both").data.curate.decontaminate, tmp_path))  # type: ignore[union-attr, arg-type]
    texts = [f"He asked: {QUESTION.lower()}?", f"It was {ANSWER.upper()}, they said.", "Question: Short one? Answer: a"]
    assert {int(row) for row in open_matcher(index, "auto").hits(texts_batch(texts))["row"]} == {0, 1}


@pytest.mark.slow
def test_unknown_tasks_are_named_with_what_there_is(root: Path, tmp_path: Path) -> None:
    message = r"data\.curate\.decontaminate\.tasks: .*no task 'quizz'; .*'quiz'.* eval.tasks: 'passages', 'wikitext'"
    with pytest.raises(UserError, match=message):
        write_task_items(config(root, "quizz"), tmp_path)


class TwoBeginnings:
    """A task whose choices are beginnings, and whose answer is the end of both."""

    class config:
        doc_to_choice = "beginnings"

    def doc_to_text(self, doc: Any) -> int:
        return 1

    def doc_to_target(self, doc: Any) -> str:
        return "was too large for the door of the house"

    def doc_to_choice(self, doc: Any) -> list[str]:
        return ["The sofa", "The table"]


@pytest.mark.slow
def test_a_dry_run_names_unknown_tasks_and_missing_files(root: Path) -> None:
    assert task_problems(config(root, "quiz", "wikitext")) == []
    problems = task_problems(config(root, "quizz", "wikitext"))
    assert len(problems) == 1 and "'quizz'" in problems[0] and "data.curate.decontaminate.tasks" in problems[0]
    (wikitext,) = [task for task in config(root, "wikitext").eval.tasks if task.type == "wikitext"]
    moved = wikitext.path.rename(wikitext.path.with_suffix(".away"))
    try:
        (problem,) = task_problems(config(root, "wikitext"))
    finally:
        moved.rename(wikitext.path)
    assert str(wikitext.path) in problem


def test_choices_may_be_beginnings() -> None:
    assert curation_items._document_text(TwoBeginnings(), {}) == "The table was too large for the door of the house"
