"""Runs that the last commit of version 0.1.0 stopped are resumed, to what that version made of them.

`tests.formats.make_last` says how they were made.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from pipeline.train.checkpoint import fingerprint
from tests.formats import make, make_last
from tests.formats.conftest import Call
from tests.formats.test_kept import CLOSE, SAME, steps

pytestmark = pytest.mark.guard


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was kept."""
    return make.unpack(make_last.PACKED, tmp_path_factory.mktemp("kept-last"))


@pytest.mark.parametrize("name", make_last.NAMES)
def test_training_resumes(root: Path, call: Call, name: str) -> None:
    run, then = root / "runs" / name, root / "runs" / f"{name}-then"
    stopped = make_last.STOP + 1
    state = orjson.loads((run / "checkpoints" / f"step-{stopped:08d}" / "state.json").read_bytes())
    assert state["fingerprints"]["code"] == "0.1.0"
    call("train", f"{name}.yaml")
    now, before = steps(run), steps(then)
    assert [row["step"] for row in now] == [row["step"] for row in before] == list(range(1, make_last.STEPS + 1))
    assert now[:stopped] == before[:stopped] and {row["attempt"] for row in now[stopped:]} == {2}
    for one, two in zip(now, before, strict=True):
        assert {key: one[key] for key in SAME} == {key: two[key] for key in SAME}
        losses = {key for key in two if "loss" in key or key == "grad_norm"}
        assert {"loss", "mtp_loss" if name == "experts" else "weighted_loss"} <= losses
        for key in losses:
            assert one[key] == pytest.approx(two[key], **CLOSE), (key, one["step"])
    assert (run / "journal.json").read_bytes() == (then / "journal.json").read_bytes()


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("0.12.0", "0.12.0 changed what a step computes, see CHANGELOG.md; a release before it resumes the run"),
        ("0.0.9", "what a step computes is that of 0.1.0: that release or a later one resumes the run"),
    ],
)
def test_another_computation_is_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, says: str
) -> None:
    """By a release with another `NUMERICS_VERSION`, until the run file accepts it."""
    make.unpack(make_last.PACKED, tmp_path)
    monkeypatch.setattr(fingerprint, "NUMERICS_VERSION", release)
    monkeypatch.chdir(tmp_path)
    found = call("train", "experts.yaml", code=2)
    assert f"code: 0.1.0 -> {release}" in found and says in " ".join(found.split())
    assert "resume.allow=[code] accepts this" in found and "set the values back" not in found
    assert [row["step"] for row in steps(tmp_path / "runs/experts")] == list(range(1, make_last.STOP + 2))
