"""SLURM's programs are run in one place, and a job that sbatch got no answer about is found."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm import jobs, scheduler
from slurm.scheduler import SchedulerError
from slurm.submit.submitit_backend import cancel_unknown
from tests.repository import ROOT

PROGRAMS = {
    "sbatch",
    "srun",
    "squeue",
    "scontrol",
    "sacct",
    "sacctmgr",
    "scancel",
    "sinfo",
    "sprio",
    "sstat",
    "sreport",
}
NAMES_COMMANDS = {
    "pipeline/common/slurm_commands.py",  # the one that runs them
    "slurm/scheduler.py",  # hands them to it
    "slurm/devcluster/cluster.py",  # hands them to it, with an environment of its own
    "slurm/job/srun_step.py",  # the steps of a job
}
BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


STARTS = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "system", "popen", "execvp", "_slurm"}
"""Functions that start a program which their first argument names."""


def commands(tree: ast.AST) -> Iterator[ast.AST]:
    """Lists and tuples that are a command of SLURM, and calls that start one."""
    messages = [
        node.args[0] for node in ast.walk(tree) if isinstance(node, ast.Call) and name(node) == "SchedulerError"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple) and node.elts and node not in messages:
            words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
            if words[0] in PROGRAMS and not PROGRAMS.issuperset(words):  # else names of programs
                yield node
        elif isinstance(node, ast.Call) and name(node) in STARTS and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and str(first.value).partition(" ")[0] in PROGRAMS:
                yield node


def name(call: ast.Call) -> str:
    """The name of a function that is called, without the module or object that has it."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_one_module_runs_the_programs_of_slurm() -> None:
    found = {}
    for file in [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "slurm").rglob("*.py")]:
        if lines := [getattr(node, "lineno", 0) for node in commands(ast.parse(file.read_text()))]:
            found[str(file.relative_to(ROOT))] = lines
    assert found.keys() - NAMES_COMMANDS == set(), "use slurm.scheduler, or a new function there"
    assert found.keys() == NAMES_COMMANDS, "a name that is no longer needed here"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ('subprocess.run(["squeue", "-h"])', True),
        ('subprocess.check_output(("sacct", "-X"))', True),
        ('os.system("scancel 5")', True),
        ('self._slurm("scontrol", "ping")', True),
        ('say("sbatch is not there")', False),
        ('which("sbatch")', False),
        ('for program in ("sbatch", "srun"): pass', False),
        ('raise SchedulerError(["sbatch", file], output)', False),
    ],
)
def test_a_second_place_would_be_found(text: str, is_one: bool) -> None:
    assert bool(list(commands(ast.parse(text)))) is is_one


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Programs of a scheduler whose queue is a file with a line `NUMBER|SCRIPT` for each job."""

    def put(sbatch: str) -> Path:
        queue = tmp_path / "queue"
        queue.touch()
        submit = f'echo "$(($(wc -l < {queue}) + 1))|$1" >> {queue}'
        bodies = {
            "sbatch": f"echo tried >> {tmp_path}/tries\n" + sbatch.replace("SUBMIT", submit),
            "squeue": f"cat {queue}",
            "sacct": "exit 1",
            "scancel": f'for each; do sed -i "/^$each|/d" {queue}; done',
        }
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, body in bodies.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(scheduler, "_BUSY_PAUSES", (0.0, 0.0, 0.0))
        return queue

    return put


def test_a_job_that_was_accepted_without_an_answer_is_found_by_its_script(
    cluster: Callable[[str], Path], tmp_path: Path
) -> None:
    queue = cluster(f"SUBMIT\necho '{BUSY}' >&2; exit 1")
    queue.write_text("1|/another/script.sh\n")
    assert scheduler.send(tmp_path / "own.sh") == "2"
    assert (tmp_path / "tries").read_text().split() == ["tried"], "it is not sent again"


@pytest.mark.parametrize("words", ["echo 'Message receive failure' >&2; exit 1", "kill -9 $$", "echo 'no number'"])
def test_words_that_nobody_knows_are_no_refusal_of_a_job_that_is_in_the_queue(
    cluster: Callable[[str], Path], tmp_path: Path, words: str
) -> None:
    cluster(f"SUBMIT\n{words}")
    assert scheduler.send(tmp_path / "own.sh") == "1"
    assert (tmp_path / "tries").read_text().split() == ["tried"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_lost_script_of_another_user_is_left_to_them(cluster: Callable[[str], Path], tmp_path: Path) -> None:
    folder = jobs.jobs_folder(tmp_path / "run")
    folder.mkdir(parents=True)
    mine, other = folder / ".submission_file_1.sh", folder / ".submission_file_2.sh"
    mine.touch()
    other.touch()
    os.chown(other, 65534, 65534)
    queue = cluster("exit 1")
    queue.write_text(f"7|{mine}\n8|{other}\n")
    assert cancel_unknown(tmp_path / "run") == ["7"]
    assert queue.read_text() == f"8|{other}\n" and other.exists() and not mine.exists()


def test_a_controller_that_is_too_busy_is_asked_again(cluster: Callable[[str], Path], tmp_path: Path) -> None:
    queue = cluster(
        f"[ $(wc -l < {tmp_path}/tries) -gt 1 ] || {{ echo '{BUSY}' >&2; exit 1; }}\nSUBMIT\necho Submitted batch job 1"
    )
    assert scheduler.send(tmp_path / "own.sh") == "1"
    assert len(queue.read_text().splitlines()) == 1


def test_of_two_tries_that_were_both_accepted_one_job_stays(cluster: Callable[[str], Path], tmp_path: Path) -> None:
    """The first one gets into the queue only after it was looked for."""
    queue = cluster(
        f"[ $(wc -l < {tmp_path}/tries) -gt 1 ] || {{ echo '{BUSY}' >&2; exit 1; }}\n"
        "SUBMIT\nSUBMIT\necho Submitted batch job 2"
    )
    assert scheduler.send(tmp_path / "own.sh") == "2"
    assert queue.read_text() == f"2|{tmp_path}/own.sh\n"


def test_tries_end_and_a_refusal_is_one(cluster: Callable[[str], Path], tmp_path: Path) -> None:
    queue = cluster(f"echo '{BUSY}' >&2; exit 1")
    with pytest.raises(SchedulerError) as found:
        scheduler.send(tmp_path / "own.sh")
    assert found.value.away and len((tmp_path / "tries").read_text().split()) == 3
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\necho tried >> {tmp_path}/tries; echo denied >&2; exit 1\n")
    with pytest.raises(SchedulerError) as refused:
        scheduler.send(tmp_path / "own.sh")
    assert not refused.value.away and len((tmp_path / "tries").read_text().split()) == 4
    assert queue.read_text() == ""
