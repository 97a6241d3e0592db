"""What a job executes is what was submitted: the check in its script, and who may write where it lies."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.common import trust
from pipeline.common.errors import EXIT_REFUSED, UserError
from pipeline.common.run_files import RunFiles
from pipeline.config.load import load
from pipeline.data.work.frozen_plan import make_data_dir
from pipeline.train.run.folder import make_writable
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.job.batch_main import run_submission
from slurm.record import integrity
from slurm.record.submission import read_submission
from slurm.site.site_profile import load_site
from slurm.submit import code_snapshot, permissions
from slurm.submit.job_plan import plan
from slurm.submit.submit import send_all, write_submission
from tests import tiny


@pytest.fixture(params=["code", 'it\'s `$HOME` "ü"'])
def code(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A small archive, in a folder of an ordinary name or an odd one."""
    file = tmp_path / request.param / "0123.zip"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pipeline/__init__.py", "a = 1")
    integrity.others_cannot_write(file.parent, file)
    return file


def check(code: Path, digest: str, *, owned: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the lines of a script, and then what would be Python."""
    lines = [*integrity.check_lines(code, digest, owned=owned), "echo started; pwd"]
    return subprocess.run(["bash", "-c", "\n".join(lines)], cwd="/", capture_output=True, text=True)


def refused(code: Path, digest: str) -> str:
    done = check(code, digest)
    assert (done.returncode, done.stdout) == (EXIT_REFUSED, ""), done.stderr
    assert "refused: " in done.stderr
    return done.stderr


def test_what_is_as_it_was_is_run_where_it_was(code: Path) -> None:
    for _ in range(2):  # again, as after a requeue
        done = check(code, code_snapshot.digest(code))
        assert (done.returncode, done.stdout, done.stderr) == (0, "started\n/\n", "")


def _link(code: Path) -> None:
    code.rename(code.parent / "moved")
    code.symlink_to(code.parent / "moved")


def _change(code: Path) -> None:
    with zipfile.ZipFile(code, "a") as archive:
        archive.writestr("sitecustomize.py", "")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an added file": (_change, "is not the code that was submitted"),
    "a byte before it": (lambda code: code.write_bytes(b"#" + code.read_bytes()), "is not the code"),
    "nothing left": (lambda code: code.write_bytes(b""), "is not the code"),
    "a link": (_link, "is not a file"),
    "a folder": (lambda code: (code.unlink(), code.mkdir()), "is not a file"),
    "no file": (lambda code: code.unlink(), "is not there"),
    "one that the group may write": (lambda code: code.chmod(0o664), "other users than"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("code", ["code"], indirect=True)
def test_whatever_was_changed_is_named_and_nothing_is_run(code: Path, change: str) -> None:
    digest = code_snapshot.digest(code)
    how, told = CHANGES[change]
    how(code)
    assert told in refused(code, digest)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("code", ["code"], indirect=True)
def test_the_same_files_of_another_user_are_refused(code: Path) -> None:
    os.chown(code, 12345, 12345)  # who could write to it while the job runs
    assert "other users than 0 may write to" in refused(code, code_snapshot.digest(code))


def test_only_their_owner_may_write_to_code_and_submissions(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        config = load(tiny.write_run(tmp_path))
        run = config.run.dir
        run.mkdir()
        code = code_snapshot.take(run)
        site = load_site("generic")
        file = write_submission(run, config, site, plan(config, site, ["train"], "slurm")[0], "slurm", code)
    finally:
        os.umask(before)
    for each in [code, file, file.with_suffix(".yaml")]:
        assert not each.stat().st_mode & 0o022, each


def _with(code: Path, name: str, data: bytes) -> bytes:
    """The archive with another content of a file, or one more."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(code) as before, zipfile.ZipFile(buffer, "w") as after:
        for each in before.namelist():
            after.writestr(each, data if each == name else before.read(each))
        if name not in before.namelist():
            after.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.guard
def test_an_archive_that_was_changed_is_not_sent_again(tmp_path: Path) -> None:
    code = code_snapshot.take(tmp_path)
    whole = code.read_bytes()
    with zipfile.ZipFile(code) as archive:
        other = archive.read("slurm/jobs.pyc")
    for name, data in {
        "sitecustomize.py": b"",
        "slurm/__init__.py": b"evil = 1",
        "slurm/__init__.pyc": other,
        "slurm/control.pyc": other[:-9],
    }.items():
        code.write_bytes(whole)
        code.write_bytes(_with(code, name, data))
        with pytest.raises(UserError, match=f"'{name}' was changed, added or removed"):
            code_snapshot.take(tmp_path)
    code.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        code_snapshot.take(tmp_path)
    # The same files and bytecode, as another machine writes them.
    code.write_bytes(whole)
    code.write_bytes(_with(code, "slurm/py.typed", b""))
    assert code.read_bytes() != whole and code_snapshot.take(tmp_path) == code


@pytest.mark.parametrize("which", [".json", ".yaml"])
def test_a_submission_that_was_changed_is_not_run(tmp_path: Path, which: str) -> None:
    config = load(tiny.write_run(tmp_path))
    config.run.dir.mkdir()
    site = load_site("generic")
    file = write_submission(config.run.dir, config, site, plan(config, site, ["train"], "local")[0], "local", None)
    digest = integrity.sha256(file.read_bytes())
    changed = file.with_suffix(which)
    changed.write_text(changed.read_text() + "\n")
    words = [sys.executable, "-m", "slurm.job.batch_entry", "1", str(file), digest]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == EXIT_REFUSED and f"{changed} has changed since" in done.stderr
    with pytest.raises(UserError, match=changed.name):
        run_submission(str(file), 1, digest)
    assert not (config.run.dir / "logs").exists()


def group_of(root: Path) -> str:
    import grp

    return grp.getgrgid(root.stat().st_gid).gr_name


def test_with_a_group_jobs_execute_what_lies_where_only_the_owner_may_write(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        config = load(
            tiny.write_run(
                tmp_path,
                {
                    "slurm.group": group_of(tmp_path),
                    "slurm.umask": "0002",
                    "slurm.private_dir": str(tmp_path / "mine"),
                },
            )
        )
        run = config.run.dir
        permissions.apply_permissions(config)
        private = permissions.make_private(config, run)
        code = code_snapshot.take(run, (), private)
        site = load_site("generic")
        file = write_submission(run, config, site, plan(config, site, ["train"], "slurm")[0], "slurm", code)
    finally:
        os.umask(before)
    assert private and code.is_relative_to(private) and file.is_relative_to(private)
    submission = read_submission(file, integrity.sha256(file.read_bytes()))
    assert submission.run_file.is_relative_to(private) and submission.code == code
    submission.refuse_changed()
    assert not [each for each in [tmp_path / "mine", *private.rglob("*")] if each.stat().st_mode & 0o022]
    # The group can read all of it in the run folder, where it may also put what it asks for.
    kept = RunFiles(run).slurm / "submissions"
    assert {each.name for each in kept.iterdir()} == {file.name, file.with_suffix(".yaml").name}
    assert (RunFiles(run).slurm / "code" / code.name).read_bytes() == code.read_bytes()
    assert run.stat().st_mode & 0o020 and RunFiles(run).slurm.stat().st_mode & 0o020


@pytest.mark.parametrize(
    ("umask", "keys", "own", "private"),
    [
        (0o022, (), False, False),
        (0o002, (), False, True),
        (0o002, (), True, False),
        (0o000, (), True, True),
        (0o002, ("slurm.umask='0022'",), False, False),
        (0o022, ("slurm.umask='0002'",), False, True),
    ],
)
def test_a_shell_that_lets_a_group_write_counts_as_the_key_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, keys: tuple[str, ...], own: bool, private: bool
) -> None:
    """A colleague could otherwise rename `RUN/slurm/code` after the check, before the next start of a rank."""
    monkeypatch.setattr(trust, "is_own_group", lambda number: own)
    config = load(tiny.write_run(tmp_path), keys)
    before = os.umask(umask)
    try:
        found = permissions.private_folder(config, config.run.dir)
    finally:
        os.umask(before)
    assert (found is not None) == private


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_jobs_do_not_execute_what_is_in_a_run_folder_of_another_user(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path))
    run = config.run.dir
    RunFiles(run).slurm.mkdir(parents=True)
    assert permissions.private_folder(config, run) is None
    for folder in (run, RunFiles(run).slurm):
        os.chown(folder, 65534, -1)
        assert permissions.private_folder(config, run) is not None
        os.chown(folder, 0, -1)


@pytest.mark.guard
@pytest.mark.skipif(os.geteuid() != 0, reason="takes a colleague's place, which only root may")
def test_a_colleague_of_the_group_goes_on_with_code_of_their_own() -> None:
    import grp

    if as_colleague(Path(str(code_snapshot.__file__)).read_bytes):
        pytest.skip("other users cannot read the packages here")
    with tempfile.TemporaryDirectory() as name:  # pytest's folders let nobody else in
        root = Path(name)
        root.chmod(0o755)
        keys = {"slurm.group": grp.getgrgid(65534).gr_name, "slurm.umask": "0002"}
        file = tiny.write_run(root, {**keys, "slurm.private_dir": str(root / "mine")})
        theirs = root / "theirs"
        theirs.mkdir()
        os.chown(theirs, 65534, 65534)

        def submit(private: Path) -> Path:
            config = load(file, [f"slurm.private_dir={private}"])
            permissions.apply_permissions(config)
            code = code_snapshot.take(config.run.dir, (), permissions.make_private(config, config.run.dir))
            site = load_site("generic")
            planned = plan(config, site, ["train"], "slurm")[0]
            return write_submission(config.run.dir, config, site, planned, "slurm", code)

        before = os.umask(0o022)
        try:
            mine = submit(root / "mine")
            assert as_colleague(lambda: submit(theirs)) == 0
        finally:
            os.umask(before)
        code = read_submission(mine).code
        assert code
        for path in (mine, mine.with_suffix(".yaml"), code):
            assert as_colleague(path.read_bytes) == 0
            assert as_colleague(lambda path=path: path.open("r+")) == 1
            assert as_colleague(lambda path=path: path.rename(path.with_name("moved"))) == 1
        for folder in code.parents[: len(code.relative_to(root).parts)]:
            assert as_colleague(lambda folder=folder: (folder / "sitecustomize.py").touch()) == 1


def as_colleague(does: Callable[[], object]) -> int:
    """How another user of the group fares: 0, or 1 where that is not permitted."""
    if (child := os.fork()) == 0:
        code = 70
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            does()
            code = 0
        except PermissionError:
            code = 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("open_to", ["mine", "."])
def test_a_private_folder_that_others_can_replace_is_refused(tmp_path: Path, open_to: str) -> None:
    group, folder = group_of(tmp_path), tmp_path / "mine"
    folder.mkdir()
    (tmp_path / open_to).chmod(0o777)
    config = load(tiny.write_run(tmp_path, {"slurm.group": group, "slurm.private_dir": str(folder)}))
    with pytest.raises(UserError, match=r"all users may write to .*set slurm.private_dir to a folder of yours"):
        permissions.make_private(config, config.run.dir)


@pytest.fixture
def run_file(cluster: DevCluster, tmp_path: Path) -> Iterator[Path]:
    """A run whose job waits until it is released, and leaves a mark before the check."""
    site = {"defaults": {"partition": "train", "time": 10, "options": {"hold": ""}}}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    keys = {"launch.device": "cpu", "slurm.profile": str(tmp_path / "site.yaml"), "slurm.array.tasks": 1}
    yield tiny.write_run(tmp_path, keys)
    for job in jobs.sent(tmp_path / "run"):
        scheduler.cancel([job.job])


@pytest.mark.first(1)
@pytest.mark.slurm
@pytest.mark.parametrize("change", ["code", "submission", "nothing"])
def test_a_job_of_a_cluster_whose_files_were_changed_is_refused(run_file: Path, change: str) -> None:
    config = load(run_file)
    run, site = config.run.dir, load_site(config.slurm.profile)
    make_writable(run)
    make_data_dir(config)
    code = code_snapshot.take(run)
    planned = plan(config, site, ["preprocess"], "slurm", units=1)[:1]
    (job,) = send_all(run, config, site, planned, "slurm", code)
    mark = run / "evil"
    if change == "code":
        with zipfile.ZipFile(code, "a") as archive:
            archive.writestr("sitecustomize.py", f"open({str(mark)!r}, 'w')\n")
    if change == "submission":
        submission = run / job.submission
        submission.write_text(submission.read_text().replace('"container_prefix": ""', '"container_prefix": "touch"'))
    scheduler.release([job.job])
    until_ended(job.job)
    log = job.log(run).read_text()
    details = scheduler.details(job.job)
    assert not mark.exists()
    if change == "nothing":
        assert details["JobState"] == "COMPLETED", log
        return
    assert (details["JobState"], details["ExitCode"], details["Restarts"]) == ("FAILED", f"{EXIT_REFUSED}:0", "0")
    assert f"{code} is not the code" in log if change == "code" else str(job.submission) in log
    assert not (run / "logs").exists()


@pytest.mark.slurm
def test_a_job_of_a_run_of_a_group_executes_nothing_of_the_run_folder(run_file: Path, tmp_path: Path) -> None:
    keys = [f"slurm.group={group_of(tmp_path)}", "slurm.umask='0002'", f"slurm.private_dir={tmp_path / 'mine'}"]
    done = tiny.pipeline("preprocess", run_file, *keys, "--slurm")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    array, finish = jobs.sent(run)
    for archive in run.glob("slurm/code/*.zip"):  # the copy to read
        archive.write_bytes(b"")
    for file in (run / "slurm" / "submissions").iterdir():
        file.write_text("")
    for job in (array, finish):
        scheduler.release([job.job])
        until_ended(job.job)
        assert scheduler.details(job.job)["JobState"] == "COMPLETED", job.log(run).read_text()
    private = str(tmp_path / "mine")
    assert private in (jobs.jobs_folder(run) / f"{array.job}_submission.sh").read_text()


def until_ended(number: str) -> None:
    import time

    end = time.monotonic() + 300
    while scheduler.details(number)["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        assert time.monotonic() < end
        time.sleep(0.1)
