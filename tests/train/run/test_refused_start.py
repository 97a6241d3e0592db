"""A start that is refused leaves nothing that was not there, and is no attempt at the run."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest

from pipeline.common.console import Console
from pipeline.common.errors import EXIT_OK, EXIT_REFUSED, MachineError, RankFailed, UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.run.attempts import attempts
from pipeline.train.run.folder import no_trace_if_refused, note_end
from pipeline.train.run.lock import last_attempt
from slurm.local import stages
from slurm.local.stage_ledger import Ledger
from slurm.status.command import status

HUGE = "model={layers: 400, dim: 65536, heads: 512}"


def _config(root: Path, name: str, *overrides: str) -> Config:
    return load(root / "run.yaml", [f"run.dir={root / name}", "launch.device=cpu", *overrides])


def _train(config: Config) -> int:
    return stages.train(config, Console(file=io.StringIO(), width=200))


@pytest.mark.parametrize(
    "override", ["train.duration=0 tokens", "train.sequence_length=1000000", HUGE, "parallel.tp=3"]
)
def test_a_new_run_that_is_refused_leaves_no_folder(root: Path, override: str) -> None:
    before = sorted(root.rglob("*"))
    with pytest.raises(UserError) as refused:
        _train(_config(root, "new/run", override))
    assert refused.value.exit_code == EXIT_REFUSED
    assert sorted(root.rglob("*")) == before


def test_datasets_of_other_settings_are_not_trained_on(root: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)was made with other settings.*unit_bytes"):
        _train(_config(root, "other", "data.preprocess.unit_bytes=2000000"))


def test_preprocessing_that_is_refused_leaves_no_folder(root: Path) -> None:
    with pytest.raises(UserError):
        stages.preprocess(_config(root, "nodata", "data.sources.0.paths=[/nowhere/*.txt]", f"data.dir={root / 'none'}"))
    assert not (root / "nodata").exists()


@pytest.mark.guard
def test_a_refused_start_does_not_count_as_an_attempt(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = root / "counted"
    _train(_config(root, "counted", "train.duration=2 steps"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for _ in range(2):
        with pytest.raises(UserError):
            _train(_config(root, "counted", "model.dim=64"))
        told = orjson.loads((run / "exit.json").read_bytes())
        assert (told["code"], told["attempt"]) == (EXIT_REFUSED, 2), "what a job's batch process reads"
        assert last_attempt(run) == 1
    monkeypatch.delenv("SLURM_JOB_ID")
    assert _train(_config(root, "counted", "train.duration=4 steps")) == 4
    assert [(each.number, each.code) for each in attempts(run)] == [(1, EXIT_OK), (2, EXIT_OK)]
    assert last_attempt(run) == 2


@pytest.mark.guard
def test_a_start_by_hand_that_is_refused_leaves_a_run_that_is_done_as_it_was(root: Path) -> None:
    run = root / "kept"
    _train(_config(root, "kept", "train.duration=2 steps"))
    before = (run / "exit.json").read_bytes(), (run / "exit.json").stat().st_mtime_ns
    for override in ("model.dim=64", "parallel.tp=3"):  # as its only process, and before any is started
        with pytest.raises(UserError):
            _train(_config(root, "kept", override))
        assert ((run / "exit.json").read_bytes(), (run / "exit.json").stat().st_mtime_ns) == before
        (found,) = status({run: None})
        assert (found.state, found.seconds_left) == ("done", None)
    ends = [line for line in Ledger(run).entries() if line["event"] == "end"]
    assert [line["exit"] for line in ends] == [EXIT_OK, EXIT_REFUSED, EXIT_REFUSED]
    assert "reason" not in ends[0]
    assert ends[1]["reason"].startswith("this run differs from its checkpoint")


def test_a_refused_launch_leaves_the_end_of_a_run_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RunFiles(tmp_path).exit
    done = {"attempt": 1, "code": EXIT_OK, "reason": "done", "agreed": True, "step": 2}
    file.write_bytes(orjson.dumps(done))
    note_end(tmp_path, UserError("no"), file.stat().st_mtime + 1)
    assert orjson.loads(file.read_bytes()) == done
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "7")
    note_end(tmp_path, UserError("no"), file.stat().st_mtime + 1)
    assert orjson.loads(file.read_bytes())["code"] == EXIT_REFUSED, "what a job's batch process reads"


def test_a_run_folder_that_cannot_be_looked_at_is_named(root: Path) -> None:
    """As below a folder that may not be searched, which root may: so a name that no disk takes."""
    with pytest.raises(MachineError, match=r"run\.dir .* cannot be written to"):
        _train(_config(root, "x" * 300))


@pytest.mark.parametrize(
    "error", [MachineError("a full disk"), RankFailed("the logs are in logs", EXIT_REFUSED), UserError("no")]
)
def test_what_may_be_needed_stays(tmp_path: Path, error: Exception) -> None:
    run = tmp_path / "run"
    with pytest.raises(type(error)), no_trace_if_refused(run):
        run.mkdir()
        with Ledger(run).stage("train"):
            if type(error) is UserError:
                (run / "notes.txt").write_text("of a person")
            raise error
    assert (run / "ledger.jsonl").exists()
