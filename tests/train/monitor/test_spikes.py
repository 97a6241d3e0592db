"""The guard against spikes, compared with plain Python over lists."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import orjson
import pytest
import torch

from pipeline.config.train import FaultsConfig
from pipeline.train.monitor.spikes import SpikeGuard

CPU = torch.device("cpu")


def guard(window: int = 16, zscore: float = 4.0) -> SpikeGuard:
    return SpikeGuard(FaultsConfig(on_spike="skip", spike_window=window, spike_zscore=zscore), CPU)


def judge(found: SpikeGuard, loss: float, norm: float = 1.0) -> tuple[bool, list[float]]:
    finite = math.isfinite(loss) and math.isfinite(norm)
    values = (torch.tensor(value, dtype=torch.float64) for value in (loss, norm))
    verdict = found.judge(*values, torch.tensor(finite))
    return bool(verdict.spike), verdict.zscores.tolist()


def by_hand(values: list[tuple[float, float]], window: int, limit: float) -> list[tuple[bool, list[float]]]:
    """Verdicts by the definition, with the standard library."""
    kept: list[tuple[float, float]] = []
    verdicts = []
    for pair in values:
        zscores = [math.nan, math.nan]
        if len(kept) >= window // 2:
            columns = list(zip(*kept, strict=True))
            zscores = [(v - statistics.mean(c)) / statistics.stdev(c) for v, c in zip(pair, columns, strict=True)]
        finite = all(map(math.isfinite, pair))
        spike = finite and any(zscore > limit for zscore in zscores)
        if finite and not spike:
            kept = [*kept, pair][-window:]
        verdicts.append((spike, zscores))
    return verdicts


def history(count: int, seed: int) -> list[tuple[float, float]]:
    """Losses that fall slowly and norms, with spikes of one or the other and values that are not finite."""
    chance = random.Random(seed)
    values = []
    for step in range(count):
        loss, norm = 5 - step / 100 + chance.gauss(0, 0.1), math.exp(chance.gauss(0, 0.2))
        odd = chance.choice(["loss", "norm", "nan", "inf", *[""] * 16])
        loss = {"loss": 9.0, "nan": math.nan}.get(odd, loss)
        norm = {"norm": 50.0, "inf": math.inf}.get(odd, norm)
        values.append((loss, norm))
    return values


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_the_definition_finds(seed: int) -> None:
    values = history(120, seed)
    expected = by_hand(values, 16, 4.0)
    found = guard()
    for pair, (spike, zscores) in zip(values, expected, strict=True):
        spikes, scores = judge(found, *pair)
        assert spikes == spike
        if all(map(math.isfinite, pair)):
            assert scores == pytest.approx(zscores, rel=1e-9, nan_ok=True)
    assert 2 < sum(spike for spike, _ in expected) < 40


def test_a_resumed_window_gives_the_bits_of_an_uninterrupted_one() -> None:
    values = history(100, 7)
    whole, parts = guard(), guard()
    for step, pair in enumerate(values):
        if step % 13 == 5:
            state = orjson.loads(orjson.dumps(parts.state()))
            parts = guard()
            parts.load(state)
        one, other = judge(whole, *pair), judge(parts, *pair)
        assert repr(one) == repr(other)  # NaN equals NaN
    assert whole.state() == parts.state()


def test_with_less_than_half_a_window_nothing_is_a_spike() -> None:
    found = guard(window=10)
    for step in range(5):
        assert judge(found, 2.0 + 0.01 * step) == (False, [pytest.approx(math.nan, nan_ok=True)] * 2)
    assert judge(found, 50.0)[0]


def test_a_spike_and_what_is_not_finite_do_not_join() -> None:
    found = guard(window=8)
    for step in range(8):
        judge(found, 2.0 + 0.01 * (step % 3))
    before = found.state()
    assert judge(found, 9.0)[0] and judge(found, 2.0, norm=9.0)[0]
    assert not judge(found, math.nan)[0] and not judge(found, 2.0, norm=math.inf)[0]
    assert found.state() == before
    judge(found, 2.0)
    assert found.state()["losses"] == [*before["losses"][1:], 2.0]


def test_a_fall_is_no_spike() -> None:
    found = guard()
    for step in range(16):
        judge(found, 5.0 + 0.01 * (step % 3))
    assert not judge(found, 1.0, norm=0.01)[0]


def test_values_that_hardly_differ_are_no_spikes() -> None:
    """A standard deviation of zero, or of rounding, says nothing."""
    found = guard(zscore=6.0)
    for _ in range(16):
        judge(found, 2.0)
    assert not judge(found, 2.0 + 1e-9)[0]
    assert judge(found, 2.1)[0]


@pytest.mark.parametrize("size", [8, 40])
def test_another_window_on_resume_takes_the_newest_steps(size: int) -> None:
    old = guard(window=16)
    for step in range(16):
        judge(old, 2.0 + 0.01 * step)
    new = guard(window=size)
    new.load(old.state())
    assert new.state()["losses"] == old.state()["losses"][-size:]
    # 16 of 40 are less than half.
    assert judge(new, 50.0)[0] == (size == 8)


def test_steps_on_another_kind_of_data_are_not_compared() -> None:
    found = guard(window=8)
    for kind, loss in (("web", 2.0), ("code", 1.0), ("web", 2.0)):
        found.compare_within(kind)
        for step in range(8):
            assert not judge(found, loss + 0.01 * (step % 3))[0], (kind, step)
    # A checkpoint keeps the kind: going on with the same data compares, with others it does not.
    state: dict[str, Any] = orjson.loads(orjson.dumps(found.state()))
    for kind in ("web", "code"):
        resumed = guard(window=8)
        resumed.load(state)
        resumed.compare_within(kind)
        assert judge(resumed, 50.0)[0] == (kind == "web")


def test_a_checkpoint_without_a_window_empties_it() -> None:
    found = guard()
    found.compare_within("web")
    for step in range(16):
        judge(found, 2.0 + 0.01 * step)
    found.load({})
    assert found.state() == guard().state()
