"""The training stage: next batch, forward and backward, clip, step, log, checkpoint, check for a stop request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console

from pipeline.config import Config
from pipeline.config.load import dump
from pipeline.console import say
from pipeline.data import store
from pipeline.data.batch import StepData
from pipeline.data.dataset import Dataset
from pipeline.data.heldout import HeldOut
from pipeline.data.journal import Segment
from pipeline.data.loader import Loader, open_loader
from pipeline.data.progress import counted
from pipeline.data.staging import staged
from pipeline.errors import NumericalError, Stopped, UserError
from pipeline.train.checkpoint import storage
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.describe import describe_change, describe_run
from pipeline.train.metrics import Metrics, Sink, TensorBoard, Terminal, Wandb, peak_flops
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.optim import Optimizers
from pipeline.train.parallel import processes
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.parallel.processes import Processes
from pipeline.train.parallel.rules import check_layout, layout_warnings
from pipeline.train.parallel.watchdog import Watchdog
from pipeline.train.plan import RunPlan
from pipeline.train.run_folder import RunFolder
from pipeline.train.saving import Saver
from pipeline.train.schedule import Schedule
from pipeline.train.setup import Setup, be_deterministic, join, out_of_memory_means, set_up
from pipeline.train.start import open_run_everywhere, open_validation
from pipeline.train.step import Stepper, agree
from pipeline.train.stop import StopRequest
from pipeline.train.validation import HeldOutLoss, heldout_loss

_MAX_NONFINITE = 3
"""So many non-finite steps one after the other end the run: they are no longer an accident."""


def train(config: Config, console: Console | None = None) -> int:
    """Train to the end of the run, from the latest checkpoint if there is one; returns the steps trained in all.

    Every process of the run calls this; rank 0 alone locks the run folder, checks the data and speaks. The run ends
    after `train.duration`, or before it where a source with `on_exhausted: stop` does.

    Raises:
        UserError: the config, the data or the checkpoint do not allow it.
        NumericalError: several steps in a row were not finite.
        Stopped: a signal or the `stop` file asked for it; a checkpoint was saved.
    """
    ranks = processes.of_environment()
    console = console if console and ranks.rank == 0 else Console(quiet=ranks.rank > 0)
    layout = check_layout(config, ranks.world_size)
    if config.train.deterministic:
        be_deterministic()
    with ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.launch.time_limits))
        watchdog.phase("init")
        device = join(config, ranks)
        # Rank 0 reads the whole checkpoint to verify it, and the others wait.
        watchdog.phase("save")
        folder, checkpoint, plan = open_run_everywhere(config, ranks, stack, console)
        total, reason = plan.length.steps, plan.length.reason
        if total == 0:
            raise UserError(f"the run has no step ({reason}); give it at least one")
        if checkpoint is not None and checkpoint.step >= total:
            say(console, f"train: nothing to do, already at step {checkpoint.step} ({reason})")
            return checkpoint.step
        for line in [*layout_warnings(config, layout), *plan.warnings]:
            say(console, f"warning: {line}")
        heldout = open_validation(config, plan.tokenizer, check=ranks.rank == 0)
        # Copying may take long, and is interrupted at once: nothing of it needs to be saved.
        watchdog.pause()
        datasets = staged(config, plan.datasets, plan.journal, first_step=folder.step)
        # Here too: where all is there already, the other ranks are waited for without a limit.
        processes.wait_for_all()
        watchdog.phase("init")
        setup = set_up(config, plan.tokenizer, device, layout)
        # The stop file is rank 0's to look at. A rank of several does nothing after training, unlike `pipeline run`.
        with StopRequest(folder.stop_file if ranks.rank == 0 else None, to_the_end=ranks.world_size > 1) as stop:
            with out_of_memory_means(lambda: _advice_on_weights(ranks)):
                trainer = Trainer(config, plan, setup, datasets, heldout, folder, ranks, watchdog, console)
                if checkpoint is not None:
                    trainer.restore(checkpoint)
            trainer.run(stop)
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
        self._loader: Loader = open_loader(
            config,
            datasets,
            journal=plan.journal,
            dp_rank=mesh.rank("batch"),
            dp_size=mesh.size("batch"),
            device=setup.device,
        )
        self._heldout = heldout
        self._model = build_model(
            config.model,
            spec,
            mesh,
            config.parallel,
            train.precision,
            setup.device,
            config.run.seed,
            train.sequence_length,
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
        checkpoints = Checkpoints.of_run(folder.path)
        self._saver = Saver(config, plan, folder, checkpoints, mesh.layout, self._model, self._optimizers)
        peak = peak_flops(setup.device, train.precision.compute)
        self._peak = None if peak is None else peak * ranks.world_size
        # A device has its queue; without one, waiting for the next step would only delay what is known.
        self._runs_ahead = setup.device.type != "cpu"
        self._nonfinite = 0
        self._since = time.monotonic()  # when the last step, validation or save ended
        self._pending: Callable[[], dict[str, Any]] | None = None
        self._stop_agreed = False

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the weights and moments of a checkpoint."""
        self._watchdog.phase("save")
        storage.read(checkpoint.path, self._model, self._optimizers)
        scale, saved = self._stepper.loss_scale, checkpoint.state().get("loss_scale")
        if scale is not None and saved is not None:
            scale.load(saved)
        say(self._console, f"train: going on from {checkpoint.path.name}")

    def run(self, stop: StopRequest) -> None:
        """Train up to the end of the run."""
        first, total = self._folder.step, self._plan.length.steps
        if self._ranks.rank == 0:
            store.put(self._folder.path / "config.yaml", dump(self._config).encode())
            store.put_json(self._folder.path / "journal.json", self._plan.journal.to_json())
        self._announce(first)
        self._watchdog.phase("first_step", first + 1)
        with out_of_memory_means(self._advice), Metrics(self._sinks(first, total)) as metrics:
            waiting = self._since = time.monotonic()
            for data in self._loader.iterate(first, total):
                waited = time.monotonic() - waiting
                self._announce_step(data, first)
                # The numbers of a step are read when the next one has been issued, so that a device never idles.
                passes_over = data.skipped or not data.valid_targets
                row = self._pass_over(data, stop) if passes_over else self._train(data, waited, stop)
                self._flush(metrics)
                self._pending = row
                if not self._runs_ahead:
                    self._flush(metrics)
                self._folder.step = data.step + 1
                self._between_steps(stop, metrics)
                self._watchdog.phase("step", data.step + 2)
                waiting = time.monotonic()
            # All is saved. What is left is to close the sinks, one of which may still have much to send.
            self._watchdog.pause()

    def _between_steps(self, stop: StopRequest, metrics: Metrics) -> None:
        """Validate and save where it is time to, and look for a stop request."""
        step, total = self._folder.step, self._plan.length.steps
        checkpoint, validation = self._config.train.checkpoint, self._config.train.validation
        stops = self._stop_agreed
        if stops:
            # Before a validation, which may take longer than there is until the processes are killed.
            self._flush(metrics)
            self._save(step, last=True)
        if step % validation.every_steps == 0 or step == total:
            self._flush(metrics)
            self._validate(step, metrics)
        if (step % checkpoint.every_steps == 0 or step == total) and not stops:
            self._flush(metrics)
            self._save(step, last=step == total)
        if stops or step == total:
            reason = stop.reason() or "a stop request"  # of another rank
            # Also a stop file that came during the last step: a longer run would stop at once.
            stop.consume()
            if step < total:
                self._watchdog.pause()
                raise Stopped(f"{reason} at step {step} of {total}; saved. Run the same command to go on.")

    def _advice(self) -> str:
        now = self._loader.micro_batch_size(self._folder.step)
        where = f"rank {self._ranks.rank} in " if self._ranks.world_size > 1 else ""
        return (
            f"{where}step {self._folder.step + 1}: lower train.micro_batch_size, or that of the phase ({now} now); "
            "the result is the same"
        )

    def _where(self) -> str:
        """Devices, layout and threads: `cpu, 2 threads`, `4 x cpu (pp 2 x tp 2), 1 thread each`."""
        device, threads = self._setup.device.type, counted(torch.get_num_threads(), "thread")
        if self._ranks.world_size == 1:
            return f"{device}, {threads}"
        return f"{self._ranks.world_size:,} x {device} ({self._setup.mesh.layout}), {threads} each"

    def _announce(self, first: int) -> None:
        train, spec, length = self._config.train, self._setup.spec, self._plan.length
        say(
            self._console,
            f"train: {num_parameters(spec) / 1e6:,.4g} M parameters, {train.precision.compute} on {self._where()}, "
            f"{self._flops(first, causal=True) / 1e6:,.4g} MFLOP a token",
        )
        say(
            self._console,
            f"train: {describe_run(self._config, self._plan.journal, first, length.steps)} ({length.reason})",
        )
        if train.validation.samples and not any(len(split) for split in self._heldout.values()):
            share = self._config.data.splits.get(train.validation.split)
            where = f"data.splits.{train.validation.split}: {share}"
            say(self._console, f"warning: nothing is held out ({where}), so there is no validation")

    def _announce_step(self, data: StepData, first: int) -> None:
        """Say what changes with this step, if anything does."""
        journal, step = self._plan.journal, data.step
        number = journal.segment_number(step)
        if step and step == journal.segments[number].first_step:
            say(self._console, f"step {step + 1}: {describe_change(self._config, journal, number)}")
        for line in self._plan.exhaustions.get(step, ()):
            say(self._console, f"step {step + 1}: {line}")
        if data.skipped and (step == first or not journal.is_skipped(step - 1)):
            total = self._plan.length.steps
            end = next((s for s in range(step + 1, total) if not journal.is_skipped(s)), total)
            what = f"step {step + 1} is" if end == step + 1 else f"steps {step + 1} to {end} are"
            say(self._console, f"{what} passed over (blend.skip)")
        elif not data.skipped and not data.valid_targets:
            say(self._console, f"step {step + 1} is passed over: all of its targets are masked (blend.skip)")

    def _sinks(self, first: int, total: int) -> list[Sink]:
        if self._ranks.rank > 0:
            return []
        config = self._config.train.metrics
        sinks: list[Sink] = [store.JsonLines(self._folder.metrics)]
        if config.tensorboard:
            sinks.append(TensorBoard(self._folder.path / "tensorboard", first))
        if config.wandb is not None:
            sinks.append(Wandb(config, self._folder.path, self._config.model_dump(mode="json")))
        return [*sinks, Terminal(self._console, first, total, config.log_every_steps)]

    def _segment(self, step: int) -> Segment:
        journal = self._plan.journal
        return journal.segments[journal.segment_number(step)]

    def _flops(self, step: int, *, causal: bool) -> float:
        """FLOPs of a token at a step, counted from 0."""
        return flops_per_token(self._setup.spec, self._segment(step).sequence_length, causal=causal)

    def _pass_over(self, data: StepData, stop: StopRequest) -> Callable[[], dict[str, Any]]:
        """The metrics of a step of which nothing is trained on: nothing is computed and nothing changes."""

        def row() -> dict[str, Any]:
            self._stop_agreed |= agree(stop.reason() is not None, self._setup.device)
            self._since = time.monotonic()
            return {**self._place(data), "passed_over": True}

        return row

    def _train(self, data: StepData, waited: float, stop: StopRequest) -> Callable[[], dict[str, Any]]:
        """Issue a step; its metrics come as a function that reads the device and is called a step later."""
        lr = self._config.train.optimizer.lr * self._schedule.factor(self._plan.journal.tokens(data.step + 1))
        result = self._stepper.step(
            data.micro_batches, data.valid_targets, lr, data_hash=data.data_hash, stop=lambda: stop.reason() is not None
        )
        tokens = sum(data.tokens_by_source.values())

        def row() -> dict[str, Any]:
            nats, targets = result.nats.tolist(), result.targets.tolist()
            self._stop_agreed |= result.stops.item() > 0
            # The device has done the step by now: a step lasts from the end of the one before to its own.
            now = time.monotonic()
            rate, self._since = tokens / (now - self._since), now
            flops = self._flops(data.step, causal=False)
            values = {
                **self._place(data),
                "loss": sum(nats) / max(1.0, sum(targets)),
                "loss_by_source": {
                    name: nats[k] / targets[k] for k, name in enumerate(self._loader.names) if targets[k]
                },
                "grad_norm": result.grad_norm.item(),
                "lr": lr,
                "skipped": not result.finite.item(),
                "tokens_per_second": rate,
                "data_wait": waited,
                "model_flops_per_second": rate * flops,
                "data_hash": f"{result.data_hash():016x}",
            }
            if result.loss_scale is not None:
                values["loss_scale"] = result.loss_scale.item()
            if self._peak is not None:
                values["mfu"] = rate * flops / self._peak
                values["mfu_causal"] = rate * self._flops(data.step, causal=True) / self._peak
            return values

        return row

    def _place(self, data: StepData) -> dict[str, Any]:
        """What the metrics of every step have: where it is in the run and its data."""
        step = data.step + 1
        return {
            "step": step,
            "attempt": self._folder.attempt,
            "time": time.time(),
            "tokens": self._loader.tokens(step),
            "tokens_by_source": self._loader.tokens_by_source(step),
            "epochs_by_source": self._loader.epochs_by_source(step),
            "order_hash": f"{data.order_hash:016x}",
        }

    def _flush(self, metrics: Metrics) -> None:
        if self._pending is not None:
            row, self._pending = self._pending(), None
            metrics.write(row)
            if "passed_over" not in row:
                # An overflow of fp16 that a smaller scale prevents next time is part of the method.
                finite = not row["skipped"] or row.get("loss_scale", 1.0) > 1.0
                self._check_finite(row["step"], finite=finite)

    def _check_finite(self, step: int, *, finite: bool) -> None:
        """Record a step whose update was withheld; end the run after several in a row."""
        if finite:
            self._nonfinite = 0
            return
        self._nonfinite += 1
        if self._ranks.rank == 0:
            self._record_nonfinite(step)
        if self._nonfinite >= _MAX_NONFINITE:
            raise NumericalError(
                f"{self._nonfinite} steps in a row up to step {step} were not finite. {self._saver.last_good()} is "
                "from before them. Lower train.optimizer.lr, lengthen train.schedule.warmup or look at the samples in "
                f"{self._folder.path / 'nonfinite.jsonl'}; to go further back, move newer checkpoints away"
            )

    def _record_nonfinite(self, step: int) -> None:
        record = {"step": step, "attempt": self._folder.attempt, "samples": self._loader.describe(step - 1)}
        lines = store.JsonLines(self._folder.path / "nonfinite.jsonl")
        lines.write(record)
        lines.close()
        say(
            self._console,
            f"warning: step {step}: loss or gradient is not finite; the weights were not updated "
            f"(its samples are in {self._folder.path / 'nonfinite.jsonl'})",
        )

    def _validate(self, step: int, metrics: Metrics) -> None:
        samples = self._config.train.validation.samples
        splits = {name: split for name, split in self._heldout.items() if len(split)}
        if not samples or not splits:
            return
        losses: dict[str, HeldOutLoss] = {}
        # As many tokens at once as in a micro-batch of the step, whose windows may be shorter or longer.
        tokens = self._loader.micro_batch_size(step - 1) * self._segment(step - 1).sequence_length
        batch_size = max(1, tokens // self._config.train.sequence_length)
        everything = sum(len(split) for split in splits.values())
        for name, split in splits.items():
            # Each source has its share of the sample, and at least one window.
            windows = split.spread(max(1, samples * len(split) // everything))
            losses[name] = heldout_loss(
                self._model,
                self._stepper.runner,
                self._setup.mesh,
                split,
                windows,
                batch_size=batch_size,
                document_attention=self._config.model.document_attention,
                device=self._setup.device,
                advance=lambda windows: self._watchdog.beat(),
            )
        blended = sum(losses.values(), HeldOutLoss(0.0, 0))
        metrics.write(
            {
                "step": step,
                "attempt": self._folder.attempt,
                "time": time.time(),
                "validation_loss": blended.mean,
                "validation_loss_by_source": {name: loss.mean for name, loss in losses.items()},
            }
        )
        say(self._console, f"step {step}: validation loss {blended.mean:.4f}")
        self._since = time.monotonic()

    def _save(self, step: int, *, last: bool) -> None:
        """Save, and remove what is too old.

        While steps are not finite nothing is removed, and nothing saved but at the end.
        """
        if self._nonfinite and not last:
            return
        scale = self._stepper.loss_scale
        self._watchdog.phase("save", step)
        self._saver.save(step, {} if scale is None else {"loss_scale": scale.state()})
        if not self._nonfinite:
            self._saver.prune()
        self._since = time.monotonic()
