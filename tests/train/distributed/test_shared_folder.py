"""Run folders that are not the same one for all ranks are refused before anything is trained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.common.errors import RankFailed, UserError
from pipeline.train.checkpoint import committed
from pipeline.train.distributed.process_group import of_environment
from pipeline.train.start.open_run import refuse_separate_folders
from tests.train.distributed.ranks import Ranks

pytestmark = [pytest.mark.parallel, pytest.mark.guard]


def start(root: Path, shared: bool) -> str:
    """A rank that looks at its run folder: the message of the refusal, or its kind on ranks that say nothing."""
    committed.PATIENCE_S = 0.2
    ranks = of_environment()
    run = root / ("all" if shared else f"node-{ranks.rank}")
    run.mkdir(exist_ok=True)
    try:
        refuse_separate_folders(run, ranks)
    except (UserError, RankFailed) as error:
        return str(error) if ranks.rank == 0 else type(error).__name__
    return "" if not ranks.rank or not os.listdir(run) else f"{os.listdir(run)} is left"


def test_folders_of_each_node_are_refused(tmp_path: Path) -> None:
    with Ranks(2, connect=True) as ranks:
        assert ranks.call(start, tmp_path, True) == ["", ""]
        message, other = ranks.call(start, tmp_path, False)
    assert str(tmp_path / "node-0") in message and "all nodes" in message and other == "RankFailed"
    assert list((tmp_path / "node-0").iterdir()) == []
