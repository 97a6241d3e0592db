"""The stages of a run on this machine, each recorded once in the run's ledger.

All run in this process, but training and evaluation on several processes, which are started from here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.common import run_identity
from pipeline.common.console import Console, on_stop, say, warn
from pipeline.common.errors import MachineError, Stopped, UserError
from pipeline.common.imports import heavy_imports
from pipeline.common.signals import ignore, stop_signals
from pipeline.config import Config
from pipeline.config.parsing.code_keys import TASK_KEYS, refuse_code_of_others, refuse_mirrors_of_others
from slurm.jobs import stages_of_run
from slurm.local.stage_ledger import Ledger

if TYPE_CHECKING:
    from pipeline.common.problems import Problems
    from pipeline.eval.perplexity import EvalReport
    from pipeline.train.checkpoint.exported import WeightsOf
    from pipeline.train.distributed.rank import Processes

# Each stage imports what it needs when its turn comes: preprocessing does not wait for torch.


def curate(config: Config, *, dry_run: bool = False, units: bool = False) -> None:
    """Documents to decisions; see `pipeline.data.curate.stage`. A dry run leaves no trace."""
    from pipeline.data.curate.stage import curate as stage
    from pipeline.data.provenance.excerpts import ExcerptReader

    if config.data.curate is not None and config.data.curate.decontaminate is not None:
        refuse_code_of_others(config, *TASK_KEYS)
    if dry_run:
        with _terminate_stops():
            stage(config, dry_run=True, task_problems=_task_problems)
        return
    with _stage(config, "curate"), _terminate_stops():
        _write_task_items(config)
        stage(config, units=units, read_texts=ExcerptReader(config.data.curate))


def _task_problems(config: Config) -> list[str]:
    """Reasons why items of the tasks that curation looks for could not be read."""
    curate = config.data.curate
    if curate is None or curate.decontaminate is None or not curate.decontaminate.tasks:
        return []
    from pipeline.eval.curation_items import task_problems

    return task_problems(config)


def _write_task_items(config: Config) -> None:
    """Write the items of the tasks that curation looks for, in a process of its own.

    Evaluation imports torch: with its threads this process could not fork workers, and each would have its memory.
    """
    curate = config.data.curate
    if curate is None or curate.decontaminate is None or not curate.decontaminate.tasks:
        return
    from pipeline.data.work.worker_pool import Lost, Workers

    with Workers[str, None](_task_items_writer, (config,), 1) as workers:
        for event in workers.retry(["items of evaluations"]):
            if isinstance(event, Lost) and event.is_last:
                raise MachineError(f"data.curate.decontaminate.tasks: {event.how}; run the same command again")


def _task_items_writer(config: Config) -> Callable[[str, Callable[[int], None]], None]:
    """In a process of its own: returns the function that writes the items."""

    def write(job: str, progress: Callable[[int], None]) -> None:
        from pipeline.data.curate.measurers import items_folder
        from pipeline.data.work.frozen_plan import make_data_dir
        from pipeline.eval.curation_items import write_task_items

        make_data_dir(config, items_folder(config))
        write_task_items(config, items_folder(config))

    return write


def preprocess(config: Config, *, dry_run: bool = False, units: bool = False, grow: bool = False) -> None:
    """Documents to tokens; see `pipeline.data.preprocess.stage`. A dry run leaves no trace."""
    from pipeline.data.preprocess.stage import preprocess as stage

    if dry_run:
        with _terminate_stops():
            stage(config, dry_run=True, grow=grow)
        return
    with _stage(config, "preprocess"), _terminate_stops():
        stage(config, units=units, grow=grow)


@contextmanager
def _terminate_stops() -> Iterator[None]:
    """`stop_signals` end the stage as Ctrl-C does, and it says so."""

    def stop(number: int, frame: object) -> None:
        on_stop(number)
        ignore(*before)  # one is enough; another would only interrupt the leaving
        name = signal.Signals(number).name
        raise Stopped(f"received {name}; what was committed is kept; run the same command again to resume")

    from pipeline.data.sources.foreign_parser import ended_by

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt = () if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else (signal.SIGINT,)
    before = {each: signal.signal(each, stop) for each in stop_signals()}
    try:
        with ended_by(*before, *interrupt):
            yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def train(config: Config, console: Console | None = None) -> int:
    """Tokens to a model, up to the step that is returned; see `pipeline.train.loop.trainer`.

    On as many processes as `launch.processes` or `parallel` name, unless this process is one of them already, because
    a launcher has started it.
    """
    from pipeline.train.distributed import rank

    if rank.is_rank():
        return _train_as(rank.of_environment(), config, console, own=rank.LAUNCHER in os.environ)
    from pipeline.train.distributed.layout import fixed_processes

    processes = config.launch.processes or fixed_processes(config.parallel)
    refuse_mirrors_of_others(config)
    _resolve_schedule(config, processes, console or Console())
    from slurm.local.training_notices import notified_training

    # From when the ranks are there, or the training here listens itself, a signal lets them save first.
    notices = nullcontext() if config.launch.reference_only else notified_training(config, console)
    with notices, _stage(config, _train_stage(config)), _terminate_stops():
        if processes > 1:
            with heavy_imports():
                from slurm.local.launcher import launch_training

            return launch_training(config, processes, console)
        with _early_end_noted(config):
            with heavy_imports():
                from pipeline.train.loop.trainer import train as stage

            _check_machine(config, console)
            return stage(config, console)


def _resolve_schedule(config: Config, processes: int, console: Console) -> None:
    """Ask about a learning rate that rises where the run resumes, or refuse it; not in a job, which was looked at."""
    from pipeline.train.start.schedule_seam import schedule_differs
    from slurm.job.srun_task import LOGS

    if LOGS in os.environ or not schedule_differs(config):
        return
    with heavy_imports():
        from pipeline.train.start.checks import SEAM_CHECK, TrainScope
    from pipeline.common.problems import Problems

    found = Problems()
    found.look([SEAM_CHECK], TrainScope(config, processes))
    found.ask(console)
    found.raise_problems()


@contextmanager
def _early_end_noted(config: Config) -> Iterator[None]:
    """Write down a stop that comes while the run folder is not this process's yet."""
    start = time.time()
    try:
        yield
    except (Stopped, KeyboardInterrupt) as end:
        from pipeline.train.run.folder import note_end
        from pipeline.train.run.lock import is_held

        # It may have come before the run folder was this process's, which then has noted nothing.
        if not is_held(config.run.dir):
            note_end(config.run.dir, end, start)
        raise


def _train_stage(config: Config) -> str:
    """Name in the ledger: a start that only computes a reference trains nothing."""
    return "reference" if config.launch.reference_only else "train"


def _train_as(ranks: Processes, config: Config, console: Console | None, *, own: bool) -> int:
    """The part of one rank; `own` if our launcher has started it, which keeps the ledger."""
    if config.launch.processes is not None:
        _refuse_other_number("launch.processes", config.launch.processes, ranks)
    with heavy_imports():
        from pipeline.train.loop.trainer import train as stage

    ledger = nullcontext() if own or ranks.rank else _stage(config, _train_stage(config))
    # Our launcher itself knows of a signal that comes before the training listens.
    with ledger, nullcontext() if own else _terminate_stops():
        _check_machine(config, console, room=False)  # of a job, looked at before it was sent
        return stage(config, console)


def _check_machine(config: Config, console: Console | None, *, room: bool = True) -> None:
    """Refuse what this machine has no memory or no disk for, and warn where either is tight."""
    from pipeline.train.planning.fit import check_memory
    from slurm.submit.disk_space import check_room

    for line in [*check_memory(config), *(check_room(config) if room else ())]:
        warn(console or Console(), line)


def check_layout(config: Config) -> None:
    """Show what a run's layout over processes comes to, and whether it fits this machine. Leaves no trace.

    See `pipeline.train.rules.layout_check` and `pipeline.train.planning.fit`.
    """
    from pipeline.train.planning.fit import check_memory, is_meant_for_this_machine
    from pipeline.train.rules.layout_check import check

    refuse_code_of_others(config, "notify")  # as the training would
    console = Console()
    processes = check(config, console).world_size
    if not is_meant_for_this_machine(config, processes):
        say(console, "the memory of this machine is not compared: the run is for other machines")
        return
    for line in check_memory(config, processes):
        warn(console, line)


def evaluate(
    config: Config, which: WeightsOf = None, console: Console | None = None, *, importance: bool = False
) -> EvalReport | None:
    """A model to numbers; see `pipeline.eval.perplexity`. In a folder that cannot be written to, nothing is kept.

    On `eval.processes` processes, unless this process is one of several already, because a launcher has started it.

    Args:
        config: the run.
        which: checkpoint or folder, by default the latest checkpoint.
        console: where to print.
        importance: measure the importance of the model's parts instead; see `pipeline.eval.importance`.

    Returns:
        The figures; None where they were computed by other processes and could not be kept, and of importance.
    """
    from pipeline.train.distributed import rank

    refuse_code_of_others(config, *TASK_KEYS)  # what is refused leaves no trace in the run folder
    if isinstance(which, Path):
        from pipeline.train.checkpoint.exported import ExportedWeights

        ExportedWeights.open(which)  # the same
    run_identity.refuse_lost(config.run.dir, run_identity.expected_id(config.run.dir))
    own = rank.LAUNCHER in os.environ  # which keeps the ledger
    ranks = rank.of_environment()
    if rank.is_rank() and config.eval.processes != 1:
        _refuse_other_number("eval.processes", config.eval.processes, ranks)
    keep = ranks.rank == 0
    ledger: AbstractContextManager[None] = nullcontext()
    if keep:
        try:
            stage_of_ledger = _ledger(config).stage("eval")
        except MachineError:
            keep = False
        else:
            ledger = nullcontext() if own and rank.is_rank() else stage_of_ledger
    with ledger:
        if not rank.is_rank() and config.eval.processes > 1:
            return _evaluate_elsewhere(config, which, console, importance=importance)
        if importance:
            with heavy_imports():
                from pipeline.eval.importance import measure_importance

            measure_importance(config, which, console, keep=keep, ranks=ranks)
            return None
        with heavy_imports():
            from pipeline.eval.perplexity import evaluate as stage

        return stage(config, which, console, keep=keep, ranks=ranks)


def _evaluate_elsewhere(
    config: Config, which: WeightsOf, console: Console | None, *, importance: bool
) -> EvalReport | None:
    """On processes that are started for it."""
    from pipeline.eval.heldout_data import check_heldout
    from pipeline.eval.perplexity import read_report
    from pipeline.train.checkpoint.manager import Checkpoints

    with heavy_imports():
        from slurm.local.launcher import launch_evaluation

    # What would be refused is refused before they are started; and all of them have the same checkpoint.
    check_heldout(config)
    if importance:
        from pipeline.eval.checks import refuse_importance

        refuse_importance(config, config.eval.processes)
    of = which if isinstance(which, Path) else Checkpoints.of_run(config.run.dir).find(which).step
    launch_evaluation(config, of, console, importance=importance)
    return None if importance else read_report(config, of)


def _refuse_other_number(key: str, wanted: int, ranks: Processes) -> None:
    """A `UserError` where another number of processes was started than a key of the run file asks for."""
    if wanted != ranks.world_size:
        raise UserError(
            f"{key} is {wanted}, but {ranks.world_size} processes were started (WORLD_SIZE); set "
            f"{key}={ranks.world_size}, or start {wanted}"
        )


def run(config: Config, console: Console | None = None) -> None:
    """Preprocess, train, evaluate, summarize. What is done already is skipped, so the same call resumes."""
    from pipeline.train.distributed.rank import is_rank

    if is_rank():
        raise UserError(
            "`pipeline run` is one process, which starts those of the training itself (launch.processes), but "
            "WORLD_SIZE is set; unset it, or call `pipeline preprocess`, `torchrun ... -m pipeline train` and "
            "`pipeline eval`"
        )
    console = console or Console()
    # What could not be trained or evaluated is refused before anything is tokenized, where that can be told.
    refuse_code_of_others(config, "notify", *TASK_KEYS)
    _refuse_problems(config, console)
    if config.data_url is None:
        if config.data.curate is not None:
            curate(config)
        preprocess(config)

    from pipeline.eval.benchmarks import benchmarks_are_made
    from pipeline.eval.heldout_data import check_heldout
    from pipeline.eval.perplexity import read_report
    from pipeline.eval.summary import show, summarize

    check_heldout(config)
    step = train(config, console)
    report = read_report(config, step) if benchmarks_are_made(config, step) else None
    report = report or evaluate(config, step, console)
    assert report is not None, "the run folder was written to just now"
    show(config, summarize(config, report, _ledger(config).seconds(), console), console)


def _refuse_problems(config: Config, console: Console) -> None:
    """Refuse a run of which a later stage would be refused, as its preview does.

    In a process of its own: this one must not import torch, with whose threads it could not fork workers.
    """
    from pipeline.data.work.worker_pool import Done, Lost, Workers

    with _terminate_stops(), Workers[str, "Problems"](_looker, (config,), 1) as workers:
        for event in workers.retry(["the checks of the run"]):
            if isinstance(event, Done):
                event.result.ask(console)
                event.result.raise_problems()
            if isinstance(event, Lost) and event.is_last:
                raise MachineError(f"the checks of the run: {event.how}; run the same command again")


def _looker(config: Config) -> Callable[[str, Callable[[int], None]], Problems]:
    """In a process of its own: returns the function that looks at all stages."""

    def look(job: str, progress: Callable[[int], None]) -> Problems:
        from pipeline.common.problems import Problems
        from pipeline.train.rules.layout_check import world_size
        from slurm.checks import look_at_stages

        found = Problems()
        look_at_stages(
            config, stages_of_run(config), found, train=world_size(config, {}), evaluate=config.eval.processes
        )
        return found

    return look


@contextmanager
def _stage(config: Config, name: str) -> Iterator[None]:
    """A stage with its lines in the ledger; where a new run is refused, its folder is not left behind."""
    from pipeline.train.run.folder import no_trace_if_refused

    with no_trace_if_refused(config.run.dir), _ledger(config).stage(name):
        yield


def _ledger(config: Config) -> Ledger:
    from pipeline.train.run.folder import make_writable

    make_writable(config.run.dir)
    return Ledger(config.run.dir)
