"""`is_complete` says yes only where the stage would find nothing to do, and writes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.data.preprocess.stage import is_complete, preprocess
from tests import tiers
from tests.data.runs import make_config, write_text


def config_of(root: Path, shuffle: str, **more: object):
    sources = [
        {"name": name, "type": "text", "paths": [f"{root}/{name}/**/*.txt"], "weight": 1.0} for name in ("sea", "land")
    ]
    settings = {"unit_bytes": 1_000, "workers": 1, "shuffle": shuffle, **more}
    return make_config(root, sources, preprocess=settings, splits={"heldout": "2 documents"})


def state(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("shuffle", tiers.first(1, ["unit", "global"], rest="guard"))
def test_complete_until_something_is_missing_or_other(tmp_path: Path, shuffle: str) -> None:
    for seed, name in enumerate(("sea", "land")):
        write_text(tmp_path / name, 12, seed)
    config = config_of(tmp_path, shuffle)
    assert not is_complete(config)
    preprocess(config, units=True)
    assert not is_complete(config), "units alone are no dataset"
    preprocess(config)
    before = state(tmp_path)
    assert is_complete(config) and state(tmp_path) == before
    fewer = config.model_copy(update={"data": config.data.model_copy(update={"sources": config.data.sources[:1]})})
    with pytest.raises(UserError, match="changed since it was trained"):
        is_complete(fewer)
    assert not is_complete(config_of(tmp_path, shuffle, max_document_bytes=2_000))

    folder, kept = config.data_dir / "sea", tmp_path / "kept"
    shutil.copytree(folder, kept)
    for copy in sorted(path for path in kept.rglob("*") if path.is_file()):
        path = folder / copy.relative_to(kept)
        path.unlink()
        assert not is_complete(config), path
        shutil.copy2(copy, path)
    assert is_complete(config)
    os.utime(next((tmp_path / "land").rglob("*.txt")), (1, 1))
    assert not is_complete(config), "another time: the stage looks at it again"
    preprocess(config)
    assert is_complete(config)
    write_text(tmp_path / "land", 13, 1)
    with pytest.raises(UserError, match="changed since it was trained"):
        is_complete(config)


def test_what_was_rejected_is_for_the_stage_to_judge(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text('{"text": "good"}\n' * 50 + '{"text": ""}\n')
    sources = [{"name": "sea", "type": "jsonl", "paths": [str(file)], "weight": 1.0}]
    config = make_config(tmp_path, sources, preprocess={"max_error_rate": 0.5})
    preprocess(config)
    assert is_complete(config)
    file = tmp_path / "others.jsonl"
    file.write_text('{"text": "good"}\n' * 50 + "no JSON\n")
    sources = [{"name": "land", "type": "jsonl", "paths": [str(file)], "weight": 1.0}]
    config = make_config(tmp_path / "other", sources, preprocess={"max_error_rate": 0.5})
    preprocess(config)
    assert not is_complete(config)
