"""What is counted on paper, against what a real training over gloo sends: byte by byte, call by call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.distributed.layout import resolve
from pipeline.train.parallel.pipeline_stages import split_stages
from pipeline.train.parallel.step_shapes import run_stream, step_shapes
from pipeline.train.planning.traffic import Transfer, bytes_by_axis, stage_traffic
from pipeline.train.rules.layout_check import planned_spec
from tests.train.distributed import ranks
from tests.train.parallel import layouts
from tests.train.planning.counted import Counts, count

pytestmark = pytest.mark.parallel
STEP = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traffic")
    layouts.write(folder)
    return folder


def expected(config: Config, world: int) -> list[Counts]:
    """By pp rank."""
    layout, spec = resolve(config.parallel, world), planned_spec(config)
    stages = split_stages(spec, layout.pp, config.parallel.pipeline, run_stream(config))
    found: list[Counts] = [{} for _ in range(layout.pp)]
    one_mesh = layout.pp == layout.dp_replicate == layout.tp == layout.ep == 1  # both are all processes
    sent = stage_traffic(config, layout, spec, step_shapes(config, layout.dp)[0], stages)
    for stage, transfers in zip(stages, sent, strict=True):
        counts = found[stage.rank]
        for each in transfers:
            axis = "dp_shard" if each.axis == "expert_shards" and one_mesh else each.axis
            calls, size = counts.get((axis, each.operation), (0, 0))
            counts[axis, each.operation] = calls + each.calls, size + each.bytes
    return found


_EVEN: dict[str, Any] = {"balance.force": True, "batch_size": 16}
"""No rank gets more than another, or padding."""
_SIZES: dict[str, Any] = {"model.kinds.kimi.delta.rank": 8, "model.kinds.gated.delta.value_dim": 6}
"""Numbers of rows of `delta` that two processes divide: padding is not counted."""
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("llama", 2, {"tp": 2}, {"loss.chunk_tokens": 37, "recompute.mode": "full"}),
    ("delta", 2, {"cp": 2}, _SIZES),
    ("gpt2", 4, {"pp": 2, "dp_shard": 2}, {}),
    # The others take long.
    ("llama", 2, {"dp_shard": 2}, {}),
    ("llama", 4, {"pp": 2, "dp_shard": 2, "reshard_after_forward": True}, {}),
    ("gpt2", 2, {"tp": 2}, {"recompute.mode": "selective"}),
    ("gpt2", 2, {"tp": 2, "sequence_parallel": False}, {"recompute": {"mode": "selective", "keep": ["matmul"]}}),
    ("qwen3", 4, {"tp": 4}, {}),
    ("llama", 2, {"dp_shard": 2, "reshard_after_forward": False}, {"recompute.mode": "full"}),
    ("llama", 4, {"dp_shard": 2, "dp_replicate": 2}, {}),
    ("llama", 4, {"dp_shard": 2, "tp": 2}, {}),
    ("llama", 4, {"pp": 2, "tp": 2}, {}),
    ("qwen3", 4, {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "zbv"}}, {}),
    (
        "llama",
        4,
        {"pp": 2, "dp_shard": 2, "reshard_after_forward": True, "pipeline": {"schedule": "interleaved_1f1b"}},
        {},
    ),
    ("llama", 2, {"cp": 2}, {"recompute.mode": "full"}),
    ("llama", 2, {"cp": 2, "cp_method": "ulysses"}, {"recompute.mode": "selective"}),
    ("qwen3", 4, {"cp": 4, "cp_method": "ulysses"}, {"recompute": {"mode": "selective", "keep": ["attention"]}}),
    ("llama", 4, {"cp": 2, "tp": 2}, {"recompute.mode": "selective"}),
    ("llama", 2, {"dp_shard": 2, "overlap": {"reduce": "last", "forward_prefetch": 2}}, {}),
    ("llama", 4, {"dp_shard": 2, "tp": 2, "overlap": {"reduce": "last"}}, {}),
    ("llama", 4, {"pp": 2, "dp_shard": 2, "overlap": {"reduce": "each"}}, {}),
    ("qwen3", 4, {"pp": 2, "tp": 2, "overlap": {"reduce": "each"}}, {}),
    # Layers of several kinds, with sums of squares over tp, and norms behind the sums.
    ("mixed", 2, {"tp": 2}, {"recompute.mode": "selective"}),
    ("mixed", 2, {"tp": 2, "sequence_parallel": False}, {"recompute": {"mode": "selective", "keep": ["matmul"]}}),
    ("mixed", 4, {"cp": 2, "tp": 2}, {"recompute.mode": "full"}),
    ("branches", 2, {"tp": 2}, {"recompute.mode": "full"}),
    ("branches", 4, {"pp": 2, "dp_shard": 2}, {}),
    # Experts: on a mesh of their own, with exchanges of tokens; choices that ranks of a sample add up.
    ("mixtral", 2, {"dp_shard": 2}, _EVEN),
    ("mixtral", 4, {"dp_shard": 4, "ep": 2}, _EVEN),
    ("mixtral", 4, {"dp_shard": 2, "tp": 2, "ep": 2, "reshard_after_forward": False}, _EVEN),
    ("mixtral", 2, {"dp_shard": 2, "ep": 2}, {**_EVEN, "recompute.mode": "full"}),
    ("mixtral", 2, {"dp_shard": 2}, {**_EVEN, "recompute.mode": "full"}),
    ("mixtral", 2, {"dp_shard": 2, "ep": 2}, {**_EVEN, "recompute.mode": "selective"}),
    ("mixtral", 4, {"cp": 2, "tp": 2, "ep": 2}, _EVEN),
    ("mixtral", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, _EVEN),
    ("mixtral", 4, {"pp": 2, "dp_shard": 2, "ep": 2}, _EVEN),
    ("gpt_oss", 4, {"dp_shard": 2, "tp": 2}, _EVEN),
    ("deepseek", 2, {"tp": 2, "ep": 2}, {**_EVEN, "recompute.mode": "full"}),
    ("deepseek", 2, {"tp": 2, "ep": 2}, {**_EVEN, "recompute.mode": "selective"}),
    ("gpt_oss", 2, {"tp": 2, "ep": 2, "sequence_parallel": False}, _EVEN),
    ("gpt_oss", 2, {"tp": 2, "ep": 2, "sequence_parallel": False}, {**_EVEN, "recompute.mode": "full"}),
    # Latents that are sent in place of keys and values, and matrices that all ranks of tp have.
    ("latent", 2, {"tp": 2}, {"recompute": {"mode": "selective", "keep": ["matmul", "communication"]}}),
    ("latent", 2, {"cp": 2}, {"recompute.mode": "full"}),
    ("latent", 2, {"cp": 2, "cp_method": "ulysses"}, {}),
    ("latent", 4, {"cp": 2, "tp": 2}, {"recompute.mode": "selective"}),
    # Recurrences: states of pieces and ends of convolutions over cp, norms by groups and shared groups over tp, and
    # rates that are in fp32 whatever is computed in.
    ("mamba", 2, {"tp": 2}, {"recompute.mode": "full"}),
    ("one_group", 4, {"tp": 4}, {"recompute.mode": "selective"}),
    ("delta", 2, {"tp": 2, "sequence_parallel": False}, {"recompute": {"mode": "selective", "keep": ["matmul"]}}),
    ("one_group", 2, {"tp": 2, "sequence_parallel": False}, {}),
    ("mamba", 2, {"cp": 2}, {"recompute.mode": "full"}),
    ("mamba", 2, {"cp": 2, "cp_method": "ulysses"}, {"recompute.mode": "selective"}),
    ("delta", 2, {"cp": 2, "cp_method": "ulysses"}, {**_SIZES, "recompute.mode": "selective"}),
    ("one_group", 4, {"cp": 2, "tp": 2}, {"recompute.mode": "selective"}),
    ("delta", 4, {"cp": 2, "tp": 2}, {**_SIZES, "precision.compute": "bf16"}),
    ("mamba", 2, {"dp_shard": 2}, {"precision.compute": "bf16"}),
    ("delta", 2, {"dp_shard": 2}, {**_SIZES, "precision.compute": "bf16", "recompute.mode": "full"}),
    ("one_group", 4, {"dp_shard": 2, "tp": 2, "overlap": {"reduce": "last"}}, {"precision.compute": "bf16"}),
    ("one_group", 4, {"dp_shard": 2, "dp_replicate": 2}, {}),
    ("mamba", 4, {"pp": 2, "dp_shard": 2}, {"precision.compute": "bf16"}),
    ("one_group", 4, {"pp": 2, "tp": 2}, {}),
    ("delta", 4, {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "zbv"}}, _SIZES),
    ("delta", 4, {"pp": 2, "dp_shard": 2, "reshard_after_forward": True}, {**_SIZES, "precision.compute": "bf16"}),
    # Multi-token prediction.
    ("ahead", 2, {"tp": 2}, {"loss.chunk_tokens": 37, "recompute.mode": "full"}),
    ("ahead", 2, {"tp": 2, "sequence_parallel": False}, {"recompute.mode": "selective"}),
    ("ahead", 4, {"pp": 2, "dp_shard": 2}, {}),
    ("ahead_tied", 4, {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "zbv"}}, {}),
    ("ahead", 4, {"cp": 2, "tp": 2}, {}),
    ("ahead_tied", 4, {"dp_shard": 2, "tp": 2}, {}),
    # Encoders: parameters whole on all ranks before the layers and before the head, which scores some positions.
    ("bert", 2, {"tp": 2}, {"loss.chunk_tokens": 37}),
    ("bert", 2, {"tp": 2, "sequence_parallel": False}, {}),
    ("modernbert", 4, {"pp": 2, "tp": 2}, {}),
    ("modernbert", 4, {"pp": 2, "dp_shard": 2}, {}),
    ("bert", 2, {"cp": 2}, {"recompute.mode": "full"}),
    # Two sides: each layer sends its own, and attention to the encoder gathers that, too.
    ("sides", 2, {"tp": 2}, {"recompute.mode": "full"}),
    ("sides", 2, {"tp": 2}, {"recompute.mode": "selective"}),
    ("sides", 2, {"tp": 2, "sequence_parallel": False}, {}),
    ("t5", 4, {"pp": 2, "dp_shard": 2}, {}),
    ("t5", 4, {"pp": 2, "tp": 2}, {}),
    # More stages on a rank than torch keeps whole at a time.
    (
        "llama",
        4,
        {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 4}},
        {},
    ),
]


def cases() -> Iterator[Any]:
    for number, (family, world, parallel, train) in enumerate(CASES):
        words = [family, *(f"{key}_{value}" for key, value in parallel.items() if isinstance(value, int | str))]
        words += [key for key in train if key not in _EVEN | _SIZES]
        for section in ("pipeline", "overlap"):
            words += [str(value) for value in parallel.get(section, {}).values()]
        marks: Any = ([], pytest.mark.guard, pytest.mark.slow)[min(number, 2)]
        yield pytest.param(family, world, parallel, train, id="-".join(words), marks=marks)


@pytest.mark.parametrize(("family", "world", "parallel", "train"), list(cases()))
def test_bytes_are_those_that_are_sent(
    root: Path,
    tmp_path: Path,
    family: str,
    world: int,
    parallel: dict[str, Any],
    train: dict[str, Any],
) -> None:
    virtual = parallel.get("pipeline", {}).get("virtual_stages", 2)
    values = [
        f"run.dir={tmp_path / 'run'}",
        f"parallel={json.dumps(parallel)}",
        f"model.layers={2 * virtual if 'pipeline' in parallel else 2}",
        f"train.duration={STEP} steps",
        f"train.micro_batch_size={4 // parallel.get('pp', 1)}",
        "train.validation.samples=0",
        *(f"{'' if key in _SIZES else 'train.'}{key}={json.dumps(value)}" for key, value in train.items()),
    ]
    file = root / f"{family}.yaml"
    # New ones: torch remembers groups of an earlier run, and would use them for gradients of whole parameters.
    real = ranks.run(world, count, file, values, STEP, connect=False)
    on_paper = expected(load(file, [*values, f"launch.processes={world}"]), world)
    ranks_of_stage = world // len(on_paper)
    assert real == [on_paper[rank // ranks_of_stage] for rank in range(world)]


def test_what_a_rank_sends_of_a_collective() -> None:
    """Thakur et al. 2005: a ring moves (n - 1) / n of the whole for a gather, and twice that for an all-reduce."""

    def sent(operation: Any) -> float:
        return Transfer("tp", operation, "", "forward", 3, 1200, 4).sent

    assert sent("all_gather") == sent("reduce_scatter") == sent("all_to_all") == 900
    assert sent("all_reduce") == 1800 and sent("send") == 1200
    two = [Transfer("pp", "send", "", "forward", 1, 7, 2), Transfer("tp", "all_gather", "", "forward", 1, 8, 2)]
    assert bytes_by_axis([*two, *two]) == {"tp": 8, "pp": 14}
