"""The training loop: next batch, forward and backward, update, log, validate, save."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pipeline.common import storage
from pipeline.common.console import Console, detail, say, warn
from pipeline.common.errors import NumericalError, Stopped, UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import dump
from pipeline.data.loading.batch import StepData
from pipeline.data.loading.heldout import HeldOutTexts
from pipeline.data.loading.loader import Loader, open_loader
from pipeline.data.loading.local_copy import copy_locally
from pipeline.data.loading.prefetch import copied
from pipeline.data.preprocess.run_file_check import check_run_file
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.committed import VALIDATION_LOSSES
from pipeline.train.checkpoint.manager import Checkpoint
from pipeline.train.checkpoint.policy import due
from pipeline.train.distributed import process_group
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.host.gc_schedule import GcSchedule
from pipeline.train.host.trace_spans import span
from pipeline.train.loop.faults import Faults
from pipeline.train.loop.out_of_memory import out_of_memory_means, step_advice, weights_advice
from pipeline.train.loop.quantities.data_hash import DataHash
from pipeline.train.loop.quantities.requests import AgreedRequests
from pipeline.train.loop.quantities.windows import WindowLosses
from pipeline.train.loop.quantities.work import RankWork
from pipeline.train.loop.reference_scores import begin_with_references, make_references
from pipeline.train.loop.rewind import go_back
from pipeline.train.loop.saving import Saver, copy_missing
from pipeline.train.loop.step import Stepper
from pipeline.train.loop.step_metrics import Issued, StepMetrics
from pipeline.train.loop.validation import Validator, validation_line
from pipeline.train.model.flops import flops_per_token
from pipeline.train.monitor.loggers.base import Logger
from pipeline.train.monitor.loggers.open import open_loggers
from pipeline.train.monitor.loggers.prometheus import PrometheusFile
from pipeline.train.monitor.metrics import Metrics
from pipeline.train.monitor.profiler import Profile
from pipeline.train.monitor.spikes import kind_of
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.compile import choose_compiling
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.parallel.setup import Setup, set_up
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.goodput import goodput
from pipeline.train.run.heartbeat import host_of
from pipeline.train.run.rewind_request import Rewind
from pipeline.train.run.stop_requests import RESUME_ADVICE, Requests, StopRequest
from pipeline.train.start.open_run import open_run_everywhere, open_validation
from pipeline.train.start.resume import THREADS, resume_lines
from pipeline.train.start.run_log import print_start, step_lines
from pipeline.train.start.run_plan import RunPlan
from pipeline.train.start.schedule_seam import BEFORE, begin_lines, run_schedule
from pipeline.train.start.setup import be_deterministic, init_rank
from pipeline.train.start.warm_start import WeightsOrigin, warm_start

_COMPILED = "compiled"
"""In state.json: by type of device, whether layers are compiled there."""


class Trainer:
    """A run in this process: its part of the model and the data, and on rank 0 its metrics."""

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        setup: Setup,
        heldout: HeldOutTexts,
        folder: RunFolder,
        watchdog: Watchdog,
        requests: Requests,
        console: Console,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._config, self._plan, self._setup, self._heldout = config, plan, setup, heldout
        self._validator = Validator(config, setup, heldout)
        self._folder, self._watchdog, self._requests, self._console = folder, watchdog, requests, console
        self._schedule = run_schedule(config, plan.journal, plan.length.steps, checkpoint)
        self._loader = self._open_loader()
        self._compiles, self._compiler_line = self._choose_compiling(checkpoint)
        self._profile = Profile(config.train.profile, setup.device, dist.get_rank(), folder, console)
        self._profile.watch_memory()
        train = config.train.model_copy(update={"compile": self._compiles})
        self._model = build_model(config.model_copy(update={"train": train}), setup)
        self._optimizers = Optimizers(config, self._model)
        teacher = None if plan.teacher is None else plan.teacher.load(config, setup)
        self._agreement = AgreedRequests(self._request, setup.device)
        self._work = RankWork(lambda rank: host_of(folder.path, rank))
        self._losses = WindowLosses(config, folder, setup.device)
        self._stepper = Stepper(
            config,
            setup,
            self._model,
            self._optimizers,
            sources=self._loader.names,
            quantities=[self._agreement, DataHash(setup.mesh), self._work, self._losses],
            teacher=teacher,
        )
        state = (self._model, self._optimizers, self._stepper.ema)
        self._saver = Saver(config, setup, plan, folder, watchdog, *state, console)
        describe = lambda step: self._loader.describe(step)  # noqa: E731, PLW0108, a rewind replaces the loader
        self._faults = Faults(config.train.faults, folder, self._saver, describe, console)
        self._rows = StepMetrics(config, setup, folder, console, watchdog.stopped, self._stepper.quantities, teacher)
        self._metrics = Metrics([])
        # A device has its queue; without one, waiting for the next step would only delay what is known.
        self._runs_ahead = setup.device.type != "cpu"
        self._garbage = GcSchedule()
        self._origin = WeightsOrigin()
        self._issued: Issued | None = None
        """The last step, as long as its numbers have not been read."""
        self._shapes: set[tuple[int, int]] = set()
        """Shapes of micro-batches, samples and length, that have been trained on in this process."""

    def run(self) -> None:
        """The training loop, from the steps that are done to the end of the run.

        Raises:
            Rewind: the run goes back to a checkpoint, see `rewind`; then this is called again.
            NumericalError: too many steps went wrong.
            Stopped: a stop request came; a checkpoint was saved.
        """
        first, total = self._folder.step, self._plan.length.steps
        self._limit_step(first + 1)
        self._rows.start()
        self._work.clock.take()
        with closing(self._loader.iterate(first, total)) as read:
            batches = copied(read, self._setup.device)
            for step in range(first + 1, total + 1):
                with self._profile.step(step):
                    issued = self._fetch(batches, first)
                    if issued.trains:
                        issued.lr = self._prepare(issued)
                        issued.result = self._stepper.step(issued.data, issued.lr).to_host()
                    # The numbers of a step are read when the next one has been issued, so that a device never idles.
                    self._read_numbers()
                    self._issued = issued
                    if not self._runs_ahead:
                        self._read_numbers()
                    self._folder.step = step
                    self._after(step)
                    self._note_shape(issued)
                    if step == first + 1:
                        process_group.start_is_over()
                    if self._profile.ends_with(step):
                        self._read_numbers()
                if self._profile.ends_with(step):
                    self._write_profile(step)
                self._garbage.after(step)
                self._limit_step(step + 1)

    def _after(self, step: int) -> None:
        """Do what is due after a step. The order matters, and is the same on all ranks."""
        total = self._plan.length.steps
        self._saver.report(self._write)
        if step == total:
            self._read_numbers()
            self._faults.at_end(step)
        stop, save, unsaved = self._agreement.agreed
        if stop:
            # Before a validation, which may take longer than there is until the processes are killed.
            self._save(step, last=True)
        if sets := self._validator.due(step, total):
            self._validate(step, sets)
        # After a validation, whose losses decide which checkpoints are the best.
        if (save or unsaved or due(self._config.train.checkpoint, step, total)) and not stop:
            self._save(step, last=unsaved or step == total, overdue=unsaved and step < total)
        if stop or step == total:
            self._end(step)

    def _fetch(self, batches: Iterator[StepData], first: int) -> Issued:
        """The next step, of which nothing is issued yet; `first` steps were done when the loop began."""
        begin = time.monotonic()
        with span("fetch"):
            data = next(batches)
        waited, step = time.monotonic() - begin, data.step
        issued = Issued(data, self._plan.segment(step), self._plan.stream(self._config, step), begin, waited)
        for line in step_lines(self._config, self._plan, data, first):
            say(self._console, line)
        return issued

    def _prepare(self, issued: Issued) -> float:
        """Tell what watches over steps which one comes; returns its learning rate."""
        if self._stepper.spikes is not None:
            self._stepper.spikes.compare_within(kind_of(issued.segment))
        self._work.add_wait(issued.waited)
        tokens = self._plan.journal.tokens(issued.data.step + 1)
        return self._config.train.optimizer.lr * self._schedule.factor(tokens)

    def _read_numbers(self) -> None:
        """Wait for the numbers of the step that was issued last, write them down, and act on faults."""
        if self._issued is None:
            return
        with span("metrics"):
            issued, self._issued = self._issued, None
            if issued.result is None:
                for quantity in self._stepper.quantities:
                    quantity.skipped(issued.data)
                row = self._rows.skipped(self._loader, issued)
            else:
                with self._work.clock.pause():  # it waits for the device, and that for the other ranks
                    result = issued.result()
                row = self._rows.trained(self._loader, issued, result.columns())
            self._metrics.write(row)
            if issued.result is not None:
                self._faults.after(row)

    def _validate(self, step: int, due: Sequence[str]) -> None:
        self._read_numbers()
        # As many tokens at once as in a micro-batch of the step, whose windows may be shorter or longer.
        samples, length = self._shape(step)
        with span("validation"):
            values = self._validator.validate(
                step, due, self._model, self._stepper.runner, tokens=samples * length, advance=self._watchdog.beat
            )
        if values:
            self._write(step, {"validation_seconds": self._rows.wall.take(), **self._rows.wall.suspended(), **values})
            say(self._console, f"step {step}: {validation_line(self._validator.losses_at(step))}")

    def _save(self, step: int, *, last: bool, overdue: bool = False) -> None:
        """Save, and remove what is too old.

        While steps go wrong nothing is removed, and nothing saved but at the end. For `overdue` see `Saver.save`.
        """
        self._read_numbers()
        if self._faults.troubled and not last:
            return
        start = time.monotonic()
        # Each of the two saves that this may wait for has the whole limit.
        self._watchdog.phase("save", step)
        more = {name: part.state() for name, part in self._stateful().items()}
        more[_COMPILED] = {self._setup.device.type: self._compiles}
        if self._setup.device.type == "cpu":
            more[THREADS] = torch.get_num_threads()
        more[BEFORE] = self._schedule.before
        if self._config.train.checkpoint.keep_best is not None:
            more[VALIDATION_LOSSES] = self._validator.losses_at(step)
        prune = not self._faults.troubled
        with span("save"):
            self._losses.sync()
            self._saver.save(step, self._plan.journal, more, last=last, overdue=overdue, prune=prune)
        self._requests.saved()
        self._agreement.saved()
        self._saver.report(self._write)
        self._rows.wall.take()
        suspended = self._rows.wall.suspended()
        blocked = time.monotonic() - start - sum(suspended.values())
        self._write(step, {"save_blocked": max(0.0, blocked), **suspended})

    def _end(self, step: int) -> None:
        """Raise `Stopped` for a stop request, unless the run is at its end."""
        total, reason = self._plan.length.steps, self._requests.reason() or "a stop request"  # of another rank
        # Also a stop file that came during the last step: a longer run would stop at once.
        self._requests.remove_stop_file()
        if step < total:
            self._watchdog.pause()
            raise Stopped(f"{reason} at step {step:,} of {total:,}; saved.{RESUME_ADVICE}", agreed=True)

    def _write_profile(self, step: int) -> None:
        self._watchdog.phase("save", step)
        with self._work.clock.pause():
            self._profile.finish()
            process_group.wait_for_all()  # or who writes nothing is in the next step, with its limit
        self._rows.wall.take()  # writing it was part of no step

    def _limit_step(self, step: int) -> None:
        """Start the time limit of a step: shapes that are new may have to be compiled."""
        is_new = step <= self._plan.length.steps and self._shape(step) not in self._shapes
        self._watchdog.phase("first_step" if is_new else "step", step)

    def _note_shape(self, issued: Issued) -> None:
        """Note the shape of a step that is done; unless it was new, also how long all of it took."""
        shape = self._shape(issued.data.step + 1)
        if shape in self._shapes:
            self._requests.note_durations(time.monotonic() - issued.begin, self._saver.longest)
        if issued.trains:
            self._shapes.add(shape)

    def _shape(self, step: int) -> tuple[int, int]:
        """Samples of a micro-batch on this rank, and their length."""
        return self._loader.micro_batch_size(step - 1), self._plan.segment(step - 1).sequence_length

    def _request(self) -> StopRequest:
        """Requests to this rank, as of now."""
        return self._requests.request()._replace(unsaved=self._saver.unsaved.overdue)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        """Write a row of metrics that is not that of a step."""
        self._metrics.write({**self._rows.head(step), **values})

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Load what the run starts with: a checkpoint of its own, the weights of another run, or nothing."""
        self._watchdog.phase("save")
        if checkpoint is not None:
            self._restore(checkpoint)
            say(self._console, f"train: resuming from {checkpoint.path.name}")
        elif self._config.train.init_from is not None:
            lines, self._origin = warm_start(self._config, self._plan.tokenizer, self._model, self._optimizers)
            lines += begin_lines(self._config, self._schedule, self._plan.journal)
            if self._stepper.ema is not None:
                self._stepper.ema.reset()
            for line in lines:
                say(self._console, f"train: {line}")
        self._faults.recall()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Around the loop: what it writes metrics, checkpoints and profiles with, and closes however it ends."""
        first, total, loggers = self._folder.step, self._plan.length.steps, list[tuple[str, Logger]]()
        if dist.get_rank() == 0:
            storage.put(RunFiles(self._folder.path).config, dump(self._config).encode())
            self._plan.write_journal(self._folder.path)
            loggers = open_loggers(self._config, self._folder, self._console, total, self._origin.state())
        self._losses.resume(self._plan.journal, first)
        print_start(self._config, self._plan, self._setup, self._heldout, first, self._console)
        detail(self._console, f"train: {self._compiler_line}")
        for line in self._profile.announce(total):
            warn(self._console, line)
        if (prometheus := self._config.train.metrics.prometheus) is not None and dist.get_rank() == 0:
            seconds, unsaved = self._config.launch.heartbeat_seconds, self._saver.unsaved
            textfile = PrometheusFile(prometheus, self._folder, total, seconds, lambda: unsaved.saves, self._console)
            loggers.append(("Prometheus", textfile))
        with (
            out_of_memory_means(self._memory_advice),
            Metrics(loggers, self._folder.assert_mine if loggers else lambda: None) as self._metrics,
            self._losses,
            self._saver,
            self._profile,
            self._garbage,
            self._rows.hardware,
        ):
            self._saver.begin_copies()
            try:
                yield
            except NumericalError:
                self._watchdog.phase("save")  # the one in flight is waited for
                raise
            # All is saved. What is left is to close the loggers, one of which may still have much to send.
            self._watchdog.pause()
            self._saver.finish_copies(self._requests.reason, self._write)
        if withheld := self._faults.withheld:
            say(self._console, f'train: {withheld} (`"skipped": true` in metrics.jsonl)')

    def _memory_advice(self) -> str:
        done = self._folder.step
        experts = bool(self._setup.spec.expert_layers)
        return step_advice(done + 1, self._loader.micro_batch_size(done), experts=experts)

    def rewind(self, rewind: Rewind) -> None:
        """Go back to a checkpoint, and skip the steps around a fault when the run comes to them again."""
        self._issued = None
        self._agreement.forget()
        self._saver.finish()
        self._profile.finish()
        self._saver.report(self._write)
        self._saver.close_copies()  # before the checkpoints that are being read are moved
        checkpoint, self._plan = go_back(rewind, self._config, self._plan, self._folder, self._console)
        self._saver.unsaved.rewound()
        self._saver.begin_copies()
        self._validator.forget()
        self._loader = self._open_loader()
        if self._stepper.spikes is not None:
            self._stepper.spikes.load({})  # of a checkpoint that has none
        self._restore(checkpoint)
        self._metrics.rewind(checkpoint.step)
        self._losses.resume(self._plan.journal, checkpoint.step)
        warn(
            self._console,
            f"{rewind.reason}; rewound to step {checkpoint.step}, steps {rewind.skip[0] + 1} to "
            f"{rewind.skip[1]} will be skipped",
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Load the whole state of a checkpoint."""
        if dcp_storage.read(checkpoint, self._model, self._optimizers, self._stepper.ema):
            say(
                self._console,
                f"train: moments of the layers' matrices begin at zero: {checkpoint.path.name} has those of another "
                "train.optimizer.type",
            )
        state = checkpoint.state()
        for name, part in self._stateful().items():
            if state.get(name):
                part.load(state[name])

    def _stateful(self) -> dict[str, Any]:
        """Other objects whose state is saved, by its name in state.json; each has `state` and `load`."""
        parts = {
            "loss_scale": self._stepper.loss_scale,
            "spikes": self._stepper.spikes,
            "faults": self._faults,
            "origin": self._origin,
            # Windows derive them from the journal.
            "targets": self._loader.drawn_targets if self._plan.journal.order_version > 1 else None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _open_loader(self) -> Loader:
        check_run_file(self._config, self._plan.datasets)
        mesh = self._setup.mesh
        return open_loader(
            self._config,
            self._plan.datasets,
            journal=self._plan.journal,
            dp_rank=mesh.rank("batch"),
            dp_size=mesh.size("batch"),
            device=self._setup.device,
            references={name: each.scores for name, each in self._plan.references.items()} or None,
        )

    def _choose_compiling(self, checkpoint: Checkpoint | None) -> tuple[bool, str]:
        """True if layers are compiled, and a line for the log; see `choose_compiling`."""
        device, plan = self._setup.device, self._plan
        stream = plan.stream(self._config, 0)
        flops = flops_per_token(self._setup.spec, stream, causal=True)
        flops = flops * plan.journal.tokens(plan.length.steps) / dist.get_world_size()
        before = checkpoint.state().get(_COMPILED, {}).get(device.type) if checkpoint else None
        threads = torch.get_num_threads()
        return broadcast_from_rank0(lambda: choose_compiling(self._config, device, flops, threads, before))


def train(config: Config, console: Console | None = None) -> int:
    """Train to the end of the run, from the latest checkpoint if there is one; returns the steps trained in all.

    Every process of the run calls this; rank 0 alone locks the run folder, checks the data and speaks. The run ends
    after `train.duration`, or before it where a source with `on_exhausted: stop` does.

    Raises:
        UserError: the config, the data or the checkpoint do not allow it.
        NumericalError: several steps in a row were not finite.
        Stopped: a signal or the `stop` file asked for it; a checkpoint was saved.
    """
    started = time.monotonic()
    ranks = process_group.of_environment()
    console = console if console and ranks.rank == 0 else Console(quiet=ranks.rank > 0)
    layout = check_layout(config, ranks.world_size)
    if config.train.deterministic:
        be_deterministic()
    with ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.launch.time_limits))
        watchdog.phase("init")
        device = init_rank(config, ranks, lambda line: detail(console, f"train: {line}"))
        # Rank 0 reads the whole checkpoint to verify it, and the others wait.
        watchdog.phase("save")
        if config.launch.reference_only:
            make_references(config, device, watchdog, console)
            return 0
        folder, checkpoint, plan = open_run_everywhere(config, ranks, stack, watchdog, console)
        total, reason = plan.length.steps, plan.length.reason
        if total == 0:
            raise UserError(f"the run has no step ({reason}); give it at least one")
        if checkpoint is not None and checkpoint.step >= total:
            say(console, f"train: nothing to do, already at step {checkpoint.step} ({reason})")
            watchdog.pause()
            copy_missing(config, folder, console)
            return checkpoint.step
        if checkpoint is not None and ranks.rank == 0:
            threads = torch.get_num_threads() if device.type == "cpu" else None
            for line in resume_lines(checkpoint, config, plan.fingerprints, layout, threads):
                say(console, line)
        for line in [*layout_warnings(config, layout), *plan.warnings]:
            warn(console, line)
        heldout = open_validation(config, plan.tokenizer, check=ranks.rank == 0)
        # Copying may take long, and is interrupted at once: nothing of it needs to be saved.
        watchdog.pause()
        plan = replace(plan, datasets=copy_locally(config, plan.datasets, plan.journal, first_step=folder.step))
        # Here too: where all is there already, the other ranks are waited for without a limit.
        process_group.wait_for_all()
        watchdog.phase("init")
        setup = set_up(config, plan.tokenizer.vocab_size, device)
        # The stop file is rank 0's to look at. A rank of several does nothing after training, unlike `pipeline run`.
        with Requests(
            config.run.dir if ranks.rank == 0 else None,
            to_the_end=ranks.world_size > 1,
            started=started,
            max_minutes=config.launch.max_minutes,
            before_end=config.launch.stop_before_end_seconds,
            save_minutes=config.train.checkpoint.every_minutes,
        ) as requests:
            with out_of_memory_means(weights_advice):
                if config.train.preference is not None and checkpoint is None:
                    config, plan = begin_with_references(config, plan, setup, watchdog, requests, console)
                trainer = Trainer(config, plan, setup, heldout, folder, watchdog, requests, console, checkpoint)
                trainer.begin(checkpoint)
            with trainer.opened():
                while folder.step < total:
                    try:
                        trainer.run()
                    except Rewind as rewind:
                        trainer.rewind(rewind)
            if ranks.rank == 0 and (spent := goodput(folder.path)):
                say(console, f"train: goodput {spent}")
            say(console, f"train: done, {total} steps ({reason}); checkpoints and metrics are in {folder.path}")
            return total
