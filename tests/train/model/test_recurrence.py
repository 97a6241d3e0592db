"""Recurrent layers: what is computed in fp32, what their states take, and how often they are compiled."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.distributed.process_group import destroy
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.recurrence import delta_rule, ssd
from pipeline.train.model.mixers.recurrence import RecurrentState
from pipeline.train.model.mixers.recurrent_spec import RecurrentSpec
from pipeline.train.model.states import States
from pipeline.train.parallel import compile
from pipeline.train.parallel.compile import compile_layers
from pipeline.train.parallel.parallelize import build_model
from tests.train.model.decoders import uneven_decoder
from tests.train.one_process import config_of, setup_of

DELTA = {"key_heads": 2, "key_dim": 6, "value_dim": 8}
MODEL: dict[str, Any] = {
    **{"layers": 4, "dim": 32, "heads": 4, "vocab_multiple": 8},
    "pattern": ["state", "gated", "kimi", "full"],
    "kinds": {
        "state": {"mixer": "mamba2", "mamba2": {"heads": 4, "head_dim": 16, "state_dim": 8}},
        "gated": {"mixer": "gated_delta", "delta": {**DELTA, "value_heads": 4}},
        "kimi": {"mixer": "kda", "delta": DELTA},
        "full": {},
    },
}
FP32_INPUTS = {"ssd": (1, 2), "delta_rule": (3,)}
"""By kernel the places of steps of time and rates, or of the logarithms of decays."""


@pytest.fixture
def no_group() -> Iterator[None]:
    destroy()
    yield
    destroy()


RATES = {"ssd": (1,), "delta_rule": (3, 4)}
"""By kernel the places of what sets the rates of a state: steps of time; logarithms of decays, and shares replaced."""


def test_matrices_that_feed_a_rate_say_so_whatever_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd finds them; fp8 and Muon follow from the spec."""
    config = ModelConfig.model_validate(MODEL)
    model = uneven_decoder(config, 97, seed=0)
    rates: list[list[Tensor]] = []
    for module, name in ((ssd, "ssd"), (delta_rule, "delta_rule")):
        monkeypatch.setattr(module, name, recording(getattr(module, name), RATES[name], rates))
    model(torch.arange(40).view(2, 20), Context())
    recurrent = [index for index, layer in enumerate(model.spec.layers) if isinstance(layer.mixer, RecurrentSpec)]
    kinds = {type(model.spec.layers[index].mixer) for index in recurrent}
    assert kinds == {spec for spec in subclasses(RecurrentSpec) if spec.__module__.startswith("pipeline.")}
    for index, found in zip(recurrent, rates, strict=True):
        mixer = model.spec.layers[index].mixer
        assert mixer is not None
        weights = [model.get_parameter(f"layers.{index}.mixer.{each.name}.weight") for each in mixer.matrices]
        gradients = torch.autograd.grad(sum(each.sum() for each in found), weights, allow_unused=True)
        feeding = {each.name for each, given in zip(mixer.matrices, gradients, strict=True) if given is not None}
        assert feeding == {each.name for each in mixer.matrices if each.feeds_rate}
        assert feeding == {each.name for each in mixer.matrices if not each.takes_fp8}
        assert feeding.isdisjoint(each.name for each in mixer.matrices if each.takes_muon)


def recording(kernel: Any, places: Sequence[int], into: list[list[Tensor]]) -> Any:
    """A kernel that keeps its arguments at some places."""

    def recorded(*given: Any) -> Any:
        into.append([given[place] for place in places])
        return kernel(*given)

    return recorded


def subclasses(of: type) -> set[type]:
    """All classes below one that can be built."""
    below = {each for direct in of.__subclasses__() for each in {direct, *subclasses(direct)}}
    return {each for each in below if not inspect.isabstract(each)}


@pytest.mark.usefixtures("no_group")
def test_decays_are_computed_in_fp32_where_the_model_computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(MODEL, precision={"compute": "bf16"})
    model = build_model(config, setup_of(config)).whole
    seen = []

    def watch(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        def watched(*given: Any) -> Any:
            seen.append((name, [each.dtype if isinstance(each, Tensor) else None for each in given]))
            return kernel(*given)

        monkeypatch.setattr(module, name, watched)

    watch(ssd, "ssd")
    watch(delta_rule, "delta_rule")
    held: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if name.endswith("decay"):
            module.register_forward_hook(
                lambda decay, given, out, name=name: held.update(
                    {f"{name}.{own}": each.dtype for own, each in decay.named_parameters()}
                )
            )
    model(torch.arange(40).view(2, 20), Context()).sum().backward()
    assert [name for name, _ in seen] == ["ssd", "delta_rule", "delta_rule"]
    for name, types in seen:
        assert types[0] == torch.bfloat16
        assert all(types[place] == torch.float32 for place in FP32_INPUTS[name])
    assert len(held) == 3 + 2 + 2 and set(held.values()) == {torch.float32}


def _bytes(states: States) -> list[int]:
    """Of the tensors that each layer holds."""
    tuples = [[value for value in vars(state).values() if isinstance(value, tuple)] for state in states.layers]
    return [sum(each.nbytes for held in of_layer for each in held) for of_layer in tuples]


def test_states_do_not_grow_with_the_text() -> None:
    model = Decoder(decoder_spec(ModelConfig.model_validate(MODEL), 61, 400)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    states, sizes = model.new_states(2, 400), []
    with torch.no_grad():
        for length in (10, 1, 300):
            model(torch.zeros(2, length, dtype=torch.long), Context(states=states))
            sizes.append(_bytes(states))
    for layer, (state, size, later, last) in enumerate(zip(states.layers, *sizes, strict=True)):
        assert size > 0
        if layer < 3:
            assert isinstance(state, RecurrentState) and size == later == last
        else:
            assert last > size, "keys and values do"


@pytest.mark.guard
@pytest.mark.usefixtures("fresh_compiler")
def test_each_kind_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    model = Decoder(decoder_spec(ModelConfig.model_validate({**MODEL, "layers": 8}), 61, 100))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(61, (2, 100), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, Context())
    compile_layers(model, RecomputeConfig())
    for _ in range(2):
        torch.testing.assert_close(model(tokens, Context()), expected, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
