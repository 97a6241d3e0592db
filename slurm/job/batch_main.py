"""The batch process of a job: it starts the processes of the stage, waits for their end, and decides what follows.

`batch_entry` starts it, one a job, outside of any container, where SLURM's commands are. It reads what to do from a
file, so a job that starts days later, or again after a requeue, does the same with what it finds then. It never works
inside a signal handler, and it asks for a requeue only where the scheduler has not ended the job by itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from pipeline.common import run_identity, storage
from pipeline.common.console import Console, on_stop, say
from pipeline.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OTHER,
    EXIT_STOPPED,
    EXIT_SUPERSEDED,
    EXIT_UNSAVED,
    UserError,
)
from pipeline.common.format import when
from pipeline.common.process_identity import node_name
from pipeline.common.run_files import RunFiles
from pipeline.common.run_identity import LostRunFolder
from pipeline.common.signals import ignore, stop_signals
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.run.lock import clear, last_attempt, taken_over
from pipeline.train.run.stop_requests import RESUME_ADVICE
from pipeline.train.run.unsaved import read_saves
from slurm import jobs, scheduler
from slurm.doctor.command import doctor_command
from slurm.doctor.report import compare, full_run_disk, gather_reports, read_reports
from slurm.job import end_report
from slurm.job.allocation import Allocation
from slurm.job.array_end import array_end
from slurm.job.ending import SRUN_LINES, Ending, ExitFile, exit_state, judge, read_exit_file, too_few_nodes
from slurm.job.eval_jobs import Evaluations
from slurm.job.folder_watch import FolderWatch
from slurm.job.health_checks import HealthChecks
from slurm.job.job_queue import JobQueue
from slurm.job.pack import Pack
from slurm.job.restart_policy import Situation, choose_nodes, crashes_in_a_row, decide, stops_in_a_row, suspects
from slurm.job.srun_step import SrunStep, rendezvous_env
from slurm.job.step_signals import StepSignals
from slurm.jobs import LAST_OF_ARRAYS, stage_words
from slurm.notify.job import JobNotices
from slurm.record.failure_analysis import first_failure, gather_errors, interrupted
from slurm.record.launch_log import Launch, LaunchEnd, Next, begin, end, launches, next_words
from slurm.record.rank_logs import STAMP
from slurm.record.submission import Submission, read_submission
from slurm.record.tail import last_lines
from slurm.submit import permissions

_LOOK = 10.0
"""Seconds between looks at new checkpoints."""
_PAUSE = 5.0
"""Seconds before a launch after a crash, times the crashes in a row: a node or file system may need a moment."""
_LONGEST_PAUSE = 60.0
_WITHOUT_QUEUE = ("requeue", "scheduler")
"""Decisions that need a queue, which a job of this machine alone has not."""
_STOPS = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}
"""Signals after which nothing is started."""
_LISTENED = (*stop_signals(), signal.SIGCONT, signal.SIGINT)
"""Signals that are noted. The end of a stage ignores them, and the next one must not take that for `nohup`."""
_NOBODY = 300.0
"""Seconds for which it is waited that the last process that trained in the run folder is gone."""


def run_submission(
    file: str,
    chain_job: int = 1,
    digest: str | None = None,
    early: Collection[int] = frozenset(),
    *,
    by_hand: bool = False,
) -> str:
    """Run a submission, and those that follow it in the same job. Exits with the stage's exit code.

    Args:
        file: of the submission.
        chain_job: number within the chain, from 1.
        digest: of that file, as it was sent.
        early: signals that came before this, and may still come.
        by_hand: a user has started it in an allocation, and signals stop it.

    Returns:
        What follows, a word of `slurm.record.launch_log.Next`.

    Raises:
        UserError: a file of the submission is not what was sent.
    """
    submission = _read_unchanged(file, digest)
    console = Console(width=120)
    if submission.beside:
        code = Pack(submission, chain_job, lambda text: say(console, f"{when(time.time())} {text}")).run()
        sys.exit(code)
    start = JobStart(submission, chain_job, console, early, by_hand=by_hand)
    following, code = start.run()
    for after in submission.then:
        if following == "done":
            later = _read_unchanged(after, submission.sha256.get(after))
            start = JobStart(later, 1, console, start.signals, by_hand=by_hand)
            following, code = start.run()
    for other in submission.others:
        try:
            run_submission(other, digest=submission.sha256.get(other))
        except UserError as error:
            say(console, f"error: {error}")
        except SystemExit:  # which is noted in that run
            pass
    if code != EXIT_OK:
        sys.exit(code)  # no traceback: what happened has been said
    return following


def tell_killed(file: str, digest: str) -> None:
    """Send the notice that a batch process was killed and is not started again.

    Args:
        file: of the submission.
        digest: of that file, as it was sent.

    Raises:
        UserError: a file of the submission is not what was sent.
    """
    JobStart(_read_unchanged(file, digest), 1, Console(width=120)).tell_killed()


def _read_unchanged(file: str, digest: str | None) -> Submission:
    """A submission, if it and the files that it names are what was sent."""
    found = read_submission(Path(file), digest)
    found.refuse_changed()
    return found


class JobStart:
    """A start of a job for one submission.

    Args:
        submission: what to run.
        chain_job: number within the chain, from 1.
        console: for what is told.
        early: signals that came before it listens. They count where each one comes once: for a run that shares its
            job, and one that a user has started. Another job is signalled long before its end, and may begin all the
            same.
        by_hand: a user has started it in an allocation, and signals stop it.
    """

    def __init__(
        self,
        submission: Submission,
        chain_job: int,
        console: Console,
        early: Collection[int] = frozenset(),
        *,
        by_hand: bool = False,
    ) -> None:
        self._submission = submission
        self._run = submission.run
        self._chain_job = chain_job
        self._console = console
        self._job, self._restarts = jobs.this_job(submission.where)
        alone = submission.where == "slurm" and not submission.packed
        self._allocation = Allocation.of_environment(self._job, self._say) if alone else None
        self._step: subprocess.Popen[bytes] | None = None
        self._by_hand = by_hand
        self._to_step = (
            StepSignals(self._job, submission.stage, self._say) if by_hand and self._allocation is not None else None
        )
        self._early = early if submission.packed or by_hand else ()
        self._stop_name = ""
        """Name of the last signal to stop."""
        self._signals: set[int] = set()
        """Signals that came to this process, and SIGUSR2 where one to stop came to the doctor's alone."""
        self._evaluations = Evaluations(submission, console) if submission.every_checkpoint else None
        self._looked = 0.0
        self._guard: subprocess.Popen[bytes] | None = None
        self._failed_save: float | None = None
        """Time of the failed save that was announced last."""
        self._attempt = 0
        """The last one before this launch."""
        self._launched: Launch | None = None
        """The launch of which only the start is noted yet."""
        self._queue = JobQueue(submission, (self._job, self._restarts), self._allocation, self._signals, self._say)
        self._notices = JobNotices(self._run, submission.stage, self._warn, job=self._job, restarts=self._restarts)
        self._folder = FolderWatch(submission, self._job, self._signals, self._say)
        self._health = HealthChecks(submission, self._allocation, self._say)
        self._full_disk: str | None = None
        """Problem of the disk of run.dir that the check of the nodes found on all of them."""

    @property
    def signals(self) -> Collection[int]:
        """Signals that came so far."""
        return self._signals

    def run(self) -> tuple[Next, int]:
        """Run to the end of this start; returns what follows, and the exit code of the job."""
        chain = f", job {self._chain_job} of its chain" if self._chain_job > 1 else ""
        self._say(f"{stage_words(self._submission.stage)}: job {self._job}, start {self._restarts + 1}{chain}")
        with self._listening():
            try:
                return self._run_launches()
            except LostRunFolder as lost:
                say(self._console, f"error: {lost}")  # `pipeline status` knows the line by that
                self._notices.lost_folder(self._submission.config(), self._chain_job, str(lost))
                return "end", EXIT_OTHER

    def tell_killed(self) -> None:
        """Send the notice of the last launch, whose batch process was killed."""
        past = launches(self._run, self._submission.stage)
        if past and past[-1].end is not None:
            self._notices.begin(self._submission.config(), self._chain_job, continues=False)
            self._notices.failed(past[-1].end)
            self._notices.close(hurried=False)

    def _run_launches(self) -> tuple[Next, int]:
        """Launch until there is nothing more to do in this start of the job."""
        self._folder.wait()
        permissions.apply_permissions(self._submission.config())
        self._notices.begin(self._submission.config(), self._chain_job, continues=not self._why_over())
        if why := self._why_unwanted():
            return self._refuse_start(why)
        number = len([each for each in launches(self._run) if each.key[:2] == (self._job, self._restarts)])
        if not self._why_over() and self._queue.has_wrong_nodes():
            return "requeue", EXIT_OK
        while not (over := self._why_over()):  # it may be cancelled between two launches
            number += 1
            self._folder.wait()  # it may have gone in the pause
            try:
                how = self._launch(number)
            except OSError:
                if not self._folder.is_lost():
                    raise
                self._folder.wait()
                continue
            self._say(how.reason)
            if how.next != "relaunch":
                return how.next, self._leave(how)
            self._notices.ended(how, self._attempt, continued=True)
            crashes = crashes_in_a_row(launches(self._run, "train"), how.checkpoint)
            time.sleep(min(_LONGEST_PAUSE, _PAUSE * crashes))
        self._say(f"nothing is started: {over}")
        self._queue.end_chain()
        return "end", self._stopped_code()

    def _stopped_code(self) -> int:
        """Exit code of a job that stopped as it was asked to: training must not start on half of its data."""
        return EXIT_STOPPED if self._submission.stage in LAST_OF_ARRAYS else EXIT_OK

    def _why_unwanted(self) -> str | None:
        """The reason not to end a stage, if somebody has cancelled the array before it."""
        if self._submission.stage not in LAST_OF_ARRAYS or self._allocation is None:
            return None
        array = array_end(self._run, self._job, has_sacct=self._submission.site.has_sacct)
        if array is None or not array.cancelled:
            return None
        if array.unwanted:
            return f"{array.words}, so the units that are left are not processed; submit the run again to process them"
        self._say(f"{array.words}; this job processes the units that are left")
        return None

    def _refuse_start(self, why: str) -> tuple[Next, int]:
        """Note a start of the job that launches nothing."""
        how = LaunchEnd(EXIT_STOPPED, why, "end", 0, time.time())
        self._note(self._begin(1, (), self._make_logs(1)), how)
        self._say(f"nothing is started: {why}")
        return how.next, self._stopped_code()

    def _why_over(self) -> str | None:
        """The reason why this job has nothing to do, if there is one."""
        if by := jobs.cancelled(self._run, self._submission.stage):
            return f"{by.by} has cancelled the run"
        sent = [job.time for job in jobs.sent(self._run) if self._job in job.numbers]
        past = launches(self._run, self._submission.stage)
        if any(each.job == self._job and each.end and each.end.code == EXIT_SUPERSEDED for each in past):
            return "a later attempt has taken the run over from this job"
        if self._submission.stage == "train" and sent and max(sent) < taken_over(self._run):
            return "the run was taken over after this job was sent"
        ended = past[-1].end if past else None
        if ended is not None and ended.code == EXIT_SUPERSEDED:  # by this job, perhaps
            return None
        if self._submission.stage == "train" and ended and ended.next == "end" and sent and ended.time > max(sent):
            return f"the run has ended: {ended.reason}"
        return None

    def _launch(self, number: int) -> LaunchEnd:
        """Start the processes on nodes that can be used, and wait for their end."""
        submission = self._submission
        logs = self._make_logs(number)
        warnings = self._check_nodes(logs) if self._allocation and submission.doctor else []
        if submission.stage == "train":
            self._health.check(logs)
        nodes = self._nodes()
        if submission.stage == "train":
            self._wait_for_lock()
            self._start_guard()
        self._attempt = last_attempt(self._run)
        before = read_exit_file(self._run)
        launch = self._launched = self._begin(number, nodes, logs)
        for line in warnings:
            self._say(line)
        if self._signals & _STOPS or jobs.cancelled(self._run, submission.stage):
            ending = Ending(EXIT_STOPPED, "the job was told to end before its processes were started")
        elif self._full_disk is not None:
            ending = Ending(EXIT_UNSAVED, f"the disk of run.dir is too full: {self._full_disk}")
        elif self._allocation and len(nodes) < submission.nodes:
            ending = too_few_nodes(self._allocation, submission.nodes)
        else:
            module = "slurm.job.srun_task" if nodes else "pipeline"
            words = ("-m", module, submission.command[0], str(submission.run_file), *submission.command[1:])
            environment, name = self._rank_env(launch), self._to_step.name if self._to_step else None
            step = SrunStep(
                submission, words, tuple(nodes), submission.processes_per_node, logs, environment, name=name
            )
            on = f" on {', '.join(nodes)}" if nodes else ""
            self._say(f"launch {number}: {submission.processes} processes{on}; logs are in {logs}")
            status = step.run(self._look, self._started)
            self._folder.wait()  # its end is in there, and would be taken for none
            self._warn_of_failed_saves()
            self._notices.look(self._attempt, running=False)
            ending = self._judge(step, status, launch, before)
            gather_errors(logs)
        how = self._decide(launch, ending)
        self._note(launch, how)
        return how

    def _make_logs(self, number: int) -> Path:
        """The folder for what the processes of a launch print."""
        logs = RunFiles(self._run).logs / f"{time.strftime(STAMP)}-{self._job}.{self._restarts}.{number}"
        storage.make_below(self._run, logs)
        return logs

    def _begin(self, number: int, nodes: Sequence[str], logs: Path) -> Launch:
        """Note that a launch begins."""
        return begin(
            self._run,
            self._submission.stage,
            self._job,
            restarts=self._restarts,
            number=number,
            link=self._chain_job,
            nodes=tuple(nodes),
            processes_per_node=self._submission.processes_per_node,
            logs=str(logs.relative_to(self._run)),
            checkpoint=self._checkpoint(),
        )

    def _judge(self, step: SrunStep, status: int, launch: Launch, before: ExitFile | None) -> Ending:
        """The end of the processes of a launch."""
        state = exit_state(self._run, before, self._attempt) if self._submission.stage == "train" else None
        if state is not None and state.agreed:
            return state  # without a question to the scheduler, for which there may be no time
        lost = tuple(node for node in self._allocation.down() if node in step.nodes) if self._allocation else ()
        stop = self._to_step.first if self._to_step else None
        if self._to_step and self._to_step.killed:
            return Ending(EXIT_INTERRUPTED, "a second Ctrl-C ended all processes")
        return judge(self._run, step, status, launch, state, lost=lost, signals=self._signals, stop=stop)

    def _decide(self, launch: Launch, ending: Ending) -> LaunchEnd:
        """Decide what follows."""
        submission, checkpoint = self._submission, self._checkpoint()
        how = LaunchEnd(
            ending.code, ending.reason, "end", checkpoint, time.time(), ending.rank, ending.node, ending.failed_nodes
        )
        crashed = ending.code not in (EXIT_OK, EXIT_STOPPED)
        past = [each for each in launches(self._run, submission.stage) if each.key != launch.key]
        usable = submission.nodes
        if self._allocation and crashed:
            down = {*self._allocation.down(), *ending.failed_nodes}
            usable = len([node for node in self._allocation.nodes if node not in down])
        following, why = decide(
            Situation(
                stage=submission.stage,
                code=ending.code,
                chain=submission.chain,
                cancelled=jobs.cancelled(self._run, self._submission.stage) is not None,
                asked_to_stop=ending.code == EXIT_STOPPED and "stop file" in ending.reason,
                terminated=signal.SIGTERM in self._signals and (not self._by_hand or self._is_ended_by_scheduler()),
                running=self._allocation.is_running() if self._allocation else True,
                over_time=self._allocation.is_over_time() if self._allocation else False,
                crashes=crashes_in_a_row([*past, replace(launch, end=how)], checkpoint) if crashed else 0,
                max_restarts=submission.max_restarts,
                nodes=usable,
                needed=submission.nodes,
                stops=1 + stops_in_a_row(past, checkpoint) if submission.stage == "train" else 0,
            )
        )
        if not self._allocation and not submission.packed and following in _WITHOUT_QUEUE:
            following, why = "end", "there is no queue here; submit it again to continue"
        code = f" (code {ending.code})" if ending.code else ""
        reason = ending.reason
        if following not in ("done", "end"):
            reason = reason.removesuffix(RESUME_ADVICE).removesuffix(".")
        text = reason if following == "done" else f"{reason}{code}; {next_words(following)}: {why}"
        return replace(how, next=following, reason=text)

    def _leave(self, how: LaunchEnd) -> int:
        """Do what was decided; returns the exit code of the job."""
        if self._submission.packed and how.next in (*_WITHOUT_QUEUE, "next link"):
            self._notices.ended(how, self._attempt, continued=True, hurried=signal.SIGTERM in self._signals)
            return EXIT_STOPPED  # the job asks for all of its runs, see `slurm.job.pack`
        if how.next == "requeue":
            self._notices.ended(how, self._attempt, continued=True, hurried=signal.SIGTERM in self._signals)
            if refused := self._queue.requeue(self._queue.avoid(how)):
                return self._end_refused(how, refused)
        elif how.next == "next link":
            waiting = self._queue.waiting_chain_jobs()
            self._notices.ended(how, self._attempt, continued=bool(waiting))
            if not waiting:
                self._say("this was the last job of the chain; submit the run again to continue")
            elif self._allocation:
                exclude = self._queue.exclude(waiting[0], self._queue.avoid(how))
                if exclude is not None:
                    self._allocation.keep_from(waiting[0], exclude, scheduler.kill_wait())
        elif how.next in ("done", "end") and self._submission.stage == "train":
            self._queue.end_chain()
        if how.next in ("done", "end"):
            self._notices.ended(how, self._attempt, continued=False)
        if how.next != "end" or how.code in (EXIT_OK, EXIT_STOPPED):
            return self._stopped_code() if how.next == "end" else EXIT_OK
        if not (self._by_hand and how.code == EXIT_INTERRUPTED):  # who interrupts it knows the cause
            self._say(end_report.write(self._run, self._submission.stage))
        return how.code

    def _end_refused(self, how: LaunchEnd, why: str) -> int:
        """The job cannot go back into the queue: that is the end of it, which must not look like a good one."""
        last = launches(self._run, self._submission.stage)[-1]
        text = f"{how.reason}, but that was refused: {why}"
        refused = replace(how, next="end", reason=text, time=time.time())
        self._note(last, refused)
        self._notices.failed(refused)
        self._say(end_report.write(self._run, self._submission.stage))
        return EXIT_OTHER

    def _note(self, launch: Launch, how: LaunchEnd) -> None:
        """Note how a launch ended; a full disk must not keep the job from what follows."""
        try:
            end(self._run, launch, how)
        except OSError as error:
            self._warn(f"the end of the launch cannot be recorded ({error.filename}: {error.strerror})")

    def _nodes(self) -> list[str]:
        """Nodes of the job to use; fewer than are needed where there are no more. None for this machine alone."""
        if self._allocation is None:
            return []
        avoid = suspects(launches(self._run, "train"), self._checkpoint())
        nodes = choose_nodes(self._allocation.nodes, self._submission.nodes, self._allocation.down(), avoid)
        if avoid:
            what = "is used anyway" if set(avoid) & set(nodes) else "is left out"
            self._say(f"{', '.join(avoid)} {what}: the last launches failed there")
        return nodes

    def _check_nodes(self, logs: Path) -> list[str]:
        """Let the doctor check the nodes; unhealthy ones are not used. Returns messages."""
        assert self._allocation is not None
        down = self._allocation.down()
        nodes = tuple(node for node in self._allocation.nodes if node not in down)
        if not nodes:
            return []
        folder = logs / "doctor"
        folder.mkdir()
        words = tuple(doctor_command(self._submission.run_file, folder, self._submission.site.gpus_per_node))
        place = rendezvous_env(self._submission, nodes)
        step = SrunStep(self._submission, words, nodes, 1, folder, place, together=False, through_srun=True)
        step.run(lambda: None, lambda _: None)
        if signal.SIGTERM in self._signals or (self._by_hand and signal.SIGINT in self._signals):
            return []  # it was not the nodes that kept them from answering
        srun = "\n".join(last_lines(step.srun_output, SRUN_LINES))
        if (failure := first_failure(folder, nodes, 1, srun)) and failure.lost_nodes:
            # srun has ended the others. The scheduler knows of the lost one itself.
            return [f"warning: the check of the nodes was interrupted: {failure.words}"]
        if interrupted(folder, srun):
            self._signals.add(signal.SIGUSR2)
            return []
        reports = read_reports(folder, nodes)
        gather_reports(folder, nodes)
        found, self._full_disk = compare(reports), full_run_disk(reports)
        if self._full_disk is not None:  # other nodes would see the same disk
            return [f"warning: {text}" for text in found.warnings]
        self._allocation.unhealthy.update(found.unhealthy)
        bad = [f"{node} is unhealthy: {'; '.join(why)}" for node, why in found.unhealthy.items()]
        return [*bad, *(f"warning: {text}" for text in found.warnings)]

    def _rank_env(self, launch: Launch) -> dict[str, str]:
        """Environment of the processes: rendezvous, and the end of the job's time."""
        found = rendezvous_env(self._submission, launch.nodes)
        found |= run_identity.environment(self._run, self._submission.folder_id)
        if self._allocation and self._allocation.end is not None:
            found["SLURM_JOB_END_TIME"] = str(int(self._allocation.end))
        return found

    def _checkpoint(self) -> int:
        """Steps of the newest checkpoint of the run."""
        found = Checkpoints.of_run(self._run).latest() if self._submission.stage == "train" else None
        return found.step if found else 0

    def _wait_for_lock(self) -> None:
        """Clear the run's lock of a holder that is gone.

        The processes themselves may be in a container, where the scheduler cannot be asked about another job. One that
        is not gone yet may be leaving; if it stays, training says who it is.
        """
        until = time.monotonic() + _NOBODY
        while (why := clear(self._run, self._job)) and time.monotonic() < until and not self._signals:
            self._say(f"waiting: {why}")
            time.sleep(_LOOK)

    def _look(self) -> None:
        """Check saves and evaluations while the processes run."""
        if signal.SIGTERM in self._signals and self._launched is not None:
            # This process may be killed before it can note how they ended.
            following: Next = "scheduler" if self._is_ended_by_scheduler() else "end"
            text = "the scheduler ends this job" if following == "scheduler" else f"stopped by {self._stop_name}"
            self._note(self._launched, LaunchEnd(EXIT_STOPPED, text, following, self._checkpoint(), time.time()))
            self._launched = None
        if self._to_step is not None:
            self._to_step.hand_on()
        if time.monotonic() - self._looked <= _LOOK:
            return
        self._looked = time.monotonic()
        self._notices.look(self._attempt, running=True)
        self._warn_of_failed_saves()
        if self._launched is not None and self._submission.stage == "train":
            self._health.look(self._launched.nodes, self._run / self._launched.logs)
        if self._evaluations is not None:
            self._evaluations.look()

    def _is_ended_by_scheduler(self) -> bool:
        """True if SIGTERM came from the scheduler: to the batch process of a job, or at the end of an allocation."""
        if self._by_hand:
            return self._allocation is not None and self._allocation.is_ending()
        return self._allocation is not None or self._submission.packed

    def _warn_of_failed_saves(self) -> None:
        """Say that a save has failed, also where the logs of the ranks have no room for it."""
        found = read_saves(self._run) if self._submission.stage == "train" else None
        if found is not None and found.attempt > self._attempt and found.failed_at not in (None, self._failed_save):
            self._failed_save = found.failed_at
            self._warn(found.words(time.time()))

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Note signals. The scheduler itself signals the processes of the steps of a job."""

        def note(number: int, frame: FrameType | None) -> None:
            on_stop(number)
            # The end of a terminal is the end of a job that runs in it.
            self._signals.add(signal.SIGTERM if number == signal.SIGHUP else number)
            self._stop_name = self._stop_name if number == signal.SIGCONT else signal.Signals(number).name
            if self._to_step is not None and number != signal.SIGCONT:
                self._to_step.note(number, runs=self._step is not None and self._step.returncode is None)
            if self._allocation is None and self._step is not None and number != signal.SIGCONT:
                with suppress(ProcessLookupError):
                    self._step.send_signal(number)

        before = {number: signal.signal(number, note) for number in _LISTENED}
        self._signals.update(self._early)
        try:
            yield
        finally:
            if self._guard is not None:
                self._guard.terminate()
            self._health.stop()
            if self._evaluations is not None:
                self._evaluations.look()
            self._notices.close(hurried=signal.SIGTERM in self._signals)
            # What is left to do is to leave; a requeue has the scheduler end this process meanwhile.
            ignore(*before)

    def _start_guard(self) -> None:
        """Let another node look after the job, which lives on if this process's node is lost; see `headless_guard`."""
        if self._allocation is None or not self._submission.spare_nodes:
            return
        if self._guard is not None and self._guard.poll() is None:
            return
        down = {*self._allocation.down(), node_name()}
        others = [node for node in self._allocation.nodes if node not in down]
        if others:
            words = ("-m", "slurm.job.headless_guard", self._job, str(self._run))
            step = SrunStep(self._submission, words, (others[-1],), 1, self._run, {}, through_srun=True)
            # It has nothing to say but what ends with it; its own session, as for the ranks.
            nowhere = subprocess.DEVNULL
            self._guard = subprocess.Popen(
                step.command(outside=True), stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
            )

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        self._step = process

    def _say(self, text: str) -> None:
        who = f"{self._run.name}: " if self._submission.packed else ""
        say(self._console, f"{when(time.time())} {who}{text}")

    def _warn(self, message: object) -> None:
        self._say(f"warning: {message}")
