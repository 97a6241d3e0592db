"""What is told of real trainings: by the command that starts one, and by its job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.main import main
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config.load import dump, load, load_run
from pipeline.config.parsing.code_keys import refuse_code_of_others
from slurm import scheduler
from tests import tiny
from tests.slurm.notify.receivers import ALL, SECRET, entry, received, serving, to_file
from tests.slurm.training import Run
from tests.waiting import until

DIVERGES = {"train.optimizer.lr": 1e30, "train.faults.on_nonfinite": "stop", "train.precision": {"compute": "fp32"}}


@pytest.mark.guard
@pytest.mark.parametrize("how", [pytest.param("processes", marks=pytest.mark.slow), "job"])
def test_a_training_that_diverges(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two processes of the launcher, and in a job of this machine; a webhook that is broken changes nothing."""
    seen, places = tmp_path / "seen", {"launch": {"threads": 1, "device": "cpu"}}
    if how == "processes":
        places["launch"]["processes"] = 2
    with serving() as server:
        server.status = 500
        monkeypatch.setenv("HOOK", server.address)
        hook = {"on": ALL, "webhook_env": "HOOK"}
        file = tiny.write_run(tmp_path, {**DIVERGES, **places, "notify": [to_file(seen), hook]})
        assert tiny.pipeline("preprocess", file).returncode == 0
        run = load(file).run.dir
        if how == "processes":
            done = tiny.pipeline("train", file)
            assert done.returncode == 77, done.stderr
            said = done.stdout + done.stderr
        else:
            done = tiny.pipeline("train", file, "--local")
            assert done.returncode == 0, done.stderr
            said = until(lambda: "notify.1" in (text := logs(run)) and len(received(seen)) > 1 and text)
            until(lambda: len(server.bodies) > 1)
        assert len(server.bodies) == 2
    assert [(each["event"], each["code"]) for each in received(seen)] == [("spike", None), ("failed", 77)]
    state = RunFiles(run).exit_state()
    failed = received(seen)[-1]
    assert failed["attempt"] == state["attempt"] and failed["step"] == state["step"]
    assert failed["reason"].startswith(state["reason"].partition(". ")[0])
    assert failed["job"] is None or how == "job"
    assert said.count("notify.1 (webhook of HOOK)") == 1 and "HTTP status 500" in said
    for path in [path for path in run.rglob("*") if path.is_file()]:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in said


def logs(run: Path) -> str:
    """Everything that jobs of this machine have said."""
    return "".join(path.read_text() for path in (run / "slurm").rglob("*.out"))


@pytest.mark.guard
def test_a_training_that_is_done_is_told_of_once(tmp_path: Path) -> None:
    from slurm.local.stages import preprocess, train

    seen = tmp_path / "seen"
    file = tiny.write_run(tmp_path, {"notify": [to_file(seen)], "train.duration": "2 steps"})
    preprocess(load(file))
    for overrides in ((), (), ("train.duration=3 steps",)):
        train(load(file, overrides))
    with pytest.raises(UserError, match="checkpoint of step 7"):
        train(load(file, ["resume.from=7"]))
    assert [(each["event"], each["step"]) for each in received(seen)] == [("done", 2), ("done", 3)]


def test_a_trial(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipeline doctor RUN --notify`; and what a submission warns of."""
    from slurm.notify.trial import try_notifications
    from slurm.site.site_profile import site_of
    from slurm.submit.preflight import examine

    seen = tmp_path / "seen"
    notify: list[Any] = [to_file(seen, ["spike"]), {"on": ["done"], "command": ["sh", "-c", "echo shown; exit 4"]}]
    notify += [{"on": ["failed"], "webhook_env": "HOOK"}]
    monkeypatch.delenv("HOOK", raising=False)
    file = tiny.write_run(tmp_path, {"notify": notify})
    monkeypatch.setattr(sys, "argv", ["pipeline", "doctor", str(file), "--notify"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capfd.readouterr()
    (notice,) = received(seen)
    assert (notice["event"], notice["test"]) == ("spike", True) and "[test]" in notice["text"]
    assert "shown" in said.out and "code 4" in said.out and "HOOK is not set" in said.out
    assert "notify.1" in said.err and "notify.2" in said.err and "notify.0" not in said.err
    config = load(file)
    found = examine(config, site_of(config), [], "local")
    assert len([line for line in found.warnings if line.startswith("notify.2") and "HOOK" in line]) == 1
    assert not [line for line in found.warnings if line.startswith("notify.0")]
    with pytest.raises(Exception, match="no notifications"):
        try_notifications(file, ["notify=[]"], None)  # type: ignore[arg-type]


@pytest.mark.slurm
@pytest.mark.timeout(1500)
@pytest.mark.slow
def test_a_job_that_goes_back_into_the_queue(train: Run, tmp_path: Path) -> None:
    """Also by an operator, of which the next start tells; then it is done."""
    seen = train.folder.parent / "notices"
    values = json.dumps([to_file(seen), {"on": ["requeued"], "command": ["sleep", "600"], "timeout_seconds": 600}])
    train.overrides += [f"notify={values}"]
    (job,) = train.submit()
    train.until_step(12)
    scheduler.ask(["scancel", "--signal=USR2", job])
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    train.until_step(30)
    scheduler.ask(["scontrol", "requeue", job])
    train.until(lambda: len(train.launches()) == 3, why="the third start")
    train.until_over()  # though one of the notifications still hangs
    told = received(seen)
    assert [(each["event"], each["job"], each["restarts"]) for each in told] == [
        ("requeued", job, 0),
        ("requeued", job, 2),
        ("done", job, 2),
    ]
    assert (told[0]["code"], told[0]["next"]) == (75, "requeue") and told[0]["step"] >= 12
    assert told[-1]["step"] == 100


def test_commands_from_a_run_folder_of_others_are_refused(tmp_path: Path) -> None:
    """Overrides are the user's own."""
    config = load(tiny.write_run(tmp_path, {"notify": [to_file(tmp_path / "seen")]}))
    refuse_code_of_others(config)
    run, file = config.run.dir, config.run.dir / "config.yaml"
    run.mkdir()
    file.write_text(dump(config))
    refuse_code_of_others(load_run(run))
    for path, mode in ((file, 0o646), (run, 0o757), (run, 0o1777)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(UserError, match=r"notify=\[\]"):
            refuse_code_of_others(load_run(run))
        refuse_code_of_others(load_run(run, ["notify=[]"]))
        path.chmod(before)
    moved = load_run(run, [f"run.dir={tmp_path / 'other'}"])
    file.chmod(0o646)
    with pytest.raises(UserError, match=r"notify=\[\]"):
        refuse_code_of_others(moved)


def test_an_address_is_refused_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In no error there is a part of it."""
    address = f"https://hooks.example.org/{SECRET}"
    monkeypatch.setenv("MY_HOOK", address)
    for notify in (
        address,
        {"webhook": address},
        [{"on": ["done"], "webhook_env": address}],
        [{"on": ["done"], "webhook_env": f"hooks.example.org/{SECRET}"}],
        [{"on": ["done"], "webhook_env": "${oc.env:MY_HOOK}"}],
        [{"on": ["none"], "webhook_url": address}],
        [{"on": ["done"], "command": ["curl", address]}],
        [{"on": ["done"], "command": ["true"], address: 1}],
    ):
        file = tiny.write_run(tmp_path, {"notify": notify})
        plain = tiny.write_run(tmp_path, name="plain.yaml")
        for written, overrides in ((file, ()), (plain, (f"notify={json.dumps(notify)}",))):
            with pytest.raises(ValueError, match="notify") as caught:
                load(written, overrides)
            assert SECRET not in str(caught.value) and "s3cr3t" not in str(caught.value)
    assert entry(command=["a"]).webhook_env is None
