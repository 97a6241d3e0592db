"""Evaluation jobs for permanent checkpoints: which are sent, how often, and what comes of it on a real scheduler."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import EXIT_REFUSED
from pipeline.common.run_files import RunFiles
from pipeline.config.load import load
from pipeline.eval.reports import report_path
from pipeline.train.checkpoint.manager import Checkpoints
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.job import eval_jobs as evaluations
from slurm.job.eval_jobs import Evaluations
from slurm.jobs import Job
from slurm.record.launch_log import launches
from slurm.record.rank_logs import rank_log
from slurm.record.submission import Submission, read_submission
from slurm.site.site_profile import load_site
from slurm.submit.job_plan import plan
from slurm.submit.submit import write_submission
from tests import tiny
from tests.clock import set_time
from tests.slurm.training import Run

SBATCH = """#!/bin/sh
if [ -e {folder}/refusal ]; then cat {folder}/refusal >&2; exit 1; fi
echo x >> {folder}/sent
echo "Submitted batch job $(wc -l < {folder}/sent)"
"""
SQUEUE = """#!/bin/sh
echo x >> {folder}/asked
cat {folder}/queue
"""


class Site:
    """A run that trains, beside commands that answer as a scheduler does: what they are told is in files."""

    def __init__(self, root: Path, **changes: object) -> None:
        self.folder = root / "scheduler"
        self.folder.mkdir()
        for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": "#!/bin/sh\n"}.items():
            (self.folder / name).write_text(text.format(folder=self.folder))
            (self.folder / name).chmod(0o755)
        self.queue()
        settings = {
            "train.checkpoint.keep_every": 4,
            "eval.every_checkpoint": True,
            "slurm.eval": {"partition": "night"},
        }
        self.config = load(tiny.write_run(root, settings | changes))
        self.run = self.config.run.dir
        RunFiles(self.run).slurm.mkdir(parents=True)
        self.log = io.StringIO()

    def queue(self, **states: str) -> None:
        """What squeue says: `j1="RUNNING"` of job 1."""
        lines = [f"{name[1:]}|{state}|None||N/A|N/A|\n" for name, state in states.items()]
        (self.folder / "queue").write_text("".join(lines))

    def submission(self) -> Submission:
        site = load_site(self.config.slurm.profile)
        training = plan(self.config, site, ["train"], "slurm")[0]
        return read_submission(write_submission(self.run, self.config, site, training, "slurm", None))

    def evaluations(self) -> Evaluations:
        """Of a start of the training's job."""
        assert self.submission().every_checkpoint
        return Evaluations(self.submission(), Console(file=self.log))

    def commit(self, step: int, attempt: int = 1) -> None:
        """A checkpoint, as far as it matters here."""
        path = self.run / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        storage.put_json(path / "COMMIT", {"step": step, "time": time.time(), "files": {}, "attempt": attempt})

    def report(self, step: int) -> None:
        """What an evaluation leaves."""
        (checkpoint,) = (each for each in Checkpoints.of_run(self.run).all() if each.step == step)
        path = report_path(self.config, step)
        path.parent.mkdir(exist_ok=True)
        storage.put_json(path, {"made_with": {"checkpoint": checkpoint.fingerprint}})

    def end(self, step: int) -> None:
        """The training is done."""
        end = {"attempt": 1, "code": 0, "reason": "done", "agreed": True, "step": step}
        storage.put_json(self.run / "exit.json", end)

    def sent(self) -> list[Job]:
        return jobs.sent(self.run)

    @property
    def questions(self) -> int:
        """Calls of squeue so far."""
        file = self.folder / "asked"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def steps(self) -> list[int | None]:
        return [job.step for job in self.sent()]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.log.getvalue().splitlines() if line.startswith("warning: ")]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setenv("PATH", str(made.folder), prepend=":")
    monkeypatch.setattr(evaluations, "ASK_EVERY", 0.0)
    return made


def test_each_permanent_checkpoint_is_sent_once(site: Site) -> None:
    looking = site.evaluations()
    looking.look()
    assert site.steps == []
    for step in (3, 4, 6):
        site.commit(step)
    looking.look()
    looking.look()
    site.commit(8)
    site.queue(j1="RUNNING", j2="PENDING")
    looking.look()
    assert site.steps == [4, 8]
    site.evaluations().look()  # of another start of the job
    assert site.steps == [4, 8]

    job = site.sent()[0]
    assert (job.stage, job.job, job.where) == ("eval", "1", "slurm")
    submission = read_submission(site.run / job.submission)
    assert submission.command == ("eval", "--step", "4")
    assert submission.resources.partition == "night"
    assert submission.config() == site.config
    assert site.warnings == []


def test_what_has_a_report_is_not_sent_until_the_checkpoint_is_another_one(site: Site) -> None:
    site.commit(4)
    site.commit(8)
    site.report(4)
    looking = site.evaluations()
    looking.look()
    assert site.steps == [8]
    site.report(8)
    looking.look()
    site.commit(4, attempt=2)  # the run went back and came here again
    looking.look()
    assert site.steps == [8, 4]
    assert not (site.folder / "asked").exists()  # whatever has a report needs no scheduler


def test_a_job_that_ends_amid_the_benchmarks_is_sent_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "eval.tasks": [{"type": "lambada", "path": "/a"}, {"type": "lambada", "path": "/b", "name": "b"}],
        "eval.harness": {"tasks": ["c"]},
    }
    site = Site(tmp_path, **changes)
    monkeypatch.setenv("PATH", str(site.folder), prepend=":")
    monkeypatch.setattr(evaluations, "ASK_EVERY", 0.0)
    site.commit(4)
    (checkpoint,) = Checkpoints.of_run(site.run).all()
    of_it, of_another = ({"made_with": {"checkpoint": each}} for each in (checkpoint.fingerprint, "x"))
    tasks, harness = (site.run / "eval" / f"{kind}-step-00000004.json" for kind in ("tasks", "harness"))

    def is_evaluated() -> bool:
        return site.evaluations()._is_evaluated(checkpoint)

    site.report(4)
    assert not is_evaluated()
    storage.put_json(tasks, {"step": 4, "tasks": {"lambada": of_it, "b": of_another}})
    storage.put_json(harness, {"step": 4} | of_it)
    assert not is_evaluated()
    site.evaluations().look()
    assert site.steps == [4]
    storage.put_json(tasks, {"step": 4, "tasks": {"lambada": of_it, "b": of_it}})
    assert is_evaluated()
    storage.put_json(harness, {"step": 4} | of_another)
    assert not is_evaluated()
    harness.write_bytes(b"{")
    assert not is_evaluated()
    harness.unlink()
    assert not is_evaluated()
    assert site.warnings == []


def test_what_looks_for_results_does_not_load_torch() -> None:
    script = "import sys, slurm.job.eval_jobs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_run_with_many_checkpoints_is_caught_up_on(site: Site) -> None:
    steps = list(range(4, 84, 4))
    for step in steps:
        site.commit(step)
    site.queue(**{f"j{number}": "PENDING" for number in range(1, 21)})
    looking = site.evaluations()
    looking.look()
    assert site.steps == steps[:8]
    for _ in range(4):
        looking.look()
    assert site.steps == steps


def test_a_refusal_is_told_once_and_tried_three_times(site: Site) -> None:
    refusal = site.folder / "refusal"
    refusal.write_text("sbatch: error: invalid partition specified: night\n")
    site.commit(4)
    site.commit(8)
    looking = site.evaluations()
    looking.look()
    looking.look()
    (warning,) = site.warnings
    assert "invalid partition specified: night" in warning
    site.commit(12)
    looking.look()
    refusal.unlink()
    looking.look()
    assert site.steps == [12]  # the others had their three tries
    site.evaluations().look()
    assert site.steps == [12, 4, 8]


def test_a_job_that_ends_without_a_report_is_sent_once_more(site: Site) -> None:
    site.commit(4)
    looking = site.evaluations()
    looking.look()
    site.queue(j1="RUNNING")
    looking.look()
    site.queue(j1="FAILED")
    looking.look()
    assert site.steps == [4]  # its report may take a moment to be seen
    looking.look()
    assert site.steps == [4, 4]
    site.queue()  # by now the scheduler has forgotten both
    for again in (looking, looking, site.evaluations()):
        again.look()
    assert site.steps == [4, 4]


def test_many_jobs_are_one_question_and_nothing_new_is_asked_for_less_often(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(evaluations, "ASK_EVERY", 60.0)
    set_time(monkeypatch, monotonic=lambda: clock[0])
    due = site.evaluations()
    for step in (4, 8, 12):
        site.commit(step)
    due.look()
    site.queue(j1="PENDING", j2="PENDING", j3="PENDING")
    asked = []
    for clock[0] in range(10, 4 * 3600, 10):
        before = site.questions
        due.look()
        if site.questions > before:
            assert site.questions == before + 1
            asked.append(clock[0])
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[:5] == [120, 240, 480, 960, 960] and set(pauses[5:]) == {960}
    assert site.steps == [4, 8, 12]


def test_a_scheduler_that_does_not_answer_ends_nothing(site: Site) -> None:
    site.commit(4)
    looking = site.evaluations()
    looking.look()
    (site.folder / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2; exit 1\n")
    looking.look()
    looking.look()
    assert site.steps == [4]
    assert len(site.warnings) == 1


def test_the_last_checkpoint_when_the_run_is_done(site: Site) -> None:
    site.commit(4)
    site.commit(6)
    looking = site.evaluations()
    looking.look()
    assert site.steps == [4]
    site.end(6)
    looking.look()
    assert site.steps == [4, 6]


def test_the_last_checkpoint_is_left_to_the_evaluation_that_was_sent_along(site: Site) -> None:
    later = jobs.new_job("eval", "7", "slurm", "eval", "submissions/x.json", after=("6",))
    jobs.note(site.run, later)
    site.queue(j7="PENDING")
    site.commit(4)
    site.commit(6)
    site.end(6)
    looking = site.evaluations()
    looking.look()
    assert site.steps == [None, 4]
    site.queue(j1="RUNNING")  # it was cancelled
    looking.look()
    assert site.steps == [None, 4, 6]


def test_a_run_that_was_cancelled_sends_nothing(site: Site) -> None:
    site.commit(4)
    jobs.note_cancelled(site.run, now=False)
    site.evaluations().look()
    assert site.steps == []


def test_whatever_goes_wrong_is_a_warning(site: Site) -> None:
    looking = site.evaluations()
    site.commit(4)
    (site.run / "slurm" / "jobs.jsonl").mkdir()
    looking.look()
    looking.look()
    assert len(site.warnings) == 1


@pytest.mark.slurm
def test_on_a_cluster(cluster: DevCluster, tmp_path: Path) -> None:
    changes = {
        "train.checkpoint": {"every_steps": 2, "keep": 1, "keep_every": 4},
        "train.duration": "10 steps",
        "slurm": {"profile": "devcluster", "doctor": False},
    }
    file = tiny.write_run(tmp_path, changes)
    done = tiny.pipeline("preprocess", file)
    assert done.returncode == 0, done.stderr
    run = Run(cluster, file, "run", "eval.every_checkpoint=true")
    run.submit()

    def all_are_evaluated() -> bool:
        return all(report_path(load(file), step).exists() for step in (4, 8, 10))

    run.until(all_are_evaluated, why="the evaluations")
    run.until_over()
    sent = [job for job in jobs.sent(run.folder) if job.stage == "eval"]
    assert sorted(job.step or 0 for job in sent) == [4, 8, 10]
    with (run.folder / "eval" / "table.csv").open() as table:
        assert [row["step"] for row in csv.DictReader(table)] == ["4", "8", "10"]
    tokens = {row["step"]: row["tokens"] for row in orjson.loads(show(file))["evaluations"]}
    assert tokens == {step: step * 4 * 32 for step in (4, 8, 10)}
    assert {state.state for state in scheduler.jobs([job.job for job in sent]).values()} == {"COMPLETED"}


@pytest.mark.slow
@pytest.mark.slurm
def test_on_several_nodes(cluster: DevCluster, tmp_path: Path) -> None:
    """An evaluation of four processes, two on a node, gives the number of one process."""
    changes = {
        "model": {"layers": 2, "dim": 32, "heads": 2, "vocab_multiple": 16},
        "launch": {"threads": 1, "device": "cpu"},
        "train.precision": {"compute": "fp32"},
        "train.duration": "2 steps",
        "slurm": {"profile": "devcluster", "doctor": False, "processes_per_node": 2},
    }
    file = tiny.write_run(tmp_path, changes)
    for stage in ("preprocess", "train", "eval"):
        done = tiny.pipeline(stage, file)
        assert done.returncode == 0, done.stderr
    report = report_path(load(file), 2)
    alone = orjson.loads(report.read_bytes())
    report.unlink()
    run = Run(cluster, file, "run", "eval.processes=4", "eval.parallel={tp: 2, pp: 2}")
    sent = tiny.pipeline("eval", file, *run.overrides, "--slurm")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    run.until(report.exists, why="the report")
    run.until_over()
    (launch,) = launches(run.folder, "eval")
    assert (len(launch.nodes), launch.processes_per_node) == (2, 2)
    assert launch.end is not None and launch.end.code == 0, run.story()
    logs = ["\n".join(rank_log(run.folder / launch.logs, rank, 2).last_lines(0)) for rank in range(4)]
    assert [" at step 2" in log for log in logs] == [True, False, False, False], "rank 0 alone speaks"
    together = orjson.loads(report.read_bytes())
    assert together["made_with"] == alone["made_with"]
    assert together["blended"]["loss"] == pytest.approx(alone["blended"]["loss"], rel=1e-6)
    run.check_left()


def show(file: Path) -> str:
    shown = tiny.pipeline("eval", file, "--table", "--json")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@pytest.mark.guard
def test_what_is_told_ahead_of_the_end_of_a_jobs_time_does_not_end_an_evaluation(tmp_path: Path) -> None:
    """It has nothing to save: the time that is left may be enough."""
    command = [sys.executable, "-m", "slurm.job.srun_task", "eval", str(tiny.write_run(tmp_path))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while not int(status.read_text().partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGUSR2 - 1) & 1:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR2)
        said = process.communicate(timeout=300)[1]
    assert process.returncode == EXIT_REFUSED and "heldout" in said
