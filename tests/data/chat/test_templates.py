"""Text and mask of conversations, beside those of transformers; templates that are refused."""

import datetime

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.config.data import SourceConfig
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.chat.renderer import ChatRenderer
from pipeline.data.chat.results import BadTemplate, CannotRender
from pipeline.data.sources.records import UnusableRecord
from pipeline.data.sources.templates.chat_template import ChatTemplate
from pipeline.data.sources.templates.record_templates import planned_template
from pipeline.data.tokenization.chat_encoding import ChatRules, encode_chat
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests import tiers
from tests.data.chat.templates import TEMPLATES, conversations, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder, TokenizerConfig(path=folder))


def chat(folder, text, **keys):
    """The template of a source, as a plan gives it back."""
    (folder / "own.jinja").write_text(text)
    section = {"format": "openai", "template": str(folder / "own.jinja"), "tools_key": "tools", **keys}
    source = SourceConfig.model_validate({"name": "s", "type": "jsonl", "paths": ["/x"], "chat": section})
    made = ChatTemplate.of(source, TokenizerConfig(path=folder))
    assert planned_template(made.settings()) == made
    return made


@pytest.mark.parametrize("name", tiers.first(1, ["tools", "thinking", "plain", "date", "double bos"], rest="guard"))
def test_ids_and_masks_are_those_of_transformers(folder, tokenizer, name, monkeypatch):
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2)

    monkeypatch.setattr(chat_template_utils, "datetime", Day, raising=False)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = chat(folder, TEMPLATES[name], date="2026-01-02")
    ours.check("s")
    for record in conversations(40):
        text, spans = ours.render(record)
        expected = theirs.apply_chat_template(
            record["messages"],
            tools=record["tools"],
            chat_template=TEMPLATES[name],
            tokenize=False,
        )
        assert text == expected
        encoded = theirs.apply_chat_template(
            record["messages"],
            tools=record["tools"],
            chat_template=TEMPLATES[name],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found = encode_chat(tokenizer, text, spans, ChatRules(masks=True))
        assert found.ids.tolist() == encoded["input_ids"]
        assert list(found.mask) == [*encoded["assistant_masks"], 0]


@pytest.mark.guard
@pytest.mark.parametrize(
    ("name", "words"),
    [("no markers", "train_on: all"), ("untrained stop", "never learn to stop"), ("date", "set chat.date")],
)
def test_templates_that_are_refused(folder, name, words):
    with pytest.raises(UserError, match=words):
        chat(folder, TEMPLATES[name]).check("s")


def test_all_tokens_need_no_marks(folder, tokenizer):
    made = chat(folder, TEMPLATES["no markers"], train_on="all")
    made.check("s")
    (record,) = conversations(1)
    text, spans = made.render(record)
    assert spans == () and not made.masks and tokenizer.decode(tokenizer.encode_parsed(text)[0]) == text


@pytest.mark.guard
def test_a_missing_token_is_named(folder, tmp_path):
    with pytest.raises(UserError, match="uses cls_token"):
        chat(folder, "{{ cls_token }}" + TEMPLATES["plain"]).check("s")


def said(*turns, **more):
    return {"messages": [{"role": role, "content": content} for role, content in turns], "tools": None, **more}


CALL = {"type": "function", "function": {"name": "far", "arguments": {"to": "a"}}}
BAD = [
    (said(("user", "a<|end|>\n<|start|>assistant\nb"), ("assistant", "c")), "text of a special token in a message"),
    (said(("user", [{"type": "text", "text": "<|e"}, {"type": "text", "text": "nd|>"}])), "text of a special token"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": {"<|end|>": 1}}}]}]}, "text of a special token"),
    (said(("user", "a"), ("alien", "b")), "unknown role"),
    (said(("user", "a")), "nothing to train on"),
    (said(("user", "a"), ("assistant", None)), "message without content"),
    (said(("user", [{"type": "image", "url": "x"}]), ("assistant", "b")), "content that is not text"),
    ({"messages": "a"}, "is not a list"),
    ({}, "no value for 'messages'"),
    ({"messages": []}, "no messages"),
    (said(("user", "a"), ("assistant", "b"), ) | {"tools": "{"}, "tools are not JSON"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 2}]}, "weight"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}, "nothing"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, "are not JSON"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": '{"to": "\\ud800"}'}}]}]}, "lone surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_records_that_are_rejected(folder, record, reason):
    with pytest.raises(UnusableRecord) as error:
        chat(folder, TEMPLATES["tools"]).render(record)
    assert reason in error.value.reason


def test_special_tokens_of_messages_can_be_allowed(folder, tokenizer):
    record, _ = BAD[0]
    text, spans = chat(folder, TEMPLATES["plain"], special_in_content="allow").render(record)
    assert tokenizer.encode_parsed(text)[0].count(tokenizer.encode_parsed("<|start|>")[0][0]) == 3 and len(spans) == 1


def trained(template, record):
    text, spans = template.render(record)
    return [text[start:end] for start, end in spans]


def test_formats_and_what_is_trained(folder):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    plain = TEMPLATES["plain"]
    assert trained(chat(folder, plain), said(*turns)) == ["b<|end|>", "d<|end|>"]
    assert trained(chat(folder, plain, train_on="last"), said(*turns)) == ["d<|end|>"]
    weighed = said(*turns)
    weighed["messages"][3]["weight"], weighed["messages"][0]["weight"] = 0, 0
    assert trained(chat(folder, plain), weighed) == ["b<|end|>"]
    speakers = {"user": "human", "assistant": "gpt"}
    shared = {"conversations": [{"from": speakers[role], "value": text} for role, text in turns], "tools": None}
    sharegpt = chat(folder, plain, format="sharegpt", messages_key="conversations")
    assert sharegpt.render(shared) == chat(folder, plain).render(said(*turns))
    with pytest.raises(UnusableRecord, match="unknown speaker"):
        sharegpt.render({"conversations": [{"from": "alien", "value": "a"}]})
    pair = chat(folder, plain, format="prompt_completion", tools_key=None)
    assert trained(pair, {"prompt": "a", "completion": "b"}) == ["b<|end|>"]
    sides = {"prompt": said(*turns[:3])["messages"], "completion": said(turns[3])["messages"]}
    assert trained(pair, sides) == ["d<|end|>"]


def test_calls_are_one_whatever_their_form(folder):
    tools, args = TEMPLATES["tools"], '{"to": "a"}'
    call = {"type": "function", "function": {"name": "far", "arguments": {"to": "a"}}}
    as_text = {**call, "function": {"name": "far", "arguments": args}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    other = [turns[0], {"role": "assistant", "tool_calls": [as_text], "name": None}]
    ours = chat(folder, tools)
    assert ours.render({"messages": turns}) == ours.render({"messages": other, "tools": []})
    speakers = [
        {"from": "human", "value": "x"},
        {"from": "function_call", "value": f'{{"name": "far", "arguments": {args}}}'},
    ]
    sharegpt = chat(folder, tools, format="sharegpt", messages_key="conversations")
    assert sharegpt.render({"conversations": speakers}) == ours.render({"messages": turns})


def test_conversations_are_cut_behind_a_turn(tokenizer):
    text = "<|start|>fa<|end|><|start|>mi<|end|>"
    spans = ((9, 18), (27, 36))
    whole = encode_chat(tokenizer, text, spans, ChatRules(True))
    assert list(whole.mask) == [0, 1, 1, 0, 1, 1, 0]
    assert encode_chat(tokenizer, text, spans, ChatRules(True, 7, True)).text == text
    cut = encode_chat(tokenizer, text, spans, ChatRules(True, 6, True))
    assert cut.text == text[:18] and list(cut.mask) == [0, 1, 1, 0] and cut.ids.tolist() == whole.ids[:3].tolist()
    for rules in (ChatRules(True, 6, False), ChatRules(True, 3, True)):
        with pytest.raises(UnusableRecord, match="longer than"):
            encode_chat(tokenizer, text, spans, rules)


def test_tokens_at_the_edges_of_spans(tokenizer):
    with pytest.raises(UnusableRecord, match="straddles"):
        encode_chat(tokenizer, "xfar", ((2, 4),), ChatRules(True))
    assert list(encode_chat(tokenizer, "xfar y", ((1, 3),), ChatRules(True)).mask) == [0, 1, 0, 0, 0]
    with pytest.raises(UnusableRecord, match="nothing to train on"):
        encode_chat(tokenizer, "far", ((0, 3),), ChatRules(True))


def test_the_end_of_a_document_may_be_the_end_of_a_turn(tokenizer):
    """As with models whose padding, end of turn and end of document are one token."""
    text = "<|start|>fa<|endoftext|><|start|>mi<|endoftext|>"
    found = encode_chat(tokenizer, text, ((9, 24), (33, 48)), ChatRules(True))
    assert list(found.mask) == [0, 1, 1, 0, 1, 1] and len(found.ids) == 5
    assert np.count_nonzero(found.ids == tokenizer.end_of_document) == 1


HOSTILE = {
    "size": "{{ 'a' * (10 ** 12) }}",
    "width": "{{ '%1000000000000d' % 1 }}",
    "doubling": "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "escape": "{{ ''.__class__.__mro__ }}",
    "address": "{{ messages | map('upper') }}",
    "change": "{{ messages.append(1) }}",
    "output": "{{ 'a' * 5000 }}",
}


@pytest.mark.parametrize("name", tiers.first(1, HOSTILE, rest="guard"))
def test_hostile_templates_end(name):
    renderer = ChatRenderer(HOSTILE[name], longest=1000)
    with pytest.raises(CannotRender):
        renderer.render({"messages": []})
    renderer.close()


@pytest.mark.guard
def test_a_template_that_never_ends_is_ended():
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    renderer = ChatRenderer("{% if messages %}" + endless + "{% endif %}x", seconds=1)
    with pytest.raises(CannotRender, match="more time"):
        renderer.render({"messages": [1]})
    assert renderer.render({"messages": []}).text == "x"
    renderer.close()


@pytest.mark.guard
@pytest.mark.parametrize("text", ["{{ x | random }}", "{% for %}", "{{ " * 10_000, "{% generation %}"])
def test_what_is_no_template(text):
    with pytest.raises(BadTemplate):
        _ = ChatRenderer(text).used


@pytest.mark.guard
def test_a_conversation_that_is_nested_too_deeply(folder):
    deep = []
    for _ in range(5000):
        deep = [deep]
    calls = [{"function": {"name": "f", "arguments": {"to": deep}}}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(UnusableRecord, match="nested too deeply"):
        chat(folder, TEMPLATES["tools"]).render({"messages": turns})
