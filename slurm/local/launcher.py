"""A stage on several processes of this machine: torch's elastic agent starts them, we watch and tell how they ended.

The first one that fails ends all. A signal to this process is handed on to the ranks, which in training agree at a
step, save and leave; nothing here ends them in that case. However this process ends, no rank outlives it.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from pipeline.common import links, run_identity, storage
from pipeline.common.console import Console, on_stop, say, warn
from pipeline.common.errors import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_OTHER,
    EXIT_STOPPED,
    MachineError,
    RankFailed,
    Stopped,
    UserError,
)
from pipeline.common.imports import module_command
from pipeline.common.run_files import LAUNCHER_LOG, RunFiles
from pipeline.common.signals import stop_signals
from pipeline.config import Config
from pipeline.config.load import RUN_FILE, dump
from pipeline.config.parsing.code_keys import TASK_KEYS, vouch_for
from pipeline.train.checkpoint.exported import WEIGHTS_OPTION
from pipeline.train.distributed.process_group import visible_gpus
from pipeline.train.distributed.rank import LAUNCHER, NODE_ERRORS, STORE, read_error
from pipeline.train.distributed.watchdog import STACKS_SIGNAL
from pipeline.train.planning.fit import check_memory
from pipeline.train.rules.layout import check_evaluation_layout, check_layout
from pipeline.train.run.folder import note_end
from pipeline.train.torch_compat.agent import OneNode, WatchedAgent
from slurm.record.drill_record import read_drill
from slurm.record.failure_analysis import TAIL, FailedProcess, causes, first_of
from slurm.record.rank_logs import STAMP, error_file, log_file
from slurm.record.tail import last_lines
from slurm.submit.disk_space import check_room

RANK_MODULE = ("pipeline",)
"""Module that a rank runs, and words before the stage and the run file."""
LaunchedStage = Literal["train", "eval"]
_TAKEN_BY_TORCH = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AFTER_FAILURE = 5.0
"""Seconds that the other ranks have to end on their own, time enough for rank 0 to note how far it came."""
_AFTER_HANG = 10.0
"""The same where it hung: time for the others to notice, too, and for a rank that was stopped to write its stacks."""
_AFTER_CONSEQUENCE = 30.0
"""The same where the ones that ended name another that has failed, which is yet to say why."""
_AFTER_STOP = 90.0
"""The same where they have agreed on a stop: longer than the last rank may take to close its files."""
_AFTER_KILL = 30.0
"""Seconds after which a rank that the kernel does not let die is left behind."""


def launch_training(config: Config, processes: int, console: Console | None = None) -> int:
    """Train on processes of this machine, `pipeline train` in each; returns the steps trained in all.

    Raises:
        UserError: the layout or the machine does not fit this number of processes. Nothing was started.
        RankFailed: a rank did not end well.
        Stopped: a signal came before the ranks listened.
        KeyboardInterrupt: a second Ctrl-C came; all ranks were killed.
    """
    check_layout(config, processes)
    check_devices(config.launch.device, processes)
    logs = _log_folder(config.run.dir)
    start = time.time()
    console = console or Console()
    try:
        for line in [*check_memory(config, processes), *check_room(config)]:
            warn(console, line)
        _launch_stage("train", config, processes, logs, console)
    except BaseException as end:  # a second Ctrl-C, too
        # Rank 0 has noted what it has said, unless it hung: then nothing of it ran any more.
        if not (isinstance(end, RankFailed) and end.shown and end.exit_code != EXIT_HANG):
            note_end(config.run.dir, end, start)
        raise
    if config.launch.reference_only:
        return 0
    return int(storage.read_object(RunFiles(config.run.dir).exit)["step"])


def launch_evaluation(
    config: Config, of: int | Path, console: Console | None = None, *, importance: bool = False
) -> None:
    """Evaluate on `eval.processes` processes of this machine, `pipeline eval` in each.

    Args:
        config: The run. In a folder that cannot be written to, the logs of the ranks are kept elsewhere.
        of: Step of the checkpoint, or folder of the weights.
        console: Where to say what is started.
        importance: Measure importance (`--importance`) instead of losses.

    Raises:
        UserError: the layout or the machine does not fit this number of processes. Nothing was started.
        RankFailed: a rank did not end well.
        Stopped: a signal came.
        KeyboardInterrupt: Ctrl-C came.
    """
    processes = config.eval.processes
    check_evaluation_layout(config, processes)
    check_devices(config.launch.device, processes, "eval.processes", "eval.parallel")
    try:
        logs = _log_folder(config.run.dir, "eval")
    except OSError:
        logs = Path(tempfile.mkdtemp(prefix="pipeline-eval-"))
    option = WEIGHTS_OPTION if isinstance(of, Path) else "--step"
    more = ["--importance"] if importance else []
    with vouch_for(config, *TASK_KEYS):
        _launch_stage("eval", config, processes, logs, console or Console(), option, str(of), *more)


def _launch_stage(
    stage: LaunchedStage, config: Config, processes: int, logs: Path, console: Console, *options: str
) -> None:
    # Importing torch and joining takes a while, in which rank 0 says nothing yet.
    say(console, f"{stage}: starting {processes:,} processes; logs of ranks from 1 on are in {logs}")
    # A copy, so that all ranks read the same, whatever is edited meanwhile.
    run_file = logs / RUN_FILE
    storage.put(run_file, dump(config).encode())
    words = [*module_command(RANK_MODULE[0]), *RANK_MODULE[1:], stage, str(run_file), *options]
    # Each rank must find the folder that this process has found, and makes none in its place.
    environment = run_identity.environment(config.run.dir, run_identity.read_id(config.run.dir))
    launch(words, processes, logs, stage, environment)


def check_devices(wanted: str, processes: int, key: str = "launch.processes", section: str = "parallel") -> None:
    """A `UserError` where `launch.device` means GPUs and there are too few of them for a process each.

    Args:
        wanted: `launch.device`.
        processes: How many there are to be.
        key: What the run file calls their number.
        section: What it calls their layout.
    """
    there = visible_gpus()
    if wanted == "cpu" or (wanted == "auto" and not there):
        return
    if there < processes:
        what = f"set {key}={there} and a layout ({section}:) that fits, or " if there > 1 else ""
        raise UserError(
            f"{key} is {processes}, each with a GPU, but torch sees {there} here (launch.device={wanted}); "
            f"{what}use launch.device=cpu, or a machine with {processes} GPUs"
        )


def launch(
    command: Sequence[str],
    processes: int,
    logs: Path,
    stage: LaunchedStage = "train",
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command on several ranks to its end; rank 0 has this process's terminal, the others a log each.

    Args:
        command: Program and arguments. It should call `begin_rank` first.
        processes: How many.
        logs: An existing folder for `rank-0001.log` and so on, and what ranks write of their errors.
        stage: What they do: training alone saves when it is asked to stop.
        environment: Variables that they get besides those of this process.

    Raises:
        RankFailed: with the message and exit code of the rank that failed first.
        Stopped: a signal came before the ranks listened, which only those of the training do.
        KeyboardInterrupt: a second Ctrl-C came; all ranks were killed.
    """
    ranks = _Ranks(processes, logs)
    signals = _Signals(ranks, stage)

    def started(pids: dict[int, int]) -> None:
        signals.listen()  # torch has just put its own handlers, which would end all ranks
        ranks.start(pids)

    with signals, _quiet(logs / LAUNCHER_LOG), _private_folder() as folder:
        try:
            spec = WorkerSpec(
                role=stage,
                local_world_size=processes,
                entrypoint=command[0],
                args=tuple(command[1:]),
                rdzv_handler=OneNode(),
                max_restarts=0,
                monitor_interval=0.1,
                local_addr="localhost",
            )
            WatchedAgent(spec, _Logs(logs, Path(folder, "store"), environment or {}), started, ranks.have_ended).run()
        except SignalException as interrupted:
            ranks.forward(interrupted.sigval)
        except OSError as error:
            raise MachineError(f"the {processes} processes could not be started: {error}") from error
        finally:
            ranks.kill()
    _raise_failure(ranks, logs, stage)


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that only this user may enter, in memory where there is such a place: a disk may be full."""
    memory = "/dev/shm"
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else None
    return tempfile.TemporaryDirectory(prefix="pipeline-store-", dir=parent, ignore_cleanup_errors=True)


class _Ranks:
    """The processes that were started: how each ended, and the end of all when one has failed."""

    def __init__(self, number: int, logs: Path) -> None:
        self.number = number
        self._logs = logs
        self.codes: dict[int, int] = {}
        """By rank, of those that have ended on their own; of one that a signal ended minus its number."""
        self.times: dict[int, float] = {}
        """Times at which that was noticed, in seconds since 1970."""
        self.forwarded: set[int] = set()
        """Signals that were handed on."""
        self._pids: dict[int, int] = {}
        self._running: set[int] = set()
        self._asked = False
        self._kill_at: float | None = None
        self._killed_at: float | None = None

    def start(self, pids: Mapping[int, int]) -> None:
        """They run now."""
        self._pids = dict(pids)
        self._running = set(pids)
        for number in self.forwarded:  # it came while they were started
            self._send(number)

    def have_ended(self) -> bool:
        """Look at each of them; True when none runs any more. None is reaped, so that no pid can be another's."""
        for rank in sorted(self._running):
            code = _exit_status(self._pids[rank])
            if code is None:
                continue
            self._running.remove(rank)
            if self._killed_at is None:
                self.codes[rank], self.times[rank] = code, time.time()
            if code == EXIT_HANG:
                self._ask_for_stacks()
            if code != 0:
                at = time.monotonic() + self._patience(rank, code)
                self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
        now = time.monotonic()
        if self._running and self._killed_at is None and self._kill_at is not None and now > self._kill_at:
            self.kill()
        stuck = self._killed_at is not None and now > self._killed_at + _AFTER_KILL
        if self._running and not stuck:
            return False
        if any(self.codes.values()):
            self.kill()  # the children of ranks that had no time to end theirs
        self._running, self._pids = set(), {}  # from now on these numbers may be other processes'
        return True

    def _patience(self, rank: int, code: int) -> float:
        """Seconds that the others have when this one has ended badly."""
        if code == EXIT_STOPPED:
            return _AFTER_STOP
        if code == EXIT_HANG:
            return _AFTER_HANG
        record = read_error(error_file(self._logs, rank))
        return _AFTER_CONSEQUENCE if record is not None and record.consequence else _AFTER_FAILURE

    def forward(self, number: int) -> None:
        """Hand a signal on."""
        self.forwarded.add(number)
        self._send(number)

    def _ask_for_stacks(self) -> None:
        """Let those that still run write where they are, once. One that is stopped does so before it goes on."""
        if not self._asked:
            self._asked = True
            for number in (STACKS_SIGNAL, signal.SIGCONT):
                self._send(number)

    def _send(self, number: int) -> None:
        for rank in self._running:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def kill(self) -> None:
        """End all that still run, and what they have started."""
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            for pid in self._pids.values():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)


def _exit_status(pid: int) -> int | None:
    """Exit code or minus signal of a child that has ended, else None; it stays to be reaped."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None or info.si_pid == 0:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


class _Signals:
    """A context manager that hands signals on to the ranks."""

    def __init__(self, ranks: _Ranks, stage: LaunchedStage) -> None:
        self._ranks = ranks
        self._what = b"Stopping after this step" if stage == "train" else b"Stopping"
        self._forwarded = (*stop_signals(), signal.SIGINT)
        self._before = {number: signal.getsignal(number) for number in {*self._forwarded, *_TAKEN_BY_TORCH}}
        self._here = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        self.listen()

    def __exit__(self, *_: object) -> None:
        if self._here:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Put our handlers in place."""
        if self._here:
            for number, handler in self._before.items():
                signal.signal(number, self._on_signal if number in self._forwarded else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if number in self._ranks.forwarded:
                self._ranks.kill()
                raise KeyboardInterrupt
            self._ranks.forward(number)  # before it is said: who reads it may ask again within this call
            with suppress(OSError):
                os.write(2, b"\n" + self._what + b"; once more ends all ranks at once.\n")
        else:
            on_stop(number)
            self._ranks.forward(number)


class _Logs(LogsSpecs):
    """Files for the output of each rank, and its environment besides torch's."""

    def __init__(self, folder: Path, store: Path, environment: Mapping[str, str]) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._store = store
        self._environment = environment

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = {rank: str(log_file(self._folder, rank)) if rank else "" for rank in envs}
        errors = {rank: str(error_file(self._folder, rank)) for rank in envs}
        for rank, environment in envs.items():
            environment.update(self._environment)
            environment["TORCHELASTIC_ERROR_FILE"] = errors[rank]
            environment[LAUNCHER] = str(os.getpid())
            environment[STORE] = str(self._store)
            environment[NODE_ERRORS] = ""  # of a step that this process is part of
            if rank:
                environment["PYTHONUNBUFFERED"] = "1"  # the last lines before a kill count
        return LogsDest(stdouts=logs, stderrs=logs, error_files=errors)


class _LogFile(logging.FileHandler):
    """On a full disk it loses lines; how the ranks ended is what the user must see then."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextmanager
def _quiet(file: Path) -> Iterator[None]:
    """Send the log of torch's agent to a file; the terminal gets our own messages."""
    logger, handler = logging.getLogger("torch.distributed.elastic"), _LogFile(file, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        with suppress(OSError):
            handler.close()


def _raise_failure(ranks: _Ranks, logs: Path, stage: LaunchedStage = "train") -> None:
    """Raise what ended the ranks, if anything did."""
    failures = [
        FailedProcess(rank, code, ranks.times[rank], read_error(error_file(logs, rank)))
        for rank, code in ranks.codes.items()
        if code != 0
    ]
    ended_by_signal = [failure for failure in failures if _ended_by(failure, ranks.forwarded)]
    if ended_by_signal:
        # They did not listen yet; those that did have lost them.
        failures = [failure for failure in failures if failure not in ended_by_signal and not failure.consequence]
    if ranks.forwarded and not failures and (ended_by_signal or len(ranks.codes) < ranks.number):
        if ranks.forwarded == {signal.SIGINT}:
            raise KeyboardInterrupt
        names = " and ".join(sorted(signal.Signals(number).name for number in ranks.forwarded))
        if stage == "train":
            raise Stopped(f"received {names} before training began; run the same command again to resume")
        raise Stopped(f"received {names}; nothing of this evaluation is kept; run the same command again")
    if not failures:
        return
    first = first_of(causes(failures))
    if first.record is not None and first.record.was_shown and not first.consequence:
        raise RankFailed(first.record.message, first.code, shown=True)
    code = first.code if first.code > 0 else EXIT_OTHER
    raise RankFailed(_describe(first, ranks.number, logs), code)


def _ended_by(failure: FailedProcess, signals: set[int]) -> bool:
    """True if one of these signals ended a rank, and it has not reported that itself."""
    said = failure.record is not None and failure.record.was_shown
    return -failure.code in signals or (failure.code == EXIT_INTERRUPTED and signal.SIGINT in signals and not said)


def _describe(failure: FailedProcess, number: int, logs: Path) -> str:
    who = f"rank {failure.rank} of {number}"
    folder = f"The logs of the ranks are in {logs}"
    if failure.record is not None:
        trace = f"\n{failure.record.traceback.rstrip()}" if failure.record.traceback else ""
        return f"{who} failed: {failure.record.message}{trace}\n{folder}"
    log = log_file(logs, failure.rank)
    lines = last_lines(log, TAIL)
    tail = "\n".join([f"\nThe end of {log.name}:", *lines]) if lines else ""
    drill = read_drill(logs)
    words = drill.words if drill is not None and failure.rank in drill.ranks else failure.words
    return f"{who} {words}{tail}\n{folder}"


def _log_folder(run: Path, stage: LaunchedStage = "train") -> Path:
    """A new folder with the local time as its name; `pipeline logs` knows it by that."""
    parent = RunFiles(run).logs
    storage.make_below(run, parent)
    name = time.strftime(STAMP) + ("" if stage == "train" else f"-{stage}")
    for attempt in range(1, 1000):
        folder = parent / (name if attempt == 1 else f"{name}.{attempt}")
        with suppress(FileExistsError), links.folder_of(folder) as (own, above):  # no link of somebody else
            os.mkdir(own, dir_fd=above)
            return folder
    raise MachineError(f"{parent} has too many folders of {name}; run the same command again")
