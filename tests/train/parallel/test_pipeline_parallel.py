"""Every pipeline schedule has the losses and gradients of one process."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.config.model import InitConfig, ModelConfig
from pipeline.config.parallel import V_SHAPED, ZERO_BUBBLE, PipelineConfig, ScheduleName
from pipeline.data.loading.batch import Batch
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder, ModelPart
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.model.init import init_weights
from pipeline.train.parallel.overlap import Reduction
from pipeline.train.parallel.pipeline_parallel import Action, PipelineRunner, forward_order
from pipeline.train.parallel.pipeline_stages import Stage
from pipeline.train.parallel.tied_tables import TiedTables
from tests.train.distributed import ranks

CPU = torch.device("cpu")
LAYERS = 6
VOCAB = 43
TRAIN = [(1, (2, 12)), (2, (1, 16))]
"""Calls of a step: micro-batches in units of the number of stages, and their shape."""
EVALUATE = [(3, (3, 8)), (1, (2, 12))]
"""Calls of an evaluation: micro-batches and their shape."""
STEPS = 2
LR = 0.5


class Model(NamedTuple):
    """What differs between models."""

    tied: bool
    sides: bool = False
    relative: bool = False


@dataclass(frozen=True)
class Case:
    """A pipeline and its data-parallel axes."""

    schedule: ScheduleName
    layers: tuple[int, ...]
    tied: bool = False
    replicate: int = 1
    shard: int = 1
    reshard: bool = False
    dtype: torch.dtype = torch.float32
    sides: bool = False
    """An encoder-decoder."""

    @property
    def model(self) -> Model:
        # Backward passes of two halves do not go with tables that several layers share: a rule refuses them.
        return Model(self.tied, self.sides, self.sides and self.schedule not in ZERO_BUBBLE)

    @property
    def tolerance(self) -> tuple[float, float]:
        """Of loss and gradients."""
        return (1e-5, 1e-4) if self.dtype == torch.float32 else (5e-3, 1e-1)

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard


@cache
def spec_of(model: Model) -> DecoderSpec:
    values: dict[str, Any] = {"layers": LAYERS, "tie_embeddings": model.tied}
    if model.sides:
        values |= {
            "layers": LAYERS // 2,
            "encoder": {"layers": LAYERS // 2},
            "positions": "relative" if model.relative else "rope",
        }
    config = ModelConfig(dim=16, heads=2, ffn_dim=32, vocab_multiple=8, **values)
    return decoder_spec(config, VOCAB, 16)


def make_batch(seed: tuple[int, ...], shape: tuple[int, int]) -> Batch:
    generator = torch.Generator().manual_seed(hash(seed) % 2**32)
    tokens = torch.randint(VOCAB, (shape[0], shape[1] + 1), generator=generator)
    weight = (torch.rand(shape, generator=generator) < 0.8).float()
    middle = int(torch.randint(1, shape[1], (1,), generator=generator))
    starts = torch.tensor([0, middle, *range(shape[1], shape[0] * shape[1], shape[1])], dtype=torch.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], weight, starts, torch.zeros(shape[0], dtype=torch.int64), {})


def train_batches(step: int, call: int, stages: int, rank: int) -> list[Batch]:
    units, shape = TRAIN[call]
    return [make_batch((step, call, rank, number), shape) for number in range(units * stages)]


def evaluate_batches(step: int, call: int, rank: int) -> list[Batch]:
    number, shape = EVALUATE[call]
    return [make_batch((99, step, call, rank, index), shape) for index in range(number)]


def contexts_of(batches: list[Batch], model: Model) -> list[Context]:
    if not model.sides:
        return [Context(bounds_BS=batch.bounds, length=batch.tokens.shape[1]) for batch in batches]
    return [context_of_sides(batch) for batch in batches]


def context_of_sides(batch: Batch) -> Context:
    """Two documents on each side of every row."""
    samples, length = batch.tokens.shape
    starts = torch.tensor([0, 3, length // 2, length // 2 + 2])
    sizes = torch.tensor([*starts[1:].tolist(), length]) - starts
    bounds = starts.repeat_interleave(sizes).expand(samples, -1)
    rows = torch.arange(samples)[:, None] * length
    return Context(bounds_BS=bounds, starts=(starts + rows).flatten(), length=length, encoder=length // 2)


def objective(logits: Tensor, batch: Batch) -> Tensor:
    targets, weight = (x[:, -logits.shape[1] :] for x in (batch.targets, batch.weight))  # of an encoder there are none
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(weight) * weight).sum() / 100


@dataclass
class Outcome:
    """Of a number of steps."""

    train: list[float]
    """Summed loss of each call."""
    evaluate: list[float]
    gradients: list[dict[str, Tensor]]
    """Name -> gradient, of each step."""


@cache
def reference(of: Model, stages: int, data_ranks: int) -> Outcome:
    """One process, plain tensors."""
    outcome = Outcome([], [], [])
    model = Decoder(spec_of(of))
    init_weights(model, model.spec, InitConfig(std=0.1), seed=1)
    for step in range(STEPS):
        for call in range(len(TRAIN)):
            batches = [b for rank in range(data_ranks) for b in train_batches(step, call, stages, rank)]
            losses = [objective(model(b.tokens, c), b) for b, c in zip(batches, contexts_of(batches, of), strict=True)]
            sum(losses).backward()
            outcome.train.append(float(sum(loss.item() for loss in losses)))
        gradients = {name: p.grad for name, p in model.named_parameters()}
        outcome.gradients.append(gradients)
        with torch.no_grad():
            for call in range(len(EVALUATE)):
                batches = [b for rank in range(data_ranks) for b in evaluate_batches(step, call, rank)]
                losses = [
                    objective(model(b.tokens, c), b) for b, c in zip(batches, contexts_of(batches, of), strict=True)
                ]
                outcome.evaluate.append(float(sum(losses)))
            for p in model.parameters():
                p.sub_(LR * p.grad)
                p.grad = None
    return outcome


def stages_of(case: Case, pp: int) -> list[Stage]:
    stages, first = [], 0
    for index, layers in enumerate(case.layers):
        last = index == len(case.layers) - 1
        rank = index % pp if case.schedule not in V_SHAPED or index < pp else 2 * pp - 1 - index
        stages.append(Stage(index, rank, ModelPart(range(first, first + layers), index == 0, last)))
        first += layers
    assert first == LAYERS
    return stages


def sharded(case: Case, part: ModelPart, params: DeviceMesh, spec: DecoderSpec | None = None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec or spec_of(case.model), part)
    policy = MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=params, mp_policy=policy, reshard_after_forward=case.reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    init_weights(model, model.spec, InitConfig(std=0.1), seed=1)
    return model


def reduction_of(schedule: ScheduleName) -> Reduction:
    """The one that is the default."""
    return "after" if schedule in ZERO_BUBBLE else "last"


def runner_of(case: Case, stages: list[Stage], parts: list[Decoder], mesh: DeviceMesh) -> PipelineRunner:
    """Of the stages of this process."""
    return PipelineRunner(
        stages,
        parts,
        mesh["pp"],
        PipelineConfig(schedule=case.schedule),
        reduction=reduction_of(case.schedule),
        device=CPU,
        dtype=case.dtype,
        sequence_shards=1,
    )


def run_case(case: Case, world: int) -> dict[str, Any]:
    """What this rank has: errors of its gradients, sums of its losses."""
    pp = world // case.data_ranks
    degrees = {"pp": pp, "replicate": case.replicate, "shard": case.shard}
    degrees = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis != "replicate"}
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    params = mesh["replicate", "shard"] if case.replicate > 1 else mesh["shard"]
    rank = mesh.get_rank() % case.data_ranks
    stages = stages_of(case, pp)
    mine = [stage for stage in stages if stage.rank == mesh["pp"].get_local_rank()]
    parts = {stage.index: sharded(case, stage.part, params) for stage in mine}
    runner = runner_of(case, mine, list(parts.values()), mesh)
    tied = TiedTables(spec_of(case.model), stages, parts, mesh["pp"]) if case.tied or case.sides else None
    expected = reference(case.model, len(stages), case.data_ranks)
    losses: list[float] = []

    def minimize(logits: Tensor, batch: Batch) -> Tensor:
        loss = objective(logits, batch)
        losses.append(loss.item())
        return loss

    def measure(logits: Tensor, batch: Batch) -> None:
        assert not logits.requires_grad
        losses.append(objective(logits, batch).item())

    def sum_of_losses() -> float:
        total = sum(losses)
        losses.clear()
        return total

    result: dict[str, Any] = {"rank": rank, "train": [], "evaluate": [], "errors": {}, "counted": Counter(), "tied": []}
    for step in range(STEPS):
        for call in range(len(TRAIN)):
            batches = train_batches(step, call, len(stages), rank)
            runner.train(batches, contexts_of(batches, case.model), minimize)
            result["train"].append(sum_of_losses())
            if call == 0:  # between two parts of a step, the gradients of the first stay
                batches = evaluate_batches(step, call, rank)
                runner.evaluate(batches, contexts_of(batches, case.model), measure)
                losses.clear()
        if tied is not None:
            tied.sum_gradients()
        for part in parts.values():
            for name, parameter in part.named_parameters():
                assert isinstance(parameter.grad, DTensor), f"{name} has no gradient"
                gradient, right = parameter.grad.full_tensor(), expected.gradients[step][name]
                error = float((gradient - right).abs().max() / right.abs().max())
                result["errors"][name] = max(error, result["errors"].get(name, 0.0))
                if tied is None or all(parameter is not other for other in tied.counted_elsewhere):
                    result["counted"][name] += 1
                if name.startswith(("embedding.weight", "relative.")):
                    result["tied"].append((step, name, gradient.numpy().tobytes()))
        for call in range(len(EVALUATE)):
            batches = evaluate_batches(step, call, rank)
            runner.evaluate(batches, contexts_of(batches, case.model), measure)
            result["evaluate"].append(sum_of_losses())
        with torch.no_grad():
            for part in parts.values():
                for parameter in part.parameters():
                    parameter.sub_(LR * parameter.grad)
                    parameter.grad = None
    return result


def run_cases(cases: list[Case], world: int) -> list[dict[str, Any]]:
    return [run_case(case, world) for case in cases]


def check(cases: list[Case], world: int) -> None:
    by_rank = ranks.run(world, run_cases, cases, world)
    wrong = [error for number, case in enumerate(cases) for error in errors_of(case, [r[number] for r in by_rank])]
    assert not wrong, "\n".join(wrong)


def errors_of(case: Case, by_rank: list[dict[str, Any]]) -> list[str]:
    loss_tolerance, gradient_tolerance = case.tolerance
    expected = reference(case.model, len(case.layers), case.data_ranks)
    wrong = []
    for kind, right in (("train", expected.train), ("evaluate", expected.evaluate)):
        for call, value in enumerate(right):
            total = sum(result[kind][call] for result in by_rank)
            if abs(total - value) > loss_tolerance * value:
                wrong.append(f"{case}: {kind} loss {call} is {total}, not {value}")
    counted: Counter[str] = Counter()
    copies = set()
    for number, result in enumerate(by_rank):
        counted += result["counted"]
        copies |= set(result["tied"])
        far = {name: error for name, error in result["errors"].items() if not error <= gradient_tolerance}
        if far:
            wrong.append(f"{case}: rank {number} has gradients that are off by {far}")
    if counted != dict.fromkeys(expected.gradients[0], STEPS * case.data_ranks):
        wrong.append(f"{case}: the norm would count {counted}")
    if len(copies) != STEPS * (1 + 2 * case.model.relative):
        wrong.append(f"{case}: copies of a table have different gradients")
    return wrong


ONE = (5, 1)
TWO = (1, 3, 1, 1)
FOUR = (1, 2, 2, 1)
EIGHT = (0, 1, 1, 1, 1, 1, 1, 0)
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def several(schedule: ScheduleName) -> bool:
    return schedule not in ("gpipe", "1f1b")


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_ranks(tied: bool) -> None:
    check([Case(s, TWO if several(s) else ONE, tied) for s in SCHEDULES], 2)


@pytest.mark.slow
@pytest.mark.parallel
def test_sides_on_two_ranks() -> None:
    """Cuts within the encoder and within the decoder, with an embedding that is tied and one that is not."""
    check([Case(s, TWO if several(s) else ONE, s in ("gpipe", "zbv"), sides=True) for s in SCHEDULES], 2)


@pytest.mark.parallel
@pytest.mark.slow
def test_sides_on_four_ranks() -> None:
    cases = [Case(s, EIGHT if several(s) else FOUR, sides=True) for s in SCHEDULES]
    cases += [Case(s, TWO if several(s) else ONE, tied=True, shard=2, sides=True) for s in SCHEDULES]
    check(cases, 4)


@pytest.mark.parallel
@pytest.mark.slow
def test_two_ranks_in_bf16() -> None:
    cases = [Case(s, TWO if several(s) else ONE, dtype=torch.bfloat16) for s in ("1f1b", *ZERO_BUBBLE)]
    check(cases, 2)


@pytest.mark.parallel
@pytest.mark.slow
def test_four_ranks() -> None:
    check([Case(s, EIGHT if several(s) else FOUR, tied) for s in SCHEDULES for tied in (False, True)], 4)


@pytest.mark.parallel
@pytest.mark.slow
def test_shards_and_replicas() -> None:
    cases = []
    for s in SCHEDULES:
        layers = TWO if several(s) else ONE
        cases += [Case(s, layers, tied=True, shard=2), Case(s, layers, replicate=2)]
        if s not in ZERO_BUBBLE:
            cases.append(Case(s, layers, tied=True, shard=2, reshard=True))
    check(cases, 4)


@pytest.mark.parallel
@pytest.mark.slow
def test_hybrid_shards() -> None:
    check([Case("1f1b", ONE, tied=True, replicate=2, shard=2), Case("zbv", TWO, replicate=2, shard=2)], 8)


def run_and_fail() -> None:
    """Of the stages of two ranks the first one fails: the sequence is longer than learned positions."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    case = Case("interleaved_1f1b", TWO)
    stages = [stage for stage in stages_of(case, 2) if stage.rank == mesh["pp"].get_local_rank()]
    spec = replace(spec_of(Model(tied=False)), learned_positions=8)
    parts = [sharded(case, stage.part, mesh["shard"], spec) for stage in stages]
    runner = runner_of(case, stages, parts, mesh)
    batches = train_batches(0, 0, 4, 0)
    runner.train(batches, contexts_of(batches, Model(tied=False)), objective)


@pytest.mark.guard
@pytest.mark.parallel
def test_a_users_error_stays_one() -> None:
    with pytest.raises(ranks.RankFailed, match=r"(?s)UserError: model.max_positions is 8") as failure:
        ranks.run(2, run_and_fail)
    assert "Full Schedule" not in str(failure.value)


def live_tensors(shape: tuple[int, ...]) -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return sum(1 for tensor in tensors if not tensor.is_meta and tensor.shape == shape)


def run_and_count() -> dict[str, int]:
    """By schedule: tensors like those between stages that are alive after training and after evaluation."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    counts = {}
    for schedule in ("1f1b", "zbv"):
        case = Case(schedule, TWO if several(schedule) else ONE)
        stages = [stage for stage in stages_of(case, 2) if stage.rank == mesh["pp"].get_local_rank()]
        parts = [sharded(case, stage.part, mesh["shard"]) for stage in stages]
        runner = runner_of(case, stages, parts, mesh)
        batches = train_batches(0, 0, 8, 0)
        width = batches[0].tokens.shape[0], batches[0].tokens.shape[1], 16
        runner.train(batches, contexts_of(batches, Model(tied=False)), objective)
        counts[schedule] = live_tensors(width)
        runner.evaluate(batches, contexts_of(batches, Model(tied=False)), lambda logits, batch: None)
        counts[schedule + " evaluate"] = live_tensors(width)
    return counts


@pytest.mark.guard
@pytest.mark.parallel
def test_nothing_of_a_step_is_kept() -> None:
    for counts in ranks.run(2, run_and_count):
        assert counts == dict.fromkeys(counts, 0)


@pytest.mark.parametrize("ranks_there", [1, 2, 4])
@pytest.mark.parametrize("shape", ["one", "loop", "v"])
@pytest.mark.parametrize("micro_batches", [1, 3, 9])
def test_forward_order(ranks_there: int, shape: str, micro_batches: int) -> None:
    there = list(range(ranks_there))
    placement = {"one": there, "loop": there * 3, "v": there + there[::-1]}[shape]
    orders = forward_order(placement, micro_batches)
    everything = {(stage, number) for stage in range(len(placement)) for number in range(micro_batches)}
    place = {action: (rank, at) for rank, order in enumerate(orders) for at, action in enumerate(order)}
    assert {action[1:] for action in place if action.kind == "forward"} == everything
    assert len(place) == sum(map(len, orders)), "nothing is done twice"
    for (kind, stage, number), (rank, at) in place.items():
        assert placement[stage] == rank
        if kind == "forward" and stage > 0:
            local = placement[stage - 1] == rank
            arrives = place[Action("forward" if local else "receive", stage - (1 if local else 0), number)]
            assert arrives[0] == rank and arrives[1] < at, "the input is there before"
    for a in there:
        for b in there:
            sent = [(s + 1, m) for k, s, m in orders[a] if k == "forward" and placement[(s + 1) % len(placement)] == b]
            received = [(s, m) for k, s, m in orders[b] if k == "receive" and placement[s - 1] == a]
            if a != b:
                assert [action for action in sent if action[0] < len(placement)] == received, "in one order"
