"""A mixer and an mlp of another package: computed, trained, cut, planned, continued and refused as ours are."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed.process_group import destroy
from pipeline.train.host.devices import DEVICES
from pipeline.train.huggingface.configs import to_hf_config
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.model.part_spec import Division, LayerPartSpec
from pipeline.train.model.plugins.check import check_layers
from pipeline.train.parallel.tested import TESTED, WITHIN_LAYERS
from pipeline.train.planning.plan import plan
from pipeline.train.rules.layout import check_layout
from tests import tiers, tiny
from tests.plugins.installed import installed
from tests.train.distributed.ranks import Ranks, kept_ranks
from tests.train.model.decoders import check_states, uneven_decoder
from tests.train.one_process import config_of
from tests.train.parallel import layouts
from tests.train.runs import exact, start, train, weights_hash

VOCAB, LENGTH, TAPS = 31, 13, 4
MODEL: dict[str, Any] = {
    "layers": 2,
    "dim": 16,
    "ffn_dim": 20,
    "vocab_multiple": 1,
    "document_attention": True,
    "mixer": "example.short_conv",
    "mixer_options": {"channels": 24, "taps": TAPS},
    "mlp": "example.signed_relu2",
}
RUN: dict[str, Any] = {
    "model.document_attention": True,
    "model.layers": 4,
    "model.pattern": ["near", "far"],
    "model.kinds": {"near": {"mixer": "example.short_conv"}, "far": {}},
    "model.mlp": "example.signed_relu2",
    "model.ffn_dim": 48,
    "train.checkpoint.every_steps": 2,
    "train.duration": "4 steps",
}
"""Convolutions between attention."""


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("installed")):
        yield


def model_of(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({**MODEL, **keys})


def decoder(**keys: Any) -> Decoder:
    return uneven_decoder(model_of(**keys), VOCAB, seed=7)


def plain(model: Decoder, tokens_S: Tensor, first_S: list[int]) -> Tensor:
    """Logits of one sequence, position by position and channel by channel; `first_S` is where documents begin."""
    w = dict(model.named_parameters())
    stream = [w["embedding.weight"][token] for token in tokens_S]

    def normed(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-5) * w[name]

    for layer in (f"layers.{index}." for index in range(len(model.layers))):
        inputs = [normed(x, f"{layer}mixer_norm.weight") for x in stream]
        b, c, u = ([w[f"{layer}mixer.{name}.weight"] @ x for x in inputs] for name in ("wb", "wc", "wu"))
        for place, taps in enumerate(w[f"{layer}mixer.taps"] for _ in stream):
            convolved = torch.zeros_like(b[0])
            for back in range(TAPS):
                if place - back >= first_S[place]:
                    convolved = convolved + taps[:, TAPS - 1 - back] * b[place - back] * u[place - back]
            stream[place] = stream[place] + w[f"{layer}mixer.wo.weight"] @ (c[place] * convolved)
        for place, x in enumerate(stream):
            hidden = w[f"{layer}mlp.w1.weight"] @ normed(x, f"{layer}mlp_norm.weight")
            squares = torch.where(hidden > 0, hidden**2, -w[f"{layer}mlp.slope"] * hidden**2)
            stream[place] = x + w[f"{layer}mlp.w2.weight"] @ squares
    return torch.stack([w["head.weight"] @ normed(x, "norm.weight") for x in stream])


def test_logits_and_gradients_are_those_of_plain_loops() -> None:
    """Two documents in a sequence: one does not see the other."""
    model, tokens = decoder(), torch.arange(LENGTH) * 7 % VOCAB
    first = [0] * 6 + [6] * (LENGTH - 6)
    weights = torch.randn(LENGTH, VOCAB, generator=torch.Generator().manual_seed(1))
    found = []
    for logits in (
        model(tokens[None], Context(bounds_BS=torch.tensor([first])))[0],
        plain(model, tokens, first),
    ):
        model.zero_grad()
        (logits * weights).sum().backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own_state", [True, False])
def test_generation(own_state: bool) -> None:
    """Rows of unequal lengths, of which one joins and one leaves; a mixer without a state computes all again."""
    model = decoder()
    if not own_state:
        for block in model.blocks:
            block.mixer = Stateless(block.get_submodule("mixer"))
    check_states(model, torch.stack([torch.arange(start, start + 12) * 5 % VOCAB for start in (0, 40)]))


class Stateless(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, *arguments: Any) -> Tensor:
        assert arguments[2] is None
        out: Tensor = self.mixer(*arguments)
        return out


def test_counts() -> None:
    model = decoder()
    matrices, taps = 4 * 16 * 24 + 2 * 16 * 20, 24 * TAPS
    layer = matrices + taps + 20 + 2 * 16
    assert num_parameters(model.spec) == 2 * layer + 2 * VOCAB * 16 + 16
    assert num_parameters(model.spec) == sum(each.numel() for each in model.parameters())
    assert flops_per_token(model.spec, 32, causal=True) == 3 * 2 * (2 * (matrices + taps) + VOCAB * 16)
    assert (model.get_parameter("layers.0.mlp.slope") - 0.25).abs().max() < 0.5


@pytest.mark.guard
def test_plan() -> None:
    destroy()  # a training of this process may have come before
    found = plan(config(tp=2, pp=2), DEVICES["h100"], 4)
    assert found.peak_bytes > 0 and found.main.seconds.total > 0


def config(model: dict[str, Any] | None = None, **parallel: int) -> Config:
    values = {**MODEL, "vocab_multiple": 16, "vocab_size": 300, **(model or {})}
    return config_of(values, parallel=parallel, sequence_length=64, batch_size=4, micro_batch_size=1)


REFUSED = (
    ({"model.heads": 2}, "heads is not for mixer: example.short_conv, which does not read it"),
    ({"model.bias": "all"}, "bias is not for mixer: example.short_conv"),
    ({"model.bias": "mlp"}, "bias is not for mlp: example.signed_relu2"),
    ({"model.init": {"scheme": "mup", "mup_base_dim": 8}}, "init.scheme: mup is not known for mixer: example.short"),
    ({"model.direction": "both"}, "direction: both is not for mixer: example.short_conv"),
    ({"model.mixer": "mamba2"}, r"model.mixer_options: is for plug-ins, and mixer is mamba2"),
    ({"model.mixer": "example.short_con"}, r"run.yaml:\d+: model.mixer = .* installed are example.short_conv"),
    ({"model.mixer": "conv"}, r"run.yaml:\d+: model.mixer = \"conv\": must be one of 'attention'"),
    ({"model.mixer_options": {"tap": 3}}, r"run.yaml:\d+: model.mixer_options.tap: .* model.mixer_options.taps\?"),
    ({"model.mixer_options": {"taps": 0}}, r"run.yaml:\d+: model.mixer_options.taps = 0: must be greater"),
)


def test_what_does_not_fit_in_a_run_file_is_refused(tmp_path: Path) -> None:
    of_model = {f"model.{key}": value for key, value in MODEL.items()}
    for values, message in REFUSED:
        file = tiny.write_run(tmp_path, of_model | {"model.heads": None, **values})
        with pytest.raises(UserError, match=message):
            load(file)


def test_what_a_plugin_does_not_answer_is_refused() -> None:
    from example_plugins.short_conv import ShortConvSpec

    assert check_layout(config(tp=2), 2).tp == 2
    with pytest.raises(UserError, match=r"model.mixer_options.channels=24 cannot be cut over parallel.tp=16"):
        check_layout(config({"ffn_dim": 32}, tp=16), 16)
    with pytest.raises(UserError, match=r"parallel.cp=2 .* gated short convolution cannot compute on shards of seq"):
        check_layout(config(cp=2), 2)
    with (
        mock.patch.object(ShortConvSpec, "divisions", None),
        pytest.raises(UserError, match=r"parallel.tp=2: gated short convolution cannot be cut over processes"),
    ):
        check_layout(config(tp=2), 2)
    with (
        mock.patch.object(ShortConvSpec, "divisions", (Division("dim", 16),)),
        pytest.raises(UserError, match=r"parallel.tp=16: gated short convolution has wb, wc, wu, wo, taps in unequal"),
    ):
        check_layout(config({"ffn_dim": 32}, tp=16), 16)
    with (
        mock.patch.object(ShortConvSpec, "documents_apart", False),
        pytest.raises(ValueError, match="does not say that it keeps documents apart"),
    ):
        model_of()
    with pytest.raises(UserError, match=r"model.mixer is 'example.short_conv': no supported family of Hugging Face"):
        to_hf_config(model_of(), VOCAB, 64)


def test_a_module_that_is_not_what_its_spec_says_is_refused() -> None:
    from example_plugins.short_conv import ShortConvSpec
    from example_plugins.short_conv_module import ShortConv

    def changed(change: Callable[[nn.Module], object]) -> Callable[[ShortConvSpec], nn.Module]:
        def build(spec: ShortConvSpec) -> nn.Module:
            module = ShortConv(spec)
            change(module)
            return module

        return build

    for message, change in {
        "no parameter taps, which the spec lists": lambda module: delattr(module, "taps"),
        "the parameter more, which is in no": lambda module: module.register_parameter("more", module.taps),
        r"taps has the shape \(2,\), and in the spec \(24, 4\)": lambda module: setattr(
            module, "taps", nn.Parameter(torch.zeros(2))
        ),
        "the buffer mask, and initial weights": lambda module: module.register_buffer("mask", torch.zeros(2)),
        "drops at random": lambda module: module.add_module("drop", nn.Dropout(0.1)),
    }.items():
        with mock.patch.object(ShortConvSpec, "build", changed(change)), pytest.raises(UserError, match=message):
            decoder()
    for changes, message in (
        ({"build": LayerPartSpec.build, "module": None}, "names no module, and has no build"),
        ({"label": ""}, "ShortConvSpec has no label"),
    ):
        with mock.patch.multiple(ShortConvSpec, create=True, **changes), pytest.raises(UserError, match=message):
            decoder()
    with (
        mock.patch.object(ShortConvSpec, "of", lambda *_: ShortConvSpec(8, 8, 4)),
        pytest.raises(UserError, match=r"the mixer example.short_conv \(example-plugins 1.0\): dim of the spec is not"),
    ):
        decoder()


def test_promises_that_are_not_kept_are_found() -> None:
    from example_plugins.short_conv_module import ShortConv
    from example_plugins.signed_relu2 import SignedRelu2

    check_layers(model_of(pattern=["near", "far"], kinds={"near": {}, "far": {"mixer": "attention", "heads": 2}}))
    convolved, relu = ShortConv._convolved, SignedRelu2.forward
    for message, where, name, broken in (
        ("positions see those behind", ShortConv, "_convolved", lambda *given: convolved(*given).flip(1)),
        ("documents of a sequence", ShortConv, "_convolved", lambda *given: convolved(*given[:3], None)),
        ("texts that are continued", SignedRelu2, "forward", lambda self, x: relu(self, x.cumsum(1))),
    ):
        with mock.patch.object(where, name, broken), pytest.raises(UserError, match=message):
            check_layers(model_of())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    preprocess(load(tiny.write_run(folder, RUN)))
    return folder


@pytest.mark.slow
def test_trained_resumed_and_recomputed(root: Path) -> None:
    straight = train(root, "straight")
    half = "checkpoints/step-00000002"
    shutil.copytree(straight / half, root / "resumed" / half)
    resumed = train(root, "resumed")
    assert exact(resumed) == exact(straight)[2:]
    assert weights_hash(resumed) == weights_hash(straight)
    for mode in ("full", "selective"):
        assert weights_hash(train(root, mode, f"train.recompute.mode={mode}")) == weights_hash(straight)


@pytest.mark.guard
def test_another_version_is_refused(root: Path, tmp_path: Path) -> None:
    run = train(root, "versions", "train.duration=2 steps")
    version = r"model.plugins.mixers.example.short_conv.version: 1.0 -> 1.1"
    with mock.patch.object(sys, "path", [each for each in sys.path if "installed" not in each]):
        with installed(tmp_path, "1.1"):
            code, out = start(root, run.name)
            assert code == 2 and version in out and "resume.allow=[model] accepts this" in out
            code, out = start(root, run.name, "resume.allow=[model]")
            assert code == 0, out
        with pytest.raises(UserError, match=r'model.kinds.near.mixer = "example.short_conv": no installed package'):
            load(root / "run.yaml")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("layouts")
    keys = {key: value for key, value in RUN.items() if key.startswith("model.")}
    preprocess(load(tiny.write_run(folder, {**layouts.COMMON, **keys}, "plugins.yaml")))
    with mock.patch.dict(layouts.CHUNK_TOKENS, {"plugins": 37}):
        yield folder


@pytest.fixture(scope="module")
def processes(package: None) -> Iterator[Callable[[int], Ranks]]:
    with kept_ranks() as get:
        yield get


ROWS = {row.name: row for row in (*TESTED, *WITHIN_LAYERS)}


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(
    "name", tiers.first(2, ["fsdp2-reshard", "tp2", "tp2-no_sp", "pp2-1f1b", "tp2-selective"], rest="slow")
)
def test_a_layout_computes_what_one_process_does(families: Path, processes: Callable[[int], Ranks], name: str) -> None:
    row = ROWS[name]
    assert layouts.compare(families, "plugins", row, processes(row.layout.world_size)) == []


@pytest.mark.slow
@pytest.mark.parallel
def test_a_run_changes_its_layout(families: Path, processes: Callable[[int], Ranks]) -> None:
    chain = [(3, {"tp": 2}), (5, {"pp": 2}), (layouts.LAST_STEP, {"dp_shard": 2})]
    assert layouts.compare_chain(families, "plugins", chain, processes) == []
