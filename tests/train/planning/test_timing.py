"""Times of steps, against closed forms and against figures that others have published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.train import RecomputeConfig
from pipeline.train.distributed.layout import Layout, resolve
from pipeline.train.host.devices import DEVICES, Device
from pipeline.train.model.block import Block
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import expert_flops, flops_per_token, layer_parameters, num_parameters
from pipeline.train.model.loss import Criterion
from pipeline.train.model.mlps.experts.routing import Routing
from pipeline.train.model.recompute import Recompute
from pipeline.train.parallel.footprint import end_parameters
from pipeline.train.parallel.pipeline_stages import split_stages
from pipeline.train.parallel.step_shapes import StepShape, step_shapes
from pipeline.train.planning.timing import (
    LINK_SHARE,
    StepTime,
    _repeated,
    recompute_flops_per_token,
    step_time,
    transfer_seconds,
)
from pipeline.train.planning.traffic import Transfer
from pipeline.train.rules.layout_check import planned_spec
from tests.config.runfile import write

LLAMA_8B = "model={layers: 32, dim: 4096, heads: 32, kv_heads: 8, ffn_dim: 14336, vocab_size: 128256}"
LLAMA_405B = "model={layers: 126, dim: 16384, heads: 128, kv_heads: 8, ffn_dim: 53248, vocab_size: 128256}"
GPT_530B = (
    "model={layers: 105, dim: 20480, heads: 128, mlp: gelu, norm: layernorm, bias: all, positions: learned, "
    "tie_embeddings: true, vocab_size: 51200}"
)
H100, A100 = DEVICES["h100"], DEVICES["a100"]


class Case:
    """A run over so many processes."""

    def __init__(self, folder: Path, world: int, *values: str) -> None:
        self.config: Config = load(write(folder), ["tokenizer.train.vocab_size=300", *values])
        self.layout: Layout = resolve(self.config.parallel, world)
        self.spec: DecoderSpec = planned_spec(self.config)
        self.shape: StepShape = step_shapes(self.config, self.layout.dp)[0]

    def parameters(self) -> Sequence[int]:
        layout, spec = self.layout, self.spec
        counts = [0] * layout.pp
        for stage in split_stages(spec, layout.pp, self.config.parallel.pipeline, self.config.train.sequence_length):
            counts[stage.rank] += end_parameters(spec, stage.part, layout.tp)
            counts[stage.rank] += sum(layer_parameters(spec.layers[index], layout.tp) for index in stage.part.layers)
        return counts

    def time(self, device: Device) -> StepTime:
        return step_time(self.config, self.layout, self.spec, self.shape, device, self.parameters())

    def mfu(self, device: Device, *, causal: bool = False) -> float:
        tokens = self.shape.batch_size * self.shape.sequence_length
        flops = tokens * flops_per_token(self.spec, self.shape.sequence_length, causal=causal)
        return flops / (self.time(device).seconds.total * self.layout.world_size * device.flops["bf16"])


def train(length: int, batch: int, micro: int, more: str = "") -> str:
    return (
        f"train={{duration: 10 steps, sequence_length: {length}, batch_size: {batch}, micro_batch_size: {micro}{more}}}"
    )


def test_one_process_by_hand(tmp_path: Path) -> None:
    case = Case(tmp_path, 1, LLAMA_8B, train(8192, 4, 2))
    seconds, tokens = case.time(H100).seconds, 4 * 8192
    # Each matrix of a layer and the head: 2 FLOPs a weight forward, 4 backward; embedding and norms have none.
    weights = num_parameters(case.spec) - 128256 * 4096 - 65 * 4096
    assert seconds.products == pytest.approx(6 * tokens * weights / (0.6 * 989e12))
    # Scores and their sum, half of the square: 2 * 2 * D * S / 2 a token forward, 2.5 times that backward.
    scores = 3.5 * 32 * 2 * 4096 * 8192 * tokens
    assert seconds.attention == pytest.approx(scores / (0.6 * 0.6 * 989e12))
    assert seconds.optimizer == pytest.approx(40 * num_parameters(case.spec) / (0.8 * 3.35e12))
    bf16 = Case(tmp_path, 1, LLAMA_8B, train(8192, 4, 2, ", optimizer: {states: bf16}")).time(H100).seconds
    assert bf16.optimizer == pytest.approx(112 / 40 * seconds.optimizer)
    unclipped = Case(tmp_path, 1, LLAMA_8B, train(8192, 4, 2, ", optimizer: {clip_norm: null}")).time(H100).seconds
    assert unclipped.optimizer == pytest.approx(32 / 40 * seconds.optimizer)
    # Five times X X', its square, and that times X, of query and output, keys and values, and three of the mlp.
    square, key = 3 * 4096**3, 2 * 1024**2 * 4096 + 1024**3
    flops = 32 * 5 * 2 * (2 * square + 2 * key + 3 * (2 * 4096**2 * 14336 + 4096**3))
    for processes, share in ((1, 1), (8, 1 / 8)):
        muon, plain = (
            Case(tmp_path, processes, LLAMA_8B, train(8192, 16, 2, f", optimizer: {{type: {kind}}}")).time(H100).seconds
            for kind in ("muon", "adamw")
        )
        extra = muon.optimizer - plain.optimizer
        assert extra == pytest.approx(share * flops / (0.6 * 989e12), rel=0.02)
    assert seconds.bubble == seconds.recompute == 0 and not seconds.communication
    parts = (seconds.products, seconds.attention, seconds.elementwise, seconds.optimizer)
    assert seconds.total == pytest.approx(sum(parts))


@pytest.mark.parametrize(
    ("axis", "ranks", "operation", "bandwidth"),
    [
        ("tp", 8, "all_gather", 450e9),
        ("dp_shard", 2, "all_gather", 50e9),  # one rank of the group in each node: one adapter
        ("pp", 2, "send", 50e9),
    ],
)
def test_links_and_network(axis: Any, ranks: int, operation: Any, bandwidth: float) -> None:
    layout = Layout(pp=2, dp_shard=2, tp=8)
    transfer = Transfer(axis, operation, "", "forward", 1, 10**15, ranks)
    assert transfer_seconds(transfer, layout, H100) == pytest.approx(transfer.sent / bandwidth / LINK_SHARE, rel=1e-3)


def test_a_group_of_whole_nodes_has_all_their_adapters() -> None:
    transfer = Transfer("dp_shard", "all_gather", "", "forward", 1, 10**15, 64)
    seconds = transfer_seconds(transfer, Layout(dp_shard=64), H100)
    assert seconds == pytest.approx(transfer.sent / (8 * 50e9) / LINK_SHARE, rel=1e-3)


LAYOUTS = [
    ("parallel={tp: 8}", 64),
    ("parallel={dp_shard: -1}", 64),
    ("parallel={dp_shard: 8, dp_replicate: -1}", 64),
    ("parallel={tp: 4, pp: 4}", 64),
    ("parallel={tp: 2, pp: 2, cp: 2}", 64),
    ("parallel={tp: 2, cp: 4, cp_method: ulysses}", 64),
]


@pytest.mark.parametrize(("parallel", "world"), LAYOUTS)
def test_a_better_device_is_never_slower(tmp_path: Path, parallel: str, world: int) -> None:
    case = Case(tmp_path, world, LLAMA_8B, parallel, train(8192, 256, 1, ", recompute: {mode: full}"))
    before = case.time(H100).seconds.total
    better: dict[str, Any] = {
        "flops": {"bf16": 2 * 989e12},
        "memory_bandwidth": 2 * H100.memory_bandwidth,
        "link_bandwidth": 2 * H100.link_bandwidth,
        "network_bandwidth": 2 * H100.network_bandwidth,
    }
    for name, value in better.items():
        assert case.time(replace(H100, **{name: value})).seconds.total <= before * (1 + 1e-12), name
    all_ = case.time(replace(H100, **better)).seconds.total
    assert before / 2 * 0.999 <= all_ < before
    assert 0 < case.mfu(H100) < H100.products_share


def test_weights_that_travel_longer_than_a_layer_computes_are_waited_for(tmp_path: Path) -> None:
    case = Case(tmp_path, 64, LLAMA_8B, "parallel={dp_shard: -1}", train(8192, 64, 1))
    slow = replace(H100, network_bandwidth=1e9)
    hidden, waited = case.time(H100).seconds, case.time(slow).seconds
    assert hidden.communication["dp_shard"] < 0.02 * hidden.total
    computed = waited.products + waited.attention + waited.elementwise
    # Two gathers in bf16 and a reduce-scatter in fp32 of 63 / 64 of the weights, through 8 adapters of a node.
    sent = 8 * num_parameters(case.spec) * 63 / 64 / (8 * 1e9 * LINK_SHARE)
    # The head's weights are gathered once.
    assert computed + waited.communication["dp_shard"] == pytest.approx(sent, rel=0.07)


PUBLISHED = {
    # Grattafiori et al. 2024, table 4. Their schedule is interleaved, too; how many stages a rank has is not told.
    "llama 405B on 8,192 H100: 43 %": (
        (8192, LLAMA_405B, "parallel={tp: 8, pp: 16, pipeline: {schedule: interleaved_1f1b, virtual_stages: 4}}"),
        train(8192, 2048, 1),
        H100,
        0.43,
    ),
    "llama 405B on 16,384 H100: 41 %": (
        (16384, LLAMA_405B, "parallel={tp: 8, pp: 16, pipeline: {schedule: interleaved_1f1b, virtual_stages: 4}}"),
        train(8192, 2048, 1),
        H100,
        0.41,
    ),
    # Korthikanti et al. 2022, abstract; three stages on a rank.
    "GPT 530B on 2,240 A100: 54.2 %": (
        (2240, GPT_530B, "parallel={tp: 8, pp: 35, pipeline: {schedule: interleaved_1f1b, virtual_stages: 3}}"),
        train(2048, 2240, 1, ", recompute: {mode: selective, keep: [matmul, communication]}"),
        A100,
        0.542,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_are_met_within_a_fifth(tmp_path: Path, name: str) -> None:
    (world, *values), steps, device, mfu = PUBLISHED[name]
    assert Case(tmp_path, world, *values, steps).mfu(device) == pytest.approx(mfu, rel=0.2)


def test_torchtitan_is_met_within_a_half(tmp_path: Path) -> None:
    """Its benchmarks of December 2024: 6,667 tokens/s a GPU, on cards with 500 W instead of 700 and slower memory."""
    steps = train(8192, 16, 2, ", recompute: {mode: selective}")
    case = Case(tmp_path, 8, LLAMA_8B, "parallel={dp_shard: -1}", steps)
    rate = 16 * 8192 / case.time(H100).seconds.total / 8
    assert 6667 < rate < 1.5 * 6667


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(mode="full"),
        RecomputeConfig(mode="full", every=2),
        RecomputeConfig(mode="selective"),
        RecomputeConfig(mode="selective", keep=["attention"]),
    ],
    ids=["full", "every second", "selective", "attention kept"],
)
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_recomputation_is_what_torch_counts(tmp_path: Path, recompute: RecomputeConfig, mlp: str) -> None:
    """The matrix products of projections; torch's counter knows no attention kernel of a CPU."""
    case = Case(tmp_path, 1, f"model={{layers: 4, dim: 64, heads: 4, kv_heads: 2, mlp: {mlp}}}", train(32, 2, 2))
    more = _products(case.spec, recompute) - _products(case.spec, RecomputeConfig())
    attention = {"full": 2.0 * 64 * 32 * (4 // recompute.every), "selective": 0.0}[recompute.mode]
    assert more == 2 * 32 * (recompute_flops_per_token(recompute, case.spec, 32) - attention)


EXPERTS = "model={layers: 4, dim: 64, heads: 4, kv_heads: 2, mlp: experts, experts: {count: 8, top_k: 2, ffn_dim: 32}}"


def test_products_of_experts_by_hand(tmp_path: Path) -> None:
    """Those that a token goes to count, at the speed of their sides; where tokens are few, reading the weights does."""
    many = Case(tmp_path, 1, EXPERTS, train(4096, 4, 4))
    dense = Case(tmp_path, 1, "model={layers: 4, dim: 64, heads: 4, kv_heads: 2, mlp: none}", train(4096, 4, 4))
    tokens, rate = 4 * 4096, 0.6 * 989e12
    more = many.time(H100).seconds.products - dense.time(H100).seconds.products
    router, experts = 6 * tokens * 4 * 8 * 64 / rate, 6 * tokens * 4 * 2 * 3 * 32 * 64 / rate
    assert more == pytest.approx(router + experts * (32 + 512) / 32, rel=1e-6)
    assert many.time(H100).seconds.communication == {}
    few = Case(tmp_path, 1, EXPERTS.replace("count: 8", "count: 4096"), train(32, 1, 1))
    other = Case(tmp_path, 1, "model={layers: 4, dim: 64, heads: 4, kv_heads: 2, mlp: none}", train(32, 1, 1))
    more = few.time(H100).seconds.products - other.time(H100).seconds.products
    router, read = 6 * 32 * 4 * 4096 * 64 / rate, 3 * 4 * 2 * 3 * 4096 * 32 * 64 / (0.8 * 3.35e12)
    assert more == pytest.approx(router + read, rel=1e-6)


def test_groups_of_experts_have_the_nearest_ranks(tmp_path: Path) -> None:
    """ep 8 stays within a node; what its shards gather goes between nodes, and 16 of ep through the network."""
    wide = EXPERTS.replace("count: 8", "count: 16").replace("dim: 64", "dim: 2048")
    seconds = {}
    for ep in (8, 16):
        steps = train(4096, 64, 1)
        case = Case(tmp_path, 64, wide, f"parallel={{ep: {ep}}}", steps)
        found = case.time(H100)
        seconds[ep] = found.seconds.communication["ep"]
        shards = next(each for each in found.traffic[0] if each.axis == "expert_shards")
        assert shards.ranks == 64 // ep
    assert seconds[16] > 4 * seconds[8]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_of_experts_is_what_torch_counts(tmp_path: Path, mode: Any) -> None:
    case = Case(tmp_path, 1, EXPERTS, train(32, 2, 2))
    recompute = RecomputeConfig(mode=mode, keep=["attention"])
    before, after = (_grouped(case.spec, each) for each in (RecomputeConfig(), recompute))
    assert before == 3 * 2 * 32 * sum(map(expert_flops, case.spec.layers))
    again = sum(_repeated(recompute, layer, 32, causal=True)[1] for layer in case.spec.layers)
    assert after - before == 2 * 32 * again > 0


def _grouped(spec: DecoderSpec, recompute: RecomputeConfig) -> int:
    """FLOPs of the products of experts in a training step."""
    model = Decoder(spec)
    for index, layer in model.layers.items():
        assert isinstance(layer, Block)
        layer.recompute = Recompute.of_layer(recompute, int(index), spec.layers[int(index)])
        layer.mlp.experts.recompute = Recompute.of_experts(recompute, int(index), spec.layers[int(index)])
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    routing = Routing(2, 2, 32, 0.01, "sequence", 0.0)
    context = Context(length=32, criterion=Criterion(tokens, torch.ones(2, 32)), routing=routing)
    with FlopCounterMode(display=False) as counter:
        model(tokens, context).total.backward()
    return sum(flops for operation, flops in counter.get_flop_counts()["Global"].items() if "grouped" in str(operation))


def _products(spec: DecoderSpec, recompute: RecomputeConfig) -> int:
    model = Decoder(spec)
    for index, layer in model.layers.items():
        assert isinstance(layer, Block)
        layer.recompute = Recompute.of_layer(recompute, int(index), spec.layers[int(index)])
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    context = Context(length=32, criterion=Criterion(tokens, torch.ones(2, 32)))
    with FlopCounterMode(display=False) as counter:
        model(tokens, context).total.backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in counts.items() if str(operation) in ("aten.mm", "aten.addmm"))
