"""Repeated paragraphs, against plain Python."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config.curation.curate import DuplicatesConfig, ParagraphsConfig
from pipeline.config.root import Config
from pipeline.data.curate.duplicates.line_text import hashed_paragraphs, remove_lines
from pipeline.data.curate.duplicates.lines import lines_of
from pipeline.data.curate.stage import curate
from pipeline.data.curate.verdicts import read_curation
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.why_removed import why
from tests.data.curate.duplicates.made import make_passes, make_scope, removed, run_all
from tests.data.curate.runs import curate_config

PARAGRAPHS = ParagraphsConfig(min_bytes=20, min_words=3)
SETTINGS = DuplicatesConfig(exact="text", paragraphs=PARAGRAPHS)


def _texts(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    common = [f"  a common paragraph {number}\t\nof two lines" for number in range(8)] + ["short", "one-long-word" * 3]
    texts = []
    for number in range(count):
        parts = [common[place] for place in rng.integers(0, len(common), int(rng.integers(0, 5))).tolist()]
        parts.insert(int(rng.integers(0, len(parts) + 1)), f"a paragraph of document {number} alone")
        texts.append(("\n\n", "\n \n\n")[number % 2].join(parts))
    return [*texts, texts[0]]


def _plain(text: str) -> list[str]:
    """Paragraphs that may go, by plain Python."""
    bare = "\n".join(line.strip() for line in text.split("\n"))
    parts = [part for part in re.split("\n{2,}", bare.strip("\n")) if part]
    return [part for part in parts if len(part.encode()) >= 20 and len(part.split()) >= 3]


@pytest.mark.parametrize("keep", ["first", "none"])
def test_paragraphs_of_kept_documents(tmp_path: Path, keep: Literal["first", "none"]) -> None:
    settings = SETTINGS.model_copy(update={"paragraphs": PARAGRAPHS.model_copy(update={"keep": keep})})
    texts, bad = {"web": _texts(0, 40), "book": _texts(1, 15)}, {"web": [1, 2], "book": [0]}
    passes = make_passes(make_scope(tmp_path, texts, settings, bad=bad), settings)
    assert passes.names[-2:] == ("kept", "paragraphs")
    run_all(passes)
    gone = removed(passes)
    kept = [
        (name, row)
        for name in sorted(texts)
        for row in range(len(texts[name]))
        if (name, row) not in gone and row not in bad[name]
    ]
    counts = Counter(part for name, row in kept for part in _plain(texts[name][row]))
    seen: set[str] = set()
    expected: Counter[tuple[str, int]] = Counter()
    for name, row in kept:
        for part in _plain(texts[name][row]):
            expected[name, row] += counts[part] > 1 and (keep == "none" or part in seen)
            seen.add(part)
    found: Counter[tuple[str, int]] = Counter()
    numbers: dict[tuple[str, int], list[int]] = {}
    for chunk in passes.scope.chunks:
        paragraphs = passes.removed_paragraphs(chunk)
        for row, line in lines_of(paragraphs, blank=True).tolist():
            numbers.setdefault((passes.source_names[chunk.source], row + chunk.first), []).append(line)
        found.update((passes.source_names[chunk.source], row + chunk.first) for row in paragraphs["row"].tolist())
    assert found == +expected and found
    assert sum(counts["removed"] for counts in passes.counts("paragraphs")) == found.total()

    left = [part for name, row in kept for part in _plain(remove_lines(texts[name][row], numbers.get((name, row), [])))]
    assert Counter(left) == Counter({part: 1 for part in counts if keep == "first" or counts[part] == 1})


def test_result_is_independent_of_buckets(tmp_path: Path) -> None:
    texts, found = {"web": _texts(2, 40)}, []
    for name, bucket_bytes in (("one", 2**29), ("many", 2**10)):
        passes = make_passes(make_scope(tmp_path / name, texts, SETTINGS), SETTINGS, bucket_bytes=bucket_bytes)
        run_all(passes)
        found.append([passes.removed_paragraphs(chunk).tolist() for chunk in passes.scope.chunks])
        assert len(passes.jobs("paragraphs")) > (3 if name == "many" else 0)
    assert found[0] == found[1] and any(found[0])


@given(text=st.text(st.sampled_from("ab \n\t`")))
def test_places_and_bytes(text: str) -> None:
    raw, end = text.encode(), 0
    for each in hashed_paragraphs(raw, 1, 0):
        lines = raw.split(b"\n")
        own = lines[each.line : each.line + each.lines]
        behind = lines[each.line + each.lines : each.line + each.lines + each.blank]
        assert each.line >= end and all(line.strip() for line in own) and not any(line.strip() for line in behind)
        end = each.line + each.lines + each.blank
        last = end == len(lines)
        assert last or lines[end].strip()
        assert each.bytes == len(b"\n".join([*own, *behind])) + (not last)
    assert sum(each.bytes for each in hashed_paragraphs(raw, 1, 0)) <= len(raw)


def test_code_stays() -> None:
    text = "a paragraph\n```\nwith code\n```\n\n```\ncode\n\nmore code\n```\n\na paragraph"
    assert [each.line for each in hashed_paragraphs(text.encode(), 1, 0)] == [11]


def test_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="removes nothing"):
        ParagraphsConfig(edit=False)


SHARED = "This paragraph is on many pages of the same site, word for word."


def _config(root: Path, paragraphs: dict[str, object], workers: int = 1) -> Config:
    """A run on documents of which `half` is half repeated, `whole` is nothing else, and `first` comes first."""
    texts = {
        "first": f"{SHARED}\n\nThe first page has this, too.",
        "half": f"{SHARED}\n\nAnother page has a paragraph of its own that is about as long as it.",
        "whole": f"{SHARED}\n",
        "other": "Nothing of this is on any other page, so it stays whatever the bounds are.",
    }
    root.mkdir(parents=True, exist_ok=True)
    lines = [orjson.dumps({"id": id, "text": text}) for id, text in texts.items()]
    (root / "a.jsonl").write_bytes(b"\n".join(lines))
    curate = {"mode": "apply", "duplicates": {"paragraphs": {"min_bytes": 20, **paragraphs}}, "engine": "python"}
    config = curate_config(root, root, curate, workers, heldout=0)
    source = config.data.sources[0].model_copy(update={"metadata": []})
    return config.model_copy(update={"data": config.data.model_copy(update={"sources": [source]})})


@pytest.mark.parametrize(
    ("paragraphs", "gone", "edited"),
    [
        ({}, {"whole"}, True),
        ({"max_share": 0.4}, {"whole", "half"}, True),
        ({"edit": False, "max_share": 0.9}, {"whole"}, False),
        ({"min_count": 4}, set(), False),
    ],
)
def test_the_stage(tmp_path: Path, paragraphs: dict[str, object], gone: set[str], edited: bool) -> None:
    config = _config(tmp_path, paragraphs)
    (source,) = curate(config).sources
    assert source.removed["duplicates.paragraphs"] == len(gone)
    assert source.paragraphs == (("half" not in gone) if gone else 0)
    about = read_curation(config.data_dir / "a" / "curate").about
    assert about["paragraphs"] == source.paragraphs
    for number, id in enumerate(("first", "half", "whole", "other")):
        found = why(config, "a", f"0:{number}", say=lambda _: None)
        assert found.id == id and found.agrees
        assert (found.first.name if found.first else None) == ("duplicates.paragraphs" if id in gone else None)
        repeated = [] if found.edits is None or id in gone else found.edits.repeated
        assert repeated == ([(1, SHARED), (2, "")] if id == "half" and edited and "half" not in gone else [])
    if not paragraphs:
        (made,) = preprocess(config).sources
        assert made.curated == {"duplicates.paragraphs": 1}
        assert made.edited_bytes == len(f"{SHARED}\n\n".encode())
