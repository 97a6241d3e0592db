"""Sampling against transformers' processors of logits, closed forms and the distribution of many draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.common.errors import UserError
from pipeline.eval.generation.sampling import Sampling, draw, penalize, probabilities

VOCAB = 50

sampling = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, VOCAB + 5),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2),
)


def theirs(logits_V: Tensor, text: list[int], how: Sampling) -> Tensor:
    """What transformers draws from."""
    processors: list[Any] = []
    if how.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    processors.append(TemperatureLogitsWarper(how.temperature))
    if how.top_k is not None:
        processors.append(TopKLogitsWarper(how.top_k))
    if how.top_p is not None:
        processors.append(TopPLogitsWarper(how.top_p))
    if how.min_p is not None:
        processors.append(MinPLogitsWarper(how.min_p))
    scores = LogitsProcessorList(processors)(torch.tensor([text]), logits_V[None].double())
    return scores.softmax(-1)[0].float()


def is_near_a_border(logits_V: Tensor, text: list[int], how: Sampling) -> bool:
    """Whether rounding may decide if a token stays."""
    before = theirs(logits_V, text, Sampling(**{**vars(how), "top_p": None, "min_p": None})).double()
    sums = before.sort(descending=True).values.cumsum(0)
    after = theirs(logits_V, text, Sampling(**{**vars(how), "min_p": None})).double()
    near_p = how.top_p is not None and bool(((sums - how.top_p).abs() < 1e-5).any())
    return near_p or (how.min_p is not None and bool(((after / after.max() - how.min_p).abs() < 1e-5)[after > 0].any()))


@settings(deadline=None, max_examples=150)
@given(st.lists(sampling, min_size=1, max_size=6), st.integers(0, 2**31))
def test_rows_of_all_settings_equal_transformers(hows: list[Sampling], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(hows), VOCAB, generator=generator)
    texts = [torch.randint(VOCAB, (20,), generator=generator).tolist() for _ in hows]
    seen = torch.zeros(len(hows), VOCAB, dtype=torch.bool)
    for row, text in enumerate(texts):
        seen[row, text] = True
    found = probabilities(penalize(logits, seen, [how.repetition_penalty for how in hows]), hows)
    for row, (text, how) in enumerate(zip(texts, hows, strict=True)):
        if not is_near_a_border(logits[row], text, how):
            torch.testing.assert_close(found[row], theirs(logits[row], text, how), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.3, 0.1, 0.4, 0.2, 0]),
        ({"top_k": 2}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_k": 99}, [0.3, 0.1, 0.4, 0.2, 0]),
        # 0.4 + 0.3 reaches 0.65; 0.4 alone reaches 0.35 and does not reach 0.45.
        ({"top_p": 0.65}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_p": 0.35}, [0, 0, 1, 0, 0]),
        ({"top_p": 0.45}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_p": 1}, [0.3, 0.1, 0.4, 0.2, 0]),
        ({"top_p": 1e-15}, [0, 0, 1, 0, 0]),
        # Of the three that top-k leaves, 4/9 + 3/9 reach 0.7.
        ({"top_k": 3, "top_p": 0.7}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [3 / 9, 0, 4 / 9, 2 / 9, 0]),
        # Squares at half the temperature.
        ({"temperature": 0.5}, [9 / 30, 1 / 30, 16 / 30, 4 / 30, 0]),
        ({"temperature": 0.5, "top_k": 2}, [9 / 25, 0, 16 / 25, 0, 0]),
        ({"temperature": 1e-300}, [0, 0, 1, 0, 0]),
        ({"min_p": 0.45}, [3 / 9, 0, 4 / 9, 2 / 9, 0]),
        ({"min_p": 0.55}, [3 / 7, 0, 4 / 7, 0, 0]),
        ({"min_p": 1}, [0, 0, 1, 0, 0]),
        ({"min_p": 0.3, "temperature": 0.5}, [9 / 25, 0, 16 / 25, 0, 0]),
    ],
)
def test_cuts_have_their_closed_form(keys: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([[0.3, 0.1, 0.4, 0.2, 0.0]]).log()
    found = probabilities(logits, [Sampling(**keys)])
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float32))
    # In one batch with rows that need none of it, and with those that need all of the order.
    others = [Sampling(), Sampling(top_p=0.9), Sampling(top_k=1)]
    together = probabilities(logits.expand(4, -1), [others[0], Sampling(**keys), *others[1:]])
    torch.testing.assert_close(together[1], torch.tensor(expected, dtype=torch.float32))


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for how in (Sampling(top_k=1), Sampling(top_k=2), Sampling(top_p=0.1), Sampling(top_k=2, top_p=0.5)):
        torch.testing.assert_close(probabilities(logits, [how])[0], torch.tensor([0, 1 / 3, 1 / 3, 1 / 3, 0]))


def test_large_logits_and_small_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, -torch.inf]])
    assert probabilities(logits, [Sampling(temperature=1e-5)]).tolist() == [[1, 0, 0, 0]]


def test_the_penalty_makes_a_seen_token_less_probable_whatever_its_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 2.0, -torch.inf], [1.0, 1.0, 1.0, 1.0, 1.0]])
    seen = torch.tensor([[True, True, True, False, True], [True, False, False, False, False]])
    found = penalize(logits, seen, [2.0, 1.0])
    assert found.tolist() == [[1.0, -4.0, 0.0, 2.0, -torch.inf], [1.0] * 5]


def test_what_has_no_probability_is_never_drawn() -> None:
    shares = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(1000, -1)
    ids = draw(shares, chances(1000))
    assert set(ids.tolist()) == {1, 3}


@pytest.mark.slow
def test_draws_of_a_large_vocabulary_follow_the_distribution() -> None:
    """Chi-squared over a token of one half and 150,000 rare ones, by blocks."""
    vocabulary, draws = 150_000, 2_000
    shares = torch.full((1, vocabulary), 0.5 / (vocabulary - 1))
    shares[0, 0] = 0.5
    (chance,) = chances(1)
    ids = torch.tensor([draw(shares, [chance]).item() for _ in range(draws)])
    counts = torch.bincount(torch.where(ids == 0, 0, 1 + (ids - 1) * 5 // (vocabulary - 1)), minlength=6)
    expected = torch.tensor([1000.0] + [200.0] * 5)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: 0.001


def test_rounding_of_probabilities_hardly_ever_draws_another_token() -> None:
    """As by bf16, where other texts of a batch change the order of sums; cumulative sums would move most draws."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(1000, 500)
    rounded = logits + 0.003 * torch.randn_like(logits)
    same = draw(logits.softmax(-1), chances(1000)) == draw(rounded.softmax(-1), chances(1000))
    assert same.sum() >= 990


def chances(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


@pytest.mark.parametrize(
    "keys",
    [
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"stop": ("a", "")},
        {"logprobs": -1},
        {"prompt_logprobs": True},
    ],
)
def test_settings_that_mean_nothing(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"^{next(iter(keys))} is .*, but must be "):
        Sampling(**keys)
