"""The ledger: one line for each start and end, also of what fails."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from slurm.local.stage_ledger import Ledger


def test_seconds_and_exit_codes_over_attempts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.stage("preprocess"):
        pass
    with pytest.raises(UserError), ledger.stage("train"):
        raise UserError("no\n  1. this\n  2. that")
    with ledger.stage("train"):
        pass
    ends = [(each["stage"], each["exit"], each.get("reason")) for each in ledger.entries() if each["event"] == "end"]
    assert ends == [("preprocess", 0, None), ("train", 2, "no"), ("train", 0, None)]
    assert set(ledger.seconds()) == {"preprocess", "train"}


def test_a_line_cut_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.stage("train"):
        pass
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"stage": "tr')
    assert len(ledger.entries()) == 2
    with ledger.stage("eval"):
        pass
    assert [entry["stage"] for entry in ledger.entries()] == ["train", "train", "eval", "eval"]


def test_a_full_disk_does_not_hide_why_a_stage_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, row: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match="step 5 could not be saved"), Ledger(tmp_path).stage("train"):
        monkeypatch.setattr("pipeline.common.storage.JsonLines.write", full)
        raise UserError("step 5 could not be saved")
