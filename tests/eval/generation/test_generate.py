"""Generation against transformers, forward passes without a cache, and each text by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.eval.generation import batch as module
from pipeline.eval.generation.batch import GenerationBatch
from pipeline.eval.generation.generate import Continuation, encode_prompt, generate, stream
from pipeline.eval.generation.sampling import Sampling, probabilities
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from tests import tiers
from tests.train.huggingface.hf_mapping import randomize, twin
from tests.train.models import FAMILIES, VOCAB

PROMPT = "\u4e05\u4e11"  # ids 5 and 17 of `Letters`
LENGTHS = (10, 1, 23, 3, 39, 10, 2)
GREEDY = Sampling(temperature=0)


SHAPE = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_multiple": 20}
DELTA = {"key_heads": 2, "key_dim": 6, "value_dim": 5, "conv_size": 3}
OURS: dict[str, dict[str, Any]] = {
    "experts": {
        "experts": {
            **{"count": 12, "top_k": 3, "ffn_dim": 16, "score": "sigmoid", "score_bias": True, "scale": 1.5},
            **{"groups": 4, "top_groups": 2, "shared_ffn_dim": 24, "shared_gate": True},
        },
        "pattern": ["dense", "routed", "routed"],
        "kinds": {"dense": {}, "routed": {"mlp": "experts"}},
    },
    "mamba": {
        "pattern": ["state", "near", "state"],
        "kinds": {"state": {"mixer": "mamba2", "mamba2": {"heads": 4, "head_dim": 6, "state_dim": 5}}, "near": {}},
    },
    "delta": {
        "pattern": ["gated", "kimi", "far"],
        "kinds": {
            "gated": {"mixer": "gated_delta", "delta": {**DELTA, "value_heads": 4, "beta_max": 2}},
            "kimi": {"mixer": "kda", "delta": DELTA},
            "far": {},
        },
    },
}
"""Keys beside `SHAPE` of models for which `FAMILIES` has none."""


class Letters:
    """A token is a letter: id i is chr(i + 0x4E00), and `end_of_document` is whatever the test wants."""

    def __init__(self, end_of_document: int = -1) -> None:
        self.end_of_document = end_of_document

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 0x4E00 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token + 0x4E00) for token in ids)


def decoder(family: str, max_positions: int = 64) -> Decoder:
    config = ModelConfig.model_validate(SHAPE | OURS[family]) if family in OURS else FAMILIES[family].config
    model = Decoder(decoder_spec(config, VOCAB, max_positions))
    randomize(model, seed=3)
    for number, (name, buffer) in enumerate(model.named_buffers()):
        if name.endswith("score_bias"):
            buffer.normal_(std=0.2, generator=torch.Generator().manual_seed(number))
    # One position at a time, and chunks of them, round a state otherwise: in fp32 by more than what is compared to.
    return model.double() if family in ("mamba", "delta") else model


def draw_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(VOCAB) for _ in range(length)] for length in lengths]


def ids(continuation: Continuation) -> list[int]:
    return [token.id for token in continuation.tokens]


def mixed_settings() -> list[Sampling]:
    """One for each of `LENGTHS`."""
    return [
        Sampling(max_tokens=20, seed=1),
        Sampling(max_tokens=9, temperature=0),
        Sampling(max_tokens=20, temperature=2, top_k=5, seed=2),
        Sampling(max_tokens=30, top_p=0.8, min_p=0.05, seed=3, logprobs=2),
        Sampling(max_tokens=20, temperature=0.7, repetition_penalty=1.5, seed=4),
        Sampling(max_tokens=1, seed=5, logprobs=0, prompt_logprobs=True),
        Sampling(max_tokens=25, temperature=0, repetition_penalty=1.2),
    ]


@pytest.mark.first(3)
@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("family", tiers.first(2, FAMILIES, rest="guard"))
def test_greedy_equals_transformers(family: str, penalty: float) -> None:
    """Token for token, prompts of unequal length together, three at a time."""
    theirs = FAMILIES[family].theirs()
    model = twin(theirs, FAMILIES[family].config, VOCAB)
    tokenizer = Letters(end_of_document=VOCAB - 1)
    prompts = draw_prompts()
    settings = [Sampling(temperature=0, max_tokens=25 - n, repetition_penalty=penalty) for n in range(len(prompts))]
    found = generate(model, tokenizer, prompts, settings, slots=3)
    lengths = []
    for prompt, how, continuation in zip(prompts, settings, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=how.max_tokens,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=tokenizer.end_of_document,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        ends = expected[-1] == tokenizer.end_of_document
        expected = expected[:-1] if ends else expected
        assert ids(continuation) == expected
        assert continuation.text == tokenizer.decode(expected)
        assert continuation.finish == ("stop" if ends else "length")
        lengths.append(len(expected))
    assert max(lengths) > 15


@pytest.mark.first(5)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen3", *OURS])
@pytest.mark.parametrize("slots", tiers.first(1, [2, 7], rest="guard"))
def test_a_text_does_not_depend_on_the_others(family: str, slots: int) -> None:
    model, tokenizer = decoder(family), Letters(end_of_document=11)
    prompts, settings = draw_prompts(), mixed_settings()
    together = generate(model, tokenizer, prompts, settings, slots=slots)
    for prompt, how, found in zip(prompts, settings, together, strict=True):
        (alone,) = generate(model, tokenizer, [prompt], how)
        assert (found.text, ids(found), found.finish) == (alone.text, ids(alone), alone.finish)
        one, other = ([token.logprob for token in each.tokens + each.prompt_tokens] for each in (found, alone))
        assert one == pytest.approx(other, abs=1e-4) if how.logprobs is not None else not any(one)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3", *OURS])
def test_reading_in_parts_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = decoder(family), Letters()
    prompts, settings = draw_prompts(), mixed_settings()
    whole = generate(model, tokenizer, prompts, settings, slots=4)
    monkeypatch.setattr(module, "_READ_AT_ONCE", 8)
    monkeypatch.setattr(module, "_SCORED_AT_ONCE", 3)
    monkeypatch.setattr(module, "_SHORT", 2)
    parts = generate(model, tokenizer, prompts, settings, slots=4)
    assert [ids(each) for each in parts] == [ids(each) for each in whole]
    scores = [[token.logprob for token in each[5].prompt_tokens] for each in (parts, whole)]
    assert scores[0][0] is scores[1][0] is None and len(scores[0]) == LENGTHS[5]
    assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3", *OURS])
def test_logprobs_are_those_of_the_model(family: str) -> None:
    """Before temperature, penalty and cuts, against one forward pass over prompt and new tokens."""
    model, tokenizer = decoder(family), Letters()
    prompts = draw_prompts()
    how = Sampling(
        max_tokens=12, temperature=0.5, top_k=8, repetition_penalty=1.3, logprobs=4, prompt_logprobs=True, seed=8
    )
    for prompt, found in zip(prompts, generate(model, tokenizer, prompts, how), strict=True):
        assert [token.id for token in found.prompt_tokens] == prompt
        first, *scored = [*found.prompt_tokens, *found.tokens]
        assert first.logprob is None and first.top == ()
        tokens = torch.tensor([[*prompt, *ids(found)]])
        with torch.no_grad():
            expected = model(tokens, Context())[0, :-1].log_softmax(-1)
        assert len(scored) == len(expected) == len(prompt) + 11
        for token, row in zip(scored, expected, strict=True):
            assert token.text == tokenizer.decode([token.id])
            assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
            best = row.topk(4)
            assert [place for place, _, _ in token.top] == best.indices.tolist()
            assert [text for _, text, _ in token.top] == [tokenizer.decode([i]) for i in best.indices.tolist()]
            assert [value for _, _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_more_logprobs_than_there_are_tokens() -> None:
    (found,) = generate(decoder("llama"), Letters(), [PROMPT], Sampling(max_tokens=2, logprobs=1000))
    assert sorted(place for place, _, _ in found.tokens[1].top) == list(range(VOCAB))


def test_reading_alone_is_enough_for_the_scores_of_a_prompt() -> None:
    how = Sampling(max_tokens=0, logprobs=1, prompt_logprobs=True)
    found = generate(decoder("llama"), Letters(), [[4, 5, 6], [7]], how)
    assert [(each.text, each.tokens, each.finish) for each in found] == [("", (), "length")] * 2
    assert [[token.logprob is None for token in each.prompt_tokens] for each in found] == [[True, False, False], [True]]


@pytest.mark.parametrize("family", tiers.first(1, ["llama", "mamba", "delta"], rest="guard"))
def test_texts_come_and_go_at_any_time(family: str) -> None:
    """Some are dropped while they wait, are read in parts, or run; what others become is as if they were alone."""
    model, tokenizer = decoder(family), Letters(end_of_document=11)
    chance = random.Random(5)
    prompts = draw_prompts([chance.randint(1, 40) for _ in range(40)])
    hows = [Sampling(max_tokens=chance.randint(0, 15), seed=n, temperature=n % 3) for n in range(40)]
    batch = GenerationBatch(model, tokenizer, slots=4, max_length=60)
    running: dict[int, int] = {}
    texts: dict[int, str] = {}
    dropped = set[int]()
    todo = list(range(40))
    while todo or running:
        while todo and batch.free and chance.random() < 0.7:
            number = todo.pop()
            running[batch.start(prompts[number], hows[number])] = number
        if running and chance.random() < 0.15:
            key = chance.choice(list(running))
            dropped.add(running.pop(key))
            batch.drop(key)
        assert batch.free == 4 - len(running)
        for key, piece in batch.step():
            texts[running[key]] = texts.get(running[key], "") + piece.text
            if piece.finish:
                del running[key]
                batch.drop(key)
    assert batch.step() == [] and len(dropped) > 3
    for number in set(range(40)) - dropped:
        (alone,) = generate(model, tokenizer, [prompts[number]], hows[number])
        assert texts[number] == alone.text


def test_ends_with_the_document() -> None:
    model = decoder("llama")
    (whole,) = generate(model, Letters(), [PROMPT], Sampling(temperature=0, max_tokens=20))
    end = ids(whole)[-1]
    at = ids(whole).index(end)
    (shorter,) = generate(model, Letters(end), [PROMPT], Sampling(temperature=0, max_tokens=20, logprobs=1))
    assert (ids(shorter), shorter.text, shorter.finish) == (ids(whole)[:at], whole.text[:at], "stop")
    how = Sampling(temperature=0, max_tokens=20, ignore_end=True)
    assert generate(model, Letters(end), [PROMPT], how) == [whole]


def test_an_empty_prompt_begins_a_document() -> None:
    model, tokenizer = decoder("llama"), Letters(end_of_document=30)
    assert encode_prompt(tokenizer, "") == [30]
    one, other = generate(model, tokenizer, ["", [30]], GREEDY)
    assert one == other
    with pytest.raises(UserError, match="not UTF-8 text"):
        generate(model, tokenizer, ["\udcff"], GREEDY)


def test_draws_are_decided_by_the_seed_alone() -> None:
    model = decoder("qwen3")

    def text(**keys: Any) -> str:
        return generate(model, Letters(), [PROMPT], Sampling(max_tokens=30, temperature=2, **keys))[0].text

    torch.manual_seed(1)
    first = text(seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert text(seed=5) == first != text(seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert text(seed=5, top_k=1) == text(seed=6, top_k=1) == text(seed=7, top_p=1e-9) == text(min_p=1)


def test_draws_follow_the_distribution() -> None:
    """The first token over many seeds, against the probabilities of the logits."""
    model, tokenizer, draws = decoder("llama"), Letters(), 600
    how = [Sampling(max_tokens=1, top_k=4, seed=seed) for seed in range(draws)]
    counts = torch.zeros(VOCAB)
    for each in generate(model, tokenizer, [PROMPT] * draws, how, slots=100):
        counts[ids(each)[0]] += 1
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(PROMPT)]), Context())[0, -1:, :VOCAB]
    expected = draws * probabilities(logits, how[:1])[0]
    assert not counts[expected == 0].any() and (expected > 0).sum() == 4
    chi_squared = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert chi_squared < 16.3  # 3 degrees of freedom: 0.001


def test_the_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = decoder("llama")
    assert model.spec.vocab_padded > VOCAB
    how = [Sampling(max_tokens=30, temperature=1000, seed=seed) for seed in range(20)]
    taken = {token for each in generate(model, Letters(), [PROMPT] * 20, how, slots=20) for token in ids(each)}
    assert max(taken) < VOCAB and len(taken) > 90


def test_learned_positions_end_the_text() -> None:
    model, tokenizer = decoder("gpt2", max_positions=16), Letters()
    prompts = draw_prompts([10, 15, 3])
    found = generate(model, tokenizer, prompts, Sampling(max_tokens=100))
    assert [(len(each.tokens), each.finish) for each in found] == [(6, "length"), (1, "length"), (13, "length")]
    with pytest.raises(UserError, match=r"16 tokens, but model\.max_positions is 16; give a prompt of at most 15"):
        generate(model, tokenizer, [list(range(16))], GREEDY)


def test_what_a_prompt_must_be() -> None:
    batch = GenerationBatch(decoder("llama"), Letters(), slots=2, max_length=5)
    with pytest.raises(UserError, match=r"has 5 tokens, but there are 5 positions.*at most 4 tokens"):
        batch.start([1] * 5, GREEDY)
    with pytest.raises(UserError, match="no tokens; give one or more"):
        batch.start([], GREEDY)
    for bad in (-1, VOCAB):  # rows of padding are no tokens
        with pytest.raises(UserError, match=f"has token {bad}; give one or more tokens from 0 to 96"):
            batch.start([1, bad], GREEDY)
    batch.start([1] * 4, Sampling(max_tokens=50))
    assert batch.free == 1
    assert [(len(piece.tokens), piece.finish) for _, piece in batch.step()] == [(1, "length")]


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_an_error(temperature: float) -> None:
    model = decoder("llama")
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite: its training diverged; try an earlier --step"):
        generate(model, Letters(), [PROMPT], Sampling(temperature=temperature))


def test_stop_strings_end_a_text_and_are_no_part_of_it() -> None:
    model, tokenizer = decoder("llama"), Letters()
    (whole,) = generate(model, tokenizer, [PROMPT], Sampling(temperature=0, max_tokens=20))
    stop = whole.text[6:9]
    at = whole.text.index(stop)
    how = Sampling(temperature=0, max_tokens=20, stop=("never", stop))
    (found,) = generate(model, tokenizer, [PROMPT], how)
    assert (found.text, found.finish) == (whole.text[:at], "stop")
    assert ids(found) == ids(whole)[: at + 3]  # those that were taken
    pieces = list(stream(model, tokenizer, PROMPT, how))
    assert "".join(piece.text for piece in pieces) == found.text
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    # What began like a stop string is part of the text when another one follows, or none.
    how = Sampling(temperature=0, max_tokens=at + 2, stop=(stop,))
    (cut,) = generate(model, tokenizer, [PROMPT], how)
    assert (cut.text, cut.finish) == (whole.text[: at + 2], "length")


def test_pieces_come_token_by_token() -> None:
    pieces = list(stream(decoder("llama"), Letters(), PROMPT, Sampling(max_tokens=9)))
    assert [len(piece.text) for piece in pieces] == [len(piece.tokens) for piece in pieces] == [1] * 9


def test_inference_mode_does_not_leak_between_pieces() -> None:
    model = Decoder(decoder_spec(ModelConfig(layers=1, dim=16, heads=2), VOCAB, 0))
    for _ in stream(model, Letters(), PROMPT, Sampling(max_tokens=2)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("family", [*FAMILIES, *OURS])
def test_states_of_unequal_rows_equal_whole_forward_passes(family: str) -> None:
    """Rows that are read with padding, join, leave and go on in pieces of several tokens."""
    model = decoder(family)
    rows = {n: torch.tensor(each) for n, each in enumerate(draw_prompts([40, 33, 50, 28]))}
    with torch.no_grad():
        whole = {n: model(each[None], Context())[0] for n, each in rows.items()}
    states, order, at = model.new_states(0, 64), list[int](), dict.fromkeys(rows, 0)

    def go_on(these: Any, numbers: list[int], counts: list[int]) -> None:
        longest = max(counts)
        padded = torch.zeros(len(numbers), longest, dtype=torch.long)
        for row, (n, count) in enumerate(zip(numbers, counts, strict=True)):
            padded[row, :count] = rows[n][at[n] : at[n] + count]
        with torch.no_grad():
            logits: Tensor = model(padded, Context(states=these, counts=counts))
        for row, (n, count) in enumerate(zip(numbers, counts, strict=True)):
            torch.testing.assert_close(logits[row, :count], whole[n][at[n] : at[n] + count], rtol=1e-4, atol=1e-4)
            at[n] += count

    for numbers, counts in (([0, 1], [13, 5]), ([2, 3], [1, 20])):
        fresh = model.new_states(2, 64)
        go_on(fresh, numbers, counts)
        states.join(fresh)
        order += numbers
    go_on(states, order, [1, 1, 1, 1])
    go_on(states, order, [3, 1, 5, 2])
    states.remove(1)
    order[1] = order.pop()
    for _ in range(5):
        go_on(states, order, [1, 1, 1])
    assert states.lengths == [at[n] for n in order]
    assert all(one < other for one, other in pairwise(sorted(set(states.lengths))))
