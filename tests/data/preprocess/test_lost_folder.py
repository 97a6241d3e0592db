"""A dataset folder that is gone in the middle of preprocessing: an error that names it, and no stub in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.common.errors import MachineError
from pipeline.config.load import load
from pipeline.data.preprocess import part_writer
from pipeline.data.preprocess.stage import preprocess
from tests import tiny


@pytest.mark.parametrize("vanishing", [".", "sea"])
def test_what_is_gone_is_not_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vanishing: str) -> None:
    """`data.dir`, or the folder of a source; both are made by the command, and then only worked in."""
    config = load(tiny.write_run(tmp_path))
    folder = config.data_dir / vanishing
    make = part_writer.storage.make_below

    def vanish(root: Path, path: Path) -> None:
        if "parts" in path.parts and folder.exists():  # in a worker, which is about to write its first part
            folder.rename(tmp_path / "away")
        make(root, path)

    monkeypatch.setattr(part_writer.storage, "make_below", vanish)
    with pytest.raises((MachineError, OSError)) as caught:
        preprocess(config)
    assert str(folder) in str(caught.value)
    assert not folder.exists()
    (tmp_path / "away").rename(folder)
    monkeypatch.undo()
    preprocess(config)
    assert (config.data_dir / "sea" / "train" / "manifest.json").exists()
