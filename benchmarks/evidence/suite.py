"""The project's own tests that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from evidence.child import end_with_parent
from evidence.imported import FOLDER, ROOT, record
from evidence.item import Result

_TEST_S = 120


def measure(device: str, work: Path, *, paths: Sequence[str] | None, marker: str, workers: int) -> Result:
    """Run pytest.

    Args:
        device: Not used: the tests ask torch.
        work: Where reports go.
        paths: Relative to the repository; None: the test files that name the marker. The others import packages that
            no item needs.
        marker: What `-m` gets.
        workers: Processes of pytest-xdist, at least 1.
    """
    if paths is None:
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        paths = [str(file.relative_to(ROOT)) for file in files if f"mark.{marker}" in file.read_text()]
    report = work / "report.xml"
    # `record` as a plugin: workers list what they imported, too.
    words = ["-p", "evidence.suite", "-q", "-m", marker, f"--junitxml={report}", "-p", "no:cacheprovider"]
    # A test that hangs costs its worker, not all results.
    spread = ["-n", str(workers), "--dist", "load", f"--timeout={_TEST_S}", "--timeout-method=thread"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *spread, *paths],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])},
    )
    if not report.exists():
        raise RuntimeError(
            f"pytest left no report (exit code {done.returncode}): {done.stdout[-300:]}{done.stderr[-300:]}"
        )
    cases = list(ET.parse(report).getroot().iter("testcase"))
    kinds = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    bad = [*kinds["failure"], *kinds["error"]]
    return {
        "device": device,
        "passed": len(cases) - sum(map(len, kinds.values())),
        "failed": {_name(case): _reason(case, "failure", "error") for case in bad},
        "skipped": dict(Counter(_reason(case, "skipped") for case in kinds["skipped"])),
        "checks": {"no test fails": not bad, "tests ran": len(cases) > len(kinds["skipped"])},
    }


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"


def _reason(case: ET.Element, *kinds: str) -> str:
    found = next(element for kind in kinds for element in case.iter(kind))
    return " ".join((found.get("message") or "").split())[:200]


def pytest_configure() -> None:
    """Hook of pytest: no tests are left running when the item is killed."""
    if FOLDER in os.environ:
        end_with_parent()


def pytest_sessionfinish() -> None:
    """Hook of pytest, in the main process and in workers."""
    if FOLDER in os.environ:
        record()
