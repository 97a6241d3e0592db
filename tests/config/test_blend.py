"""Ranges, places among documents, and the rules of `blend:`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.config.blend import BlendConfig, Bound, PhaseConfig, Range, SkipConfig
from pipeline.config.train import TrainConfig
from tests.config.runfile import MINIMAL, refused, write


def test_ranges() -> None:
    assert [(r.first, r.last) for r in map(Range.model_validate, (7, "7", "7-9", "1_000 - 2_000"))] == [
        (7, 7),
        (7, 7),
        (7, 9),
        (1000, 2000),
    ]
    assert [str(Range.model_validate(value)) for value in (7, "7-9")] == ["7", "7-9"]
    for bad in ("9-7", "-1", "a", "1-2-3", True, 1.5):
        with pytest.raises(ValidationError):
            Range.model_validate(bad)


def test_places_among_documents() -> None:
    assert [Bound.model_validate(value).of(1000) for value in (0, 0.3, 1, "25 documents", "1K documents")] == [
        0,
        300,
        1000,
        25,
        1000,
    ]
    # 0.29 * 100 is 28.999... in binary.
    assert Bound.model_validate(0.29).of(100) == 29
    for bad in (1.5, -0.1, "5", "half", True):
        with pytest.raises(ValidationError):
            Bound.model_validate(bad)


def test_written_out_and_read_again() -> None:
    values = {
        "phases": [{"until": "10 steps", "slices": {"a": [0, "5 documents"]}}, {"weights": "tokens"}],
        "skip": [{"steps": "3-4"}, {"source": "a", "documents": [3, "4-9"], "from_step": 2}],
    }
    blend = BlendConfig.model_validate(values)
    assert BlendConfig.model_validate(blend.model_dump(mode="json")) == blend


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        (BlendConfig, {"phases": [{}, {}]}, r"phases.0: `until` is missing"),
        (BlendConfig, {"phases": [{"until": "3 steps"}]}, r"phases.0: the last phase lasts to the end"),
        (BlendConfig, {"phases": [{"until": "0 steps"}, {}]}, r"phases.0: .* so 0 steps must be more than 0 here"),
        (
            BlendConfig,
            {"phases": [{"until": "50 steps"}, {"until": "9 tokens"}, {"until": "50 steps"}, {}]},
            r"phases.2: `until` counts from the start of the run, so 50 steps must be more than 50 here",
        ),
        *(
            (PhaseConfig, {"weights": {"b": 1, "a": weight}}, f"weights\n.* a: {weight} is not a number > 0; omit")
            for weight in (0, -1, float("nan"), float("inf"), True, "much", None)
        ),
        (PhaseConfig, {"weights": {}}, "a weight for each source of the phase"),
        (PhaseConfig, {"weights": "proportional"}, "must be 'tokens', or a weight"),
        (PhaseConfig, {"slices": {"a": [0.5, 0.5]}}, r"slices.a\n.*\[0.5, 0.5\] has no documents"),
        (PhaseConfig, {"slices": {"a": [1, 0]}}, r"\[1, 0\] has no documents"),
        (PhaseConfig, {"slices": {"a": ["9 documents", "7 documents"]}}, r"\[9 documents, 7 documents\] has no"),
        (PhaseConfig, {"sources": ["a", "a"]}, "each only once"),
        (SkipConfig, {}, "exactly one of"),
        (SkipConfig, {"steps": 1, "source": "a"}, "exactly one of"),
        (SkipConfig, {"samples": 1, "documents": [1]}, "needs `source`"),
        (SkipConfig, {"steps": "0-3"}, "numbered from 1"),
        (
            TrainConfig,
            {"duration": "9 steps", "batch_size": 10, "batch_ramp": {"start": 4, "increment": 4, "tokens": 9}},
            "increment 4 is never batch_size 10",
        ),
    ],
)
def test_refused(section, value, message) -> None:
    with pytest.raises(ValidationError, match=message):
        section.model_validate(value)


def test_what_is_not_refused() -> None:
    # Floats like 4e-3 are text to YAML 1.1.
    assert PhaseConfig.model_validate({"weights": {"a": "4e-3", "b": 1}}).weights == {"a": 0.004, "b": 1}
    for bounds in ([0, "1 documents"], ["9 documents", 0.5], ["7 documents", "9 documents"]):
        PhaseConfig.model_validate({"slices": {"a": bounds}})
    # Which comes first is known when the plan is made.
    BlendConfig.model_validate({"phases": [{"until": "50 steps"}, {"until": "9 tokens"}, {"until": "51 steps"}, {}]})


def test_names_of_sources_are_checked(tmp_path) -> None:
    file = write(tmp_path)
    assert "blend.skip.0.source: 'x' is not one of data.sources" in refused(file, "blend.skip=[{source: x}]")
    assert "data.sources.0: on_exhausted: stop needs max_epochs" in refused(file, "data.sources.0.on_exhausted=stop")
    assert "data.sources.0.slice: [0.9, 0.1] has no documents" in refused(file, "data.sources.0.slice=[0.9, 0.1]")
    assert "blend.phases.0.weights: 'x' is not one of" in refused(file, "blend.phases=[{weights: {x: 1}}]")
    # Beside weights too, where it would be a mistake even if it existed.
    both = "blend.phases=[{weights: {words: 1}, sources: [%s]}]"
    assert "blend.phases.0.sources: 'x' is not one of data.sources (words)\n" in refused(file, both % "x")
    message = refused(file, both % "wrods")
    assert (
        "command line: blend.phases.0.sources: 'wrods' is not one of data.sources (words); did you mean words?"
        in message
    )
    more = "data.sources=[{name: words, paths: [a]}, {name: b, paths: [b]}]"
    assert "blend.phases.0.sources: weights names other sources (words); remove" in refused(file, more, both % "b")


def test_rules_of_a_section_are_blamed_on_the_command_line(tmp_path) -> None:
    file = write(tmp_path)
    assert "command line: train: batch_ramp: " in refused(file, "train.batch_ramp={start: 3, increment: 5, tokens: 9}")
    assert "command line: blend: phases.1: the last phase" in refused(
        file, "blend.phases=[{until: 3 steps}, {until: 4 steps}]"
    )
    assert "command line: blend.skip.0: give exactly one of steps" in refused(file, "blend.skip=[{from_step: 3}]")
    text = MINIMAL + "blend:\n  warn_epochs: 3\n  phases:\n    - until: 3 steps\n    - until: 4 steps\n"
    assert "run.yaml:19: blend: phases.1: the last phase" in refused(write(tmp_path, text))
