"""The training stage: next batch, forward and backward, clip, step, log, checkpoint, check for a stop request."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pipeline import __version__
from pipeline.config import Config
from pipeline.config.load import dump
from pipeline.console import say
from pipeline.data import store
from pipeline.data.heldout import HeldOut
from pipeline.data.loader import Loader, StepData, open_loader
from pipeline.data.preprocess import open_datasets, run_tokenizer
from pipeline.errors import MachineError, NumericalError, Stopped, UserError
from pipeline.train.checkpoint import storage
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.fingerprint import compare, fingerprints
from pipeline.train.metrics import Metrics, Sink, TensorBoard, Terminal, Wandb, peak_flops
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.optim import build_optimizer
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.run_folder import RunFolder, open_run
from pipeline.train.schedule import Schedule
from pipeline.train.setup import Setup, check_tokenizer, out_of_memory_means, set_up
from pipeline.train.step import Stepper, StepResult
from pipeline.train.stop import StopRequest
from pipeline.train.validation import HeldOutLoss, heldout_loss

_CHECKPOINT_BYTES = 12
"""Of a parameter in a checkpoint: fp32 weight and two moments."""
_MAX_NONFINITE = 3
"""So many non-finite steps one after the other end the run: they are no longer an accident."""


def total_steps(config: Config) -> int:
    """Steps of the whole run; a duration in tokens is rounded up to whole steps."""
    duration = config.train.duration
    if duration.unit == "steps":
        return duration.count
    per_step = config.train.batch_size * config.train.sequence_length
    return -(-duration.count // per_step)


def train(config: Config, console: Console | None = None) -> int:
    """Train until `train.duration`, from the latest checkpoint if there is one; returns the steps trained in all.

    Raises:
        UserError: the config, the data or the checkpoint do not allow it.
        NumericalError: several steps in a row were not finite.
        Stopped: a signal or the `stop` file asked for it; a checkpoint was saved.
    """
    console = console or Console()
    total = total_steps(config)
    if total == 0:
        raise UserError("train.duration is 0; give it at least one step")
    with open_run(config.run.dir) as folder:
        checkpoints = Checkpoints.of_run(folder.path)
        checkpoints.clean(lambda line: say(console, line))
        checkpoint = checkpoints.resumable(lambda line: say(console, f"warning: {line}"))
        folder.step = checkpoint.step if checkpoint else 0
        if checkpoint is not None and checkpoint.step >= total:
            say(console, f"train: nothing to do, already at step {checkpoint.step} (train.duration: {total} steps)")
            return checkpoint.step
        with StopRequest(folder.stop_file) as stop:
            trainer = Trainer(config, folder, checkpoints, console)
            if checkpoint is not None:
                trainer.restore(checkpoint)
            trainer.run(total, stop)
            say(console, f"train: done, {total} steps; checkpoints and metrics are in {folder.path}")
            return total


class Trainer:
    """A run in this process: its model, data and sinks."""

    def __init__(self, config: Config, folder: RunFolder, checkpoints: Checkpoints, console: Console) -> None:
        self._config = config
        self._folder = folder
        self._checkpoints = checkpoints
        self._console = console
        train = config.train
        self._setup: Setup = set_up(config, run_tokenizer(config))
        mesh = self._setup.mesh
        datasets = open_datasets(config, "train")
        self._loader: Loader = open_loader(config, datasets, dp_rank=mesh.rank("batch"), dp_size=mesh.size("batch"))
        validation = config.train.validation
        self._heldout = open_heldout(config, validation.split) if validation.samples else {}
        self._schedule = Schedule(
            train.schedule,
            train.duration.in_tokens(train.batch_size * train.sequence_length),
            train.batch_size * train.sequence_length,
        )
        check_tokenizer(datasets, self._setup.tokenizer)
        self._fingerprints = fingerprints(
            config,
            {name: dataset.fingerprint for name, dataset in datasets.items()},
            self._setup.tokenizer.fingerprint,
            self._loader.journal.fingerprint,
        )
        spec = self._setup.spec
        self._model = build_model(config.model, spec, mesh, train.precision, self._setup.device, config.run.seed)
        self._optimizer = build_optimizer(self._model, spec, config.model.init, train.optimizer)
        self._stepper = Stepper(
            self._model,
            self._optimizer,
            mesh,
            self._setup.device,
            train=train,
            sources=len(self._loader.names),
            document_attention=config.model.document_attention,
        )
        self._flops = {causal: flops_per_token(spec, train.sequence_length, causal=causal) for causal in (False, True)}
        self._peak = peak_flops(self._setup.device, train.precision.compute)
        # A device has its queue; without one, waiting for the next step would only delay what is known.
        self._runs_ahead = self._setup.device.type != "cpu"
        self._nonfinite = 0
        self._since = time.monotonic()  # when the last step, validation or save ended
        self._pending: Callable[[], dict[str, Any]] | None = None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint, after comparing what it depends on with what there is now."""
        state = checkpoint.state()
        # The journals say what differs in the order; their hashes only that something does.
        saved = {**state["fingerprints"], "order": state["journal"]}
        now = {**self._fingerprints, "order": self._loader.journal.to_json()}
        for line in compare(saved, now, self._config.resume.allow):
            say(self._console, f"warning: allowed difference from the checkpoint: {line}")
        storage.read(checkpoint.path, self._model, self._optimizer)
        say(self._console, f"train: going on from {checkpoint.path.name}")

    def run(self, total: int, stop: StopRequest) -> None:
        """Train up to step `total`."""
        first = self._folder.step
        store.put(self._folder.path / "config.yaml", dump(self._config).encode())
        self._announce(first, total)
        checkpoint, validation = self._config.train.checkpoint, self._config.train.validation
        advice = f"lower train.micro_batch_size ({self._loader.micro_batch_size} now); the result is the same"
        with out_of_memory_means(advice), Metrics(self._sinks(first, total)) as metrics:
            waiting = self._since = time.monotonic()
            for data in self._loader.iterate(first, total):
                waited = time.monotonic() - waiting
                lr = self._config.train.optimizer.lr * self._schedule.factor(self._loader.tokens(data.step + 1))
                result = self._stepper.step(data.micro_batches, data.valid_targets, lr)
                # The numbers of a step are read when the next one has been issued, so that a device never idles.
                self._flush(metrics)
                self._pending = self._row(data, result, lr, waited)
                if not self._runs_ahead:
                    self._flush(metrics)
                step = self._folder.step = data.step + 1
                reason = stop.reason()
                if step % validation.every_steps == 0 or step == total:
                    self._flush(metrics)
                    self._validate(step, metrics)
                if step % checkpoint.every_steps == 0 or step == total or reason:
                    self._flush(metrics)
                    self._save(step, last=step == total or reason is not None)
                if reason:
                    stop.consume()
                    if step < total:
                        raise Stopped(f"{reason} at step {step} of {total}; saved. Run the same command to go on.")
                waiting = time.monotonic()

    def _announce(self, first: int, total: int) -> None:
        train, spec = self._config.train, self._setup.spec
        tokens = train.batch_size * train.sequence_length
        say(
            self._console,
            f"train: {num_parameters(spec) / 1e6:,.4g} M parameters, {total - first:,} steps of {tokens:,} tokens, "
            f"{train.precision.compute} on {self._setup.device.type}, {torch.get_num_threads()} threads, "
            f"{self._flops[True] / 1e6:,.4g} MFLOP a token",
        )
        if train.validation.samples and not any(len(split) for split in self._heldout.values()):
            share = self._config.data.splits.get(train.validation.split)
            where = f"data.splits.{train.validation.split}: {share}"
            say(self._console, f"warning: nothing is held out ({where}), so there is no validation")

    def _sinks(self, first: int, total: int) -> list[Sink]:
        config = self._config.train.metrics
        sinks: list[Sink] = [store.JsonLines(self._folder.metrics)]
        if config.tensorboard:
            sinks.append(TensorBoard(self._folder.path / "tensorboard", first))
        if config.wandb is not None:
            sinks.append(Wandb(config, self._folder.path, self._config.model_dump(mode="json")))
        return [*sinks, Terminal(self._console, first, total, config.log_every_steps)]

    def _row(self, data: StepData, result: StepResult, lr: float, waited: float) -> Callable[[], dict[str, Any]]:
        """The metrics of a step, as a function that reads the device and is called a step later."""
        tokens = sum(data.tokens_by_source.values())

        def row() -> dict[str, Any]:
            nats, targets = result.nats.tolist(), result.targets.tolist()
            # The device has done the step by now: a step lasts from the end of the one before to its own.
            now = time.monotonic()
            rate, self._since = tokens / (now - self._since), now
            values = {
                "step": data.step + 1,
                "attempt": self._folder.attempt,
                "time": time.time(),
                "tokens": self._loader.tokens(data.step + 1),
                "loss": sum(nats) / max(1.0, sum(targets)),
                "loss_by_source": {
                    name: nats[k] / targets[k] for k, name in enumerate(self._loader.names) if targets[k]
                },
                "grad_norm": result.grad_norm.item(),
                "lr": lr,
                "skipped": not result.finite.item(),
                "tokens_per_second": rate,
                "data_wait": waited,
                "model_flops_per_second": rate * self._flops[False],
                "tokens_by_source": self._loader.tokens_by_source(data.step + 1),
                "epochs_by_source": self._loader.epochs_by_source(data.step + 1),
                "order_hash": f"{data.order_hash:016x}",
                "data_hash": f"{data.data_hash:016x}",
            }
            if self._peak is not None:
                values["mfu"] = rate * self._flops[False] / self._peak
                values["mfu_causal"] = rate * self._flops[True] / self._peak
            return values

        return row

    def _flush(self, metrics: Metrics) -> None:
        if self._pending is not None:
            row, self._pending = self._pending(), None
            metrics.write(row)
            self._check_finite(row["step"], finite=not row["skipped"])

    def _check_finite(self, step: int, *, finite: bool) -> None:
        """Record a step whose update was withheld; end the run after several in a row."""
        if finite:
            self._nonfinite = 0
            return
        self._nonfinite += 1
        record = {"step": step, "attempt": self._folder.attempt, "samples": self._loader.describe(step - 1)}
        lines = store.JsonLines(self._folder.path / "nonfinite.jsonl")
        lines.write(record)
        lines.close()
        say(
            self._console,
            f"warning: step {step}: loss or gradient is not finite; the weights were not updated "
            f"(its samples are in {self._folder.path / 'nonfinite.jsonl'})",
        )
        if self._nonfinite >= _MAX_NONFINITE:
            raise NumericalError(
                f"{self._nonfinite} steps in a row up to step {step} were not finite. {self._last_good()} is "
                "from before them. Lower train.optimizer.lr, lengthen train.schedule.warmup or look at the samples in "
                f"{self._folder.path / 'nonfinite.jsonl'}; to go further back, move newer checkpoints away"
            )

    def _validate(self, step: int, metrics: Metrics) -> None:
        samples = self._config.train.validation.samples
        splits = {name: split for name, split in self._heldout.items() if len(split)}
        if not samples or not splits:
            return
        losses: dict[str, HeldOutLoss] = {}
        everything = sum(len(split) for split in splits.values())
        for name, split in splits.items():
            # Each source has its share of the sample, and at least one window.
            windows = split.spread(max(1, samples * len(split) // everything))
            losses[name] = heldout_loss(
                self._model,
                split,
                windows,
                batch_size=self._loader.micro_batch_size,
                document_attention=self._config.model.document_attention,
                device=self._setup.device,
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
        config = self._config
        state = {
            "fingerprints": self._fingerprints,
            "journal": self._loader.journal.to_json(),
            "config": config.model_dump(mode="json"),
            "tokens": self._loader.tokens(step),
            "layout": {"world_size": self._setup.mesh.devices.size()},
            "versions": {
                "pipeline": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }
        try:
            self._checkpoints.save(
                step,
                self._folder.attempt,
                lambda path: storage.write(path, self._model, self._optimizer, self._setup.tokenizer),
                state,
                before_commit=self._folder.assert_mine,
            )
        except OSError as error:
            free = shutil.disk_usage(self._folder.path).free
            size = sum(p.numel() for p in self._model.parameters()) * _CHECKPOINT_BYTES
            raise MachineError(
                f"step {step} could not be saved in {self._checkpoints.folder}: {error.strerror or error}. "
                f"A checkpoint needs about {size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free. "
                f"{self._last_good()} is still good; make room and run the same command to go on"
            ) from error
        if not self._nonfinite:
            self._checkpoints.prune(config.train.checkpoint.keep)
        self._since = time.monotonic()

    def _last_good(self) -> str:
        latest = self._checkpoints.latest()
        return latest.path.name if latest else "The start"


def open_heldout(config: Config, split: str) -> dict[str, HeldOut]:
    """A held-out split of each source."""
    datasets = open_datasets(config, split)
    return {name: HeldOut(dataset, config.train.sequence_length) for name, dataset in datasets.items()}
