"""Lines that a run prints: at the start, and where something changes on the way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch

from pipeline.common.console import Console, detail, say, warn
from pipeline.common.format import counted, duration, size
from pipeline.config import Config
from pipeline.data.loading.batch import StepData
from pipeline.data.loading.heldout import HeldOutTexts
from pipeline.data.order.journal import Journal
from pipeline.data.provenance.loss_file import losses_bytes
from pipeline.train.fp8.matrices import fp8_lines
from pipeline.train.host.cpu_matmul import slow_bf16
from pipeline.train.model.flops import active_parameters, flops_per_token, num_parameters
from pipeline.train.monitor.phase_log import describe_change, describe_run, loss_weight_lines
from pipeline.train.optim.parameter_groups import group_lines
from pipeline.train.parallel.parallelize import attention_choice, has_recurrence, recurrent_choice
from pipeline.train.parallel.setup import Setup
from pipeline.train.start.run_plan import RunPlan
from pipeline.train.start.setup import threads_of_shell

_CPU_FLOPS = 2.5e10
"""A thread of a current processor, fp32: half of what products of large matrices reach."""
_LONG = 2 * 24 * 3600
_LONG_STEP = 60


def print_start(
    config: Config, plan: RunPlan, setup: Setup, heldout: HeldOutTexts, first: int, console: Console
) -> None:
    """Print `start_lines`, warnings of slow kernels and of missing validation, and with `--verbose` which kernels."""
    flops = flops_per_token(setup.spec, plan.stream(config, first), causal=True)
    for line in [
        *start_lines(config, plan, setup, first, flops),
        *nothing_held_out(config, [len(split) for split in heldout.split.values()]),
    ]:
        say(console, line)
    kernel = attention_choice(config, setup)
    (warn if kernel.slow else detail)(console, f"attention: {kernel}")
    recurrent = recurrent_choice(config, setup)
    if has_recurrence(setup.spec):
        (warn if recurrent.slow else detail)(console, f"recurrence: {recurrent}")


def start_lines(config: Config, plan: RunPlan, setup: Setup, first: int, flops: float) -> Iterator[str]:
    """The model, where it trains, and what its steps are made of.

    Args:
        config: resolved config.
        plan: of the run.
        setup: device, mesh and model.
        first: steps done already.
        flops: FLOPs of a token of the first step, causal attention counted half.
    """
    spec, length = setup.spec, plan.length
    active = f" ({active_parameters(spec) / 1e6:,.4g} M of them for each token)" if spec.expert_layers else ""
    yield (
        f"train: {num_parameters(spec) / 1e6:,.4g} M parameters{active}, {config.train.precision.compute} on "
        f"{_devices(config, setup)}, {flops / 1e6:,.4g} MFLOP per token"
    )
    if plan.teacher is not None:
        yield f"train: {plan.teacher.line}"
    if setup.device.type == "cpu" and (slow := slow_bf16(config.train.precision.compute)):
        yield f"warning: {slow}"
    if setup.device.type == "cpu":
        threads = torch.get_num_threads() * setup.mesh.layout.world_size
        total = plan.journal.tokens(length.steps) - plan.journal.tokens(first)
        yield from long_on_cpu(flops * total, threads)
        yield from long_step_on_cpu(flops * (plan.journal.tokens(first + 1) - plan.journal.tokens(first)), threads)
    fp8, layout = config.train.precision.fp8, setup.mesh.layout
    if fp8 is not None:
        yield from (f"train: {line}" for line in fp8_lines(fp8, spec, layout, config.train.sequence_length))
    if spec.expert_layers and config.train.balance.force:
        yield (
            "train: train.balance.force: tokens are dealt to experts in turn; speed is that of equal loads, and the "
            "model learns nothing of use"
        )
    yield from (f"train: {line}" for line in group_lines(config.train.optimizer, spec))
    yield from (f"train: {line}" for line in loss_weight_lines(config))
    yield f"train: {describe_run(config, plan.journal, first, length.steps)} ({length.reason})"
    if config.train.metrics.windows:
        samples = plan.journal.samples(length.steps).start - plan.journal.samples(first).start
        yield f"train: losses of {samples:,} samples will be recorded: {size(losses_bytes(samples))}"


def long_on_cpu(flops: float, threads: int) -> Iterator[str]:
    """A warning where a run on CPUs will take days: a model for GPUs shows no step for a long time.

    Args:
        flops: of all steps that are left.
        threads: of all processes.
    """
    seconds = flops / (threads * _CPU_FLOPS)
    if seconds > _LONG:
        yield (
            f"warning: {flops:.2g} FLOP on {counted(threads, 'thread')} take about {duration(seconds)}, if each makes "
            f"{_CPU_FLOPS / 1e9:.0f} GFLOP per second; for a trial set a smaller model and train.duration, as "
            "`pipeline init DIR --from starter-small` does"
        )


def long_step_on_cpu(flops: float, threads: int) -> Iterator[str]:
    """A warning where a step on CPUs takes more than a minute, in which nothing is printed.

    Args:
        flops: of the first step.
        threads: of all processes.
    """
    seconds = flops / (threads * _CPU_FLOPS)
    if seconds > _LONG_STEP:
        yield (
            f"warning: a step takes about {duration(seconds)} ({flops:.2g} FLOP on {counted(threads, 'thread')} of "
            f"{_CPU_FLOPS / 1e9:.0f} GFLOP per second), and nothing is printed before it ends; lower train.batch_size"
        )


def nothing_held_out(config: Config, sizes: Iterable[int]) -> Iterator[str]:
    """A warning where validation is wanted and no document is held out, given the windows of each source."""
    validation = config.train.validation
    if validation.samples and not any(sizes):
        where = f"data.splits.{validation.split}: {config.data.splits.get(validation.split)}"
        yield f"warning: nothing is held out ({where}), so there is no validation"


def step_lines(config: Config, plan: RunPlan, data: StepData, first: int) -> Iterator[str]:
    """Lines for what changes with a step, if anything does.

    Args:
        config: resolved config.
        plan: of the run.
        data: of the step.
        first: steps that were done when the loop began.
    """
    journal, step = plan.journal, data.step
    number = journal.segment_number(step)
    if step and step == journal.segments[number].first_step:
        yield f"step {step + 1}: {describe_change(config, journal, number)}"
    for line in plan.exhaustions.get(step, ()):
        yield f"step {step + 1}: {line}"
    if data.skipped and (step == first or _why(journal, step - 1) != _why(journal, step)):
        total = plan.length.steps
        end = next((s for s in range(step + 1, total) if _why(journal, s) != _why(journal, step)), total)
        what = f"step {step + 1} is" if end == step + 1 else f"steps {step + 1} to {end} are"
        yield f"{what} skipped ({_why(journal, step)})"
    elif not data.skipped and not data.valid_targets:
        yield f"step {step + 1} is skipped: none of its targets is trained on (masks of conversations, blend.skip)"


def _why(journal: Journal, step: int) -> str | None:
    """The reason why a step is skipped; None for a step that is made."""
    skip = journal.why_skipped(step)
    if skip is None or skip.steps is None:
        return None
    return f"fault at step {skip.steps[1]}" if skip.fault else "blend.skip"


def _devices(config: Config, setup: Setup) -> str:
    """Devices, layout and threads: `cpu, 2 threads`, `4 x cpu (pp 2 x tp 2), 1 thread each`."""
    device, threads = setup.device.type, counted(torch.get_num_threads(), "thread")
    if config.launch.threads is None and torch.get_num_threads() == threads_of_shell(os.environ):
        threads += " (OMP_NUM_THREADS)"
    world = setup.mesh.layout.world_size
    if world == 1:
        return f"{device}, {threads}"
    return f"{world:,} x {device} ({setup.mesh.layout}), {threads} each"
