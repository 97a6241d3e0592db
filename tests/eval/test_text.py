"""Prompts that are continued with a checkpoint, as `pipeline generate` does."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.console import visible
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.eval.inference import load_decoder, unwrapped
from pipeline.eval.text import continue_prompt, continue_prompts, read_prompts
from pipeline.train.model.decoder import Context
from pipeline.train.parallel.parallelize import COMPUTE_DTYPE
from pipeline.train.start.setup import load_for_inference
from tests.eval import small
from tests.eval.generation.test_generate import decoder
from tests.train.models import VOCAB


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.trained(tmp_path_factory.mktemp("text"))


def generate(file: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["generate", str(file), "--max-tokens", "12", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_model_computes_what_the_one_in_training_does(file: Path, compute: str) -> None:
    config = load(file, [f"train.precision.compute={compute}"])
    model = load_for_inference(config, None).model
    tokens = torch.randint(280, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = unwrapped(model.whole, COMPUTE_DTYPE[compute])(tokens, Context())
        expected = model.whole(tokens, Context())
    if compute == "fp32":
        assert torch.equal(logits, expected)
    difference = (logits - expected)[..., :280].abs().max()
    assert difference < 0.02 * expected[..., :280].abs().max()
    assert logits.dtype == COMPUTE_DTYPE[compute]


def test_rates_of_decay_are_those_of_training_where_all_else_is_rounded() -> None:
    model = decoder("delta").float()
    plain = unwrapped(model, torch.bfloat16)
    trained = dict(model.named_parameters())
    rates = {name: value for name, value in plain.named_parameters() if ".decay." in name}
    assert len(rates) == 4 and all(torch.equal(value, trained[name]) for name, value in rates.items())
    others = [value for name, value in plain.named_parameters() if name not in rates]
    assert others and all(value.dtype == torch.bfloat16 for value in others)
    assert plain(torch.arange(20)[None], Context())[..., :VOCAB].isfinite().all()


def test_text_is_that_of_the_run_and_of_the_checkpoint_named(file: Path) -> None:
    config = load(file, ["generate.temperature=0"])
    newest = load_decoder(config, None)
    assert newest.source.path.name == "step-00000012"
    tokens = newest.tokenizer.encode("the ")
    for _ in range(8):
        with torch.no_grad():
            tokens.append(int(newest.model(torch.tensor([tokens]), Context())[0, -1].argmax()))
    out = io.StringIO()
    text = continue_prompt(config, None, Console(file=out, width=1000))
    assert "the " + text == newest.tokenizer.decode(tokens)
    assert out.getvalue() == f"step-00000012:\nthe {text}\n"
    continue_prompt(config, 9, Console(file=out))
    assert "step-00000009:" in out.getvalue()


def test_prompts_are_continued_as_each_alone(file: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    prompts = [small.text(chance, chance.randint(1, 9)) for _ in range(9)]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    words = ["--min-p", "0.05", "--repetition-penalty", "1.2", "--seed", "3", "--stop", "tower", "--stop", "\n"]
    together = objects(generate(file, "--prompts", str(lines), "--json", "--logprobs", "2", *words))
    assert [each["prompt"] for each in together] == prompts
    for prompt, found in zip(prompts, together, strict=True):
        shown = generate(file, "--prompt", prompt, *words)
        assert shown.partition(":\n")[2] == visible(prompt + found["text"]) + "\n"
        assert "tower" not in found["text"] and found["finish"] in ("stop", "length")
        assert all(len(token["top"]) == 2 and token["logprob"] <= 0 for token in found["tokens"])
    assert len({found["finish"] for found in together}) == 2
    plain = generate(file, "--prompt", prompts[0], "--prompt", prompts[1], *words)
    texts = [each["prompt"] + each["text"] for each in together[:2]]
    assert plain.partition(":\n")[2] == visible("\n\n".join(texts)) + "\n"


def test_an_object_without_logprobs(file: Path) -> None:
    (found,) = objects(generate(file, "--json", "--greedy"))
    assert (found["prompt"], found["finish"]) == ("the ", "length")
    assert [set(token) for token in found["tokens"]] == [{"id", "text"}] * 12
    assert "".join(token["text"] for token in found["tokens"]) == found["text"]


def test_logprobs_need_json(file: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(file), "--logprobs", "2"])
    assert result.exit_code == 2
    assert "--logprobs shows nothing without --json; add --json" in " ".join(result.output.split())


def test_a_prompt_that_is_no_text(file: Path) -> None:
    with pytest.raises(UserError, match="not UTF-8 text"):
        continue_prompts(load(file), ["the", "\udcff"])


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("p.txt", b"one\n\ntwo \n", ["one", "", "two "]),
        ("p.txt", "a\u2028b\r\nc".encode(), ["a\u2028b", "c"]),
        ("p.jsonl", b'{"prompt": "a\\nb", "id": 1}\n\n"c"\n', ["a\nb", "c"]),
    ],
)
def test_files_of_prompts(tmp_path: Path, name: str, data: bytes, expected: list[str]) -> None:
    (tmp_path / name).write_bytes(data)
    assert read_prompts(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.txt", b"", "is empty; write a prompt on each line"),
        ("p.jsonl", b"\n", "is empty"),
        ("p.txt", b"\xff", "is not UTF-8"),
        ("p.jsonl", b'"a"\n{', "line 2: not JSON"),
        ("p.jsonl", b"[1]", "line 1: write a text, or an object"),
        ("p.jsonl", b'{"text": "a"}', "line 1: write a text, or an object"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)
