"""Megatron-LM's interface: its body, its answer, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.eval.server.running import Running


def test_an_answer_has_prompts_and_continuations(server: Running) -> None:
    prompts = ["the sea ", "a boat"]
    answer = server.post(
        "/api", {"prompts": prompts, "tokens_to_generate": 12, "top_k": 1, "logprobs": True, "no_log": True}
    )
    assert answer.status_code == 200
    found = answer.json()
    theirs = server.openai().completions.create(
        model=server.health()["run"], prompt=prompts, max_tokens=12, temperature=0, echo=True, logprobs=0
    )
    assert found["text"] == [choice.text for choice in theirs.choices]
    assert found["segments"] == [choice.logprobs.tokens for choice in theirs.choices]
    for values, ids, choice in zip(found["logprobs"], found["tokens"], theirs.choices, strict=True):
        assert len(values) == len(ids) - 1
        assert values == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
    put = {"prompts": prompts, "tokens_to_generate": 12, "top_k": 1, "temperature": 5, "random_seed": -1}
    again = server.put("/api", put).json()
    assert again["text"] == found["text"]
    assert again["logprobs"] is None


def test_a_prompt_can_begin_a_document(server: Running) -> None:
    body = {"tokens_to_generate": 4, "top_k": 1}
    end = server.post("/api", {**body, "prompts": [""]}).json()["tokens"][0][0]
    found = server.post("/api", {**body, "prompts": ["the", ""], "add_BOS": True, "stop_token": end}).json()
    assert [tokens[0] for tokens in found["tokens"]] == [end, end]
    theirs = server.openai().completions.create(
        model=server.health()["run"], prompt=[found["tokens"][0][:-4]], max_tokens=4, temperature=0
    )
    assert found["text"][0] == "the" + theirs.choices[0].text


def test_prompts_are_scored_without_new_tokens(server: Running) -> None:
    found = server.post("/api", {"prompts": ["the sea"], "tokens_to_generate": 0, "logprobs": True}).json()
    assert found["text"] == ["the sea"]
    assert len(found["logprobs"][0]) == len(found["tokens"][0]) - 1


def test_seeds_decide(server: Running) -> None:
    def texts(**how: Any) -> list[str]:
        body = {"prompts": ["the", "the"], "tokens_to_generate": 20, "temperature": 2.0, **how}
        found: list[str] = server.post("/api", body).json()["text"]
        return found

    assert texts(random_seed=3) == texts(random_seed=3)
    assert texts(random_seed=3)[1] == texts(random_seed=4)[0] != texts(random_seed=3)[0]
    assert texts() != texts()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompts": "the"}, "prompts: input should be a valid list"),
        ({"prompts": []}, "prompts: list should have at least 1 item"),
        ({"prompts": ["a"] * 129}, "prompts: list should have at most 128 items"),
        ({"prompts": ["a", 1]}, "prompts.1: input should be a valid string"),
        ({"tokens_to_generate": 0}, "tokens_to_generate: 0 leaves nothing to answer"),
        ({"tokens_to_generate": 129}, "tokens_to_generate: 129 is more than serve.max_length, which is 128"),
        ({"tokens_to_generate": True}, "tokens_to_generate: input should be a valid integer"),
        ({"top_p": 1.5}, "top_p: input should be less than or equal to 1 (it is 1.5)"),
        ({"top_k": 1.5}, "top_k: input should be a valid integer"),
        ({"random_seed": 2**63}, "random_seed: input should be less than"),
        ({"top_p_decay": 0.5}, "top_p_decay: 0.5 is not supported here; leave it out, or give 0"),
        ({"beam_width": 1}, "beam_width: 1 is not supported here; leave it out, or give null"),
        ({"stop_token": 7777}, "stop_token: 7777 is not supported here"),
        ({"prevent_newline_after_colon": True}, "prevent_newline_after_colon: True is not supported"),
        ({"max_len": 3}, "max_len: there is no such field"),
    ],
)
def test_refusals_name_the_field(server: Running, fields: dict[str, Any], says: str) -> None:
    answer = server.post("/api", {"prompts": ["the"], **fields})
    assert answer.status_code == 422
    found = answer.json()
    assert found["message"].startswith(says)
    assert found["field"] == next(iter(fields))


def test_line_ends_can_end_a_text(server: Running) -> None:
    body = {"prompts": ["the a sea"] * 12, "tokens_to_generate": 60, "temperature": 3.0, "random_seed": 1}
    full = server.post("/api", body).json()["text"]
    assert any("\n" in text for text in full)
    assert server.post("/api", {**body, "stop_on_eol": True}).json()["text"] == [text.split("\n")[0] for text in full]
    lines = server.post("/api", {**body, "stop_on_double_eol": True}).json()["text"]
    assert lines == [text.split("\n\n")[0] for text in full]
