"""Perplexity of WikiText against lm-evaluation-harness's own, and against a forward pass a token."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.reports import benchmark_path
from pipeline.eval.tasks.builtin import run_tasks, tasks_are_made
from pipeline.eval.tasks.wikitext import articles, detokenized, read_pages, words_and_bytes
from pipeline.train.model.decoder import Context
from tests.eval import small

TEXT = """
 = Sea =

 The sea , it 's 1 @,@ 000 @.@ 5 miles ( or " more " ) ; see [ 1 ] : N @-@ S . ! ?
 = = Under = =
 = = = Deep = = =
 20 ° C in the boys ' boat .

 = Land =
 a = b
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wikitext")
    small.trained(folder)
    small.write_wikitext(folder / "wiki.txt")
    return folder


def figures(root: Path, **keys: Any) -> tuple[GenerationEngine, dict[str, Any]]:
    task = {"type": "wikitext", "path": str(root / "wiki.txt"), **keys}
    engine = small.engine_alone(root / "run.yaml", [f"eval.tasks={json.dumps([task])}"])
    return engine, run_tasks(engine, Console(quiet=True))["wikitext"]


def nats_by_hand(engine: GenerationEngine, text: str, stride: int) -> float:
    """Token by token: each from what its window has before it, in fp64."""
    tokens = [engine.tokenizer.end_of_document, *engine.tokenizer.encode(text)]
    length, total = engine.max_length, 0.0
    last = len(tokens) - 1
    for target in range(1, len(tokens)):
        # The end of the window that scores it.
        end = length if target <= length else min(last, length + -(-(target - length) // stride) * stride)
        logits = engine.model.whole(torch.tensor([tokens[max(0, end - length) : target]]), Context())
        total -= logits[0, -1].double().log_softmax(-1)[tokens[target]].item()
    return total


def test_detokenized_as_the_harness_does_it() -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    made = detokenized(TEXT)
    assert made == wikitext_detokenizer({"page": TEXT})
    assert '1,000.5 miles (or "more");' in made and "===Deep ===" not in made and "20°C" in made


def test_articles_begin_at_titles() -> None:
    found = articles(TEXT)
    assert [article.split("\n")[0] for article in found] == [" = Sea =", " = Land ="]
    assert "\n".join(found) == TEXT.removeprefix("\n")


def test_words_as_the_harness_and_as_the_corpus_count_them() -> None:
    pages = [" = Sea = \n\n a b"]
    assert words_and_bytes(pages, documents=True) == (6, 15)  # five, and an empty one before the first space
    assert words_and_bytes(pages, documents=False) == (7, 15)  # five, and two line ends
    assert words_and_bytes(["a b", "ü"], documents=True) == (3, 5)
    assert words_and_bytes(["a b", "ü"], documents=False) == (3, 5)


@pytest.mark.slow
def test_each_token_is_scored_once(root: Path) -> None:
    engine, found = figures(root)
    pages = read_pages(root / "wiki.txt", documents=True)
    assert found["documents"] == len(pages) == 3
    nats = sum(nats_by_hand(engine, detokenized(page), engine.max_length) for page in pages)
    assert found["nats"] == pytest.approx(nats, rel=1e-5)
    words, size = words_and_bytes(pages, documents=True)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-3)
    assert found["byte_perplexity"] == pytest.approx(math.exp(nats / size), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)


@pytest.mark.guard
def test_a_stride_over_the_whole_file(root: Path) -> None:
    engine, found = figures(root, stride=5, documents=False, detokenize=False)
    (text,) = read_pages(root / "wiki.txt", documents=False)
    assert text == (root / "wiki.txt").read_text()
    assert found["documents"] == 1
    assert found["nats"] == pytest.approx(nats_by_hand(engine, text, 5), rel=1e-5)
    _, disjoint = figures(root, documents=False, detokenize=False)
    assert disjoint["tokens"] == found["tokens"] == len(engine.tokenizer.encode(text))
    assert disjoint["nats"] != found["nats"]


def test_json_lines_are_articles(root: Path, tmp_path: Path) -> None:
    pages = read_pages(root / "wiki.txt", documents=True)
    file = tmp_path / "pages.jsonl"
    for key in ("page", "text"):
        file.write_text("".join(json.dumps({key: page}) + "\n\n" for page in pages))
        assert read_pages(file, documents=True) == pages


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.txt", None, "no.txt cannot be read: No such file"),
        ("empty.txt", b" \n \n", "empty.txt has no text"),
        ("bad.txt", b"\xff", "bad.txt is not UTF-8 text"),
        (
            "bad.jsonl",
            b'{"page": "a"}\n{"pages": "b"}\n',
            "bad.jsonl:2 is not a JSON object .* 'page' or",
        ),
        ("cut.jsonl", b'{"page": "a', "cut.jsonl:1 is not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_pages(tmp_path / name, documents=True)


def test_a_stride_beyond_a_window_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match="wikitext has stride 33, but a window has 32 tokens"):
        figures(root, stride=33)


def test_what_was_made_of_the_same_is_not_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures(root)

    def config(**keys: Any) -> Config:
        task = {"type": "wikitext", "path": str(root / "wiki.txt"), **keys}
        return load(root / "run.yaml", [f"eval.tasks={json.dumps([task])}"])

    assert tasks_are_made(config(), 12)
    for other in ({"stride": 3}, {"detokenize": False}, {"documents": False}, {"name": "other"}):
        assert not tasks_are_made(config(**other), 12)
    assert not tasks_are_made(load(root / "run.yaml", ["eval.max_length=16", *overrides(config())]), 12)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr("pipeline.eval.tasks.builtin.score", again)
    out = io.StringIO()
    engine = small.engine_alone(root / "run.yaml", overrides(config()))
    run_tasks(engine, Console(file=out, width=200))
    assert "word perplexity" in out.getvalue() and "3 documents" in out.getvalue()
    benchmark_path(config(), 12, "tasks").write_bytes(b"{")
    assert not tasks_are_made(config(), 12)


def overrides(config: Config) -> list[str]:
    return [f"eval.tasks={json.dumps([task.model_dump(mode='json') for task in config.eval.tasks])}"]


@pytest.mark.slow
def test_figures_are_those_of_the_harness(root: Path, tmp_path: Path) -> None:
    engine, found = figures(root)
    theirs = small.harness_figures(small.exported(engine.config, tmp_path / "hf"), root, tmp_path, ["local_wikitext"])
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(theirs["local_wikitext"][f"{name},none"], rel=1e-4)
