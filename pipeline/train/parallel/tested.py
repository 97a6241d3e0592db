"""The combinations of parallelism that are tested. Training refuses all others.

`tests/train/parallel` trains with each row and compares losses, gradients and weights with one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, get_args

from pipeline.config.parallel import CpMethod, OverlapConfig, ParallelConfig, ScheduleName
from pipeline.config.train import RecomputeConfig
from pipeline.train.distributed.axes import axis_names
from pipeline.train.distributed.layout import Layout
from pipeline.train.parallel.pipeline_schedules import SCHEDULES, WHOLE_BACKWARD

_ALL: tuple[ScheduleName, ...] = tuple(SCHEDULES)


@dataclass(frozen=True)
class LayoutKind:
    """A layout without its degrees: layouts of one kind take the same paths through the program.

    Families of models are not part of it; the tests of a kind alternate between them.
    """

    axes: frozenset[str]
    """Axes with more than one process."""
    sequence_parallel: bool | None
    """None without tp."""
    schedule: ScheduleName | None
    """None without pp."""
    reshard: bool | None
    """True if whole weights are given back after forward; None where they are not sharded, without dp_shard and cp."""
    cp_method: CpMethod | None
    """None without cp."""
    ep: bool = False
    """Experts are dealt to several processes."""

    @classmethod
    def of(cls, parallel: ParallelConfig, layout: Layout) -> LayoutKind:
        """The kind of a layout."""
        axes = frozenset(axis for axis, degree in layout.degrees.items() if degree > 1)
        reshard = parallel.reshard_after_forward
        return cls(
            axes,
            parallel.sequence_parallel if "tp" in axes else None,
            parallel.pipeline.schedule if "pp" in axes else None,
            # With a pipeline, weights that are given back would be gathered again for every micro-batch.
            (("pp" not in axes) if reshard is None else reshard) if layout.shards > 1 else None,
            parallel.cp_method if "cp" in axes else None,
            layout.ep > 1,
        )

    def changes(self, to: LayoutKind) -> list[str]:
        """The settings that make another kind of this one."""
        changes = [f"parallel.{axis}=1" for axis in axis_names() if axis in self.axes - to.axes]
        changes += [f"parallel.{axis} above 1" for axis in axis_names() if axis in to.axes - self.axes]
        for key, now, then in (
            ("sequence_parallel", self.sequence_parallel, to.sequence_parallel),
            ("pipeline.schedule", self.schedule, to.schedule),
            ("reshard_after_forward", self.reshard, to.reshard),
            ("cp_method", self.cp_method, to.cp_method),
        ):
            if then not in (None, now):
                changes.append(f"parallel.{key}={str(then).lower()}")
        if self.ep != to.ep:
            changes.append("parallel.ep=1" if self.ep else "parallel.ep above 1")
        return changes


@dataclass(frozen=True)
class Combination:
    """A layout that is tested."""

    layout: Layout
    schedule: ScheduleName = "1f1b"
    virtual_stages: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    sequence_parallel: bool = True
    reshard_after_forward: bool | None = None
    cp_method: CpMethod = "all_gather"
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    compile: bool = False
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    depth: int | None = None
    """Layers of the model that it is tried with, if they are many."""

    @property
    def name(self) -> str:
        """Like `pp2-1f1b-fsdp2-tp2`."""
        layout, kind = self.layout, self.kind
        words = [f"pp{layout.pp}-{self.schedule}"] if layout.pp > 1 else []
        if self.virtual_stages is not None:
            words.append(f"v{self.virtual_stages}")
        if self.layers_per_stage is not None:
            words.append("layers_" + "_".join(map(str, self.layers_per_stage)))
        if layout.dp > 1:
            word = f"hsdp{layout.dp_replicate}x{layout.dp_shard}"
            word = f"fsdp{layout.dp_shard}" if layout.dp_replicate == 1 else word
            words.append(f"ddp{layout.dp_replicate}" if layout.dp_shard == 1 else word)
        if kind.reshard is not None:
            words.append("reshard" if kind.reshard else "keep")
        if layout.cp > 1:
            words.append(f"cp{layout.cp}-{self.cp_method}")
        if layout.tp > 1:
            words.append(f"tp{layout.tp}" + ("" if self.sequence_parallel else "-no_sp"))
        if layout.ep > 1:
            words.append(f"ep{layout.ep}")
        if self.recompute.mode != "none":
            words.append(self.recompute.mode)
            words += [f"of_{self.recompute.every}"] if self.recompute.every > 1 else []
            words += self.recompute.keep if "keep" in self.recompute.model_fields_set else []
        if self.compile:
            words.append("compiled")
        words += [f"{key}_{value}" for key, value in self.overlap.model_dump(exclude_unset=True).items()]
        return "-".join(words) or "one"

    @property
    def kind(self) -> LayoutKind:
        """The kind of its layout."""
        return LayoutKind.of(self.parallel, self.layout)

    @property
    def parallel(self) -> ParallelConfig:
        """The `parallel:` section of a run file with it."""
        pipeline: dict[str, Any] = {"schedule": self.schedule, "virtual_stages": self.virtual_stages}
        if self.layers_per_stage is not None:
            pipeline["layers_per_stage"] = list(self.layers_per_stage)
        return ParallelConfig.model_validate(
            {
                **self.layout.settings,
                "sequence_parallel": self.sequence_parallel,
                "reshard_after_forward": self.reshard_after_forward,
                "cp_method": self.cp_method,
                "pipeline": pipeline if self.layout.pp > 1 else {},
                "overlap": self.overlap.model_dump(exclude_unset=True),
            }
        )

    @property
    def layers(self) -> int:
        """Layers of a model that can be cut so: those that are given, or one a stage and two at least."""
        if self.depth is not None:
            return self.depth
        if self.layers_per_stage is not None:
            return sum(self.layers_per_stage)
        return max(2, self.layout.pp * self.parallel.pipeline.stages_per_rank)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one rank that it can be tried with: those that every schedule takes."""
        return 2 * self.layout.pp


def _rows() -> Iterator[Combination]:
    def layout(**degrees: int) -> Layout:
        return Layout(**degrees)

    # One axis, and the two data axes.
    for tp in (2, 4):
        for sp in (True, False):
            yield Combination(layout(tp=tp), sequence_parallel=sp)
    data = {"fsdp2": {"dp_shard": 2}, "hsdp": {"dp_replicate": 2, "dp_shard": 2}, "ddp2": {"dp_replicate": 2}}
    for degrees in ({"dp_shard": 2}, {"dp_shard": 4}, data["hsdp"]):
        for reshard in (True, False):
            yield Combination(layout(**degrees), reshard_after_forward=reshard)
    yield Combination(layout(dp_replicate=2))
    for pp in (2, 4):
        for schedule in _ALL:
            yield Combination(layout(pp=pp), schedule)
    # Uneven stages: without layers at both ends, three on a rank, unequal in a V.
    yield Combination(layout(pp=2), "1f1b", layers_per_stage=(3, 1))
    yield Combination(layout(pp=4), "1f1b", layers_per_stage=(0, 3, 1, 0))
    yield Combination(layout(pp=2), "interleaved_1f1b", virtual_stages=3, layers_per_stage=(1, 2, 1, 1, 2, 0))
    yield Combination(layout(pp=2), "zbv", layers_per_stage=(1, 2, 1, 1))
    # Tensor and data parallel.
    for sp in (True, False):
        for degrees in (data["fsdp2"], data["hsdp"]):
            for reshard in (True, False):
                yield Combination(layout(**degrees, tp=2), sequence_parallel=sp, reshard_after_forward=reshard)
        yield Combination(layout(dp_replicate=2, tp=2), sequence_parallel=sp)
    # Pipelines with others: every schedule; weights kept, as is the default.
    for schedule in _ALL:
        for degrees in data.values():
            yield Combination(layout(pp=2, **degrees), schedule)
        yield Combination(layout(pp=2, tp=2), schedule)
        yield Combination(layout(pp=2, dp_shard=2, tp=2), schedule)
        yield Combination(layout(pp=2, dp_replicate=2, tp=2), schedule)
    # Weights gathered again for every pass, where the schedule allows it.
    for schedule in WHOLE_BACKWARD:
        yield Combination(layout(pp=2, dp_shard=2), schedule, reshard_after_forward=True)
    for schedule in ("1f1b", "interleaved_1f1b"):
        yield Combination(layout(pp=2, dp_shard=2, tp=2), schedule, reshard_after_forward=True)
        yield Combination(layout(pp=2, dp_replicate=2, dp_shard=2, tp=2), schedule)
    yield Combination(layout(pp=2, tp=2), "1f1b", sequence_parallel=False)
    yield Combination(layout(pp=2, dp_shard=2, tp=2), "1f1b", sequence_parallel=False)
    yield from _context_rows()


def _context_rows() -> Iterator[Combination]:
    """Sequences cut over processes, alone and with others."""
    for method in get_args(CpMethod):
        for cp in (2, 4):
            yield Combination(Layout(cp=cp), cp_method=method)
        yield Combination(Layout(cp=2), cp_method=method, reshard_after_forward=False)
        for reshard in (True, False):
            yield Combination(Layout(dp_shard=2, cp=2), cp_method=method, reshard_after_forward=reshard)
        yield Combination(Layout(dp_replicate=2, cp=2), cp_method=method)
        yield Combination(Layout(dp_replicate=2, dp_shard=2, cp=2), cp_method=method)
        for sp in (True, False):
            yield Combination(Layout(cp=2, tp=2), cp_method=method, sequence_parallel=sp)
        yield Combination(Layout(dp_shard=2, cp=2, tp=2), cp_method=method)
        for schedule in _ALL:
            yield Combination(Layout(pp=2, cp=2), schedule, cp_method=method)
        for schedule in ("1f1b", "interleaved_1f1b"):
            yield Combination(Layout(pp=2, dp_shard=2, cp=2), schedule, cp_method=method)
            yield Combination(Layout(pp=2, cp=2, tp=2), schedule, cp_method=method)
            yield Combination(Layout(pp=2, dp_shard=2, cp=2, tp=2), schedule, cp_method=method)


TESTED: tuple[Combination, ...] = tuple(_rows())
"""Rows of layouts; each has a test."""


def _within_layers() -> Iterator[Combination]:
    every, some = {"mode": "full", "every": 2}, {"mode": "selective", "keep": ["attention"]}
    full, selective, budget = ({"mode": mode} for mode in ("full", "selective", "budget"))

    def row(recompute: dict[str, Any], schedule: ScheduleName = "1f1b", **degrees: int) -> Combination:
        return Combination(Layout(**degrees), schedule, recompute=RecomputeConfig.model_validate(recompute))

    for recompute in (full, every, selective, some):
        yield row(recompute, dp_shard=2)
        yield row(recompute, tp=2)
        yield row(recompute, dp_shard=2, tp=2)
    for schedule in _ALL:
        yield row(full, schedule, pp=2)
    for schedule in WHOLE_BACKWARD:
        yield row(selective, schedule, pp=2)
    yield replace(row(selective, tp=2), sequence_parallel=False)
    yield row(full, "zbv", pp=2, dp_shard=2)
    yield row(selective, "interleaved_1f1b", pp=2, dp_shard=2, tp=2)
    for method in get_args(CpMethod):
        yield replace(row(full, cp=2), cp_method=method)
        yield replace(row(selective, cp=2), cp_method=method)
        yield replace(row(full, cp=2, tp=2), cp_method=method)
        yield replace(row(selective, cp=2, tp=2), cp_method=method)
        yield replace(row(full, pp=2, cp=2), cp_method=method)
        yield replace(row({}, cp=2), cp_method=method, compile=True)
        yield replace(row(selective, dp_shard=2, cp=2), cp_method=method, compile=True)
    compiled = (
        row({}, dp_shard=2),
        row(selective, tp=2),
        row(full, pp=2),
        row({}, pp=2, dp_shard=2),
        row({}, dp_shard=2, tp=2),
        row(budget, dp_shard=2),
    )
    yield from (replace(each, compile=True) for each in compiled)


WITHIN_LAYERS: tuple[Combination, ...] = tuple(_within_layers())
"""Rows with recomputation or compiled layers, a test each too.

They are not part of a kind: both stay within a layer, and meet the rest of a layout where these rows do, in collectives
within a layer (tp), in weights that come and go around one (dp_shard) and in the order of backward passes (pp). What
does not go together there is refused by rules of its own.
"""


def _overlapped() -> Iterator[Combination]:
    each, last = {"reduce": "each"}, {"reduce": "last"}
    ahead = {"forward_prefetch": 2, "backward_prefetch": 3}

    def row(overlap: dict[str, Any], schedule: ScheduleName = "1f1b", **degrees: int) -> Combination:
        return Combination(Layout(**degrees), schedule, overlap=OverlapConfig.model_validate(overlap))

    yield row(last, dp_shard=2)
    yield replace(row(last, dp_shard=2), reshard_after_forward=False)
    yield row(last, dp_replicate=2, dp_shard=2)
    yield row(last, dp_shard=2, tp=2)
    yield row(last, cp=2)
    for schedule in WHOLE_BACKWARD:
        yield row(each, schedule, pp=2, dp_shard=2)
    yield row(each, pp=2, dp_replicate=2)
    yield row(each, "interleaved_1f1b", pp=2, dp_replicate=2, dp_shard=2)
    yield row(each, pp=2, dp_shard=2, tp=2)
    yield row(each, pp=2, cp=2)
    yield replace(row(each, pp=2, dp_shard=2), reshard_after_forward=True)
    yield replace(row(ahead, dp_shard=2), depth=5)
    yield replace(row(ahead, dp_shard=2), depth=5, recompute=RecomputeConfig(mode="full"))
    yield replace(row({**ahead, **last}, dp_shard=2), depth=5, reshard_after_forward=False)
    yield replace(row(ahead, "interleaved_1f1b", pp=2, dp_shard=2), depth=8, reshard_after_forward=True)


OVERLAPPED: tuple[Combination, ...] = tuple(_overlapped())
"""Rows with the keys of `parallel.overlap`, a test each. No part of a kind: they change when something is sent."""


def _of_experts() -> Iterator[Combination]:
    methods: tuple[CpMethod, ...] = get_args(CpMethod)
    # Without ep, experts are sharded over all that have other tokens: over ranks of tp and cp too.
    for degrees in ({"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}):
        yield Combination(Layout(**degrees))
    yield Combination(Layout(tp=2), sequence_parallel=False)
    # With it, each axis alone and two together; weights given back and kept.
    for reshard in (True, False):
        for degrees in ({"dp_shard": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}):
            yield Combination(Layout(**degrees, ep=2), reshard_after_forward=reshard)
    yield Combination(Layout(dp_shard=4, ep=4))
    for sp in (True, False):
        yield Combination(Layout(tp=2, ep=2), sequence_parallel=sp)
        for ep in (2, 4):
            for reshard in (True, False):
                yield Combination(Layout(dp_shard=2, tp=2, ep=ep), sequence_parallel=sp, reshard_after_forward=reshard)
        yield Combination(Layout(dp_replicate=2, tp=2, ep=2), sequence_parallel=sp)
        yield Combination(Layout(dp_replicate=2, dp_shard=2, tp=2, ep=4), sequence_parallel=sp)
    for method in methods:
        yield Combination(Layout(cp=2, ep=2), cp_method=method)
        yield Combination(Layout(dp_shard=2, cp=2, ep=4), cp_method=method)
        yield Combination(Layout(cp=2, tp=2, ep=4), cp_method=method)
        yield Combination(Layout(dp_replicate=2, cp=2, ep=2), cp_method=method)
    yield Combination(Layout(dp_shard=2, cp=2, tp=2, ep=8))
    # Pipelines.
    for schedule in _ALL:
        yield Combination(Layout(pp=2), schedule)
        yield Combination(Layout(pp=2, dp_shard=2, ep=2), schedule)
        yield Combination(Layout(pp=2, tp=2, ep=2), schedule)
        yield Combination(Layout(pp=2, cp=2, ep=2), schedule)
    yield Combination(Layout(pp=2, dp_shard=2, ep=2), "1f1b", reshard_after_forward=True)
    yield Combination(Layout(pp=2, cp=2, ep=2), "1f1b", cp_method="ulysses")
    for schedule in ("1f1b", "interleaved_1f1b", "zbv"):
        yield Combination(Layout(pp=2, dp_shard=2, tp=2, ep=4), schedule)
        yield Combination(Layout(pp=2, dp_replicate=2, dp_shard=2, ep=2), schedule)
    yield Combination(Layout(pp=2, cp=2, tp=2, ep=4), "dualpipev")
    # Within layers.
    full, selective = RecomputeConfig(mode="full"), RecomputeConfig(mode="selective")
    for recompute in (full, selective):
        for degrees in ({"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}):
            yield Combination(Layout(**degrees), recompute=recompute)
        yield Combination(Layout(pp=2), recompute=recompute)
    yield Combination(Layout(tp=2, ep=2), sequence_parallel=False, recompute=full)
    for degrees in ({"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}):
        yield Combination(Layout(**degrees), compile=True)
    yield Combination(Layout(dp_shard=2, ep=2), compile=True, recompute=selective)


OF_EXPERTS: tuple[Combination, ...] = tuple(_of_experts())
"""Rows for models with experts, a test each; they make the kinds with ep."""


@lru_cache(maxsize=1)
def tested_kinds() -> frozenset[LayoutKind]:
    """Allowed kinds: the kinds of all rows, and one process."""
    return frozenset(row.kind for row in (*TESTED, *OF_EXPERTS)) | {LayoutKind.of(ParallelConfig(), Layout())}


def nearest_tested(kind: LayoutKind) -> list[str]:
    """Changes, in words, that lead to the nearest tested kinds; empty if the kind itself is tested."""
    kinds = tested_kinds()
    if kind in kinds:
        return []
    ways = sorted({tuple(kind.changes(other)) for other in kinds}, key=lambda way: (len(way), way))
    return [" and ".join(way) for way in ways if len(way) == len(ways[0])]
