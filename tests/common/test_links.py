"""Links that another user puts in the place of a folder, before and while things in the folder are removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.common.links import held_folder, refuse_link_of_others
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints

OTHER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives links to another user")


def link(at: Path, to: Path, owner: int) -> None:
    at.symlink_to(to)
    os.lchown(at, owner, owner)


def checkpoints(run: Path) -> Checkpoints:
    for step in (1, 2):
        folder = run / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "weights").write_text("precious")
    return Checkpoints(run / "checkpoints")


def test_checkpoints_of_another_run_are_not_removed_through_a_link(tmp_path: Path) -> None:
    precious, shared = checkpoints(tmp_path / "precious"), checkpoints(tmp_path / "shared")
    before = sorted(precious.folder.rglob("*"))
    shutil.rmtree(shared.folder)
    link(shared.folder, precious.folder, OTHER)
    (precious.folder / "step-00000003.1.tmp").mkdir()
    with pytest.raises(UserError, match=f"belongs to the user {OTHER}"):
        shared.remove(shared.all())
    with pytest.raises(UserError, match="a link to"):
        shared.clean(print)
    with pytest.raises(UserError, match="a link to"):
        shared.begin(4, 1)
    assert sorted(precious.folder.rglob("*")) == sorted([*before, precious.folder / "step-00000003.1.tmp"])


def test_a_link_that_comes_during_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious, shared = checkpoints(tmp_path / "precious"), checkpoints(tmp_path / "shared")
    replace = os.replace

    def swapped(*arguments: object, **options: object) -> None:
        if not shared.folder.is_symlink():
            shared.folder.rename(tmp_path / "aside")
            link(shared.folder, precious.folder, OTHER)
        replace(*arguments, **options)  # type: ignore[arg-type]

    everything = shared.all()
    monkeypatch.setattr(os, "replace", swapped)
    with pytest.raises(UserError, match="a link to"):
        shared.remove(everything)
    assert [each.name for each in (tmp_path / "aside").iterdir()] == ["step-00000002"]
    assert len(precious.all()) == 2


def test_links_of_ones_own_are_followed(tmp_path: Path) -> None:
    elsewhere, run = checkpoints(tmp_path / "elsewhere"), tmp_path / "run"
    run.mkdir()
    link(run / "checkpoints", elsewhere.folder, os.geteuid())
    found = Checkpoints(run / "checkpoints")
    assert [each.step for each in found.remove(found.all())] == [1, 2]
    assert found.begin(3, 1).is_dir()
    # The owner of the folder decides what is in it, as in /tmp.
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    link(theirs / "checkpoints", elsewhere.folder, OTHER)
    with held_folder(theirs / "checkpoints") as descriptor:
        assert os.fstat(descriptor).st_ino == elsewhere.folder.stat().st_ino
    refuse_link_of_others(tmp_path / "nothing")


def test_a_checkpoint_that_is_a_link_goes_alone(tmp_path: Path) -> None:
    """The link is removed, and not what it leads to."""
    precious, shared = checkpoints(tmp_path / "precious"), checkpoints(tmp_path / "shared")
    shutil.rmtree(shared.folder / "step-00000001")
    link(shared.folder / "step-00000001", precious.folder / "step-00000001", OTHER)
    with pytest.raises(Exception, match="cannot be removed"):
        shared.remove([Checkpoint(shared.folder / "step-00000001", 1)])
    assert (precious.folder / "step-00000001/weights").read_text() == "precious"
