"""Sending of jobs: submitit writes sbatch's script and calls it, or starts a process on this machine.

submitit's part is the script, sbatch, the names of logs, and the process of this machine. It would put a pickle beside
the script, which whoever may write there could replace; the script names a file of JSON with its digest instead. What
the job does is in `slurm.job.batch_entry`; signals, requeues and chains are those of `slurm.job.batch_main`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor

from pipeline.common import run_identity, storage
from pipeline.common.errors import UserError
from pipeline.common.file_lock import exclusive
from pipeline.common.run_files import RunFiles
from pipeline.common.slurm_commands import is_slurm_variable
from pipeline.common.trust import TRUSTED
from pipeline.config import Config
from pipeline.config.base import single_line
from pipeline.config.slurm import SiteConfig
from slurm import jobs, scheduler
from slurm.jobs import Backend
from slurm.record import integrity
from slurm.record.planned_job import PlannedJob
from slurm.record.submission import read_submission
from slurm.submit import batch_script, code_snapshot, permissions, sbatch_hints
from slurm.submit.stop_lead_time import signal_seconds

_FOREVER = 10 * 365 * 24 * 60
"""Minutes of a local job: nothing ends it but itself and `pipeline cancel`."""
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("PIPELINE_CHECKED", "PIPELINE_LAUNCHER", "PIPELINE_LOGS", "PIPELINE_NODE_ERRORS", "PIPELINE_STORE"),
)
_SCRIPT = ".submission_file_"
"""Start of the name of a script, by which jobs are known to the scheduler until their numbers are known."""
_SENDING_SECONDS = 600.0
"""For another job that is sent with a script of the same folder, on a busy controller."""
_UNANSWERED = "The job may have been accepted all the same; submit again, which cancels it first"
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_MODULE = [
    # The shell of a job is not a login shell, so that `module`, a function, need not be there.
    'for pipeline_file in /etc/profile.d/{modules,lmod,z00_lmod}.sh "${MODULESHOME:-}/init/bash" '
    '"${LMOD_PKG:-}/init/bash" /usr/share/{lmod/lmod,modules}/init/bash; do',
    '  type module >/dev/null 2>&1 || { [ ! -r "$pipeline_file" ] || . "$pipeline_file"; }',
    "done",
    "type module >/dev/null 2>&1 || { echo \"there is no command 'module' on $(hostname), which modules of the profile "
    "needs; set before_modules there to the line that defines it, like 'source /opt/lmod/init/bash', or remove "
    'modules" >&2; exit 2; }',
]
"""Lines of a script that define `module`."""
_DERIVED_OPTIONS = {
    "account": "account",
    "array": "slurm.array.tasks",
    "chdir": None,
    "cluster": None,
    "clusters": None,
    "constraint": "constraint",
    "cpus-per-task": "cpus_per_task",
    "dependency": None,
    "error": None,
    "exclude": "exclude",
    "exclusive": "exclusive",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "job-name": None,
    "kill-on-invalid-dep": None,
    "mem": "mem_gb",
    "no-kill": "slurm.spare_nodes",
    "nodes": "slurm.nodes",
    "ntasks": "slurm.processes_per_node",
    "ntasks-per-node": "slurm.processes_per_node",
    "open-mode": None,
    "output": None,
    "partition": "partition",
    "qos": "qos",
    "requeue": "slurm.chain",
    "no-requeue": "slurm.chain",
    "signal": None,
    "time": "time",
    "wckey": "wckey",
    "wrap": None,
}
"""Options of sbatch that follow from others or are needed as they are, and the key that decides them."""


def send(
    run: Path,
    planned: PlannedJob,
    submissions: Sequence[Path],
    *,
    backend: Backend,
    dependency: str | None = None,
    chain_job: int = 1,
) -> str:
    """Send one job, or one array of them; the caller notes it.

    Args:
        run: folder; script and log of the job go there.
        planned: what it asks for.
        submissions: files for `slurm.record.submission`, one for each task of an array, or one for all of them.
        backend: to the scheduler, or into the background of this machine.
        dependency: as sbatch wants it, like `afterok:77`.
        chain_job: number within the chain, from 1.

    Returns:
        Its number, of an array without the tasks; of a local one its process id.

    Raises:
        SchedulerError: it was refused.
        UserError: SLURM would change or misread the path of the run folder.
    """
    assert len(submissions) in (1, planned.tasks)
    refuse_path(run)
    submission = read_submission(submissions[0])
    config = submission.config()
    folder = jobs.jobs_folder(run)
    storage.make_below(run, folder)
    if backend == "local":
        with _environment(rank_only=True):
            os.environ.update(_exports(submission.site, submission.code, planned))
            executor = _BackgroundExecutor(folder)
            executor.update_parameters(timeout_min=_FOREVER, stderr_to_stdout=True)
            # No shell reads it.
            return str(executor.send(f"{_PYTHON} {chain_job} {_words(submissions[0])}").job_id)
    private = permissions.make_private(config, run)
    if private is not None:
        refuse_path(private, "slurm.private_dir")
    sealed = None if submission.code is None else (submission.code, code_snapshot.digest(submission.code))
    folders = [(each.run, each.folder_id or "") for each in map(read_submission, submissions)]
    values = _parameters(planned, submission.site, sealed, config, folders, private, dependency)
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise scheduler.SchedulerError(["sbatch"], f"{program} is not on the path", sbatch_hints.NO_SLURM)
    with _sending(folder):
        before = set(folder.iterdir())
        try:
            with _environment():
                to_slurm = _SlurmExecutor(folder)
                to_slurm.update_parameters(**values)
                return str(to_slurm.send(_command(submissions, chain_job), planned.tasks).job_id)
        except scheduler.SchedulerError as error:
            if error.away:  # it may have been accepted: `cancel_unknown` finds it by its script
                raise scheduler.SchedulerError(["sbatch"], f"{error.output}\n{_UNANSWERED}") from None
            refused = _remove_refused(folder, before, planned.name)
            raise scheduler.SchedulerError(
                ["sbatch", *refused], error.output, sbatch_hints.hint(error.output)
            ) from None


def _sending(folder: Path) -> AbstractContextManager[None]:
    """Hold off other jobs of a folder, which runs of a sweep share: a script being sent looks like a lost one."""
    return exclusive(folder.resolve() / "send.lock", _SENDING_SECONDS)


def cancel_unknown(run: Path) -> list[str]:
    """Cancel jobs of which no command knows, since sbatch got no answer when they were sent; returns their numbers.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    folder, found = jobs.jobs_folder(run), list[str]()
    if not folder.is_dir():
        return found
    with _sending(folder):
        for script in folder.glob(f"{_SCRIPT}*.sh"):
            status = script.lstat()
            # Of another user's jobs nobody else is told; their next submission looks after them.
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                lost = scheduler.sent_with(script)
                scheduler.cancel(lost)
                found += lost
                script.unlink(missing_ok=True)
    return found


def script(
    run: Path, planned: PlannedJob, site: SiteConfig, code: tuple[Path, str], config: Config, backend: Backend
) -> str:
    """The script that sbatch would be given, without the jobs that are waited for; or what a local job comes to.

    Args:
        run: folder.
        planned: what the job asks for.
        site: where it runs.
        code: archive, and its digest.
        config: of the run.
        backend: to the scheduler, or into the background of this machine.
    """
    if backend == "local":
        lines = [f"export {name}={shlex.quote(value)}" for name, value in _exports(site, code[0], planned).items()]
        # Its run file is written when it is sent; the name has the time of that.
        run_file = RunFiles(run).slurm / jobs.SUBMISSIONS / f"TIME-{planned.stage}.yaml"
        first, *rest = planned.command
        return "\n".join([*lines, shlex.join([sys.executable, "-m", "pipeline", first, str(run_file), *rest])])
    paper = _ScriptWriter(jobs.jobs_folder(run))
    folders = [(run, run_identity.read_id(run) or "ID")]
    private = permissions.private_folder(config, run)
    paper.update_parameters(**_parameters(planned, site, code, config, folders, private, None))
    # Its submission is written when it is sent; the name has the time of that.
    words = f"set -- {shlex.quote(f'TIME-{planned.stage}.json')} DIGEST"
    return paper.text(f'{words}\n{_PYTHON} 1 "$@"', planned.tasks)


_PYTHON = f"{shlex.quote(sys.executable)} -u -m slurm.job.batch_entry"


def _words(submission: Path) -> str:
    """Words of the batch process that say what it runs: the file and its digest."""
    return shlex.join([str(submission.absolute()), integrity.sha256(submission.read_bytes())])


def _command(submissions: Sequence[Path], chain_job: int) -> str:
    """Shell that runs a submission, or that of the task of an array, if it is what is sent now."""
    words = [_words(file) for file in submissions]
    chosen = [f"set -- {words[0]}"]
    if len(words) > 1:
        cases = [f"{task}) set -- {each} ;;" for task, each in enumerate(words)]
        chosen = ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]
    return "\n".join([*chosen, f'{_PYTHON} {chain_job} "$@"'])


def refuse_path(folder: Path, key: str = "run.dir") -> None:
    """Refuse a folder that jobs cannot have: SLURM and submitit replace `%j` and so on in the paths of logs.

    Raises:
        UserError: its path has such a character.
    """
    if odd := next((each for each in str(folder) if each in "%\\"), None):
        raise UserError(
            f"{key} = {folder}: jobs cannot have a folder with {odd} in its path, which SLURM replaces in the names of "
            f"their logs; set {key} to another one"
        )
    refuse_control_characters([(key, str(folder))])


def refuse_control_characters(values: Iterable[tuple[str, str]]) -> None:
    """Refuse what would be more than one line of a script: the last look before one is written.

    Raises:
        UserError: with the name of the first such value, which is shown escaped.
    """
    for name, value in values:
        try:
            single_line(value)
        except ValueError as error:
            raise UserError(f"{ascii(name)[1:-1]}: {error}") from None


class _SlurmExecutor(SlurmExecutor):
    """Sends a command as it is, without a pickle."""

    def send(self, command: str, tasks: int = 1) -> Job[Any]:
        """Send a job, or an array; its tasks have one number without their own."""
        if tasks > 1:
            self.parameters["map_count"] = tasks
        return self._submit_command(command)

    def _submit_command(self, command: str) -> Job[Any]:
        # As that of submitit, which takes any error of sbatch for a refusal.
        script = self.folder / f"{_SCRIPT}{uuid.uuid4().hex}.sh"
        script.write_text(self._make_submission_file_text(command, ""))
        number = scheduler.send(script)
        job = self.job_class(folder=self.folder, job_id=number, tasks=[0])
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        given = {**self.parameters, **self.parameters["additional_parameters"], "folder": str(self.folder)}
        refuse_control_characters((name, f"{name}={value}") for name, value in given.items() if isinstance(value, str))
        return str(super()._make_submission_file_text(command, uid))


class _ScriptWriter(_SlurmExecutor):
    """Writes scripts where there is no SLURM, too."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def text(self, command: str, tasks: int) -> str:
        """The script of a job, or of an array."""
        if tasks > 1:
            self.parameters["map_count"] = tasks
        return self._make_submission_file_text(command, "")


class _BackgroundExecutor(LocalExecutor):
    """Starts a process that outlives its shell and terminal, and sees the GPUs that this one sees."""

    def send(self, command: str) -> LocalJob[Any]:
        """Start a command as it is, without a pickle."""
        environment = {
            **os.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        quiet = subprocess.DEVNULL  # what the job says is in its log
        process = subprocess.Popen(
            [sys.executable, "-m", "submitit.local._local", str(self.folder)],
            env=environment,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def _parameters(
    planned: PlannedJob,
    site: SiteConfig,
    code: tuple[Path, str] | None,
    config: Config,
    folders: Sequence[tuple[Path, str]],
    private: Path | None,
    dependency: str | None,
) -> dict[str, Any]:
    """Parameters of submitit's executor.

    Args:
        planned: what the job asks for.
        site: where it runs.
        code: archive, and its digest.
        config: of the run.
        folders: run folder and its id, of each task of an array if their runs differ.
        private: folder for what jobs execute, where that is not the run folder.
        dependency: as sbatch wants it.
    """
    resources = planned.resources
    setup = _setup(planned, site, None if code is None else code[0])
    if code is not None:
        setup += integrity.check_lines(*code, owned=private is not None)
    refuse_derived_options(planned, site)
    more: dict[str, Any] = {key: value or True for key, value in resources.options.items()}
    more["requeue" if planned.chain == "requeue" else "no-requeue"] = True
    more["kill-on-invalid-dep"] = "yes"
    if private is not None:  # SLURM refuses to start a job whose log it cannot open
        more["output"] = f"{private}/{jobs.LOGS}/{'%A_%a' if planned.tasks > 1 else '%j'}_0_log.out"
    if planned.spare_nodes:
        more["no-kill"] = True  # the job goes on without a node that is lost
    gpus: dict[str, str] = {}
    if planned.gpus_per_node:
        text = ":".join([*([site.gpu_type] if site.gpu_type else []), str(planned.gpus_per_node)])
        gpus = {"gres": f"gpu:{text}"} if site.gpus_by == "gres" else {"gpus_per_node": text}
    return {
        "job_name": planned.name,
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "exclude": resources.exclude,
        "time": planned.minutes,
        "nodes": planned.nodes + planned.spare_nodes,
        "ntasks_per_node": planned.processes_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "mem": None if resources.mem_gb is None else _memory(resources.mem_gb),
        "exclusive": resources.exclusive or None,
        **gpus,
        "dependency": dependency,
        "array_parallelism": planned.tasks,  # by default 256 at a time
        "wckey": site.wckey,
        "signal_delay_s": signal_seconds(config, planned.minutes),
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": [*batch_script.lines_before(folders, private=private is not None), *setup],
        "teardown": batch_script.lines_after(planned.chain, config.slurm.max_restarts, f"{_PYTHON} killed"),
        "additional_parameters": more,
    }


def refuse_derived_options(planned: PlannedJob, site: SiteConfig) -> None:
    """Some options of sbatch are decided by other keys.

    Raises:
        UserError: there is one of them.
    """
    for name in planned.resources.options:
        if name.lstrip("-").replace("_", "-") != name or not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise UserError(
                f"options has {ascii(name)[1:-1]}; write the long name without dashes before it, with - inside it"
            )
        if name in _DERIVED_OPTIONS:
            todo = (
                f"set {_DERIVED_OPTIONS[name]} instead"
                if _DERIVED_OPTIONS[name]
                else "leave it out, jobs need their own"
            )
            raise UserError(f"options has {name}, which follows from other keys; {todo}")
        if name == "gres" and planned.gpus_per_node and site.gpus_by == "gres":
            raise UserError(
                f"options has gres, which would replace the {planned.gpus_per_node} GPUs per node that the "
                "profile asks for in the same way; set gpus_by: gpus-per-node there, or gpus_per_node: 0 and "
                "slurm.processes_per_node, and ask for the GPUs in options.gres, too"
            )


def _setup(planned: PlannedJob, site: SiteConfig, code: Path | None) -> list[str]:
    """Lines of the script before the command. The job ends where a module cannot be loaded."""
    lines = [*site.before_modules, *(_MODULE if site.modules else [])]
    for each in site.modules:
        failed = f"echo {shlex.quote(f'module load {each} failed on')} $(hostname) >&2; exit 2"
        lines.append(f"module load {shlex.quote(each)} || {{ {failed}; }}")
    exports = _exports(site, None, planned)
    lines += [*site.setup, *(f"export {name}={shlex.quote(value)}" for name, value in exports.items())]
    if code is not None:
        lines.append(f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return lines


def _exports(site: SiteConfig, code: Path | None, planned: PlannedJob) -> dict[str, str]:
    """Variables of the batch process, which those of the stage get from it."""
    found = dict(site.environment)
    # Else `python -m` takes the packages from the folder in which the run was submitted, if it is a checkout.
    found["PYTHONSAFEPATH"] = "1"
    if trusted := os.environ.get(TRUSTED):  # a site may have jobs start without the user's environment
        found[TRUSTED] = trusted
    if planned.resources.cpus_per_task:
        found["SRUN_CPUS_PER_TASK"] = str(planned.resources.cpus_per_task)  # since 22.05 srun does not know it
    if code is not None:
        rest = found.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        found["PYTHONPATH"] = f"{code}{os.pathsep}{rest}" if rest else str(code)
    return found


def _memory(gb: float) -> str:
    """As sbatch understands it; its 0 is all memory of the node, so nothing else may be rounded to it."""
    if gb == int(gb):
        return f"{int(gb)}G" if gb else "0"
    return f"{max(1, int(gb * 1024))}M"


@contextmanager
def _environment(*, rank_only: bool = False) -> Iterator[None]:
    """Without the variables of a job or rank that this process may be part of; what is set inside ends with it.

    Args:
        rank_only: keep those of the job, in whose allocation a process of this machine stays.
    """
    before = dict(os.environ)
    for name in before:
        # Settings that a site's modules make stay: those of MCA.
        of_launcher = name.startswith(("PMI", "OMPI_")) and not name.startswith(("OMPI_MCA_", "PMIX_MCA_"))
        of_job = is_slurm_variable(name) or of_launcher
        of_rank = name in _RANK_VARIABLES or name.startswith(("SUBMITIT_", "TORCHELASTIC_"))
        if of_rank or (not rank_only and (of_job or name in _DEVICES)):
            del os.environ[name]
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _remove_refused(folder: Path, before: set[Path], name: str) -> list[str]:
    """Tidy up after a job that was refused; others may be sent at the same time. Returns its script, which is kept."""
    kept = []
    for file in set(folder.iterdir()) - before:
        with suppress(OSError):
            data = b"" if file.is_symlink() else file.read_bytes()
            if file.name.startswith(_SCRIPT) and f"--job-name={shlex.quote(name)}\n".encode() in data:
                kept.append(str(file.replace(folder / f"refused-{name}.sh")))
    return kept
