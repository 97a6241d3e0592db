"""Optimizers on any layout: with the gradients of one process they compute its bits, whoever has what of a matrix."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.loop import trainer
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.init import is_layer_matrix
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import ParallelModel, build_model
from pipeline.train.parallel.setup import set_up
from pipeline.train.torch_compat.core import with_local
from tests.train.checkpoint.test_reshard import tensors_of
from tests.train.distributed import ranks
from tests.train.distributed.ranks import Ranks
from tests.train.one_process import config_of
from tests.train.parallel import layouts
from tests.train.runs import column, exact, weights_hash

pytestmark = pytest.mark.parallel

CPU = torch.device("cpu")
MODEL = ModelConfig.model_validate(
    {
        **{"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 52, "qk_norm": True, "vocab_multiple": 16},
        "pattern": ["dense", "routed"],
        "kinds": {"dense": {}, "routed": {"mlp": "experts"}},
        "experts": {"count": 4, "top_k": 2, "ffn_dim": 16, "bias": True},
    }
)
SPEC = decoder_spec(MODEL, 61, 16)
LR, STEPS, WITHHELD = 1e-2, 4, 2
GROUPS = [
    {"match": ["embedding.weight", "layers.1.*"], "lr_scale": 0.5, "weight_decay": 0.2},
    {"match": "layers.*.mixer.w[qk].*", "lr_scale": 2},
    {"match": "*norm*", "weight_decay": 0.3},
]
KINDS: dict[str, dict[str, Any]] = {
    "adamw-bf16": {"states": "bf16"},
    "muon": {"type": "muon"},
    "muon-bf16": {"type": "muon", "states": "bf16"},
    "muon-groups": {"type": "muon", "groups": GROUPS},
}
SLOW = pytest.mark.slow


def updated(degrees: dict[str, int], keys: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and states of this rank's parts, whole, after some steps with known gradients."""
    parallel, optimizer = Layout(**degrees).settings, {"lr": LR, **keys}
    config = config_of(MODEL, parallel=parallel, sequence_length=16, precision={"compute": "fp32"}, optimizer=optimizer)
    model = build_model(config, set_up(config, 61, CPU))
    optimizers = Optimizers(config, model)
    for step in range(STEPS):
        _give(model, step)
        optimizers.step(LR, torch.tensor(step != WITHHELD))
    found: dict[str, Tensor] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers.all():
        for parameter, values in optimizer.state.items():
            for key, value in {**values, "weight": parameter.detach()}.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{names[parameter]} {key}"] = whole.clone()
    return found


def _give(model: ParallelModel, step: int) -> None:
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(1000 * step + len(name) + sum(map(ord, name)))
        gradient = torch.randn(parameter.shape, generator=generator)
        if step == WITHHELD:
            gradient[0] = float("nan")
        own = layouts.own_part(parameter, gradient)
        parameter.grad = with_local(parameter, own)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, Tensor]]:
    return {kind: ranks.run(1, updated, {}, keys)[0] for kind, keys in KINDS.items()}


@pytest.fixture(scope="module")
def connected() -> Iterator[Callable[[int], Ranks]]:
    """So many connected processes, kept from one test to the next."""
    kept: dict[int, Ranks] = {}
    with ExitStack() as stack:

        def get(world: int) -> Ranks:
            if world not in kept or kept[world].failed:
                kept[world] = stack.enter_context(Ranks(world, connect=True))
            return kept[world]

        yield get


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, id="hsdp", marks=SLOW),
        pytest.param({"dp_shard": 2, "tp": 2}, id="fsdp2-tp2", marks=pytest.mark.guard),
        pytest.param({"dp_shard": 2, "tp": 2, "ep": 2}, id="fsdp2-tp2-ep2", marks=SLOW),
        pytest.param({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2}, id="pp2-hsdp-ep2", marks=SLOW),
        pytest.param({"tp": 4}, id="tp4-shared-keys", marks=SLOW),
        pytest.param({"pp": 2, "dp_shard": 2}, id="pp2-fsdp2", marks=pytest.mark.guard),
        pytest.param({"dp_shard": 2, "cp": 2}, id="fsdp2-cp2", marks=SLOW),
        pytest.param({"pp": 2, "tp": 2}, id="pp2-tp2", marks=SLOW),
        pytest.param({"pp": 4}, id="pp4", marks=SLOW),
        pytest.param({"dp_shard": 2}, id="fsdp2", marks=SLOW),
        pytest.param({"dp_shard": 3}, id="fsdp3", marks=SLOW),
        pytest.param({"dp_replicate": 2}, id="ddp2", marks=SLOW),
        pytest.param({"tp": 2}, id="tp2", marks=SLOW),
        pytest.param({"pp": 2, "dp_shard": 2, "tp": 2}, id="pp2-fsdp2-tp2", marks=SLOW),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, id="hsdp-tp2", marks=SLOW),
        pytest.param({"dp_shard": 2, "cp": 2, "tp": 2}, id="fsdp2-cp2-tp2", marks=SLOW),
        pytest.param({"dp_shard": 2, "tp": 4}, id="fsdp2-tp4-shared-keys", marks=SLOW),
        pytest.param({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, id="pp2-hsdp", marks=SLOW),
    ],
)
def test_with_the_gradients_of_one_process_there_are_its_bits(
    one: dict[str, dict[str, Tensor]], connected: Callable[[int], Ranks], degrees: dict[str, int]
) -> None:
    processes = connected(Layout(**degrees).world_size)
    for kind, keys in KINDS.items():
        found: dict[str, Tensor] = {}
        for part in processes.call(updated, degrees, keys):
            for name, value in part.items():
                assert name not in found or torch.equal(found[name], value), (kind, name)
                found[name] = value
        assert found.keys() == one[kind].keys()
        for name, value in found.items():
            # torch's AdamW rounds the elements at the end of a shard, and those that it vectorizes, differently.
            alike = "muon" in kind and is_layer_matrix(name.split()[0], SPEC)
            torch.testing.assert_close(
                value, one[kind][name], rtol=0 if alike else 1e-6, atol=0 if alike else 1e-8, msg=f"{kind} {name}"
            )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optim")
    layouts.write(folder)
    return folder


def train(root: Path, processes: Callable[[int], Ranks], name: str, layout: Layout, *values: str) -> Path:
    """A run in `root / name` to the end."""
    parallel = orjson.dumps({**layout.degrees}).decode()
    micro = layouts.BATCH_SIZE // layout.dp // (4 if layout.pp > 1 else 1)
    values = (f"run.dir={root / name}", f"parallel={parallel}", f"train.micro_batch_size={micro}", *values)
    processes(layout.world_size).call(_train, root / "llama.yaml", values)
    return root / name


def _train(file: Path, values: Sequence[str]) -> None:
    trainer.train(load(file, ["model.layers=4", "train.checkpoint={every_steps: 2, keep: 9}", *values]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("muon", Layout(dp_shard=2, tp=2), id="muon-fsdp2-tp2", marks=SLOW),
        pytest.param("adamw-bf16", Layout(dp_shard=2), id="adamw-bf16-fsdp2", marks=SLOW),
        pytest.param("muon-groups", Layout(dp_shard=2), id="muon-groups-fsdp2"),
        pytest.param("muon-bf16", Layout(pp=2, dp_shard=2), id="muon-bf16-pp2-fsdp2", marks=SLOW),
        pytest.param("muon", Layout(cp=2), id="muon-cp2", marks=SLOW),
        pytest.param("muon", Layout(dp_replicate=2, dp_shard=2), id="muon-hsdp", marks=SLOW),
        pytest.param("muon", Layout(pp=2, dp_shard=2, tp=2), id="muon-pp2-fsdp2-tp2", marks=SLOW),
        pytest.param("muon-bf16", Layout(pp=2, dp_shard=2, tp=2), id="muon-bf16-pp2-fsdp2-tp2", marks=SLOW),
    ],
)
def test_runs_go_as_in_one_process_and_on_from_each_other(
    root: Path, processes: Callable[[int], Ranks], kind: str, layout: Layout
) -> None:
    keys = [f"train.optimizer.{key}={orjson.dumps(value).decode()}" for key, value in KINDS[kind].items()]
    name = f"{kind}-{'-'.join(map(str, layout.degrees.values()))}"
    alone, many = (train(root, processes, f"{name}-{n}", each, *keys) for n, each in (("1", Layout()), ("n", layout)))
    for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-2)):
        assert column(many, key) == pytest.approx(column(alone, key), rel=tolerance)
    # As if it had been killed after step 5: the same layout goes on bit for bit, one process near it.
    for target, goes_on in ((layout, f"{name}-on"), (Layout(), f"{name}-moved")):
        shutil.copytree(many / "checkpoints" / "step-00000004", root / goes_on / "checkpoints" / "step-00000004")
        run = train(root, processes, goes_on, target, *keys)
        if target == layout:
            assert exact(run) == exact(many)[4:]
            assert weights_hash(run) == weights_hash(many)
        else:
            assert column(run, "loss") == pytest.approx(column(many, "loss")[4:], rel=1e-4)
    stored = tensors_of(many, 4)
    wide = {key for key, value in stored.items() if key.startswith("optimizer.state.") and value.ndim}
    assert {stored[key].dtype for key in wide} == {torch.bfloat16 if "bf16" in kind else torch.float32}
    assert any(key.endswith("momentum_buffer") for key in wide) == ("muon" in kind)
