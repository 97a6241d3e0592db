"""Layouts that fit a run's devices, fastest first, by the estimates of memory and time that `plan` makes.

The search goes best first. Every candidate begins with a lower bound of its time; the one with the lowest is priced
exactly and put back; one that comes up again with its exact time is the fastest that is left, and is taken if it fits.
So memory, which costs the most to estimate, is asked for in the order of time.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.format import counted, gib
from pipeline.config import Config
from pipeline.train.distributed.layout import Layout, resolve
from pipeline.train.host.devices import Device
from pipeline.train.parallel.pipeline_stages import split_stages
from pipeline.train.parallel.step_shapes import StepShape, run_stream, step_shapes
from pipeline.train.planning.bounds import MicroBatch, in_flight, least_bytes, least_seconds, micro_batch
from pipeline.train.planning.candidates import Overrides, candidates, differences, overridden
from pipeline.train.planning.plan import RESERVE, ResourcePlan, plan
from pipeline.train.planning.timing import rank_parameters, step_time
from pipeline.train.rules.layout import check_layout
from pipeline.train.rules.layout_check import planned_model

_ROUNDS = (3, 4)
"""Micro-batches over ranks of a pipeline, for steps that stand for longer ones."""
_SLACK = 0.9
"""Share of what a layer keeps in one layout that it keeps in similar ones at least."""
MOST_PLANS = 20
"""Candidates whose memory is estimated at most."""


def suggest(
    config: Config,
    device: Device,
    world_size: int,
    best: int = 5,
    advance: Callable[[int], None] = lambda _: None,
) -> list[tuple[Overrides, ResourcePlan]]:
    """The fastest layouts that fit, at most one for each set of degrees.

    Model, batch, lengths and data stay as they are; see `candidates` for what changes. "Fastest" is by the estimate of
    the steps that have the most tokens.

    Args:
        config: The run file, whose own layout need neither be allowed nor fit.
        device: What each process runs on.
        world_size: Processes.
        best: How many at most.
        advance: Called for each candidate whose memory was estimated, of `MOST_PLANS` at most.

    Returns:
        What to change in the run file, as key paths and values, and the plan it gives; fastest first.

    Raises:
        UserError: No layout is allowed or none fits; the message says how much is missing.
    """
    search = _Search(config, device, world_size)
    found: list[tuple[Overrides, ResourcePlan]] = []
    done: set[Layout] = set()
    plans = 0
    for candidate in search.by_time(done):
        if plans == MOST_PLANS or len(found) == best:
            break
        if search.is_hopeless(candidate):
            continue
        plans += 1
        priced = plan(candidate.config, device, world_size, model=search.model, uneven=False)
        advance(1)
        search.learn(candidate, priced)
        if priced.fits:
            done.add(candidate.layout)
            found.append((differences(config, candidate.overrides), priced))
    if not found:
        raise search.nothing_fits()
    return sorted(found, key=lambda each: each[1].hours)


def as_arguments(overrides: Mapping[str, Any]) -> list[str]:
    """Overrides as they are written on the command line: `key.path=value`."""
    return [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in overrides.items()]


@dataclass(frozen=True)
class _Candidate:
    overrides: Overrides
    config: Config
    layout: Layout
    shape: StepShape
    """Shape of the steps that have the most tokens."""
    same: tuple[Any, ...]
    """Values that two candidates have in common if `keeps` decides which of them needs more memory."""
    keeps: tuple[int, int]
    """Amounts that it keeps for backward: windows of a micro-batch, and what of a layer."""
    layer: tuple[Any, ...]
    """Values that decide how much a layer keeps of a token."""
    work: tuple[Any, ...]
    """Values that decide the time of a micro-batch."""

    def needs_no_less_than(self, other: _Candidate) -> bool:
        """True if it has the same layout, and keeps as much or more."""
        return self.same == other.same and all(a >= b for a, b in zip(self.keeps, other.keeps, strict=True))


class _Search:
    """Candidates in the order of their time."""

    def __init__(self, config: Config, device: Device, world_size: int) -> None:
        self._config, self._device, self._world_size = config, device, world_size
        self.model = planned_model(config)
        self._costs: dict[tuple[Any, ...], MicroBatch] = {}
        self._limit = int(device.memory_bytes * (1 - RESERVE))
        self._kept: dict[tuple[Any, ...], float] = {}
        self._failed: list[tuple[_Candidate, ResourcePlan]] = []
        self._least: tuple[int, _Candidate] | None = None
        self._refused: UserError | None = None

    def by_time(self, done: set[Layout]) -> Iterator[_Candidate]:
        """Candidates that may fit, fastest first; none of the layouts that are added to `done` meanwhile."""
        queue = [(self._least_seconds(each), place, False, each) for place, each in enumerate(self._possible())]
        heapq.heapify(queue)
        while queue:
            _, place, exact, candidate = heapq.heappop(queue)
            if candidate.layout in done:
                continue
            if exact:
                yield candidate
            elif self._is_allowed(candidate):
                heapq.heappush(queue, (self._seconds(candidate), place, True, candidate))

    def is_hopeless(self, candidate: _Candidate) -> bool:
        """True if it needs as much memory as one that did not fit, or more than there is by what others keep."""
        if any(candidate.needs_no_less_than(other) for other, _ in self._failed):
            return True
        kept = self._kept.get(candidate.layer)
        return kept is not None and self._least_bytes(candidate, kept) > self._limit

    def learn(self, candidate: _Candidate, priced: ResourcePlan) -> None:
        """Note how much a layer keeps, from an estimate, and whether the candidate fits."""
        if not priced.fits:
            self._failed.append((candidate, priced))
        config, layout, shape = candidate.config, candidate.layout, candidate.shape
        stages = split_stages(self.model.spec, layout.pp, config.parallel.pipeline, run_stream(config))
        layers = sum(len(stage.part.layers) for stage in stages if stage.rank == 0)
        tokens = shape.micro_batch_size * shape.stream.length / layout.cp * in_flight(config, layout, shape)
        kept = _SLACK * priced.memory[0].activations / (tokens * max(1, layers))
        self._kept[candidate.layer] = min(kept, self._kept.get(candidate.layer, kept))

    def _least_bytes(self, candidate: _Candidate, kept: float | None = None) -> int:
        shapes = step_shapes(candidate.config, candidate.layout.dp)
        return max(least_bytes(candidate.config, candidate.layout, self.model.spec, shape, kept) for shape in shapes)

    def nothing_fits(self) -> UserError:
        """The error where no candidate fits."""
        devices = f"{counted(self._world_size, 'device')} ({self._device.name})"
        if self._failed:
            candidate, priced = min(self._failed, key=lambda each: each[1].peak_bytes)
            least, limit, about = priced.peak_bytes, priced.memory_limit, "an estimated"
        elif self._least is not None:
            (least, candidate), limit, about = self._least, self._limit, "at least"
        else:
            why = f": {self._refused}" if self._refused else ""
            return UserError(f"no layout over {devices} is allowed for this model and batch{why}")
        changes = " ".join(as_arguments(differences(self._config, candidate.overrides)))
        return UserError(
            f"no layout over {devices} fits: the nearest ({changes or 'as it is'}) needs {about} "
            f"{gib(least)} of {gib(limit)} GiB per process; take more devices or larger ones, or a "
            "smaller model or sequence length"
        )

    def _possible(self) -> Iterator[_Candidate]:
        """Candidates whose least memory is there."""
        for overrides in candidates(self._config, self.model.spec, self._world_size, self._device.node_devices):
            candidate = _candidate(self._config, overrides, self._world_size)
            least = self._least_bytes(candidate)
            if self._least is None or least < self._least[0]:
                self._least = least, candidate
            if least <= self._limit:
                yield candidate

    def _is_allowed(self, candidate: _Candidate) -> bool:
        try:
            check_layout(candidate.config, self._world_size)
        except UserError as error:
            self._refused = self._refused or error
            return False
        return True

    def _least_seconds(self, candidate: _Candidate) -> float:
        """A lower bound of a step's time; many candidates have the cost of a micro-batch in common."""
        of_candidate = candidate.config, candidate.layout, self.model.spec, candidate.shape
        if candidate.work not in self._costs:
            self._costs[candidate.work] = micro_batch(*of_candidate, self._device)
        return least_seconds(*of_candidate, self._costs[candidate.work])

    def _seconds(self, candidate: _Candidate) -> float:
        """A step's time. Of many micro-batches in a pipeline by fewer: each further round adds the same."""
        pp, micro_batches = candidate.layout.pp, candidate.shape.micro_batches
        if pp == 1 or micro_batches <= _ROUNDS[1] * pp:
            return self._seconds_of(candidate, micro_batches)
        short, long = (self._seconds_of(candidate, rounds * pp) for rounds in _ROUNDS)
        return long + (long - short) * (micro_batches / pp - _ROUNDS[1]) / (_ROUNDS[1] - _ROUNDS[0])

    def _seconds_of(self, candidate: _Candidate, micro_batches: int) -> float:
        config, layout, shape = candidate.config, candidate.layout, candidate.shape
        parameters = rank_parameters(config, layout, self.model.spec)
        some = replace(shape, batch_size=micro_batches * shape.micro_batch_size * shape.ranks)
        return step_time(config, layout, self.model.spec, some, self._device, parameters).seconds.total


def _candidate(config: Config, overrides: Overrides, world_size: int) -> _Candidate:
    changed = overridden(config, overrides)
    layout, recompute = resolve(changed.parallel, world_size), changed.train.recompute
    shape = max(step_shapes(changed, layout.dp), key=lambda shape: shape.batch_size * shape.sequence_length)
    ordinary = {"none": 2, "selective": 1, "full": 0} if recompute.every == 1 or recompute.mode == "none" else {}
    special = None if recompute.mode in ordinary else (recompute.mode, recompute.every)
    of_layout = {key: value for key, value in overrides.items() if key.startswith("parallel.")}
    layer = (
        *(layout.tp, layout.cp, layout.ep, changed.parallel.cp_method, changed.parallel.sequence_parallel),
        *(recompute.mode, recompute.every),
    )
    return _Candidate(
        overrides,
        changed,
        layout,
        shape,
        same=(json.dumps(of_layout), special),
        keeps=(shape.micro_batch_size, ordinary.get(recompute.mode, 0)),
        layer=layer,
        work=(*layer, shape.micro_batch_size, changed.train.compile),
    )
