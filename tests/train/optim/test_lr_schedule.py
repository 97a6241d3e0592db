"""The learning rate against closed forms and torch's own schedulers."""

import math

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.base import Duration
from pipeline.config.train import ScheduleConfig
from pipeline.train.optim.lr_schedule import Schedule, refuse_short_duration


def duration(text: str) -> Duration:
    return Duration.model_validate(text)


def schedule(config: ScheduleConfig, length: str, per_step: int = 100) -> Schedule:
    """Of a run whose steps are all the same."""
    run = duration(length)
    steps = run.count if run.unit == "steps" else -(-run.count // per_step)
    return Schedule(config, run, steps, lambda step: step * per_step)


def factors(config: ScheduleConfig, steps: int, per_step: int = 100) -> list[float]:
    made = schedule(config, f"{steps} steps", per_step)
    return [made.factor((step + 1) * per_step) for step in range(steps)]


def test_cosine_equals_torch() -> None:
    ours = factors(ScheduleConfig(type="cosine", min_ratio=0.1), 50)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1)
    for factor in ours:
        optimizer.step()
        theirs.step()
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)


def test_linear_and_constant() -> None:
    assert factors(ScheduleConfig(type="linear", min_ratio=0.0), 4) == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert factors(ScheduleConfig(type="constant", warmup=duration("2 steps")), 4) == [0.5, 1.0, 1.0, 1.0]


def test_wsd_is_flat_then_linear() -> None:
    config = ScheduleConfig(type="wsd", warmup=duration("2 steps"), decay=duration("4 steps"), min_ratio=0.2)
    assert factors(config, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_a_schedule_continues_behind_the_tokens_of_another_run(kind: str) -> None:
    decay = duration("400 tokens") if kind == "wsd" else None
    config = ScheduleConfig(type=kind, warmup=duration("300 tokens"), decay=decay)  # type: ignore[arg-type]
    whole = schedule(config, "20 steps")
    rest = Schedule(config, duration("12 steps"), 12, lambda step: step * 100, 800)
    for tokens in range(100, 1300, 100):
        assert rest.factor(tokens) == whole.factor(800 + tokens)


def test_tokens_and_steps_say_the_same() -> None:
    by_steps = ScheduleConfig(warmup=duration("10 steps"))
    by_tokens = ScheduleConfig(warmup=duration("1000 tokens"))
    assert factors(by_steps, 40) == factors(by_tokens, 40)


def test_warmup_then_shape_meet_at_the_peak() -> None:
    values = factors(ScheduleConfig(type="cosine", warmup=duration("10 steps"), min_ratio=0.0), 20)
    assert values[9] == 1.0
    assert values[14] == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert values[-1] == pytest.approx(0.0)


def test_nothing_left_after_the_warmup_stays_at_the_peak() -> None:
    assert schedule(ScheduleConfig(warmup=duration("10 steps")), "1000 tokens").factor(1024) == 1.0
    assert schedule(ScheduleConfig(type="wsd", decay=duration("0 steps")), "1000 tokens", 128).factor(1024) == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScheduleConfig(warmup=duration("10 steps")), "warmup 10 steps lasts 1,000 tokens, but the run has 500 "),
        (
            ScheduleConfig(type="wsd", warmup=duration("200 tokens"), decay=duration("4 steps")),
            "warmup 200 tokens and decay 4 steps together last 600 tokens, but the run has 500 ",
        ),
        (ScheduleConfig(type="wsd", decay=duration("7 steps")), "and decay 7 steps together last 700 tokens"),
    ],
)
def test_a_run_shorter_than_its_warmup_and_decay_is_refused(config: ScheduleConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        schedule(config, "500 tokens")


def test_it_is_refused_without_the_data_where_units_are_equal() -> None:
    config = ScheduleConfig(type="wsd", warmup=duration("4 steps"), decay=duration("3 steps"))
    with pytest.raises(UserError, match=r"decay 3 steps together last longer than the run \(.*: 6 steps\); lower"):
        refuse_short_duration(config, duration("6 steps"))
    refuse_short_duration(config, duration("7 steps"))
    refuse_short_duration(config, duration("1 tokens"))


def test_durations_in_steps_mean_the_steps_of_the_run() -> None:
    """Steps that grow: warm-up ends with step 2 and the decay begins after step 4, whatever their tokens are."""
    sizes = [100, 100, 200, 200, 400, 400]
    config = ScheduleConfig(type="wsd", warmup=duration("2 steps"), decay=duration("2 steps"), min_ratio=0.0)
    made = Schedule(config, duration("6 steps"), 6, lambda step: sum(sizes[:step]))
    assert [made.factor(sum(sizes[: step + 1])) for step in range(6)] == pytest.approx([0.5, 1, 1, 1, 0.5, 0])


def test_a_run_that_ends_early_decays_to_its_own_end() -> None:
    """A source with `on_exhausted: stop` ends it after 4 of 10 steps."""
    for length in ("10 steps", "1000 tokens"):
        made = Schedule(ScheduleConfig(type="linear", min_ratio=0.0), duration(length), 4, lambda step: step * 100)
        assert [made.factor(100 * step) for step in (1, 2, 3, 4)] == pytest.approx([0.75, 0.5, 0.25, 0.0])
