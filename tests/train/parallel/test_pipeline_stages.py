"""How layers are cut into stages, against all possible cuts; schedules, against the closed forms of their papers."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import pytest

from pipeline.config.model import ModelConfig
from pipeline.config.parallel import PipelineConfig
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import flops_per_token
from pipeline.train.parallel.pipeline_schedules import SCHEDULES, play
from pipeline.train.parallel.pipeline_stages import balance, compute_costs, rank_of, split_stages
from pipeline.train.torch_compat.pipeline_stage import schedule_actions


def _pipeline(**keys: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(keys)


def _all_cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    return [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]


def _stage_costs(costs: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    rest = list(costs)
    return [sum(rest.pop(0) for _ in range(size)) for size in sizes]


def test_balance_is_the_best_of_all_cuts() -> None:
    chance = random.Random(0)
    for _ in range(200):
        layers = chance.randint(1, 9)
        costs = tuple(chance.randint(1, 12) for _ in range(layers))
        stages = chance.randint(1, layers)

        def worth(sizes: tuple[int, ...], costs: tuple[int, ...] = costs) -> tuple[Any, ...]:
            by_stage = _stage_costs(costs, sizes)
            return max(by_stage), sum(cost**2 for cost in by_stage), sizes

        assert balance(costs, stages) == min(_all_cuts(layers, stages), key=worth)


def test_equal_layers_are_cut_evenly() -> None:
    assert balance((1,) * 32, 8) == (4,) * 8
    # Those that are left over go to the last stages: the first ones keep the most activations.
    assert balance((1,) * 10, 4) == (2, 2, 3, 3)


LLAMA_8B = decoder_spec(
    ModelConfig(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336), vocab_size=128_256, max_positions=8192
)


def test_the_head_takes_the_place_of_layers() -> None:
    stages = split_stages(LLAMA_8B, 4, _pipeline(), 8192)
    # By hand, in MFLOP a token, forward: a layer 503 (2 * (2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14336), and
    # 2 * 4096 * 8192 of attention); the head 2 * 4096 * 128,256 = 1,051, so two layers; the embedding a tenth of it.
    assert [len(stage.part.layers) for stage in stages] == [8, 9, 9, 6]
    assert [stage.part.first for stage in stages] == [True, False, False, False]
    assert [stage.part.last for stage in stages] == [False, False, False, True]
    assert [index for stage in stages for index in stage.part.layers] == list(range(32))


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_costs_of_stages_are_the_models(pp: int) -> None:
    stages = split_stages(LLAMA_8B, pp, _pipeline(), 4096)
    total = sum(compute_costs(LLAMA_8B, stages, 4096))
    assert 3 * total == pytest.approx(flops_per_token(LLAMA_8B, 4096, causal=True), rel=1e-12)


def test_one_stage_without_a_pipeline() -> None:
    (stage,) = split_stages(LLAMA_8B, 1, _pipeline(schedule="zbv"), 1024)
    assert (stage.index, stage.rank) == (0, 0)
    assert stage.part.first and stage.part.last and len(stage.part.layers) == 32


def test_given_layers_and_places() -> None:
    spec = decoder_spec(ModelConfig(layers=6, dim=32, heads=4), 97, 64)

    def places(pp: int, **keys: Any) -> list[tuple[int, list[int]]]:
        return [(stage.rank, list(stage.part.layers)) for stage in split_stages(spec, pp, _pipeline(**keys), 64)]

    assert places(2, layers_per_stage=[6, 0]) == [(0, [0, 1, 2, 3, 4, 5]), (1, [])]
    assert places(2, schedule="interleaved_1f1b", layers_per_stage=[0, 3, 2, 1]) == [
        (0, []),
        (1, [0, 1, 2]),
        (0, [3, 4]),
        (1, [5]),
    ]
    assert places(3, schedule="zbv") == [(0, [0]), (1, [1]), (2, [2]), (2, [3]), (1, [4]), (0, [5])]
    assert [rank for rank, _ in places(2, schedule="interleaved_1f1b", virtual_stages=3)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_places_are_those_of_torchs_schedules(name: Any) -> None:
    facts = SCHEDULES[name]
    order = schedule_actions(facts.torch_name, 4, facts.default_stages, 8)
    theirs = {(stage, rank) for rank, actions in enumerate(order) for stage, _, _ in actions}
    assert theirs == {(stage, rank_of(stage, 4, _pipeline(schedule=name))) for stage in range(4 * facts.default_stages)}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_schedule_does_everything_once(name: Any, pp: int) -> None:
    facts = SCHEDULES[name]
    for v in (v for v in range(1, 4) if facts.allows_stages(v)):
        for m in (m for m in range(1, 14) if facts.allows(m, pp)):
            actions = [action for rank in schedule_actions(facts.torch_name, pp, v, m) for action in rank]
            pairs = {(stage, number) for stage in range(pp * v) for number in range(m)}
            assert len(actions) == len(set(actions))
            assert {(stage, number) for stage, kind, number in actions if kind == "F"} == pairs
            for half in ("I", "W"):
                assert {(stage, number) for stage, kind, number in actions if kind in ("B", half)} == pairs
            assert play(name, pp, v, m).bubble >= 0  # it comes to its end


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "dualpipev"])
def test_torch_refuses_the_same_numbers_of_micro_batches(name: Any) -> None:
    facts, refused = SCHEDULES[name], 0
    for pp in (2, 3, 4):
        for m in (m for m in range(1, 16) if not facts.allows(m, pp)):
            with pytest.raises(ValueError):
                schedule_actions(facts.torch_name, pp, facts.default_stages, m)
            refused += 1
    assert refused


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8), (8, 40)])
def test_bubbles_and_activations_follow_the_closed_forms(pp: int, m: int) -> None:
    """Narayanan et al. 2021, section 2.2; for the zero-bubble ones Qi et al. 2023, where F, I and W take the same."""
    gpipe, one = play("gpipe", pp, 1, m), play("1f1b", pp, 1, m)
    assert gpipe.bubble == pytest.approx((pp - 1) / (m + pp - 1))
    assert gpipe.in_flight == [m] * pp
    assert one.bubble == pytest.approx((pp - 1) / (m + pp - 1))
    assert one.in_flight == [min(m, pp - rank) for rank in range(pp)]
    for v in (2, 3):
        interleaved = play("interleaved_1f1b", pp, v, m)
        assert interleaved.bubble == pytest.approx((pp - 1) / (v * m + pp - 1))
        warm_up = [(v - 1) * pp + 2 * (pp - 1 - rank) for rank in range(pp)]
        assert interleaved.in_flight == [min(v * m, 1 + forward) for forward in warm_up]
        zero = play("interleaved_zero_bubble", pp, v, m)
        assert zero.bubble == pytest.approx((pp - 1) / (3 * v * m + pp - 1))
    for name in ("zbv", "dualpipev"):
        if m >= 2 * pp:
            assert play(name, pp, 2, m).bubble == pytest.approx((pp - 1) / (6 * m + pp - 1))


def test_unequal_stages_wait_for_the_slowest() -> None:
    # One rank works all of the time but for filling and draining; the other two thirds of it less.
    result = play("1f1b", 2, 1, 1000, costs=[3.0, 1.0], weights=[3, 1])
    assert result.bubble == pytest.approx(1 / 3, abs=1e-3)
    assert result.activations == [6, 1]
