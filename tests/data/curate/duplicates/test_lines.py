"""Repeated lines, against plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.curation.curate import DuplicatesConfig, LinesConfig
from pipeline.data.curate.duplicates.line_text import hashed_lines, remove_lines
from tests.data.curate.duplicates.made import make_passes, make_scope, removed, run_all, without_receipts

LINES = LinesConfig(min_bytes=10, min_count=3)
SETTINGS = DuplicatesConfig(exact="text", lines=LINES)
CODE = "```python\nreturn a common line\n```"


def _texts(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    common = [f"  a common line {number} of a page\t" for number in range(12)] + ["short", "", CODE]
    texts = []
    for number in range(count):
        lines = [common[place] for place in rng.integers(0, len(common), int(rng.integers(0, 7))).tolist()]
        lines.insert(int(rng.integers(0, len(lines) + 1)), f"a line of document {number} alone")
        texts.append("\n".join(lines))
    return [*texts, texts[0], texts[3]]


def _numbers(text: str, *, code: bool = False) -> list[tuple[int, str]]:
    """Lines that may go, by plain Python: those of `CODE` are marked by what is around them."""
    found, inside = [], False
    for number, line in enumerate(text.split("\n")):
        fence = line.startswith("```")
        if not (inside or fence) and len(line.strip()) >= LINES.min_bytes:
            found.append((number, line.strip()))
        inside ^= fence
    assert not inside
    return found


@pytest.mark.parametrize("keep", ["first", "none"])
def test_lines_of_kept_documents(tmp_path: Path, keep: Literal["first", "none"]) -> None:
    settings = SETTINGS.model_copy(update={"lines": LINES.model_copy(update={"keep": keep})})
    texts = {"web": _texts(0, 60), "book": _texts(1, 20)}
    bad = {"web": [1, 2, 10], "book": [0]}
    passes = make_passes(make_scope(tmp_path, texts, settings, bad=bad), settings)
    assert passes.names[-2:] == ("kept", "lines")
    run_all(passes)
    gone = removed(passes)
    assert gone
    kept = [
        (name, row)
        for name in sorted(texts)
        for row in range(len(texts[name]))
        if (name, row) not in gone and row not in bad[name]
    ]
    counts = Counter(line for name, row in kept for _, line in _numbers(texts[name][row]))
    seen: set[str] = set()
    expected = set()
    for name, row in kept:
        for number, line in _numbers(texts[name][row]):
            if counts[line] >= LINES.min_count and (keep == "none" or line in seen):
                expected.add((name, row, number))
            seen.add(line)
    found = {
        (passes.source_names[chunk.source], row + chunk.first, line)
        for chunk in passes.scope.chunks
        for row, line in passes.removed_lines(chunk).tolist()
    }
    assert found == expected
    assert sum(counts["removed"] for counts in passes.counts("lines")) == len(found)

    # What is left has no such line any more: the same pass removes nothing.
    left = {
        name: [
            remove_lines(texts[name][row], {line for who, where, line in found if (who, where) == (name, row)})
            for other, row in kept
            if other == name
        ]
        for name in texts
    }
    again = make_passes(make_scope(tmp_path / "again", left, settings), settings)
    run_all(again)
    assert not any(len(again.removed_lines(chunk)) for chunk in again.scope.chunks)


def test_result_is_independent_of_buckets(tmp_path: Path) -> None:
    texts = {"web": _texts(2, 50)}
    found = []
    for name, bucket_bytes in (("one", 2**29), ("many", 2**10)):
        passes = make_passes(make_scope(tmp_path / name, texts, SETTINGS), SETTINGS, bucket_bytes=bucket_bytes)
        run_all(passes)
        found.append([passes.removed_lines(chunk).tolist() for chunk in passes.scope.chunks])
        assert len(passes.jobs("lines")) > (5 if name == "many" else 0)
    assert found[0] == found[1]
    assert any(found[0])


def test_lines_alone(tmp_path: Path) -> None:
    settings = DuplicatesConfig(lines=LINES)
    passes = make_passes(make_scope(tmp_path, {"web": ["a line that repeats\n"] * 3}, settings), settings)
    assert passes.names == ("rank", "kept", "lines")
    run_all(passes)
    assert [passes.removed_lines(chunk).tolist() for chunk in passes.scope.chunks] == [[], [(0, 0)], [(0, 0)]]
    assert without_receipts(tmp_path)


def test_fences() -> None:
    text = "\n".join(
        [
            "a line that is long enough",
            "```sh with a long description",
            "a line that is long enough",
            "~~~",
            "``` no end of the code",
            "````",
            "a line that is long enough",
            "  ~~~~ other",
            "a line that is long enough",
            "~~~",
            "a line that is long enough",
        ]
    )
    assert hashed_lines(text.encode(), 10)[1] == [0, 6]


@given(text=st.text(st.sampled_from("ab\n\r \u2028`~")), numbers=st.sets(st.integers(0, 20)))
def test_remove_lines(text: str, numbers: set[int]) -> None:
    lines = text.split("\n")
    left = remove_lines(text, numbers)
    if set(range(len(lines))) - numbers:
        assert left.split("\n") == [line for number, line in enumerate(lines) if number not in numbers]
    else:
        assert left == ""
    hashes, places = hashed_lines(text.encode(), 1)
    assert len(hashes) == len(places)
    assert set(places) <= set(range(len(lines)))
