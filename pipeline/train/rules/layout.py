"""Rules for layouts, as data: they are checked before a run and printed in the documentation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch

from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config import Config
from pipeline.config.blend import BlendConfig
from pipeline.config.objective import KINDS
from pipeline.config.parallel import ParallelConfig, PipelineConfig
from pipeline.data.order.phases import MUCH_PADDING, padding_warning
from pipeline.train.distributed.axes import axis_names
from pipeline.train.distributed.layout import Layout, resolve
from pipeline.train.model.part_spec import Division
from pipeline.train.parallel.pipeline_schedules import SCHEDULES, WHOLE_BACKWARD
from pipeline.train.parallel.step_shapes import StepShape, step_shapes
from pipeline.train.parallel.tested import LayoutKind, nearest_tested
from pipeline.train.rules.attention import ATTENTION_RULES, attention_again
from pipeline.train.rules.base import Rule, key_of, nearest_degrees, nearest_multiples, parts_of
from pipeline.train.rules.context import CONTEXT_RULES, EVALUATED_LENGTH
from pipeline.train.rules.distillation import DISTILLATION_RULES
from pipeline.train.rules.experts import EXPERT_RULES, balance_without_effect, unbalanced_experts
from pipeline.train.rules.export import EXPORT_RULES
from pipeline.train.rules.fp8 import FP8_RULES, slow_without_compiler
from pipeline.train.rules.optimizer import OPTIMIZER_RULES, optimizer_without_effect
from pipeline.train.rules.overlap import OVERLAP_RULES, overlap_without_effect
from pipeline.train.rules.preference import PREFERENCE_RULES
from pipeline.train.rules.profiling import PROFILE_RULES
from pipeline.train.rules.recompute import RECOMPUTE_RULES, many_shapes, recompute_without_effect
from pipeline.train.rules.recurrence import RECURRENCE_RULES
from pipeline.train.torch_compat import pipeline_stage

_LARGE_NODE = 8
"""Devices that a machine has at most, as a rule."""

_OWN_KEY = re.compile(r"(?<![\w.])parallel\.")
"""A key of `parallel` in a message."""


def check_layout(config: Config, world_size: int) -> Layout:
    """The layout of a run over `world_size` processes.

    Raises:
        UserError: The degrees do not multiply to it, or rules are violated; the message lists all of them.
    """
    layout = resolve(config.parallel, world_size)
    messages = [message for rule in RULES for message in rule.check(config, layout)]
    if messages:
        found = "a problem" if len(messages) == 1 else f"{len(messages)} problems"
        lines = "".join(f"\n  {message}" for message in messages)
        raise UserError(f"the layout ({layout}) has {found}:{lines}")
    return layout


def evaluation_parallel(config: Config, world_size: int) -> ParallelConfig:
    """The layout section of an evaluation on `world_size` processes: its own, or that of the training."""
    if config.eval.parallel is not None:
        return config.eval.parallel
    return config.parallel if world_size > 1 else ParallelConfig()


def check_evaluation_layout(config: Config, world_size: int) -> Layout:
    """The layout of an evaluation over `world_size` processes, by the rules of the training that are not of steps.

    Raises:
        UserError: as `check_layout`, with the keys of the evaluation.
    """
    section = "parallel" if config.eval.parallel is None else "eval.parallel"
    parallel = evaluation_parallel(config, world_size)
    layout = resolve(parallel, world_size, section=section, processes="eval.processes")
    # Of lengths it has its own, whatever the phases of the training have.
    config = config.model_copy(update={"parallel": parallel, "blend": BlendConfig()})
    rules = [*(rule for rule in RULES if not rule.of_training), EVALUATED_LENGTH]
    messages = [message for rule in rules for message in rule.check(config, layout)]
    if messages:
        lines = "".join(f"\n  {_OWN_KEY.sub(f'{section}.', message)}" for message in messages)
        raise UserError(f"the layout of the evaluation ({layout}) is not possible:{lines}")
    return layout


def check_teacher_layout(config: Config, world_size: int, name: str) -> None:
    """Check that the layout of a training can cut a teacher, too, by the rules that are not of steps.

    Args:
        config: Of the teacher.
        world_size: Processes.
        name: Of the teacher, for the message.

    Raises:
        UserError: It cannot.
    """
    experts = any(part.stacks for part in parts_of(config))
    # Without experts there is nothing to deal, and the places of those of the model are as good as any others.
    parallel = config.parallel if experts else config.parallel.model_copy(update={"ep": 1})
    config = config.model_copy(update={"parallel": parallel})
    layout = resolve(parallel, world_size)
    if messages := [message for rule in RULES if not rule.of_training for message in rule.check(config, layout)]:
        lines = "".join(f"\n  {message}" for message in messages)
        raise UserError(f"{name} cannot be laid out as the model is ({layout}), where its keys are meant:{lines}")


def layout_warnings(config: Config, layout: Layout) -> list[str]:
    """Warnings for settings that are allowed and probably not meant."""
    return [message for rule in WARNINGS for message in rule.check(config, layout)]


def _divisions(config: Config, layout: Layout) -> Iterator[str]:
    parts = parts_of(config)
    for label in dict.fromkeys(part.label for part in parts if part.divisions is None and layout.tp > 1):
        yield f"parallel.tp={layout.tp}: {label} cannot be cut over processes: set parallel.tp=1"
    uncut = [(part, each) for part in parts for each in part.divisions or () if not each.fits(layout.tp)]
    for part in parts:
        if part.divisions is not None and part.fits(layout.tp) and (names := part.uneven(layout.tp)):
            yield (
                f"parallel.tp={layout.tp}: {part.label} has {', '.join(names)} in unequal pieces, which its divisions "
                "do not show: set parallel.tp=1; this is an error of the plug-in"
            )
    # Kinds of layers may have the same numbers.
    yield from dict.fromkeys(_undivided(key_of(config, part, each.key), each, layout.tp) for part, each in uncut)


def _undivided(key: str, division: Division, tp: int) -> str:
    size, sharers = division.size, division.shared_by
    if sharers is None:
        return (
            f"{key}={size} cannot be cut over parallel.tp={tp}: set {key}={nearest_multiples(size, tp)}, or "
            f"parallel.tp={nearest_degrees(tp, division.fits, size)}"
        )
    allowed = [n for n in range(1, sharers + 1) if sharers % n == 0 and not (n % tp and tp % n)]
    near = sorted(sorted(allowed, key=lambda n: abs(n - size))[:2])
    return (
        f"{key}={size} can neither be cut nor copied evenly over parallel.tp={tp}: set "
        f"{key}={' or '.join(map(str, near))}, or parallel.tp={nearest_degrees(tp, division.fits, sharers)}"
    )


def _vocabulary(config: Config, layout: Layout) -> Iterator[str]:
    multiple, tp = config.model.vocab_multiple, layout.tp
    if multiple % tp:
        degrees = nearest_degrees(tp, lambda d: multiple % d == 0, multiple)
        yield (
            f"model.vocab_multiple={multiple} is not a multiple of parallel.tp={tp}, so embedding and head cannot be "
            f"cut for every vocabulary: set model.vocab_multiple={math.lcm(multiple, tp)}, or parallel.tp={degrees}"
        )


def _stage_count(config: Config, layout: Layout) -> Iterator[str]:
    pipeline, layers = config.parallel.pipeline, config.model.all_layers
    stages = layout.pp * pipeline.stages_per_rank
    if layout.pp > 1 and pipeline.layers_per_stage is None and layers < stages:
        most = layers // pipeline.stages_per_rank
        ways = [f"parallel.pp={most} or less" if most > 1 else "parallel.pp=1"]
        if SCHEDULES[pipeline.schedule].allows_stages(pipeline.stages_per_rank - 1):
            ways.append("fewer parallel.pipeline.virtual_stages")
        yield (
            f"{_layers(config)} are fewer than the {stages} stages (parallel.pp={layout.pp} x "
            f"{pipeline.stages_per_rank} on each rank): set {', '.join(ways)}, or at least "
            f"{_layers_key(config)}={stages}"
        )


def _layers_key(config: Config) -> str:
    return "model.layers" if config.model.encoder is None else "model.encoder.layers + model.layers"


def _layers(config: Config) -> str:
    return f"{_layers_key(config)}={config.model.all_layers}"


def _layers_per_stage(config: Config, layout: Layout) -> Iterator[str]:
    pipeline, layers = config.parallel.pipeline, config.model.all_layers
    given = pipeline.layers_per_stage
    if layout.pp == 1 or given is None:
        return
    key = "parallel.pipeline.layers_per_stage"
    stages = layout.pp * pipeline.stages_per_rank
    if len(given) != stages:
        yield (
            f"{key} has {counted(len(given), 'number')}, but there are {stages} stages (parallel.pp={layout.pp} x "
            f"{pipeline.stages_per_rank} on each rank): give {stages} numbers, or leave the key out"
        )
    if sum(given) != layers:
        yield (
            f"{key}={given} are {counted(sum(given), 'layer')}, but {_layers(config)}: change "
            f"one of them by {abs(layers - sum(given))}"
        )
    if empty := [number for number, size in enumerate(given[1:-1], start=1) if size == 0]:
        yield f"{key}: stage {empty[0]} has nothing to do; only the first and the last stage can be without layers"


def _virtual_stages(config: Config, layout: Layout) -> Iterator[str]:
    pipeline = config.parallel.pipeline
    facts = SCHEDULES[pipeline.schedule]
    if layout.pp > 1 and not facts.allows_stages(pipeline.stages_per_rank):
        yield (
            f"parallel.pipeline.virtual_stages={pipeline.virtual_stages} does not go with "
            f"schedule={pipeline.schedule}, which has {facts.stages} on each rank: set "
            f"parallel.pipeline.virtual_stages={facts.default_stages}"
        )


def _micro_batches(config: Config, layout: Layout) -> Iterator[str]:
    schedule, pp = config.parallel.pipeline.schedule, layout.pp
    if pp == 1:
        return
    for shape in step_shapes(config, layout.dp):
        if SCHEDULES[schedule].allows(shape.micro_batches, pp):
            continue
        yield (
            f"{shape.batch_key}: {counted(shape.batch_size, 'window')} over {counted(layout.dp, 'data-parallel rank')} "
            f"in micro-batches of {shape.micro_batch_size} make {counted(shape.micro_batches, 'micro-batch')} per "
            f"step, but schedule={schedule} over parallel.pp={pp} needs {_demand(config.parallel.pipeline, pp)}: "
            f"{_way_out(config, layout, shape)}"
        )


def _demand(pipeline: PipelineConfig, pp: int) -> str:
    """The demand of a schedule with p put in."""
    allows = SCHEDULES[pipeline.schedule].allows
    if not allows(1, pp):
        return f"{next(m for m in range(1, 4 * pp) if allows(m, pp))} or more"
    return f"fewer than {2 * pp}, or a number m that m // {pp} divides, like {2 * pp} or {3 * pp}"


def _way_out(config: Config, layout: Layout, shape: StepShape) -> str:
    allows, windows = SCHEDULES[config.parallel.pipeline.schedule].allows, shape.windows_per_rank
    sizes = [size for size in range(1, windows + 1) if allows(shape.count(size), layout.pp)]
    if sizes:
        # Before others those that need no padding.
        size = min(sizes, key=lambda size: (windows % size > 0, abs(size - shape.micro_batch_size)))
        return f"set {shape.micro_key}={size} ({counted(shape.count(size), 'micro-batch')})"
    micro = next(m for m in range(max(1, windows), 4 * layout.pp + windows) if allows(m, layout.pp))
    what = "train.batch_ramp.start" if shape.batch_key == "train.batch_ramp" else shape.batch_key
    return f"set {what}={micro * layout.dp} or more, with {shape.micro_key}=1, or a smaller parallel.pp"


def _split_backward(config: Config, _: Layout) -> Iterator[str]:
    if config.parallel.splits_backward and not pipeline_stage.SPLITS_BACKWARD:
        yield (
            f"parallel.pipeline.schedule={config.parallel.pipeline.schedule} needs torch 2.13 or later, but torch "
            f"{torch.__version__} is installed, where its backward passes fail: install a later torch, or take one of "
            f"{', '.join(WHOLE_BACKWARD)}"
        )


def _resharding(config: Config, _: Layout) -> Iterator[str]:
    parallel = config.parallel
    if parallel.splits_backward and parallel.reshard_after_forward:
        yield (
            f"parallel.reshard_after_forward=true with schedule={parallel.pipeline.schedule} gives wrong gradients: "
            f"set it to false, or take one of {', '.join(WHOLE_BACKWARD)}"
        )


def _tested(config: Config, layout: Layout) -> Iterator[str]:
    if any(_resharding(config, layout)):
        return
    kind = LayoutKind.of(config.parallel, layout)
    if near := nearest_tested(kind):
        yield (
            f"this combination ({describe(kind)}) is not tested, so it is refused; the nearest tested ones have "
            + ", or ".join(near)
        )


def describe(kind: LayoutKind) -> str:
    """A kind in words: `pp with 1f1b, dp_shard, tp without sequence_parallel`."""
    words: dict[str, str] = {axis: axis for axis in axis_names() if axis in kind.axes}
    if kind.schedule is not None:
        words["pp"] += f" with {kind.schedule}"
    if kind.cp_method is not None:
        words["cp"] += f" by {kind.cp_method}"
    if kind.reshard is not None:
        sharded = [axis for axis in axis_names(lambda axis: axis.weights == "shards") if axis in words]
        words[sharded[-1]] += (" with" if kind.reshard else " without") + " resharding"
    if kind.sequence_parallel is not None:
        words["tp"] += (" with" if kind.sequence_parallel else " without") + " sequence_parallel"
    if kind.ep:
        words["ep"] = "ep"
    return ", ".join(words.values()) or "one process"


RULES: Sequence[Rule] = (
    Rule(
        ("model.heads", "model.kv_heads", "model.ffn_dim", "parallel.tp"),
        "Query heads are a multiple of `tp`: each rank has whole heads. Key and value heads are a multiple of `tp`, or "
        "`tp` is a multiple of them: then every rank has the weights of all and uses one. The hidden size of the mlp "
        "is a multiple of `tp`.",
        _divisions,
    ),
    Rule(
        ("model.vocab_multiple", "parallel.tp"),
        "`vocab_multiple` is a multiple of `tp`, so that the padded vocabulary is, whatever the tokenizer.",
        _vocabulary,
    ),
    *CONTEXT_RULES,
    *DISTILLATION_RULES,
    *PREFERENCE_RULES,
    Rule(
        ("parallel.pipeline.virtual_stages", "parallel.pipeline.schedule"),
        "Stages on a rank: 1 for `gpipe` and `1f1b`, 2 or more for the interleaved schedules, 2 for `zbv` and "
        "`dualpipev`.",
        _virtual_stages,
    ),
    Rule(
        ("model.layers", "parallel.pp", "parallel.pipeline.virtual_stages"),
        "There is a layer for every stage; the number of stages is `pp` times those on a rank.",
        _stage_count,
    ),
    Rule(
        ("parallel.pipeline.layers_per_stage", "model.layers"),
        "`layers_per_stage` has a number for each stage, and they add up to `layers`. Only the first stage (with the "
        "embedding) and the last (with the head) can have 0.",
        _layers_per_stage,
    ),
    Rule(
        ("train.batch_size", "train.micro_batch_size", "train.batch_ramp", "blend.phases.N.batch_size"),
        "Every step has as many micro-batches on a data-parallel rank as the schedule demands (table below), in each "
        "phase and at each level of the batch ramp. Without `micro_batch_size` a step is one micro-batch.",
        _micro_batches,
        of_training=True,
    ),
    Rule(
        ("parallel.pipeline.schedule",),
        "Training with schedules that split the backward pass (`interleaved_zero_bubble`, `zbv`, `dualpipev`) needs "
        "torch 2.13 or later.",
        _split_backward,
        of_training=True,
    ),
    Rule(
        ("parallel.reshard_after_forward", "parallel.pipeline.schedule"),
        "Schedules that split the backward pass (`interleaved_zero_bubble`, `zbv`, `dualpipev`) keep whole weights: "
        "`reshard_after_forward: true` would give wrong gradients.",
        _resharding,
    ),
    *EXPERT_RULES,
    *RECOMPUTE_RULES,
    *ATTENTION_RULES,
    *RECURRENCE_RULES,
    *FP8_RULES,
    *PROFILE_RULES,
    *OVERLAP_RULES,
    *OPTIMIZER_RULES,
    *EXPORT_RULES,
    Rule(
        ("parallel",),
        "The combination of axes, schedule, `sequence_parallel` and resharding is one of the tested kinds (table "
        "below); degrees may be others.",
        _tested,
    ),
)
"""Rules in the order in which messages list them."""


def _idle_ranks(config: Config, layout: Layout) -> Iterator[str]:
    shapes = [shape for shape in step_shapes(config, layout.dp) if shape.batch_size < layout.dp]
    for shape in shapes[:1]:
        yield (
            f"{shape.batch_key}: steps of {counted(shape.batch_size, 'window')} leave "
            f"{layout.dp - shape.batch_size} of {layout.dp} data-parallel ranks with padding only"
        )


def _padding(config: Config, layout: Layout) -> Iterator[str]:
    shapes = [shape for shape in step_shapes(config, layout.dp) if shape.batch_size >= layout.dp]
    worst = max(shapes, key=lambda shape: shape.padding, default=None)
    if worst is not None and worst.padding > MUCH_PADDING:
        yield padding_warning(worst.batch_key, worst.batch_size, worst.micro_batch_size, layout.dp, worst.padding)


def _short_pipeline(config: Config, layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    few = [shape for shape in step_shapes(config, layout.dp) if shape.micro_batches < layout.pp]
    for shape in few[:1]:
        smaller = f"set {shape.micro_key} lower than {shape.micro_batch_size}"
        yield (
            f"{shape.batch_key}: a step has {counted(shape.micro_batches, 'micro-batch')}, fewer than "
            f"parallel.pp={layout.pp}, so that ranks wait for a large part of the time; "
            + (smaller if shape.micro_batch_size > 1 else "take a larger batch or a smaller parallel.pp")
        )


_MANY_MICRO_BATCHES = 1000


def _long_step(config: Config, layout: Layout) -> Iterator[str]:
    worst = max(step_shapes(config, layout.dp), key=lambda shape: shape.micro_batches, default=None)
    if worst is not None and worst.micro_batches > _MANY_MICRO_BATCHES:
        yield (
            f"{worst.batch_key}: each process computes {worst.micro_batches:,} micro-batches of "
            f"{counted(worst.micro_batch_size, 'window')} one after the other in a step, and nothing is printed before "
            f"the step ends; raise {worst.micro_key} or lower {worst.batch_key}"
        )


def _without_effect(config: Config, layout: Layout) -> Iterator[str]:
    parallel = config.parallel
    if layout.pp == 1 and parallel.pipeline != PipelineConfig():
        yield "parallel.pipeline has no effect with parallel.pp=1"
    if layout.shards == 1 and parallel.reshard_after_forward:
        yield "parallel.reshard_after_forward=true has no effect: weights are not sharded (dp_shard and cp are 1)"
    yield from recompute_without_effect(config)
    yield from optimizer_without_effect(config)
    yield from balance_without_effect(config)
    yield from overlap_without_effect(config, layout)
    objectives = {objective.type for _, objective in config.objectives()}
    hiding = {name for name, kind in KINDS.items() if not kind.masks_start}
    if config.train.loss.mask_document_start and objectives <= hiding:
        yield (
            f"train.loss.mask_document_start has no effect with train.objective.type={', '.join(sorted(objectives))}, "
            "which predicts what it hides"
        )
    model = config.model
    if model.document_attention and {model.layer(kind).mixer for kind in model.layer_kinds} == {"none"}:
        yield "model.document_attention has no effect: no layer of the model has a mixer"
    if layout.cp == 1 and parallel.cp_method != ParallelConfig().cp_method:
        yield f"parallel.cp_method={parallel.cp_method} has no effect with parallel.cp=1"
    if layout.tp == 1 and not parallel.sequence_parallel:
        yield "parallel.sequence_parallel=false has no effect with parallel.tp=1"


def _wide_tp(_: Config, layout: Layout) -> Iterator[str]:
    if layout.tp > _LARGE_NODE:
        yield (
            f"parallel.tp={layout.tp}: tensor parallelism communicates within every layer; where a machine has fewer "
            "devices, that goes over the network. Raise parallel.pp or parallel.dp_shard instead"
        )


WARNINGS: Sequence[Rule] = (
    Rule(("train.batch_size",), "A step has fewer windows than there are data-parallel ranks.", _idle_ranks),
    Rule(
        ("train.batch_size", "train.micro_batch_size"),
        "More than 10 % of a step is padding up to a multiple of ranks x micro-batch.",
        _padding,
    ),
    Rule(
        ("train.batch_size", "train.micro_batch_size"),
        f"A step has more than {_MANY_MICRO_BATCHES:,} micro-batches per process.",
        _long_step,
    ),
    Rule(("train.micro_batch_size", "parallel.pp"), "A step has fewer micro-batches than `pp`.", _short_pipeline),
    Rule(
        (
            *("parallel", "train.recompute", "train.optimizer.muon", "train.optimizer.groups", "train.balance"),
            *("train.loss.mask_document_start", "model.document_attention"),
        ),
        "A key is set that has no effect in the layout, or with the model or objective.",
        _without_effect,
    ),
    Rule(
        ("train.compile", "train.batch_ramp", "train.micro_batch_size"),
        "Layers are compiled for more than 4 shapes of micro-batches: a ramp without `micro_batch_size` has many.",
        many_shapes,
    ),
    Rule(
        ("train.precision.fp8", "train.compile"),
        "`fp8` of torchao without compiled layers, where rounding reads and writes memory separately.",
        slow_without_compiler,
    ),
    Rule(
        ("train.recompute.keep", "train.attention.backend", "train.compile"),
        "Attention is to be kept, but cannot be: that of `flex` outside of compiled layers.",
        attention_again,
    ),
    Rule(
        ("train.balance", "model.experts.score_bias"),
        "Nothing balances the experts, or `balance.force` deals tokens to them in turn.",
        unbalanced_experts,
    ),
    Rule(("parallel.tp",), "`tp` is more than 8, which few machines have in one node.", _wide_tp),
)
"""Warnings of `pipeline train --check`."""
