"""What a run says of its course, in words."""

from __future__ import annotations

from typing import Any

from pipeline.config import Config
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import plan_journal
from pipeline.train.monitor.phase_log import describe_change, describe_run
from tests.data.preprocess.memory import MemoryDataset


def plan(sources: list[str], train: dict[str, Any], *phases: dict[str, Any]) -> tuple[Config, Journal]:
    config = Config.model_validate(
        {
            "run": {"dir": "run"},
            "tokenizer": {"train": {"vocab_size": 400}},
            "data": {"sources": [{"name": name, "paths": ["a.txt"], "weight": 1} for name in sources]},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": "1 steps", "sequence_length": 8, "batch_size": 4, **train},
            "blend": {"phases": phases},
        }
    )
    return config, plan_journal(config, {name: MemoryDataset([10] * 50) for name in sources})


def test_a_run_without_phases() -> None:
    config, journal = plan(["a"], {})
    assert describe_run(config, journal, 0, 2000) == "steps 1 to 2,000, 4 windows of 8 tokens"


def test_of_a_long_ramp_the_first_and_the_last_batch() -> None:
    config, journal = plan(["a"], {"batch_size": 12, "batch_ramp": {"start": 2, "increment": 2, "tokens": 800}})
    assert describe_run(config, journal, 0, 100) == "steps 1 to 100, 2 -> ... -> 12 windows of 8 tokens"
    assert describe_change(config, journal, 1) == "batch size 2 -> 4"
    # Only what is still ahead is told.
    last = journal.segments[-1].first_step
    assert describe_run(config, journal, last - 1, 100) == f"steps {last} to 100, 10 -> 12 windows of 8 tokens"


def test_what_a_phase_changes() -> None:
    names = [f"s{number}" for number in range(8)]
    config, journal = plan(
        names,
        {},
        {"until": "3 steps", "sources": names[:4]},
        {"name": "tail", "until": "6 steps", "sources": names[:4], "slices": {"s1": ["10 documents", 1]}},
        {"sequence_length": 16},
    )
    assert describe_run(config, journal, 0, 9) == "steps 1 to 9 in 3 phases, 4 windows of 8 -> 16 tokens"
    assert describe_change(config, journal, 1) == "phase 2 tail begins: s1 reads documents 10 to 49"
    halves = ", ".join(f"share of {name} 0.25 -> 0.125" for name in ("s0", "s1"))
    assert describe_change(config, journal, 2) == (
        f"phase 3 begins: sequence length 8 -> 16, {halves}, s1 reads all documents, "
        "share of s2 0.25 -> 0.125, share of s3 0.25 -> 0.125, share of s4 0 -> 0.125, 3 more sources"
    )


def test_a_phase_that_changes_nothing_still_begins() -> None:
    config, journal = plan(["a"], {}, {"until": "3 steps"}, {"name": "same"})
    assert describe_change(config, journal, 1) == "phase 2 same begins"
