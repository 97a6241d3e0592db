"""`benchmarks/gpu_evidence.py`: what it reports of items that fail, what it skips, and the page of its lines."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
sys.path.append(str(FOLDER))

import gpu_evidence  # noqa: E402
from evidence import imported, kit, machine, profiled  # noqa: E402
from evidence.catalog import ITEMS  # noqa: E402
from evidence.item import Item, goal  # noqa: E402
from evidence.page import PAGE, page  # noqa: E402

TOYS = """
import os, signal, subprocess, time
from pathlib import Path

def fine(device, work, *, size):
    return {"twice": 2 * size, "checks": {"it is even": True}, "goals": {}, "reads": ["README.md"]}

def unequal(device, work, *, size):
    return {"twice": 2 * size, "checks": {"losses are equal": False, "it is even": True}}

def strange(device, work, *, size):
    return {"twice": {2 * size}}

def broken(device, work, *, size):
    raise ValueError(f"nothing fits into {size} of {work}/file, {Path(__file__).parents[2]}/README.md")

def killed(device, work, *, size):
    os.kill(os.getpid(), signal.SIGKILL)

def hanging(device, work, *, size):
    child = subprocess.Popen(["sleep", "1000"])
    Path(os.environ["TOYS"]).write_text(f"{child.pid}\\n{os.getpid()}\\n")
    time.sleep(1000)
"""
CATALOG = """
from evidence.item import Item
ITEMS = tuple(
    Item(f"toy/{name}", "?", f"toys:{name}", full={"size": 8}, rehearsal={"size": 2}, least_s=1, limit_s=limit)
    for name, limit in (
        ("broken", 60), ("strange", 60), ("unequal", 60), ("killed", 60), ("hanging", 0.5), ("fine", 60)
    )
)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's benchmarks and package, which a test may change."""
    for name in ("benchmarks", "pipeline", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "README.md").write_text("read\n")
    return tmp_path


def run(copy: Path, *words: object, **environment: str) -> tuple[int, list[dict[str, Any]], str]:
    """The command in a process of its own; returns its exit code, its lines by item, and what it printed."""
    file = copy / "lines.jsonl"
    command = [sys.executable, str(copy / "benchmarks" / "gpu_evidence.py"), "--to", str(file), *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables)
    return done.returncode, gpu_evidence.read(file), done.stdout + done.stderr


def runs(pid: str) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return "\nState:\tZ" not in Path("/proc", pid, "status").read_text()
    except OSError:
        return False


@pytest.mark.guard
def test_items_that_end_badly_are_reported_and_the_others_run(copy: Path) -> None:
    (copy / "benchmarks/evidence/catalog.py").write_text(CATALOG)
    (copy / "benchmarks/evidence/toys.py").write_text(TOYS)
    code, lines, printed = run(copy, "--rehearse", "--commit", "abc", TOYS=str(copy / "pid"))
    by_item = {line["item"].removeprefix("toy/"): line for line in lines}
    assert code == 1
    assert {name: line["status"] for name, line in by_item.items()} == {
        "broken": "error",
        "strange": "error",
        "unequal": "failed",
        "killed": "error",
        "hanging": "cut off",
        "fine": "ok",
    }
    assert "ValueError: nothing fits into 2 of WORK/work/file, ./README.md (toys.py:" in by_item["broken"]["error"]
    assert "TypeError: Object of type set is not JSON" in by_item["strange"]["error"]
    assert by_item["unequal"]["error"] == "losses are equal: not so"
    assert by_item["unequal"]["result"]["twice"] == 4
    assert "-9" in by_item["killed"]["error"]
    if (copy / "pid").exists():
        assert not any(map(runs, (copy / "pid").read_text().split())), "its child is left"
    fine = by_item["fine"]
    assert fine["result"] == {"twice": 4, "checks": {"it is even": True}, "goals": {}}
    assert set(fine["files"]) == {"README.md", "benchmarks/evidence/toys.py", "benchmarks/evidence/child.py"}
    assert fine["commit"] == "abc" and fine["rehearsal"] and fine["shapes"] == {"size": 2}
    for word in ("error 3", "failed 1", "cut off 1", "ok 1"):
        assert word in printed


def test_an_item_ends_with_the_command_that_is_killed(copy: Path) -> None:
    (copy / "benchmarks/evidence/catalog.py").write_text(CATALOG.replace("limit_s=0.5", "limit_s=60"))
    (copy / "benchmarks/evidence/toys.py").write_text(TOYS)
    command = [sys.executable, str(copy / "benchmarks/gpu_evidence.py"), "--rehearse", "--only", "toy/hanging"]
    runner = subprocess.Popen(command, env={**os.environ, "TOYS": str(copy / "pid")})
    try:
        until(lambda: (copy / "pid").exists() and (copy / "pid").read_text().count("\n") == 2)
        child, item = (copy / "pid").read_text().split()
        runner.kill()
        runner.wait()
        until(lambda: not runs(item))
    finally:
        runner.kill()
        runner.wait()
    os.kill(int(child), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.guard
def test_an_item_that_was_broken_is_reported(copy: Path) -> None:
    broken = copy / "pipeline/train/loop/step.py"
    broken.write_text(broken.read_text() + "\nraise RuntimeError('a kernel is missing')\n")
    code, lines, _ = run(copy, "--rehearse", "--only", "profile/eager")
    assert code == 1
    (line,) = lines
    assert line["status"] == "error"
    assert "RuntimeError: a kernel is missing" in line["error"]


@pytest.mark.slow
def test_every_item_is_rehearsed(tmp_path: Path) -> None:
    words = [sys.executable, str(FOLDER / "gpu_evidence.py"), "--rehearse", "--to", str(tmp_path / "lines.jsonl")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout
    lines = gpu_evidence.read(tmp_path / "lines.jsonl")
    assert [line["item"] for line in lines] == [item.name for item in ITEMS]
    assert {line["status"] for line in lines} == {"ok"}
    assert page(lines) == page([]), "a rehearsal is no result"
    written = page([{**line, "rehearsal": False} for line in lines])
    assert all(re.search(rf"\| `{item.name}` \| (holds|measured)", written) for item in ITEMS)
    assert all(page([{**line, "rehearsal": False}]) for line in lines), "the page of a single line"


def line_of(item: Item, /, **changes: Any) -> dict[str, Any]:
    line = {
        "item": item.name,
        "status": "ok",
        "result": {"twice": 16},
        "seconds": 3.0,
        "date": "2026-01-02T03:04:05Z",
        "commit": "abc",
        "rehearsal": False,
        "shapes": item.full,
        "device": {"name": "NVIDIA H200", "driver": "580"},
        "versions": {"torch": "2.11.0"},
        "files": imported.hashes(["README.md"]),
    }
    return {**line, **changes}


ITEM = Item("toy/fine", "?", "toys:fine", full={"size": 8}, rehearsal={"size": 2})


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        ({}, True),
        ({"status": "failed"}, True),
        ({"status": "error"}, False),
        ({"status": "cut off"}, False),
        ({"shapes": {"size": 2}}, False),
        ({"device": {"name": "NVIDIA B200"}}, False),
        ({"versions": {"torch": "2.13.0"}}, False),
        ({"files": {"README.md": "0" * 12}}, False),
        ({"files": {"is/not/there.py": "0" * 12}}, False),
        ({"files": {}}, False),
        ({"item": "toy/other"}, False),
    ],
)
def test_an_item_with_a_result_is_skipped(changes: dict[str, Any], skipped: bool) -> None:
    assert gpu_evidence.has_result(ITEM, [line_of(ITEM, **changes)], "NVIDIA H200", "2.11.0") is skipped


def test_lines_are_appended_and_a_line_that_was_cut_off_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    gpu_evidence.append(file, {"a": 1})
    with file.open("a") as opened:
        opened.write('{"b": ')
    assert gpu_evidence.read(file, tmp_path / "none.jsonl") == [{"a": 1}]
    assert "not complete" in capsys.readouterr().err
    gpu_evidence.append(file, {"c": 3})
    assert gpu_evidence.read(file) == [{"a": 1}, {"c": 3}]


def test_lines_have_no_paths_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    given = {
        "/tmp/evidence-x1/run": ["/root/a, '/root' in pipeline/config/root.py", 1.5, None],
        "b": "/tmp/evidence-x12",
    }
    assert machine.without_paths(given, "/tmp/evidence-x1") == {
        "WORK/run": ["~/a, '~' in pipeline/config/root.py", 1.5, None],
        "b": "/tmp/evidence-x12",
    }


def test_ranges_of_what_changes_while_an_item_runs() -> None:
    samples = [{"clock_mhz": 1980.0, "slowdown": "0x4"}, {}, {"clock_mhz": 1200.0, "slowdown": "0x1"}]
    assert machine.ranges(samples) == {"clock_mhz": [1200.0, 1980.0], "slowdown": ["0x1", "0x4"]}
    assert machine.ranges([{}]) == {}


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine.commit() is None
    assert machine.moving() == {}, "nor nvidia-smi"


def test_goals_of_numpy_are_values_of_json() -> None:
    found = goal(np.float64(0.76543), 0.75)
    assert json.loads(json.dumps(found)) == {"value": 0.7654, "goal": 0.75, "met": True}
    assert goal(math.nan, 0.75)["met"] is False


def test_both_sets_of_shapes_have_the_same_keys() -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    for item in ITEMS:
        assert item.full.keys() == item.rehearsal.keys(), item.name
        assert item.full != item.rehearsal, item.name
        assert item.full.get("goals") == item.rehearsal.get("goals"), f"{item.name}: they are code, too"
        assert (FOLDER / "evidence" / f"{item.function.partition(':')[0]}.py").exists()
        assert item.full == json.loads(json.dumps(item.full)), "lines are compared with it"


NO_RESULT = "There is no result yet"


def test_the_page_says_that_there_is_no_result() -> None:
    text = page([])
    assert NO_RESULT in text
    assert all(f"| `{item.name}` |" in text for item in ITEMS)
    assert NO_RESULT in page([line_of(ITEMS[0], rehearsal=True)])


def test_the_page_has_the_figures_of_the_newest_result() -> None:
    item = ITEMS[0]
    old = line_of(item, result={"passed": 7})
    new = line_of(item, result={"passed": 8, "goals": {"speed": {"value": 0.5, "goal": 0.75, "met": False}}})
    bad = line_of(item, status="error", error="a | b")
    del bad["result"]
    text = page([old, new, bad])
    assert NO_RESULT not in text
    assert "| passed | 8 |" in text and "| passed | 7 |" not in text
    assert "goal missed: speed 0.5, aimed at 0.75" in text
    assert "| **error**: a \\| b |" in page([bad])


SPEED = {
    **{"variant": "a", "sequence": 8192, "precision": "bf16", "compile": True, "attention": "auto", "documents": "one"},
    **{"recompute": "none", "peer": None, "layers": 14, "parameters": 4e9, "processes": 1, "step_tokens": 32768},
    **{"micro_batch_tokens": 16384, "tokens_per_second": 200.0, "mfu": 0.5, "mfu_causal": 0.4, "product_share": 0.6},
    **{"product_share_causal": 0.5, "peak_gb": 100.0, "losses": [1.0], "product_tflops": [700.0], "device": "H200"},
    **{"step_s": 2.0, "planned_gb": 110.0, "planned_s": 3.0, "planned_from": "assumed"},
}


def test_the_page_compares_rows_of_one_model_and_version_alone() -> None:
    items = {item.name: item for item in ITEMS}
    base = line_of(items["speed/compiled"], result=SPEED)
    loop = {**SPEED, "variant": "b", "peer": "sdpa", "tokens_per_second": 100.0, "planned_gb": None}
    fp8 = {**SPEED, "variant": "c", "precision": "fp8", "tokens_per_second": 250.0}
    same = page([base, line_of(items["speed/loop"], result=loop), line_of(items["speed/fp8-tensorwise"], result=fp8)])
    assert "- `speed/fp8-tensorwise`: 1.25 of `speed/compiled` in bf16; goal 1.3, missed." in same
    assert "- `speed/compiled`: 2.00 of `speed/loop`." in same
    assert "| `speed/compiled` | 100.0 | 110.0 | 2.000 | 3.000 | assumed |" in same
    assert "| `speed/compiled` | measured |" in same, "it has no checks that could hold"
    for other in (
        {"result": {**loop, "layers": 13}},
        {"result": loop, "versions": {"torch": "2.13.0"}},
        {"result": loop, "device": {"name": "NVIDIA B200"}},
    ):
        text = page([base, line_of(items["speed/loop"], **other)])
        assert "of `speed/loop`" not in text
    two = page([base, line_of(items["speed/loop"], result=loop, versions={"torch": "2.13.0"})])
    assert "torch 2.11.0 and 2.13.0, driver 580." in two


def test_the_page_says_that_nothing_was_found() -> None:
    item = next(item for item in ITEMS if item.name == "profile/eager")
    assert "| waits | none |" in page([line_of(item, result={"waits": {}})])
    assert "| q 1.2346e-06 |" in page([line_of(item, result={"rows": [{"differences": {"q": 1.23456e-6}}]})])


def test_the_page_that_is_there_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(gpu_evidence.read(gpu_evidence.RESULTS)), "write it: gpu_evidence.py --page"


def test_time_in_which_a_device_idles() -> None:
    assert profiled.busy_and_whole([(0, 10), (5, 8), (12, 20), (19, 21)]) == (19, 21)
    with pytest.raises(ValueError):
        profiled.busy_and_whole([])
    rows = profiled.table([(0, 1000, "a"), (0, 3000, "b"), (5000, 6000, "b")], steps=2)
    assert [(row["name"], row["ms"], row["calls"], row["share"]) for row in rows] == [
        ("b", 2.0, 1.0, 0.8),
        ("a", 0.5, 0.5, 0.2),
    ]


def test_waits_are_counted_by_place() -> None:
    texts = ("called a synchronizing CUDA operation", "Synchronization debug mode is a prototype feature", "a kernel")
    caught = [warnings.WarningMessage(text, UserWarning, "/a/step.py", 7) for text in (*texts, texts[0])]
    assert profiled.waits_by_place(caught) == {"step.py:7": 2}


def test_the_kit_has_all_that_its_packages_need() -> None:
    names = kit.closure(kit.NEEDED, "x86_64", "3.12")
    assert {"pydantic-core", "huggingface-hub", "pytest", "regex", "pluggy"} <= set(names)
    assert not {"torch", "numpy", "hf-xet"} & set(names)
    entries = kit.locked(names)
    assert entries.count("==") == len(names)
    assert all("--hash=sha256:" in entry for entry in entries.split("==")[1:])
