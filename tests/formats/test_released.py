"""What scripts and run files of the last release name is still there, or the changelog says what became of it.

docs/stability.md has the rules. `tests.formats.released` made the listing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from tests.formats import make, released

LISTING: dict[str, Any] = orjson.loads(released.LISTING.read_bytes())


def changes(old: dict[str, Any], keys: dict[str, Any], commands: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was taken away or given another default: the name that the changelog needs, and the change."""
    for key, entry in old["keys"].items():
        if key not in keys:
            yield key, "the key is gone"
            continue
        now = keys[key]
        if gone := [value for value in entry.get("choices", ()) if value not in now.get("choices", ())]:
            yield key, f"no longer takes {', '.join(map(str, gone))}"
        if "default" in entry and "default" not in now:
            yield key, "is required"
        elif entry.get("default", now.get("default")) != now.get("default"):
            yield key, f"has the default {now['default']!r}; it was {entry['default']!r}"
    for words, names in old["commands"].items():
        if words not in commands:
            yield words, "the command is gone"
            continue
        for name in set(names) - set(commands[words]):
            yield f"{words} {name}" if name.startswith("-") else words, f"has no {name}"


def untold(found: Iterator[tuple[str, str]], changelog: str, release: str) -> list[str]:
    """Changes whose name is not in the changelog above the heading of a release, as code."""
    since = re.split(rf"(?m)^## {re.escape(release)}\b", changelog)[0]
    return [f"{name}: {change}" for name, change in found if f"`{name}`" not in since]


def test_users_are_told_what_changed() -> None:
    changelog = (make.HERE.parents[1] / "CHANGELOG.md").read_text()
    assert re.search(rf"(?m)^## {re.escape(LISTING['release'])}\b", changelog)
    wrong = untold(changes(LISTING, released.run_file(), released.commands()), changelog, LISTING["release"])
    assert not wrong, (
        f"since {LISTING['release']}:\n" + "\n".join(wrong) + "\nKeep the old name and print a line with the new one "
        "(docs/stability.md), and write `NAME` into CHANGELOG.md under Deprecated, Removed or Changed."
    )


def test_each_kind_of_change_is_found() -> None:
    old = {
        "keys": {
            **{"a.gone": {}, "a.told": {}, "a.default": {"default": 1}, "a.required": {"default": None}},
            "a.fewer": {"default": "x", "choices": ["x", "y"]},
        },
        "commands": {"pipeline old": [], "pipeline train": ["--check", "--json", "run"]},
    }
    keys = {"a.default": {"default": 2}, "a.required": {}, "a.fewer": {"default": "x", "choices": ["x", "z"]}}
    found = changes(old, keys, {"pipeline train": ["--json", "run"]})
    wrong = untold(found, "## Unreleased\n\n- `a.told` went.\n\n## 1.2.0 \n\n- `a.gone`\n", "1.2.0")
    assert [line.split(":")[0] for line in wrong] == [
        *("a.gone", "a.default", "a.required", "a.fewer", "pipeline old", "pipeline train --check"),
    ]
