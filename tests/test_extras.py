"""Messages and pages name our own package when they say how to install one of its extras."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from pipeline import DISTRIBUTION
from pipeline.common.errors import install_extra
from pipeline.train.fp8.convert import _PACKAGES
from tests.repository import files

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].keys()
REQUIREMENT = re.compile(r"pip install[^`\n]*?([\w.{}-]+)\[([\w,{}-]+)\]")


def texts() -> dict[str, str]:
    """Source, pages and settings under version control, without the tests, which match messages with patterns."""
    names = [name for name in files() if not name.startswith("tests/")]
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ""}
    return {name: (ROOT / name).read_text() for name in names if Path(name).suffix in kinds}


def test_the_name_is_ours() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert install_extra("te") == "pip install 'pretraining-pipeline[te]'"


def test_every_install_command_names_us_and_an_extra() -> None:
    found = {(name, *match) for name, text in texts().items() for match in REQUIREMENT.findall(text)}
    assert ("docs/evaluation.md", DISTRIBUTION, "eval") in found
    for name, package, extras in found:
        if (package, extras) == ("{DISTRIBUTION}", "{name}"):  # in `install_extra`
            continue
        assert package in (DISTRIBUTION, "."), f"{name}: {package}[{extras}]"
        assert set(extras.split(",")) <= EXTRAS, f"{name}: {package}[{extras}]"


def test_every_extra_in_a_message_exists() -> None:
    named = {extra for text in texts().values() for extra in re.findall(r"install_extra\(['\"](\w+)['\"]\)", text)}
    assert {"te", "flash", "wandb", "eval"} <= named
    assert named | {extra for _, _, extra in _PACKAGES.values()} <= EXTRAS


@pytest.mark.parametrize("text", ["pip install 'pipeline[te]'", "`pip install ...[te]`", 'pip install -U "x[te,y]"'])
def test_the_pattern_sees_others(text: str) -> None:
    (found,) = REQUIREMENT.findall(text)
    assert found[0] != DISTRIBUTION
