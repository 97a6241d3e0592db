"""Scores and greedy continuations against one plain forward pass a request, on one process and on every layout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeline.common.errors import MachineError, UserError
from pipeline.config.load import load
from pipeline.eval import scoring
from pipeline.eval.continuations import refuse_continuations, write_continuations
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.generation.generate import generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.scoring import Prompt, Request, Scored, continue_greedily, rolling, score, truncated
from pipeline.train.model.decoder import Context
from tests.eval import small
from tests.train.distributed.ranks import RankFailed, Ranks


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.trained(tmp_path_factory.mktemp("scoring"))


@pytest.fixture(scope="module")
def engine(file: Path) -> GenerationEngine:
    return small.engine_alone(file)


def requests_of(vocabulary: int, longest: int) -> list[Request]:
    """Of all lengths, several with the same input, in no order."""
    chance = random.Random(3)
    made = []
    for _ in range(11):
        tokens = [chance.randrange(vocabulary) for _ in range(chance.randint(2, longest + 1))]
        made.append(Request(tokens, chance.randint(1, len(tokens) - 1)))
        if chance.random() < 0.5:
            made.append(Request([*tokens[:-1], chance.randrange(vocabulary)], chance.randint(1, len(tokens) - 1)))
    made.append(Request([1] * (longest + 1), longest))
    chance.shuffle(made)
    return made


def prompts_of(vocabulary: int) -> list[Prompt]:
    chance = random.Random(4)
    return [
        Prompt([chance.randrange(vocabulary) for _ in range(chance.randint(1, 24))], chance.randint(1, 9))
        for _ in range(7)
    ]


def by_hand(engine: GenerationEngine, request: Request) -> Scored:
    logits = engine.model.whole(torch.tensor([request.tokens[:-1]]), Context())[0].double()
    targets = torch.tensor(request.tokens[1:])
    chosen = slice(len(targets) - request.scored, None)
    log_p = logits.log_softmax(-1)[torch.arange(len(targets)), targets][chosen]
    return Scored(-log_p.sum().item(), bool((logits.argmax(-1) == targets)[chosen].all()))


def test_windows_are_those_of_the_harness() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for count in (0, 1, 2, 7, 8, 9, 16, 17, 40):
        tokens = list(range(100, 100 + count))
        for stride in (None, 1, 3, 8):
            theirs = get_rolling_token_windows(tokens, 0, 8, 8 - (stride or 8) + 1)
            expected = [Request([*before, *after], len(after)) for before, after in map(make_disjoint_window, theirs)]
            ours = rolling(tokens, 0, 8, stride)
            assert ours == expected
            assert [token for each in ours for token in each.tokens[-each.scored :]] == tokens


def test_a_long_context_is_cut_from_the_left() -> None:
    assert truncated([1, 2, 3], [4, 5], 4) == Request([1, 2, 3, 4, 5], 2)
    assert truncated([1, 2, 3], [4, 5], 3) == Request([2, 3, 4, 5], 2)
    assert truncated([1, 2, 3], [4, 5], 2) == Request([3, 4, 5], 2)
    with pytest.raises(UserError, match=r"2 tokens to predict, .* takes 1 tokens .*raise that"):
        truncated([1], [4, 5], 1)


def test_shapes_come_again() -> None:
    lengths = {scoring._length(longest, 1024, 2) for longest in range(1, 1025)}
    assert len(lengths) == 13 and max(lengths) == 1024 and all(length % 2 == 0 for length in lengths)
    assert all(longest <= scoring._length(longest, 1000, 1) <= 1000 for longest in range(1, 1001))


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_scores_equal_a_forward_pass_each(engine: GenerationEngine, batch_size: int) -> None:
    requests = requests_of(280, engine.max_length)
    done: list[int] = []
    scores = score(engine, requests, batch_size=batch_size, advance=done.append)
    assert sum(done) == len(requests)
    for request, found in zip(requests, scores, strict=True):
        expected = by_hand(engine, request)
        assert found.nats == pytest.approx(expected.nats, rel=1e-5)
        assert found.greedy == expected.greedy
    assert score(engine, [], batch_size=batch_size) == []


def test_what_the_model_would_say_is_greedy(engine: GenerationEngine) -> None:
    prompts = prompts_of(280)
    new = continue_greedily(engine, prompts, batch_size=3)
    requests = [
        Request([*prompt.tokens, *tokens], len(tokens)) for prompt, tokens in zip(prompts, new, strict=True) if tokens
    ]
    other = [Request([*each.tokens[:-1], (each.tokens[-1] + 1) % 280], each.scored) for each in requests]
    assert requests
    assert all(each.greedy for each in score(engine, requests, batch_size=4))
    assert not any(each.greedy for each in score(engine, other, batch_size=4))


def test_continuations_equal_those_with_a_cache(engine: GenerationEngine) -> None:
    prompts = prompts_of(280)
    new = continue_greedily(engine, prompts, batch_size=2)
    settings = [Sampling(temperature=0, max_tokens=prompt.most) for prompt in prompts]
    cached = generate(engine.model.whole, engine.tokenizer, [prompt.tokens for prompt in prompts], settings)
    assert new == [[token.id for token in each.tokens] for each in cached]


def test_a_continuation_ends_when_it_is_told_to(engine: GenerationEngine) -> None:
    prompts = [Prompt([5, 6, 7], 8), Prompt([8], 8)]
    whole = continue_greedily(engine, prompts, batch_size=2)
    cut = continue_greedily(engine, prompts, batch_size=1, ended=lambda number, new: number == 1 and len(new) == 3)
    assert cut == [whole[0], whole[1][:3]]


def test_of_equal_logits_the_first_is_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -torch.inf], [torch.nan, 1.0, 0.0, 0.0]])
    assert scoring._largest(logits, None).tolist() == [1, scoring._NONE]


def test_logits_that_are_not_finite_are_an_error(file: Path) -> None:
    broken = small.engine_alone(file)
    with torch.no_grad():
        for parameter in broken.model.whole.parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite: its training diverged"):
        continue_greedily(broken, [Prompt([1, 2], 3)], batch_size=1)
    (found,) = score(broken, [Request([1, 2], 1)], batch_size=1)
    assert found.nats != found.nats and not found.greedy


def test_samples_of_text_that_cannot_be_written_end_no_evaluation(file: Path) -> None:
    asked = ["eval.continuations.prompts=['the sea', 'old']", "eval.continuations.max_tokens=3"]
    broken = small.engine_alone(file, asked)
    with torch.no_grad():
        for parameter in broken.model.whole.parameters():
            parameter.fill_(torch.nan)
    found = write_continuations(broken, Console(quiet=True))
    assert found is not None and found.texts == [] and "not finite" in str(found.error)
    assert write_continuations(small.engine_alone(file), Console(quiet=True)) is None
    drawn = load(file, [*asked, "eval.continuations.temperature=0.5"])
    refuse_continuations(drawn, 1)
    with pytest.raises(UserError, match="eval.continuations.temperature is 0.5, but 2 processes"):
        refuse_continuations(drawn, 2)


def test_weights_in_training_stay_in_training(engine: GenerationEngine) -> None:
    engine.model.train(True)
    score(engine, [Request([1, 2], 1)], batch_size=1)
    assert engine.model.whole.training
    engine.model.train(False)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, connect=False) as these:
        yield these


def on_rank(file: Path, layout: str) -> tuple[Any, Any]:
    engine = small.engine_of_rank(file, layout)
    scores = score(engine, requests_of(280, engine.max_length), batch_size=3)
    return scores, continue_greedily(engine, prompts_of(280), batch_size=2)


TEXTS = ["eval.continuations.prompts=['the sea', '', 'keeper']", "eval.continuations.max_tokens=12"]


def texts_on_rank(file: Path, layout: str) -> tuple[Any, Any]:
    engine = small.engine_of_rank(file, layout, TEXTS)
    long = small.engine_of_rank(file, layout, [*TEXTS[:1], "eval.continuations.max_tokens=4000"])
    return tuple(write_continuations(each, Console(quiet=True)) for each in (engine, long))


@pytest.mark.parallel
@pytest.mark.slow
def test_several_processes_write_the_texts_of_one(file: Path, pair: Ranks) -> None:
    expected = write_continuations(small.engine_alone(file, TEXTS), Console(quiet=True))
    assert expected is not None and len(expected.texts) == 3
    for found, long in pair.call(texts_on_rank, file, "tp2"):
        assert found == expected
        assert long.texts == [] and "eval.max_length" in long.error


def different_on_each_rank(file: Path) -> None:
    engine = small.engine_of_rank(file, "fsdp2")
    number = torch.distributed.get_rank()
    score(engine, [Request([1, 2, 3 + number], 1)], batch_size=3)


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.parametrize("layout", small.LAYOUTS)
def test_every_layout_has_the_scores_of_one_process(
    file: Path, engine: GenerationEngine, pair: Ranks, layout: str
) -> None:
    expected = [by_hand(engine, request) for request in requests_of(280, engine.max_length)]
    continued = continue_greedily(engine, prompts_of(280), batch_size=2)
    for scores, new in pair.call(on_rank, file, layout):
        assert [each.nats for each in scores] == pytest.approx([each.nats for each in expected], rel=1e-5)
        assert [each.greedy for each in scores] == [each.greedy for each in expected]
        assert new == continued


@pytest.mark.parallel
@pytest.mark.slow
def test_different_requests_are_an_error_and_no_hang(file: Path) -> None:
    with (
        Ranks(2, connect=False) as these,
        pytest.raises(RankFailed, match=f"{MachineError.__name__}.*different requests"),
    ):
        these.call(different_on_each_rank, file)
