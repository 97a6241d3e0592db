"""The OpenAI interface with OpenAI's own client, against generate() and against a forward pass."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from pipeline.config import Config
from pipeline.eval.generation.generate import generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.server.watch import load_served
from pipeline.eval.server.worker import Served
from pipeline.train.model.decoder import Context
from tests.eval.server.running import Running, running

PROMPTS = ["the sea ", "a boat", "wind", "", "old night. The ", "keeper of the light", "the a the a", "north\n"]


@pytest.fixture(scope="module")
def model(config: Config) -> Served:
    """The same model, without a server."""
    return load_served(config, None)


def test_greedy_texts_are_those_of_generate(server: Running, model: Served) -> None:
    expected = generate(model.model, model.tokenizer, PROMPTS, Sampling(max_tokens=20, temperature=0))
    answer = server.openai().completions.create(model=model.run, prompt=PROMPTS, max_tokens=20, temperature=0)
    assert [choice.text for choice in answer.choices] == [each.text for each in expected]
    assert [choice.finish_reason for choice in answer.choices] == [each.finish for each in expected]
    assert [choice.index for choice in answer.choices] == list(range(len(PROMPTS)))
    assert answer.model == model.id
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in expected)
    ids = [model.tokenizer.encode(prompt) or [model.tokenizer.end_of_document] for prompt in PROMPTS]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    again = server.openai().completions.create(model=model.run, prompt=ids, max_tokens=20, temperature=0)
    assert [choice.text for choice in again.choices] == [each.text for each in expected]


@pytest.mark.slow
def test_concurrent_requests_get_what_each_gets_alone(server: Running) -> None:
    client = server.openai()

    def text(number: int) -> str:
        answer = client.completions.create(
            model=server.health()["run"],
            prompt=PROMPTS[number],
            max_tokens=30,
            temperature=0.0 if number % 2 else 1.5,
            seed=number,
            top_p=0.9,
            extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
        )
        return answer.choices[0].text

    alone = [text(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, range(8))) == alone
    assert len(set(alone)) == 8


def test_streamed_text_is_the_text(server: Running) -> None:
    client, run = server.openai(), server.health()["run"]
    how: Any = {"model": run, "prompt": PROMPTS[:2], "max_tokens": 25, "seed": 4, "logprobs": 3, "n": 2}
    whole = client.completions.create(**how)
    texts, tokens, ends, usage = [""] * 4, [[] for _ in range(4)], [None] * 4, None
    for chunk in client.completions.create(**how, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.token_logprobs
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    for found, choice in zip(tokens, whole.choices, strict=True):
        assert found == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert usage == whole.usage
    assert len(set(texts)) == 4


@torch.no_grad()
def test_logprobs_are_those_of_a_forward_pass(server: Running, model: Served) -> None:
    ids = model.tokenizer.encode("the sea wind sails")
    logits = model.model(torch.tensor([ids]), Context())[0].float().log_softmax(-1)
    answer = server.openai().completions.create(
        model=model.run, prompt="the sea wind sails", max_tokens=0, echo=True, logprobs=4
    )
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == "the sea wind sails"
    assert answer.choices[0].finish_reason == "length"
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(
        [float(logits[place, id_]) for place, id_ in enumerate(ids[1:])], abs=1e-4
    )
    for place, top in enumerate(found.top_logprobs[1:]):
        expected = logits[place].topk(4).values.tolist()
        assert sorted(top.values(), reverse=True)[:4] == pytest.approx(expected, abs=1e-4)
    assert "".join(found.tokens) == "the sea wind sails"
    assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(len(ids))]


@pytest.mark.first(3)
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("prompt", ["海é old 🙂 sea", "🙂", "the sea", ""])
def test_offsets_are_those_of_complete_characters(server: Running, model: Served, prompt: str, echo: bool) -> None:
    ids = model.tokenizer.encode(prompt)
    (made,) = generate(model.model, model.tokenizer, [prompt], Sampling(max_tokens=12, temperature=0))
    assert made.text.isascii()
    all_ids = ids + [token.id for token in made.tokens]
    # Of whole beginnings of the text: what a cut character becomes is no part of it yet.
    expected = [len(model.tokenizer.decode(all_ids[:n]).rstrip("\ufffd")) for n in range(len(all_ids))]
    if not echo:
        expected = [offset - len(prompt) for offset in expected[len(ids) :]]
    elif not ids:  # the end of document that is put before it
        expected = [0, *expected]
    how: Any = {"model": model.run, "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 0, "echo": echo}
    client = server.openai()
    whole = client.completions.create(**how).choices[0]
    assert whole.text == (prompt if echo else "") + made.text
    assert whole.logprobs.text_offset == expected
    chunks = [chunk.choices[0] for chunk in client.completions.create(**how, stream=True)]
    assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == expected
    assert [name for chunk in chunks for name in chunk.logprobs.tokens] == whole.logprobs.tokens
    stop = made.text[4:7]
    cut = client.completions.create(**how, stop=stop).choices[0]
    assert cut.text == whole.text[: len(whole.text) - len(made.text) + made.text.index(stop)]
    count = len(cut.logprobs.tokens)
    assert cut.logprobs.text_offset == [min(offset, len(cut.text)) for offset in expected[:count]]


def test_a_stop_string_ends_the_text_before_it(server: Running, model: Served) -> None:
    client = server.openai()
    full = client.completions.create(model=model.run, prompt="the ", max_tokens=40, temperature=0).choices[0].text
    stop = full[10:13]
    ended = client.completions.create(model=model.run, prompt="the ", max_tokens=40, temperature=0, stop=[stop, "~~"])
    assert ended.choices[0].text == full[: full.index(stop)]
    assert ended.choices[0].finish_reason == "stop"


def test_models_are_the_run_and_its_step(server: Running, model: Served) -> None:
    client = server.openai()
    assert [each.id for each in client.models.list()] == [model.run, f"{model.run}@step-{model.step}"]
    assert client.models.retrieve(model.id).id == model.id
    answer = client.completions.create(model=model.id, prompt="the", max_tokens=1)
    assert answer.model == model.id
    with pytest.raises(openai.NotFoundError, match=f"model: there is no 'gpt-4'; '{model.run}' and"):
        client.completions.create(model="gpt-4", prompt="the")
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model=model.id, input="the")
    assert refused.value.code == "not_found"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_tokens", 1000, "max_tokens: 1000 is more than serve.max_length, which is 128"),
        ("max_tokens", -1, r"max_tokens: .*greater than or equal to 0 \(it is -1\)"),
        ("prompt", "the " * 300, r"prompt: has 1,200 bytes, which are too many tokens; at most 127 are"),
        ("prompt", "xyz" * 60, r"prompt: has 180 tokens; at most 127 are allowed"),
        ("prompt", ["a", 3], "prompt: must be a text, a list of texts"),
        ("prompt", [[1], [10**6]], "prompt.1: token id 1000000 is not in the vocabulary of 280"),
        ("prompt", ["a"] * 129, "prompt: has 129 prompts; at most 128"),
        ("n", 200, "n: .*less than or equal to 128"),
        ("n", True, "n: .*integer"),
        ("best_of", 3, "best_of: 3 is not supported here; leave it out, or give 1"),
        ("logit_bias", {"5": 1}, "logit_bias: .*not supported"),
        ("suffix", "end", "suffix: end is not supported"),
        ("presence_penalty", 0.5, "presence_penalty: 0.5 is not supported here; leave it out, or give 0"),
        ("temperature", -1, "temperature: .*greater than or equal to 0"),
        ("stop", ["x"] * 17, "stop: must be a text of 1 to 256 characters, or a list of at most 16"),
        ("stop", "", "stop: must be a text"),
        ("nucleus", 1, "nucleus: there is no such field"),
        ("stream_options", {"include_usage": True}, "stream_options: only with stream"),
    ],
)
def test_refusals_name_the_field(server: Running, model: Served, field: str, value: Any, says: str) -> None:
    body = {"prompt": "the", "extra_body": {field: value}} if field != "prompt" else {"prompt": value}
    with pytest.raises(openai.UnprocessableEntityError, match=says) as refused:
        server.openai().completions.create(model=model.run, **body)
    assert refused.value.param == field


def test_neutral_values_are_taken(server: Running, model: Served) -> None:
    neutral: Any = {"presence_penalty": 0, "frequency_penalty": 0, "best_of": 1, "logit_bias": {}, "suffix": ""}
    answer = server.openai().completions.create(
        model=model.run, prompt="the", max_tokens=1, user="me", n=1, stop=None, **neutral
    )
    assert len(answer.choices) == 1


def test_a_key_is_needed_where_one_is_set(config: Config) -> None:
    key = "0123456789abcdef"
    with running(config, key=key) as server:
        run = server.openai(key).models.list().data[0].id
        assert server.openai(key).completions.create(model=run, prompt="the").choices
        for wrong in ("other", key[:-1], key + "0", "é"):
            assert server.post("/v1/completions", {"prompt": "a"}, headers=_bearer(wrong)).status_code == 401
        with pytest.raises(openai.AuthenticationError, match="needs its API key"):
            server.openai("other").models.list()
        for path, status in {"/": 200, "/health": 200, "/openapi.json": 401, "/v1/models": 401, "/docs": 401}.items():
            assert server.get(path).status_code == status, path
        assert server.post("/api", {"prompts": ["a"]}).status_code == 401
        assert key not in server.log.getvalue()


def _bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


def test_the_example_of_the_page_runs(
    config: Config, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("0123456789abcdef\n")
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    example, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)  # the other is of conversations
    with running(config, key="0123456789abcdef") as server:
        exec(example.replace("http://localhost:5000", server.url))
    assert capsys.readouterr().out
