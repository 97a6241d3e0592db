"""FLOPs and parameters against figures counted by hand and against torch's own counter."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.model import ModelConfig
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import extra_flops, flops_per_token, num_parameters
from tests.train.models import FAMILIES, VOCAB


def _config(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate(keys)


LLAMA_3_8B = _config(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336)
GPT2 = _config(
    layers=12,
    dim=768,
    heads=12,
    norm="layernorm",
    mlp="gelu",
    bias="all",
    positions="learned",
    tie_embeddings=True,
    vocab_multiple=1,
)


def test_llama_3_8b_at_8192_tokens() -> None:
    spec = decoder_spec(LLAMA_3_8B, 128_256, 8192)
    # Matrices of a layer: q and o 4096^2, k and v 4096 * 1024, three of 4096 * 14336. Head: 4096 * 128,256.
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128_256
    scores = 32 * 2 * 2 * 4096 * 8192
    assert flops_per_token(spec, 8192, causal=False) == 6 * weights + 3 * scores
    assert flops_per_token(spec, 8192, causal=True) == 6 * weights + 3 * scores / 2
    assert round(6 * weights / 1e9, 2) == 45.03
    assert round(3 * scores / 2 / 1e9, 2) == 6.44
    assert round(flops_per_token(spec, 8192, causal=True) / 1e9, 2) == 51.47


def test_published_parameter_counts() -> None:
    assert num_parameters(decoder_spec(LLAMA_3_8B, 128_256, 8192)) == 8_030_261_248
    assert num_parameters(decoder_spec(GPT2, 50_257, 1024)) == 124_439_808


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_those_of_the_model(family: str) -> None:
    spec = decoder_spec(FAMILIES[family].config, VOCAB, 64)
    with torch.device("meta"):
        model = Decoder(spec)
    assert num_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_convention_equals_torchs_counter(family: str) -> None:
    """Forward pass only: torch's counter takes what fused attention recomputes as part of the backward pass."""
    config = FAMILIES[family].config.model_copy(update={"sliding_window": None, "vocab_multiple": 1})
    spec = decoder_spec(config, VOCAB, 64)
    with torch.device("meta"):
        model, tokens = Decoder(spec), torch.zeros(2, 24, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens, Context())
    assert 3 * counter.get_total_flops() == 2 * 24 * flops_per_token(spec, 24, causal=False)


@pytest.mark.parametrize("positions", ["relative", "rope"])
def test_sides_equal_torchs_counter(positions: str) -> None:
    """Each layer counts for its side; keys and values of the encoder are computed once for its positions."""
    config = _config(layers=3, dim=32, heads=4, encoder={"layers": 2}, positions=positions, vocab_multiple=1)
    spec, shape = decoder_spec(config, VOCAB, 64), StreamShape(raw=30, encoder=24, decoder=12, predicted=12)
    with torch.device("meta"):
        model, tokens = Decoder(spec), torch.zeros(2, 36, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens, Context(encoder=24))
    assert 3 * counter.get_total_flops() == pytest.approx(2 * 30 * flops_per_token(spec, shape, causal=False))
    assert num_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("window", [1, 100, 1000])
def test_sliding_window_is_the_mean_number_of_keys(window: int) -> None:
    config = _config(layers=1, dim=64, heads=4, head_dim=16, sliding_window=window)
    sequence = 1000
    spec = decoder_spec(config, 256, 0)
    per_key = 3 * 4 * 4 * 16
    weights = 6 * (4 * 64**2 + 3 * 64 * 192 + 64 * 256)
    enumerated = sum(min(q + 1, window) for q in range(sequence)) / sequence
    counted = (flops_per_token(spec, sequence, causal=True) - weights) / per_key
    # The area leaves out the upper half of the squares on the diagonal, as S / 2 does for the triangle.
    assert counted == pytest.approx(enumerated - window / (2 * sequence), abs=1e-9)
    assert (flops_per_token(spec, sequence, causal=False) - weights) / per_key == pytest.approx(window)


def test_parameters_are_counted_without_torch() -> None:
    """`pipeline report` does, and is to be quick."""
    script = (
        "import sys; from pipeline.config.model import ModelConfig\n"
        "from pipeline.train.model.decoder_spec import decoder_spec\n"
        "from pipeline.train.model.flops import num_parameters\n"
        "sizes = {'layers': 2, 'dim': 64, 'heads': 2}\n"
        "num_parameters(decoder_spec(ModelConfig.model_validate(sizes), 100, 64)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {"mamba2": {"heads": 4, "head_dim": 8, "state_dim": 16, "groups": 2}},
    "gated_delta": {"delta": {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6}},
    "kda": {"delta": {"key_heads": 2, "key_dim": 8, "value_dim": 6, "rank": 5}},
}


def _unlike_counted(mixer: str, positions: int) -> int:
    """FLOPs of a scan over whole chunks that are counted, less those of the whole convention."""
    if mixer == "mamba2":
        return 0
    heads, keys, chunk = (2 if mixer == "kda" else 4), 8, 64
    # The triangular system is inverted, in place of being solved for the keys.
    return positions * heads * chunk * (chunk - 2 * keys)


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize(("rows", "sequence"), [(1, 64), (2, 192), (3, 70)])
def test_scans_of_whole_chunks_equal_the_counter(mixer: str, rows: int, sequence: int) -> None:
    keys = {"layers": 2, "dim": 32, "mixer": mixer, "mlp": "none", "vocab_multiple": 1}
    spec = decoder_spec(_config(**keys, **RECURRENT[mixer]), VOCAB, sequence)
    tokens, positions = rows * sequence, rows * -(-sequence // 64) * 64
    with torch.device("meta"):
        model, inputs = Decoder(spec), torch.zeros(rows, sequence, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(inputs, Context())
    scans = [extra_flops(layer, sequence, causal=False) for layer in spec.layers]
    products = flops_per_token(spec, sequence, causal=False) / 3 - sum(scans)
    expected = tokens * products + positions * sum(scans) + 2 * _unlike_counted(mixer, positions)
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("mixer", RECURRENT)
def test_half_a_chunk_is_useful(mixer: str) -> None:
    """Whatever the length of a sequence."""
    config = _config(layers=1, dim=32, mixer=mixer, mlp="none", **RECURRENT[mixer])
    (layer,) = decoder_spec(config, VOCAB, 64).layers
    products = {"mamba2": 2 * 16 + 32, "gated_delta": 2 * 2 * 8 + 4 * (8 + 2 * 6), "kda": 2 * 2 * 8 + 2 * (8 + 2 * 6)}
    for sequence in (64, 1000):
        whole, useful = (extra_flops(layer, sequence, causal=causal) for causal in (False, True))
        assert whole - useful == 2 * 32 * products[mixer]
