"""The workflows run only what is pinned, with no more rights than they need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[1] / ".github/workflows"
WORKFLOWS = {file.name: file.read_text() for file in sorted(FOLDER.glob("*.y*ml"))}


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, text in WORKFLOWS.items():
        for job, content in yaml.safe_load(text)["jobs"].items():
            yield name, job, content


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_hash(name: str) -> None:
    """With the version beside the hash; one action has one hash in all files."""
    used = re.findall(r"\buses: *(.*)", WORKFLOWS[name])
    assert used
    for each in used:
        assert each.startswith("./") or re.fullmatch(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each
    everywhere = {each for text in WORKFLOWS.values() for each in re.findall(r"\buses: *([^.\n].*)", text)}
    assert len({each.partition("@")[0] for each in everywhere}) == len(everywhere)


def test_rights() -> None:
    """None but what a job names; writing is for one job each, which runs nothing of the checkout."""
    assert {yaml.safe_load(text)["permissions"] == {} for text in WORKFLOWS.values()} == {True}
    writing = {}
    for name, job, content in jobs():
        if rights := {right for right, value in content["permissions"].items() if value != "read"}:
            writing[name, job] = rights
            steps = content["steps"]
            assert not [each for each in steps if "checkout" in each.get("uses", "") or "make" in each.get("run", "")]
    assert writing == {
        ("release.yml", "publish"): {"id-token"},
        ("release.yml", "draft"): {"contents"},
        ("site.yml", "deploy"): {"pages", "id-token"},
    }
    (published,) = (content for _, job, content in jobs() if job == "publish")
    assert published["environment"] == "pypi" and set(published["needs"]) == {"tests", "build"}


def test_shells_get_no_expressions() -> None:
    """What an expression has would be run: names of branches and titles come from strangers."""
    for name, _, content in jobs():
        for step in content.get("steps", ()):
            assert "${{" not in step.get("run", ""), (name, step)
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
    assert not [name for name, text in WORKFLOWS.items() if "pull_request_target" in text]
