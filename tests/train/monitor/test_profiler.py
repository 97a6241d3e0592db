"""Profiles of real runs, read as those who open them do, and that they change no bit."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.train import ProfileConfig
from pipeline.train.host import trace_spans
from pipeline.train.monitor.profiler import Profile
from pipeline.train.rules.layout import check_layout
from pipeline.train.run.folder import RunFolder, read_metrics
from tests import tiers
from tests.train.poison import INF, poison
from tests.train.runs import exact, start, train, weights_hash

Events = list[dict[str, Any]]
PARTS = ["fetch", "prepare", "forward and backward", "reduce", "clip", "optimizer", "metrics"]


def spans_of(file: Path) -> Events:
    return [event for event in json.loads(file.read_bytes()) if event["ph"] == "X"]


def trace_of(file: Path) -> Events:
    with gzip.open(file) as opened:
        events: Events = json.load(opened)["traceEvents"]
    return events


def inside(events: Events, outer: dict[str, Any]) -> Events:
    """What lies in a span, and not in another one that lies in it, by time."""
    end = outer["ts"] + outer["dur"]
    # Times of today in microseconds have a resolution of a quarter.
    mine = [e for e in events if e is not outer and e["ts"] >= outer["ts"] - 1 and e["ts"] + e["dur"] <= end + 1]
    return [
        e
        for e in mine
        if not any(o is not e and o["ts"] <= e["ts"] < o["ts"] + o["dur"] and o["dur"] >= e["dur"] for o in mine)
    ]


@pytest.fixture(scope="module")
def profiled(root: Path) -> Path:
    return train(root, "profiled", "train.profile={steps: [3, 5]}")


@pytest.mark.guard
def test_spans_are_nested_and_cover_the_steps(profiled: Path) -> None:
    (attempt,) = (profiled / "profile").iterdir()
    assert attempt.name == "attempt-0001"
    file = attempt / "spans.rank-0000.json"
    lines = file.read_text().splitlines()
    assert lines[0] == "[" and lines[-1] == "]"
    assert all(isinstance(json.loads(line.rstrip(",")), dict) for line in lines[1:-1])
    events = spans_of(file)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    steps = {event["name"]: event for event in events if event["name"].startswith("step ")}
    assert list(steps) == ["step 3", "step 4", "step 5"]
    after = {"step 3": ["save"], "step 4": ["validation"], "step 5": []}
    covered = []
    for name, step in steps.items():
        parts = inside(events, step)
        assert [part["name"] for part in parts] == [*PARTS, *after[name]]
        for part, following in pairwise(parts):
            assert part["ts"] + part["dur"] <= following["ts"] + 1
        covered.append(sum(part["dur"] for part in parts) / step["dur"])
        (both,) = [part for part in parts if part["name"] == "forward and backward"]
        passes = inside(events, both)
        assert [each["name"] for each in passes] == ["forward", "backward"] * 2
        assert sum(each["dur"] for each in passes) <= both["dur"] + 1
    # On a busy machine another process may have the core between two of them.
    assert max(covered) > 0.8 and max(covered) <= 1.01


def test_a_file_without_its_end_is_read_all_the_same(tmp_path: Path) -> None:
    """The process was killed: the array lacks its bracket and nothing else."""
    file = tmp_path / "spans.json"
    killed = trace_spans.Spans(file, 3, traced=False)
    with trace_spans.recorded_by(killed), trace_spans.span("outer"), trace_spans.span("inner"):
        pass
    killed.write()
    events = json.loads(file.read_text() + "]")
    assert [(event["name"], event["pid"]) for event in events[1:]] == [("outer", 3), ("inner", 3)]
    with trace_spans.span("of nobody"):
        pass
    killed.close()
    assert json.loads(file.read_text()) == events


@pytest.mark.guard
def test_the_trace_has_the_operations_of_the_steps_in_their_spans(profiled: Path) -> None:
    (file,) = profiled.rglob("trace-*")
    assert file.name == "trace-step-00000003-00000005.rank-0000.json.gz"
    events = [event for event in trace_of(file) if event.get("ph") == "X"]
    names = [event["name"] for event in events]
    assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4", "step 5"]
    assert names.count("forward") == names.count("backward") == 6
    for event in [event for event in events if event["name"] == "forward"]:
        within = [e for e in events if event["ts"] <= e["ts"] < event["ts"] + event["dur"]]
        assert any(e["name"] == "aten::embedding" for e in within)
    optimizers = [event for event in events if event["name"] == "optimizer"]
    assert len(optimizers) == 3


@pytest.mark.guard
def test_a_profile_changes_no_bit(root: Path, profiled: Path) -> None:
    plain = train(root, "plain")
    assert exact(plain) == exact(profiled)
    assert weights_hash(plain) == weights_hash(profiled)
    assert not (plain / "profile").exists()


@pytest.mark.guard
def test_a_run_that_ends_within_the_steps_and_goes_on(root: Path) -> None:
    how = "train.profile={steps: [3, 6]}"
    run = train(root, "resumed", how, "train.duration=4 steps", "train.schedule.type=constant")
    train(root, "resumed", how, "train.schedule.type=constant")
    found = sorted(str(file.relative_to(run / "profile")) for file in (run / "profile").rglob("trace-*"))
    assert found == [
        "attempt-0001/trace-step-00000003-00000004.rank-0000.json.gz",
        "attempt-0002/trace-step-00000005-00000006.rank-0000.json.gz",
    ]


@pytest.mark.guard
def test_a_rewind_within_the_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {5: INF})
    run = train(root, "rewound", "train.profile={steps: [4, 6]}", "train.faults.on_nonfinite=rewind")
    ends = {}
    for file in (run / "profile").rglob("spans.*"):
        events = spans_of(file)
        ends[file.parent.name] = [event["name"] for event in events if event["name"].startswith("step ")]
        assert file.parent.joinpath(next(file.parent.glob("trace-*")).name).exists()
    assert ends == {"attempt-0001": ["step 4", "step 5"], "attempt-0002": ["step 4", "step 5", "step 6"]}
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 9))


@pytest.mark.guard
def test_what_is_written_is_what_was_asked_for(root: Path) -> None:
    run = train(root, "spans-alone", "train.profile={steps: [1, 1], trace: false}")
    assert [file.name for file in run.rglob("profile/*/*")] == ["spans.rank-0000.json"]
    run = train(root, "trace-alone", "train.profile={steps: [1, 2], spans: false}")
    assert [file.name for file in run.rglob("profile/*/*")] == ["trace-step-00000001-00000002.rank-0000.json.gz"]
    code, out = start(root, "never", "train.profile={steps: [9, 9], memory: true}")
    assert code == 0
    assert "warning: train.profile.steps=[9, 9] has no effect: the run has 8 steps" in out
    assert "warning: train.profile.memory=true has no effect on a cpu" in out
    assert not (root / "never" / "profile").exists()


def test_a_folder_that_cannot_be_written_ends_no_run(
    root: Path, profiled: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = root / "no-room"
    run.mkdir()
    (run / "profile").write_text("in the way")
    code, out = start(root, "no-room", "train.profile={steps: [2, 3]}")
    assert code == 0, out
    assert exact(run) == exact(profiled)
    assert "warning: rank 0: train.profile" in capfd.readouterr().err


@pytest.mark.parametrize("broken", tiers.first(1, ["start", "step", "stop", "export_chrome_trace"], rest="guard"))
def test_a_profiler_that_fails_ends_no_run(
    broken: str, root: Path, profiled: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    works = getattr(torch.profiler.profile, broken)

    def fail(trace: Any, *arguments: Any) -> None:
        if broken == "stop":  # or it would go on in later tests
            works(trace)
        raise AssertionError

    monkeypatch.setattr(torch.profiler.profile, broken, fail)
    code, out = start(root, f"broken-{broken}", "train.profile={steps: [3, 5]}")
    assert code == 0, out
    assert exact(root / f"broken-{broken}") == exact(profiled)
    assert [file.name for file in (root / f"broken-{broken}").rglob("profile/*/*")] == ["spans.rank-0000.json"]
    assert capfd.readouterr().err.count("could not do everything it was set to: AssertionError") == 1


def test_ranks_that_do_not_exist_are_refused(root: Path) -> None:
    config = load(root / "run.yaml", ["train.profile={steps: [2, 3], ranks: [0, 2, 5]}", "parallel.tp=2"])
    with pytest.raises(UserError, match=r"train\.profile\.ranks=\[0, 2, 5\] names 2, 5, but the run has 2 processes"):
        check_layout(config, 2)


def test_a_profile_asks_for_a_gpu_and_ends_well_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls to the GPU's allocator, the arguments as torch passes them on."""
    calls: list[tuple[Any, ...]] = []
    found = {"segments": [], "device_traces": [[{"action": "alloc"}]]}
    monkeypatch.setattr(torch._C, "_cuda_record_memory_history", lambda *told: calls.append(told), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda *_: found, raising=False)
    config = ProfileConfig.model_validate({"steps": [2, 3], "memory": True})
    out = io.StringIO()
    folder = RunFolder(tmp_path, 1)
    profile = Profile(config, torch.device("cuda", 0), 0, folder, Console(file=out, width=500))
    assert not list(profile.announce(3))
    profile.watch_memory()
    with profile:
        for step in (1, 2, 3):
            with profile.step(step):
                torch.ones(8).sum()
            if profile.ends_with(step):
                profile.finish()
    (began, ended) = calls
    assert began[:4] == ("all", "all", "python", 100_000) and ended[0] is None
    assert pickle.loads((tmp_path / "profile/attempt-0001/memory-step-00000003.rank-0000.pickle").read_bytes()) == found
    (trace,) = (tmp_path / "profile/attempt-0001").glob("trace-*")
    assert any(event["name"] == "aten::sum" for event in trace_of(trace))
