"""A kind of mixer that the package does not know, in this file alone: a gated causal convolution.

It is trained, cut over tp, pipelined, saved, planned and generated with, beside attention layers of several windows.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, get_args
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pipeline.train.model.decoder_spec
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.base import Section
from pipeline.config.model import ModelConfig
from pipeline.config.train import Fp8Config, RecomputeConfig
from pipeline.train.distributed.process_group import destroy
from pipeline.train.fp8.matrices import fp8_matrices
from pipeline.train.host.devices import DEVICES
from pipeline.train.huggingface.registry import FAMILIES
from pipeline.train.huggingface.tensors import map_tensors
from pipeline.train.model.context import LayerContext
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import MIXERS, MLPS, decoder_spec, layer_specs
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.model.init import init_weights
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.fp32_vectors import Fp32Vectors
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.parameter_spec import Matrix, Normal, Uniform, Vector
from pipeline.train.model.part_spec import Division, LayerSpec, MixerSpec
from pipeline.train.model.recompute import Recompute
from pipeline.train.model.states import MixerState
from pipeline.train.planning.plan import plan
from pipeline.train.rules.layout import check_layout
from tests import tiers
from tests.train.distributed import ranks
from tests.train.distributed.ranks import Ranks
from tests.train.model.decoders import check_states
from tests.train.parallel import layouts
from tests.train.runs import exact, train, weights_hash

REPOSITORY = Path(__file__).parents[3]


class GatedConvolutionConfig(Section):
    """What a `model:` section would have."""

    channels: int = 32
    taps: int = 4


@dataclass(frozen=True)
class GatedConvolutionSpec(MixerSpec):
    """wo(silu(wg x) * conv(wu x)), each channel with taps of its own, which end where a document begins."""

    dim: int
    channels: int
    taps: int

    label: ClassVar = "gated convolution"

    @classmethod
    def of(cls, model: ModelConfig, config: GatedConvolutionConfig) -> GatedConvolutionSpec:
        return cls(model.dim, config.channels, config.taps)

    def build(self) -> GatedConvolution:
        return GatedConvolution(self)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        return (
            Matrix("wu", self.channels, self.dim, "rows"),
            Matrix("wg", self.channels, self.dim, "rows", fp8=False),
            Matrix("wo", self.dim, self.channels, "columns", to_residual=True),
        )

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return (
            Vector("filters", (self.channels, self.taps), Normal(0.25, 0.1)),
            Vector("decay.shift", (self.channels,)),
            Vector("decay.rate", (self.channels,), Uniform(1, 16, "log")),
            Vector("decay.step", (self.channels,), Uniform(-7.0, -2.0, "inverse_softplus_of_exp")),
        )

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        return ("decay",)

    @property
    def divisions(self) -> tuple[Division, ...]:
        return (Division("channels", self.channels),)

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        return 2.0 * self.channels * self.taps

    def elementwise_numbers(self, tp: int) -> float:
        return (self.taps + 4) * self.channels / tp

    def kept_numbers(self, tp: int) -> float:
        return 3 * self.channels / tp

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        return 2 * self.channels / tp if "matmul" in keep else 0.0

    def most_numbers(self, sequence_length: int) -> int:
        return 40 * self.channels


class Tail:
    """The last inputs of the convolution, [rows, taps - 1, channels]."""

    def __init__(self, taps: int) -> None:
        self._taps = taps
        self._tail: Tensor | None = None

    def append(self, u_BSC: Tensor, counts: Sequence[int]) -> Tensor:
        before = u_BSC.new_zeros(len(u_BSC), self._taps - 1, u_BSC.shape[2])
        if self._tail is not None:
            before = self._tail[: len(u_BSC)]
        whole = torch.cat((before, u_BSC), dim=1)
        self._tail = torch.stack([whole[row, count : count + self._taps - 1] for row, count in enumerate(counts)])
        return whole

    def join(self, other: Tail, lengths: Sequence[int], more: Sequence[int]) -> None:
        assert other._tail is not None
        own = other._tail[:0] if self._tail is None else self._tail[: len(lengths)]
        self._tail = torch.cat((own, other._tail[: len(more)]))

    def move(self, source: int, target: int, length: int) -> None:
        assert self._tail is not None
        self._tail[target] = self._tail[source]


class GatedConvolution(nn.Module):
    def __init__(self, spec: GatedConvolutionSpec) -> None:
        super().__init__()
        self.taps = spec.taps
        self.wu = nn.Linear(spec.dim, spec.channels, bias=False)
        self.wg = nn.Linear(spec.dim, spec.channels, bias=False)
        self.wo = nn.Linear(spec.channels, spec.dim, bias=False)
        self.filters = nn.Parameter(torch.empty(spec.channels, spec.taps))
        self.decay = Fp32Vectors(spec, "decay")

    def new_state(self, max_length: int | None) -> Tail:
        return Tail(self.taps)

    def forward(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        u_BSC, length = self.wu(x_BSD), x_BSD.shape[1]
        if state is None:
            whole = F.pad(u_BSC, (0, 0, self.taps - 1, 0))
        else:
            assert isinstance(state, Tail)
            whole = state.append(u_BSC, context.counts or [length] * len(u_BSC))
        filters, shift, rate, step = map(own, (self.filters, self.decay.shift, self.decay.rate, self.decay.step))
        assert shift.dtype == rate.dtype == torch.float32
        y_BSC = (shift + torch.exp(-rate.exp() * F.softplus(step))).expand_as(u_BSC)
        for tap in range(self.taps):
            back = self.taps - 1 - tap
            term = (whole[:, tap : tap + length] * filters[:, tap]).float()
            if context.bounds_BS is not None:
                seen_BS = torch.arange(length) - back >= context.bounds_BS
                term = term * seen_BS[..., None]
            y_BSC = y_BSC + term
        out: Tensor = self.wo(F.silu(self.wg(x_BSD)) * y_BSC.to(u_BSC.dtype))
        return out


def own(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def mixed_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Convolutions between attention within a window and to all, with mlps of two sizes."""
    (given,) = {id(layer): layer for layer in layer_specs(config)}.values()
    convolution = GatedConvolutionSpec.of(config, GatedConvolutionConfig())
    near = AttentionSpec.of(config, config.model_copy(update={"sliding_window": 3}))
    wide = MlpSpec.of(config, config.model_copy(update={"ffn_dim": 128}))
    pattern = (
        LayerSpec(convolution, given.mlp, given.norm),
        LayerSpec(near, wide, given.norm),
        given,
        LayerSpec(convolution, wide, given.norm),
    )
    return tuple(pattern[index % 4] for index in range(config.layers))


@contextmanager
def registered() -> Iterator[None]:
    with mock.patch.object(pipeline.train.model.decoder_spec, "layer_specs", mixed_layers):
        yield


@pytest.fixture
def kind() -> Iterator[None]:
    with registered():
        yield


CONFIG = ModelConfig(layers=4, dim=32, heads=4, kv_heads=2, ffn_dim=48, vocab_multiple=10)
RUN = {
    "run": {"dir": "x"},
    "data": {"sources": [{"name": "s", "type": "text", "paths": ["a"]}]},
    "tokenizer": {"train": {"vocab_size": 300}},
    "model": {**CONFIG.model_dump(exclude_unset=True), "vocab_size": 300},
}
TRAIN = {
    "duration": "10 steps",
    "sequence_length": 64,
    "batch_size": 4,
    "micro_batch_size": 2,
    "optimizer": {"lr": 1e-3},
}


def decoder() -> Decoder:
    spec = decoder_spec(CONFIG, 97, 64)
    model = Decoder(spec)
    init_weights(model, spec, CONFIG.init, 7)
    return model


def config_of(**parallel: Any) -> Config:
    return Config.model_validate({**RUN, "train": TRAIN, "parallel": parallel})


def test_no_module_names_it() -> None:
    words = ("gatedconvolution", "gated convolution", "gated_convolution")
    for folder in ("pipeline", "slurm"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            assert not any(word in path.read_text().lower() for word in words), path


@pytest.mark.usefixtures("kind")
def test_numbers() -> None:
    model = decoder()
    spec = model.spec
    assert len(spec.different_layers) == 4
    assert num_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())
    matrices = 2 * 3 * 32 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16) + 2 * 3 * 32 * (48 + 128) + 32 * 97
    scores = 4 * 32 * (3 - 3**2 / 128 + 32)
    assert flops_per_token(spec, 64, causal=True) == 3 * (2 * matrices + 2 * 2 * 32 * 4 + scores)
    values = model.get_parameter("layers.0.mixer.filters")
    assert abs(values.mean() - 0.25) < 0.05 and abs(values.std() - 0.1) < 0.03
    assert not model.get_parameter("layers.0.mixer.decay.shift").any()
    rate, step = (model.get_parameter(f"layers.0.mixer.decay.{name}") for name in ("rate", "step"))
    assert 0 <= rate.min() < 1.5 and 2 < rate.max() <= math.log(16)
    steps = F.softplus(step).log()
    assert -7 <= steps.min() < -6 and -3 < steps.max() <= -2
    fp8 = fp8_matrices(Fp8Config(min_size=16), spec, tp=1)
    assert [each.name for each in fp8[0]] == ["mixer.wu", "mixer.wo", "mlp.w1", "mlp.w3", "mlp.w2"]
    selective = RecomputeConfig(mode="selective")
    needless = [Recompute.of_layer(selective, 0, spec.layers[0], tp).needless for tp in (1, 2)]  # type: ignore[union-attr]
    assert needless == [{5}, {2, 5}]


@pytest.mark.usefixtures("kind")
def test_what_it_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"parallel.cp=2 .* gated convolution cannot compute on shards of sequences"):
        check_layout(config_of(cp=2), 2)
    with pytest.raises(UserError, match=r"model.channels=32 cannot be cut over parallel.tp=3"):
        check_layout(config_of(tp=3), 3)
    with pytest.raises(UserError, match=r"layer 0 has gated convolution"):
        map_tensors(FAMILIES["llama"], decoder_spec(CONFIG, 97, 64))
    assert check_layout(config_of(tp=2), 2).tp == 2
    with (
        mock.patch.object(GatedConvolutionSpec, "divisions", None),
        pytest.raises(UserError, match=r"parallel.tp=2: gated convolution cannot be cut over processes: set paral"),
    ):
        check_layout(config_of(tp=2), 2)


def test_each_value_of_the_key_has_a_kind() -> None:
    for name, table in (("mixer", MIXERS), ("mlp", MLPS)):
        assert get_args(get_args(ModelConfig.model_fields[name].annotation)[0]) == (*table, "none")


@pytest.mark.guard
@pytest.mark.usefixtures("kind")
def test_plan() -> None:
    destroy()  # a training of this process may have come before
    found = plan(config_of(tp=2, pp=2), DEVICES["h100"], 4)
    assert num_parameters(found.model.spec) == num_parameters(decoder_spec(CONFIG, 300, 64))
    assert found.peak_bytes > 0 and found.main.seconds.total > 0


@pytest.mark.usefixtures("kind")
def test_a_document_is_computed_as_if_alone() -> None:
    model, tokens = decoder(), torch.arange(20)[None] * 7 % 97
    bounds = torch.zeros(1, 20, dtype=torch.int64)
    bounds[:, 8:] = 8
    together = model(tokens, Context(bounds_BS=bounds))[..., :97]
    torch.testing.assert_close(together[:, :8], model(tokens[:, :8], Context())[..., :97])
    torch.testing.assert_close(together[:, 8:], model(tokens[:, 8:], Context())[..., :97])


@pytest.mark.usefixtures("kind")
def test_generation_has_its_own_state() -> None:
    """Rows of unequal lengths, of which one joins and one leaves, against whole forward passes."""
    check_states(decoder(), torch.stack([torch.arange(start, start + 12) * 5 % 97 for start in (0, 40)]))


VALUES = ("model.layers=4", "model.document_attention=true", "train.duration=4 steps")


@pytest.mark.usefixtures("kind")
def test_trained_saved_and_resumed(root: Path) -> None:
    straight = train(root, "straight", *VALUES, "train.recompute.mode=selective", "train.checkpoint.every_steps=2")
    half = "checkpoints/step-00000002"
    shutil.copytree(straight / half, root / "resumed" / half)
    resumed = train(root, "resumed", *VALUES)
    assert exact(resumed) == exact(straight)[2:]
    assert weights_hash(resumed) == weights_hash(straight)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(
    "value", tiers.first(1, ("train.recompute.mode=full", "train.compile=true"), rest="slow"), ids=str
)
def test_vectors_of_fp32_modules_stay_so_in_16_bits(root: Path, value: str) -> None:
    """The module itself looks at them in every pass."""
    run = train(root, value, *VALUES, "train.precision.compute=bf16", "train.duration=2 steps", value)
    assert all(row["grad_norm"] > 0 for row in exact(run))


@pytest.mark.guard
@pytest.mark.parametrize(
    "degrees", tiers.first(1, [{"tp": 2}, {"dp_shard": 2}, {"pp": 2}], rest="slow"), ids=lambda each: next(iter(each))
)
def test_a_layout_computes_what_one_process_does(
    laid_out: Path, processes: Callable[[int], Ranks], degrees: dict[str, int]
) -> None:
    run = laid_out / "-".join(degrees)
    micro = layouts.BATCH_SIZE // degrees.get("dp_shard", 1) // 4
    values = [f"parallel={json.dumps(degrees)}", "model.layers=4", f"train.micro_batch_size={micro}"]
    seed = f"checkpoints/step-{layouts.SEED_STEP:08d}"
    (run / "checkpoints").mkdir(parents=True)
    (run / seed).symlink_to(laid_out / "one" / seed)
    processes(2).call(_on_layout, laid_out, run, values)
    assert layouts.differences(run, laid_out / "one") == []


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    layouts.write(folder)
    ranks.run(1, _alone, folder, connect=False)
    return folder


def _alone(folder: Path) -> None:
    with registered():
        layouts._run_one(folder, "llama", folder / "one", 4)


def _on_layout(folder: Path, run: Path, values: list[str]) -> None:
    with registered():
        layouts._run_layout(folder, "llama", run, folder / "one", values)
