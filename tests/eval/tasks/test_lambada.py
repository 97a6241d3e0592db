"""LAMBADA against lm-evaluation-harness's own figures, and against a forward pass a passage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config.eval import EvalConfig, TaskConfig
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.tasks.builtin import run_tasks
from pipeline.eval.tasks.lambada import encode_pair, last_word, read_passages
from pipeline.train.model.decoder import Context
from tests.eval import small


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lambada")
    small.trained(folder)
    engine = small.engine_alone(folder / "run.yaml")
    small.write_lambada(folder / "lambada.jsonl", engine=engine)
    return folder


@pytest.fixture(scope="module")
def engine(root: Path) -> GenerationEngine:
    task = [{"type": "lambada", "path": str(root / "lambada.jsonl")}]
    return small.engine_alone(root / "run.yaml", [f"eval.tasks={json.dumps(task)}"])


def test_last_words_equal_a_forward_pass_each(root: Path, engine: GenerationEngine) -> None:
    found = run_tasks(engine, Console(quiet=True))["lambada"]
    right, nats = [], []
    for line in (root / "lambada.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        # As Megatron-LM's strict mode has it: both parts are encoded by themselves.
        word = text.split()[-1]
        before = engine.tokenizer.encode(text[: text.rfind(word)].strip())
        last = engine.tokenizer.encode(" " + word)
        tokens = torch.tensor([*before, *last][-(engine.max_length + 1) :])
        logits = engine.model.whole(tokens[None, :-1], Context())[0, -len(last) :].double()
        targets = tokens[-len(last) :]
        right.append(bool((logits.argmax(-1) == targets).all()))
        nats.append(-logits.log_softmax(-1)[torch.arange(len(last)), targets].sum().item())
    assert 0.1 < sum(right) / len(right) < 0.9
    longest = engine.max_length + 1
    long = sum(len(engine.tokenizer.encode(text)) > longest for text in read_passages(root / "lambada.jsonl"))
    assert (found["passages"], found["truncated"]) == (len(right), long) and long
    assert found["accuracy"] == sum(right) / len(right)
    deviation = math.sqrt(sum((each - found["accuracy"]) ** 2 for each in right) / (len(right) - 1))
    assert found["accuracy_stderr"] == pytest.approx(deviation / math.sqrt(len(right)), rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)


def test_a_word_of_several_tokens_is_right_as_a_whole(engine: GenerationEngine) -> None:
    request = last_word(engine.tokenizer, "the boat sails harbourkeeper", engine.max_length)
    assert request.scored > 1
    assert engine.tokenizer.decode(request.tokens[-request.scored :]) == " harbourkeeper"


def test_spaces_before_the_word_are_the_words(engine: GenerationEngine) -> None:
    encode = engine.tokenizer.encode
    before, word = encode_pair(encode, "the sea  ", "is")
    assert before == encode("the sea")
    assert [*before, *word] == encode("the sea  is")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "word"}', r":1 has no last word after a space: 'word'"),
        ('{"text": "word "}', r":1 has no last word after a space"),
        ('{"page": "a b"}', r":1 .* 'text'"),
        ("", r"has no passages"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        read_passages(tmp_path / "x.jsonl")


@pytest.mark.parametrize("key", [{"stride": 3}, {"detokenize": False}, {"documents": False}])
def test_keys_of_the_other_type_are_refused(key: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(key))} is only for type: wikitext"):
        TaskConfig.model_validate({"type": "lambada", "path": "x", **key})


def test_two_tasks_of_a_name_are_refused() -> None:
    task = {"type": "lambada", "path": "x"}
    with pytest.raises(ValidationError, match="several have the name 'lambada'"):
        EvalConfig.model_validate({"tasks": [task, task]})
    assert EvalConfig.model_validate({"tasks": [task, {**task, "name": "other"}]}).tasks[1].title == "other"


@pytest.mark.slow
def test_figures_are_those_of_the_harness(root: Path, engine: GenerationEngine, tmp_path: Path) -> None:
    found = run_tasks(engine, Console(quiet=True))["lambada"]
    hf = small.exported(engine.config, tmp_path / "hf")
    theirs = small.harness_figures(hf, root, tmp_path, ["local_lambada"])["local_lambada"]
    assert found["accuracy"] == pytest.approx(theirs["acc,none"], rel=1e-9)
    assert found["accuracy_stderr"] == pytest.approx(theirs["acc_stderr,none"], rel=1e-9)
    assert found["perplexity"] == pytest.approx(theirs["perplexity,none"], rel=1e-4)
