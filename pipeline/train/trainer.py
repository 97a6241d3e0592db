"""The training stage: next batch, forward and backward, clip, step, log, checkpoint, check for a stop request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from pipeline.common import storage
from pipeline.common.console import Console, say
from pipeline.common.errors import NumericalError, Stopped, UserError
from pipeline.config import Config
from pipeline.config.load import RUN_FILE, dump
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.loading.batch import StepData
from pipeline.data.loading.heldout import HeldOut
from pipeline.data.loading.loader import Loader, open_loader
from pipeline.data.loading.local_copy import staged
from pipeline.data.loading.prefetch import copied
from pipeline.data.order.segments import Segment
from pipeline.data.preprocess.run_file_check import check_run_file
from pipeline.data.provenance.run import JOURNAL_FILE
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.policy import due
from pipeline.train.checkpoint.resume_point import rewind_point
from pipeline.train.distributed import process_group
from pipeline.train.distributed.process_group import Processes, share
from pipeline.train.distributed.watchdog import Phase, Watchdog
from pipeline.train.host.gc_schedule import Garbage
from pipeline.train.model.flops import flops_per_token
from pipeline.train.monitor.faults import Faults, Rewind
from pipeline.train.monitor.goodput import goodput
from pipeline.train.monitor.metrics import Metrics, Sink, open_sinks, peak_flops
from pipeline.train.monitor.profiler import Profile
from pipeline.train.monitor.spikes import kind_of
from pipeline.train.monitor.straggler import Stragglers, WorkClock
from pipeline.train.monitor.trace_spans import span
from pipeline.train.open_run import open_run_everywhere, open_validation
from pipeline.train.optim.lr_schedule import Schedule
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.compile import settle
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.parallel.rules.layout import check_layout, layout_warnings
from pipeline.train.resume import resume_lines
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.heartbeat import host_of
from pipeline.train.run.stop_requests import Requests, Wish
from pipeline.train.run.unsaved import Unsaved
from pipeline.train.run_log import nothing_held_out, start_lines, step_lines
from pipeline.train.run_plan import RunPlan
from pipeline.train.saving import Saver
from pipeline.train.setup import Setup, be_deterministic, join, out_of_memory_means, set_up
from pipeline.train.step import Stepper, agree
from pipeline.train.step_metrics import numbers, place, speed
from pipeline.train.validation import HeldOutLoss, validation_losses
from pipeline.train.warm_start import Origin, warm_start

_COMPILED = "compiled"
"""In state.json: by type of device, whether layers are compiled there."""


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
        device = join(config, ranks, lambda line: say(console, f"train: {line}"))
        # Rank 0 reads the whole checkpoint to verify it, and the others wait.
        watchdog.phase("save")
        folder, checkpoint, plan = open_run_everywhere(config, ranks, stack, watchdog, console)
        total, reason = plan.length.steps, plan.length.reason
        if total == 0:
            raise UserError(f"the run has no step ({reason}); give it at least one")
        if checkpoint is not None and checkpoint.step >= total:
            say(console, f"train: nothing to do, already at step {checkpoint.step} ({reason})")
            return checkpoint.step
        if checkpoint is not None and ranks.rank == 0:
            for line in resume_lines(checkpoint, config, plan.fingerprints, layout):
                say(console, line)
        for line in [*layout_warnings(config, layout), *plan.warnings]:
            say(console, f"warning: {line}")
        heldout = open_validation(config, plan.tokenizer, check=ranks.rank == 0)
        # Copying may take long, and is interrupted at once: nothing of it needs to be saved.
        watchdog.pause()
        datasets = staged(config, plan.datasets, plan.journal, first_step=folder.step)
        # Here too: where all is there already, the other ranks are waited for without a limit.
        process_group.wait_for_all()
        watchdog.phase("init")
        setup = set_up(config, plan.tokenizer, device, layout)
        # The stop file is rank 0's to look at. A rank of several does nothing after training, unlike `pipeline run`.
        with Requests(
            config.run.dir if ranks.rank == 0 else None,
            to_the_end=ranks.world_size > 1,
            started=started,
            max_minutes=config.launch.max_minutes,
            before_end=config.launch.stop_before_end_seconds,
            save_minutes=config.train.checkpoint.every_minutes,
        ) as requests:
            with out_of_memory_means(lambda: _advice_on_weights(ranks)):
                trainer = Trainer(config, plan, setup, datasets, heldout, folder, ranks, watchdog, console, checkpoint)
                trainer.begin(checkpoint)
            trainer.run(requests)
            if ranks.rank == 0 and (spent := goodput(folder.path)):
                say(console, f"train: {spent}")
            say(console, f"train: done, {total} steps ({reason}); checkpoints and metrics are in {folder.path}")
            return total


def _advice_on_weights(ranks: Processes) -> str:
    where = f" (rank {ranks.rank})" if ranks.world_size > 1 else ""
    return (
        f"building or loading the model{where}, whose weights and moments alone are too large for the device: raise "
        "parallel.dp_shard, tp or pp, so that each process has less of them; `pipeline train RUN.yaml --check` shows "
        "how much"
    )


class Trainer:
    """A run in this process: its share of the model and the data, and on rank 0 its sinks."""

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        setup: Setup,
        datasets: Mapping[str, Dataset],
        heldout: Mapping[str, HeldOut],
        folder: RunFolder,
        ranks: Processes,
        watchdog: Watchdog,
        console: Console,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._setup = setup
        self._folder = folder
        self._ranks = ranks
        self._watchdog = watchdog
        self._console = console
        train, mesh, spec = config.train, setup.mesh, setup.spec
        self._schedule = Schedule(train.schedule, train.duration, plan.length.steps, plan.journal.tokens)
        self._datasets = datasets
        self._loader = self._open_loader()
        self._heldout = heldout
        tokens = plan.journal.tokens(plan.length.steps)
        flops = self._flops(0, causal=True) * tokens / ranks.world_size
        before = checkpoint.state().get(_COMPILED, {}).get(setup.device.type) if checkpoint else None
        threads = torch.get_num_threads()
        self._compiles, self._compiler_line = share(
            lambda: settle(train, config.parallel, setup.device, flops, threads, before)
        )
        self._profile = Profile(
            train.profile,
            setup.device,
            ranks.rank,
            lambda: folder.path / "profile" / f"attempt-{folder.attempt:04d}",
            console,
        )
        self._profile.watch_memory()
        self._model = build_model(
            config.model,
            spec,
            mesh,
            config.parallel,
            train.precision,
            setup.device,
            config.run.seed,
            train.sequence_length,
            train.model_copy(update={"compile": self._compiles}),
        )
        self._optimizers = Optimizers(self._model, config.model.init, train.optimizer)
        self._stepper = Stepper(
            self._model,
            self._optimizers,
            mesh,
            setup.device,
            train=train,
            parallel=config.parallel,
            sources=len(self._loader.names),
            document_attention=config.model.document_attention,
        )
        self._checkpoints = Checkpoints.of_run(folder.path)
        self._saver = Saver(
            config, plan, folder, self._checkpoints, mesh.layout, self._model, self._optimizers, self._stepper.ema
        )
        self._unsaved = Unsaved(folder, train.checkpoint.max_unsaved_minutes, write=ranks.rank == 0)
        self._faults = Faults(
            train.faults,
            folder,
            ranks.rank,
            self._describe,
            self._saved_steps,
            self._last_good,
            console,
        )
        self._clock = WorkClock()
        self._stragglers = Stragglers(lambda rank: host_of(folder.path, rank))
        peak = peak_flops(setup.device, train.precision.compute)
        self._peak = None if peak is None else peak * ranks.world_size
        # A device has its queue; without one, waiting for the next step would only delay what is known.
        self._runs_ahead = setup.device.type != "cpu"
        self._garbage = Garbage()
        self._compiled: set[tuple[int, int]] = set()
        """Shapes of micro-batches, samples and length, that have been trained on in this process."""
        self._since = time.monotonic()  # when the last step, validation or save ended
        self._pending: Callable[[], dict[str, Any]] | None = None
        self._agreed = Wish(False, False)
        self._origin = Origin()

    def _open_loader(self) -> Loader:
        check_run_file(self._config, self._datasets)
        mesh = self._setup.mesh
        return open_loader(
            self._config,
            self._datasets,
            journal=self._plan.journal,
            dp_rank=mesh.rank("batch"),
            dp_size=mesh.size("batch"),
            device=self._setup.device,
        )

    def _describe(self, step: int) -> Any:
        """The samples of a step, counted from 0, by the loader of now: a rewind replaces it."""
        return self._loader.describe(step)

    def _saved_steps(self) -> list[int]:
        """Steps of the checkpoints that there are, also of one that was still being written; every rank calls this."""
        self._last_save()
        return share(lambda: [checkpoint.step for checkpoint in self._checkpoints.all()])

    def _last_good(self) -> str:
        """What the run would go on from, for messages; every rank calls this."""
        self._last_save()
        return self._saver.last_good()

    def _last_save(self) -> None:
        """Wait for the save that is being written, if there is one; every rank calls this."""
        self._watchdog.phase("save")
        self._saver.wait()

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Load what the run starts with: a checkpoint of its own, the weights of another run, or nothing."""
        self._watchdog.phase("save")
        if checkpoint is not None:
            self._restore(checkpoint)
            say(self._console, f"train: going on from {checkpoint.path.name}")
        elif self._config.train.init_from is not None:
            lines, self._origin = warm_start(self._config, self._setup.tokenizer, self._model)
            if self._stepper.ema is not None:
                self._stepper.ema.reset()
            for line in lines:
                say(self._console, f"train: {line}")
        self._faults.recall()

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Load the whole state of a checkpoint."""
        if dcp_storage.read(checkpoint, self._model, self._optimizers, self._stepper.ema):
            say(
                self._console,
                f"train: moments of the layers' matrices begin at zero: {checkpoint.path.name} has those of another "
                "train.optimizer.type",
            )
        state = checkpoint.state()
        for name, part in self._parts().items():
            if state.get(name):
                part.load(state[name])

    def _parts(self) -> dict[str, Any]:
        """What else has a state that is saved, by its name in state.json; each has `state` and `load`."""
        parts = {
            "loss_scale": self._stepper.loss_scale,
            "spikes": self._stepper.spikes,
            "faults": self._faults,
            "origin": self._origin,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def run(self, requests: Requests) -> None:
        """Train up to the end of the run."""
        first, total = self._folder.step, self._plan.length.steps
        sinks: list[Sink] = []
        if self._ranks.rank == 0:
            storage.put(self._folder.path / RUN_FILE, dump(self._config).encode())
            self._write_journal()
            sinks = open_sinks(self._config, self._folder.path, self._console, first, total)
        sizes = [len(split) for split in self._heldout.values()]
        for line in [
            *start_lines(self._config, self._plan, self._setup, first, self._flops(first, causal=True)),
            f"train: {self._compiler_line}",
            *nothing_held_out(self._config, sizes),
        ]:
            say(self._console, line)
        for line in self._profile.announce(total):
            say(self._console, f"warning: {line}")
        with (
            out_of_memory_means(self._advice),
            Metrics(sinks) as metrics,
            self._saver,
            self._profile,
            self._garbage,
        ):
            while True:
                try:
                    self._steps(requests, metrics)
                    break
                except Rewind as rewind:
                    self._rewind(rewind, metrics)
                except NumericalError:
                    self._watchdog.phase("save")  # the one in flight is waited for
                    raise
            # All is saved. What is left is to close the sinks, one of which may still have much to send.
            self._watchdog.pause()
        if withheld := self._faults.withheld:
            say(self._console, f'train: {withheld} (`"skipped": true` in metrics.jsonl)')

    def _write_journal(self) -> None:
        storage.put_json(self._folder.path / JOURNAL_FILE, self._plan.journal.to_json())

    def _steps(self, requests: Requests, metrics: Metrics) -> None:
        """The loop."""
        first, total = self._folder.step, self._plan.length.steps
        self._watchdog.phase(self._phase(first), first + 1)
        self._since = time.monotonic()
        self._clock.take()  # building and loading were no step
        with closing(self._loader.iterate(first, total)) as steps:
            on_device = copied(steps, self._setup.device)
            for step in range(first, total):
                with self._profile.step(step + 1):
                    self._step(on_device, first, requests, metrics)
                    if step == first:
                        process_group.start_is_over()
                    if self._profile.ends_with(step + 1):
                        self._flush(metrics)
                if self._profile.ends_with(step + 1):
                    self._watchdog.phase("save", step + 1)
                    with self._clock.pause():
                        self._profile.finish()
                        process_group.wait_for_all()  # or who writes nothing is in the next step, with its limit
                    self._since = time.monotonic()  # writing it was part of no step
                self._garbage.after(step + 1)
                self._watchdog.phase(self._phase(step + 1), step + 2)

    def _phase(self, step: int) -> Phase:
        """How long a step, counted from 0, may take: shapes that are new may have to be compiled."""
        is_new = step < self._plan.length.steps and self._shape(step) not in self._compiled
        return "first_step" if is_new else "step"

    def _shape(self, step: int) -> tuple[int, int]:
        """Samples of a micro-batch on this rank, and their length."""
        return self._loader.micro_batch_size(step), self._segment(step).sequence_length

    def _step(self, steps: Iterator[StepData], first: int, requests: Requests, metrics: Metrics) -> None:
        """One step, and what comes after it.

        Args:
            steps: gives the data of this one next.
            first: steps that were done when the loop began.
        """
        waiting = time.monotonic()
        with span("fetch"):
            data = next(steps)
        waited = time.monotonic() - waiting
        for line in step_lines(self._config, self._plan, data, first):
            say(self._console, line)
        # The numbers of a step are read when the next one has been issued, so that a device never idles.
        passes_over = data.skipped or not data.valid_targets
        row = self._pass_over(data, requests) if passes_over else self._train(data, waited, requests)
        self._flush(metrics)
        self._pending = row
        if not self._runs_ahead:
            self._flush(metrics)
        self._folder.step = data.step + 1
        self._between_steps(requests, metrics)
        if self._phase(data.step) == "step":
            requests.took(time.monotonic() - waiting, self._saver.longest)
        if not passes_over:
            self._compiled.add(self._shape(data.step))

    def _between_steps(self, requests: Requests, metrics: Metrics) -> None:
        """Validate and save where it is time to, and look for a stop request."""
        step, total = self._folder.step, self._plan.length.steps
        validation = self._config.train.validation
        self._report_saves(metrics)
        if step == total:
            self._flush(metrics)
            self._faults.at_end(step)
        stops, saves, unsaved = self._agreed
        if stops:
            # Before a validation, which may take longer than there is until the processes are killed.
            self._flush(metrics)
            self._save(step, requests, metrics, last=True)
        if step % validation.every_steps == 0 or step == total:
            self._flush(metrics)
            self._validate(step, metrics)
        if (saves or unsaved or due(self._config.train.checkpoint, step, total)) and not stops:
            self._flush(metrics)
            overdue = self._unsaved.why if unsaved and step < total else ""
            self._save(step, requests, metrics, last=unsaved or step == total, overdue=overdue)
        if stops or step == total:
            reason = requests.reason() or "a stop request"  # of another rank
            # Also a stop file that came during the last step: a longer run would stop at once.
            requests.consume()
            if step < total:
                self._watchdog.pause()
                message = f"{reason} at step {step:,} of {total:,}; saved. Run the same command to go on."
                raise Stopped(message, agreed=True)

    def _rewind(self, rewind: Rewind, metrics: Metrics) -> None:
        """Go back to a checkpoint, and pass over the steps around a fault when the run comes to them again."""
        self._pending, self._agreed = None, Wish(False, False)
        self._last_save()
        self._profile.finish()
        self._report_saves(metrics)
        checkpoint = rewind_point(
            self._checkpoints, self._config.resume, rewind.before, lambda line: say(self._console, f"warning: {line}")
        )
        if checkpoint is None:
            raise NumericalError(
                f"{rewind.reason}, and there is no checkpoint of step {rewind.before} or before to go back to; lower "
                "train.faults.rewind_steps, or save more often (train.checkpoint.every_steps, keep, keep_every)"
            )
        step = checkpoint.step
        journal = self._plan.journal.passing_over(rewind.skip, step)
        self._plan = replace(self._plan, journal=journal)
        self._folder.step = step

        def write_down() -> None:
            self._folder.next_attempt(write=True)
            self._write_journal()

        share(write_down)
        if self._ranks.rank > 0:
            self._folder.next_attempt(write=False)
        self._unsaved.rewound()
        self._loader = self._open_loader()
        if self._stepper.spikes is not None:
            self._stepper.spikes.load({})  # of a checkpoint that has none
        self._restore(checkpoint)
        metrics.rewind(step)
        say(
            self._console,
            f"warning: {rewind.reason}; went back to step {step}, steps {rewind.skip[0] + 1} to {rewind.skip[1]} will "
            "be passed over",
        )

    def _advice(self) -> str:
        now = self._loader.micro_batch_size(self._folder.step)
        where = f"rank {self._ranks.rank} in " if self._ranks.world_size > 1 else ""
        return (
            f"{where}step {self._folder.step + 1}: lower train.micro_batch_size, or that of the phase ({now} now); "
            "the result is the same"
        )

    def _segment(self, step: int) -> Segment:
        journal = self._plan.journal
        return journal.segments[journal.segment_number(step)]

    def _flops(self, step: int, *, causal: bool) -> float:
        """FLOPs of a token at a step, counted from 0."""
        return flops_per_token(self._setup.spec, self._segment(step).sequence_length, causal=causal)

    def _pass_over(self, data: StepData, requests: Requests) -> Callable[[], dict[str, Any]]:
        """The metrics of a step of which nothing is trained on: nothing is computed and nothing changes."""

        def row() -> dict[str, Any]:
            self._agreed = agree(self._wish(requests), self._setup.device)
            self._since = time.monotonic()
            return {**self._head(data.step + 1), **place(self._loader, data), "passed_over": True}

        return row

    def _train(self, data: StepData, waited: float, requests: Requests) -> Callable[[], dict[str, Any]]:
        """Issue a step; its metrics come as a function that waits for its end and is called when the next is issued."""
        lr = self._config.train.optimizer.lr * self._schedule.factor(self._plan.journal.tokens(data.step + 1))
        if self._stepper.spikes is not None:
            self._stepper.spikes.compare_within(kind_of(self._segment(data.step)))
        result = self._stepper.step(
            data.micro_batches,
            data.valid_targets,
            lr,
            step=data.step + 1,
            data_hash=data.data_hash,
            wish=lambda: self._wish(requests),
            work=self._clock.take() + waited,
        )
        on_host = result.to_host()
        tokens = sum(data.tokens_by_source.values())

        def row() -> dict[str, Any]:
            with self._clock.pause():  # it waits for the device, and that for the other ranks
                result = on_host()
            values = numbers(result, self._loader.names)
            self._agreed = result.wish()
            # The device has done the step by now: a step lasts from the end of the one before to its own.
            now = time.monotonic()
            seconds, self._since = now - self._since, now
            if "work" in values and (told := self._stragglers.see(data.step + 1, values["work"], seconds)):
                say(self._console, f"warning: {told}")
            flops, causal_flops = (self._flops(data.step, causal=causal) for causal in (False, True))
            return {
                **self._head(data.step + 1),
                **place(self._loader, data),
                **values,
                "lr": lr,
                "data_wait": waited,
                **speed(tokens, seconds, flops, causal_flops, self._peak),
            }

        return row

    def _wish(self, requests: Requests) -> Wish:
        return requests.wish()._replace(unsaved=self._unsaved.overdue)

    def _head(self, step: int) -> dict[str, Any]:
        """What every row of metrics has; `step` from 1."""
        return {"step": step, "attempt": self._folder.attempt, "time": time.time()}

    def _flush(self, metrics: Metrics) -> None:
        """Wait for the numbers of the last step that was issued, write them down, and act on faults."""
        if self._pending is None:
            return
        with span("metrics"):
            row, self._pending = self._pending(), None
            metrics.write(row)
            if "passed_over" not in row:
                self._faults.after(row)

    def _validate(self, step: int, metrics: Metrics) -> None:
        # As many tokens at once as in a micro-batch of the step, whose windows may be shorter or longer.
        tokens = self._loader.micro_batch_size(step - 1) * self._segment(step - 1).sequence_length
        with span("validation"):
            losses = validation_losses(
                self._config,
                self._heldout,
                self._model,
                self._stepper.runner,
                self._setup.mesh,
                self._setup.device,
                batch_size=max(1, tokens // self._config.train.sequence_length),
                advance=self._watchdog.beat,
            )
        if not losses:
            return
        blended = sum(losses.values(), HeldOutLoss(0.0, 0))
        start, self._since = self._since, time.monotonic()
        metrics.write(
            {
                **self._head(step),
                "validation_seconds": self._since - start,
                "validation_loss": blended.mean,
                "validation_loss_by_source": {name: loss.mean for name, loss in losses.items()},
            }
        )
        say(self._console, f"step {step}: validation loss {blended.mean:.4f}")

    def _save(self, step: int, requests: Requests, metrics: Metrics, *, last: bool, overdue: str = "") -> None:
        """Save, and remove what is too old.

        While steps go wrong nothing is removed, and nothing saved but at the end. For `overdue` see `Saver.save`.
        """
        if self._faults.troubled and not last:
            return
        start = time.monotonic()
        self._watchdog.phase("save", step)
        more = {name: part.state() for name, part in self._parts().items()}
        more[_COMPILED] = {self._setup.device.type: self._compiles}
        # Each of the two saves that this may wait for has the whole limit.
        advance, prune = self._watchdog.beat, not self._faults.troubled
        with span("save"):
            self._saver.save(step, self._plan.journal, more, last=last, overdue=overdue, prune=prune, advance=advance)
        requests.saved()
        self._agreed = Wish(self._agreed.stop, save=False)
        self._report_saves(metrics)
        self._since = time.monotonic()
        metrics.write({**self._head(step), "save_blocked": self._since - start})

    def _report_saves(self, metrics: Metrics) -> None:
        for report in self._saver.reports():
            if report.failure is None:
                self._unsaved.committed(report.step)
                waited = {"save_waited": report.waited} if report.waited else {}
                metrics.write({**self._head(report.step), "save_seconds": report.seconds, **waited})
            else:
                say(self._console, f"warning: {self._unsaved.failed(report.step, report.failure)}")
