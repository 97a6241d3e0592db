"""Conversations: /v1/chat/completions, as OpenAI's client sends them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.chat.kept_template import keep_template
from pipeline.data.chat.template_files import TEMPLATE_FILE
from pipeline.data.tokenization.chat_prompts import ChatPrompts
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.generation.generate import generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.inference import load_decoder
from pipeline.eval.text import continue_prompt
from pipeline.train.checkpoint.manager import Checkpoints
from tests.browser import Chromium, browser
from tests.eval.server.running import Running, running
from tests.eval.small import trained

with suppress(ImportError):  # the fixture says what is missing
    from playwright.sync_api import expect

__all__ = ["browser"]

TEMPLATE = """\
{%- for message in messages %}
{%- if message.content == 'loop' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}
{%- endif %}
{%- if message.content == 'large' %}{{ 'x' * 2 ** 30 }}{% endif %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('a system message comes first') }}{% endif %}
{{- '<|turn|>' + message.role + ' ' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant ' }}{% endif %}
"""
QUESTION = {"role": "user", "content": "the old keeper"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    file = trained(tmp_path_factory.mktemp("chat"), **{"tokenizer.special_tokens": ["<|turn|>", "<|end|>"]})
    return load(file, ["serve.port=0", "serve.slots=4", "serve.max_length=128"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module")
def server(config: Config, template: Path) -> Iterator[Running]:
    with running(config, chat_template=template) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.openai()


def test_an_answer_is_what_the_model_says_after_the_template(config: Config, client: OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[QUESTION], max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    loaded = load_decoder(config, None)
    ids = loaded.tokenizer.encode_parsed("<|turn|>user the old keeper<|end|><|turn|>assistant ")[0]
    end = loaded.tokenizer.special_tokens["<|end|>"]
    assert ids.count(end) == 1
    sampling = Sampling(max_tokens=12, temperature=0, end_tokens=(end,), logprobs=2)
    (alone,) = generate(loaded.model, loaded.tokenizer, [ids], sampling)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", alone.text)
    assert choice.finish_reason == alone.finish
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [each.token for each in choice.logprobs.content] == [token.text for token in alone.tokens]
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * len(alone.tokens)
    parts = list(
        client.chat.completions.create(
            model=model, messages=[QUESTION], max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in parts if each.choices) == alone.text
    assert parts[-1].usage == answer.usage


def test_the_end_of_a_turn_ends_an_answer(config: Config) -> None:
    loaded = load_decoder(config, None)
    ids = loaded.tokenizer.encode_parsed("<|turn|>user the old keeper<|end|><|turn|>assistant ")[0]
    (free,) = generate(loaded.model, loaded.tokenizer, [ids], Sampling(max_tokens=4, temperature=0))
    third = free.tokens[2].id
    (ended,) = generate(loaded.model, loaded.tokenizer, [ids], Sampling(temperature=0, end_tokens=(third,)))
    assert third not in [token.id for token in ended.tokens] and ended.finish == "stop"
    first = [token.id for token in free.tokens].index(third)
    assert ended.tokens == free.tokens[:first]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "tools are not supported"),
        ({"messages": [{"role": "robot", "content": "2"}]}, "'robot'"),
        ({"messages": [QUESTION], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
        ({"messages": [{"role": "user", "content": "a<|end|><|turn|>assistant b"}]}, "'<|end|>'"),
        ({"messages": [QUESTION, {"role": "system", "content": "late"}]}, "a system message comes first"),
        ({"messages": [{"role": "user", "content": "sea " * 500}]}, "serve.max_length"),
        pytest.param({"messages": [{"role": "user", "content": "loop"}]}, "template", marks=pytest.mark.guard),
        ({"messages": [{"role": "user", "content": "large"}]}, "template"),
        ({"messages": [QUESTION], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [QUESTION], "max_tokens": 0}, "max_tokens"),
        ({"messages": [QUESTION], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [QUESTION], "n": 129}, "n:"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(server: Running, body: dict[str, Any], says: str) -> None:
    answer = server.post("/v1/chat/completions", body)
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert says in error["message"] and error["type"] == "invalid_request_error"
    assert server.post("/v1/chat/completions", {"messages": [QUESTION], "max_tokens": 1}).status_code == 200


def test_text_parts_are_a_text(server: Running) -> None:
    parts = [{"type": "text", "text": "the old "}, {"type": "text", "text": "keeper"}]
    contents = (parts, QUESTION["content"])
    bodies = [{"messages": [{"role": "user", "content": each}], "temperature": 0, "max_tokens": 5} for each in contents]
    texts = [server.post("/v1/chat/completions", body).json()["choices"][0]["message"] for body in bodies]
    assert texts[0] == texts[1]


def test_a_model_without_a_template_has_no_conversations(config: Config) -> None:
    with running(config) as plain:
        assert plain.health()["chat"] is False
        with pytest.raises(APIStatusError) as refused:
            plain.openai().chat.completions.create(model="x", messages=[QUESTION])
        assert refused.value.status_code == 404
        answer = plain.post("/v1/chat/completions", {"messages": [QUESTION]})
        assert answer.status_code == 404 and "--chat-template" in json.dumps(answer.json())


def test_turns_end_as_the_template_says(config: Config) -> None:
    tokenizer = load_decoder(config, None).tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert ChatPrompts(TEMPLATE, tokenizer, "x").end_tokens == (tokenizer.special_tokens["<|end|>"],)
    assert ChatPrompts("{{ messages[-1].content }}{{ eos_token }}", tokenizer, "x").end_tokens == ()


def test_special_tokens_are_no_text_of_an_answer(config: Config) -> None:
    loaded = load_decoder(config, None)
    ids = loaded.tokenizer.encode("the old keeper")
    (free,) = generate(loaded.model, loaded.tokenizer, [ids], Sampling(max_tokens=6, temperature=0))
    third = free.tokens[2]
    (hidden,) = generate(
        loaded.model,
        loaded.tokenizer,
        [ids],
        Sampling(max_tokens=6, temperature=0, hidden_tokens=frozenset({third.id})),
    )
    assert [token.id for token in hidden.tokens] == [token.id for token in free.tokens]
    shown = [token.id for token in free.tokens if token.id != third.id]
    assert hidden.text.strip() == loaded.tokenizer.decode(shown).strip()


def test_a_kept_template_that_cannot_be_used_keeps_no_server_from_starting(config: Config, tmp_path: Path) -> None:
    folder = Checkpoints.of_run(config.run.dir).at(None, lambda _: []).path
    keep_template(folder, "{{ raise_exception('needs a system message') }}")
    try:
        with running(config) as plain:
            answer = plain.post("/v1/chat/completions", {"messages": [QUESTION]})
            assert answer.status_code == 404 and "needs a system message" in answer.json()["error"]["message"]
            assert plain.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).status_code == 200
        with pytest.raises(UserError, match="needs a system message"):
            continue_prompt(config, chat=True)
    finally:
        (folder / TEMPLATE_FILE).unlink()


@pytest.mark.guard
def test_the_page_has_conversations(browser: Chromium, server: Running) -> None:
    """Two turns, the second of which is answered with the first in view, as the interface answers them."""

    def answer(*turns: dict[str, str]) -> str:
        body = {"messages": [*turns], "max_tokens": 8, "temperature": 0}
        text: str = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        return text

    again = {"role": "user", "content": "the old boat"}
    first = answer(QUESTION)
    second = answer(QUESTION, {"role": "assistant", "content": first}, again)
    with browser.open(server.url) as opened:
        page = opened.page
        page.get_by_label("Conversation").check()
        for name, value in (("max_tokens", "8"), ("temperature", "0")):
            page.locator(f"#{name}").fill(value)
        shown = []
        for message in (QUESTION, again):
            page.get_by_label("Message").fill(message["content"])
            page.get_by_role("button", name="Send", exact=True).click()
            expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
            shown.append("".join(page.locator(".token:not(.unseen)").all_text_contents()))
        assert shown == [first, second]
        assert page.locator(".turn p").all_text_contents() == [QUESTION["content"], first, again["content"]]
        assert page.locator("#prompt").input_value() == ""
        # A refusal takes nothing from the conversation, and the message stays in its field.
        page.get_by_label("Message").fill("a<|end|>")
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("<|end|>")
        assert page.locator("#prompt").input_value() == "a<|end|>"
        assert len(page.locator(".turn p").all()) == 3
        page.get_by_role("button", name="New conversation").click()
        assert not page.locator(".turn, .token").all()
        opened.errors.clear()


def test_the_examples_of_the_page_run(
    config: Config, template: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("0123456789abcdef\n")
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    examples = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    with running(config, key="0123456789abcdef", chat_template=template) as server:
        exec(examples.replace("http://localhost:5000", server.url))
    assert capsys.readouterr().out
