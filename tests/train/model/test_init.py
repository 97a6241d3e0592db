"""Initial weights: the same whatever the layout, with the stated distribution, and muP's promise."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.init import init_weights, lr_scale, normal_rows
from pipeline.train.parallel.tensor import apply_tensor_parallel
from tests import tiers
from tests.train.models import FAMILIES, VOCAB


def _config(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"layers": 2, "dim": 24, "heads": 2, "ffn_dim": 52, "vocab_multiple": 10, **keys})


def _whole(config: ModelConfig, seed: int = 7, vocab_size: int = VOCAB) -> Decoder:
    spec = decoder_spec(config, vocab_size, 32)
    model = Decoder(spec)
    init_weights(model, spec, config.init, seed)
    return model


@pytest.fixture
def no_group_left() -> Iterator[None]:
    if dist.is_initialized():  # a test in this process has trained before
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _mesh(rank: int, *shape: int) -> DeviceMesh:
    """The mesh as `rank` sees it, in a group that talks to nobody: nothing here may need communication.

    Its axes are named by the rank, because torch caches by mesh, and would take one rank's mesh for another's.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{axis}-rank{rank}" for axis in range(len(shape))))


def _piece(tensor: torch.Tensor, pieces: int, index: int, dim: int) -> torch.Tensor:
    """As torch.chunk cuts, but with empty pieces at the end."""
    chunks = tensor.chunk(pieces, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize(
    ("family", "ranks"), tiers.first(2, [("gpt2", 3), ("qwen3", 7), ("gpt2", 1), ("qwen3", 64)], rest="guard")
)
def test_shards_equal_the_rows_of_the_whole(family: str, ranks: int) -> None:
    """FSDP2 on meta, given memory, filled on each rank alone: uneven shards, and with 64 ranks empty ones."""
    config = FAMILIES[family].config
    spec = decoder_spec(config, VOCAB, 32)
    whole = dict(_whole(config).named_parameters())
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    for rank in range(ranks):
        mesh = _mesh(rank, ranks)
        with torch.device("meta"):
            model = Decoder(spec)
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        init_weights(model, spec, config.init, seed=7)
        for name, parameter in model.named_parameters():
            pieces[name].append(parameter.to_local().detach().clone())
        dist.destroy_process_group()
    for name, parameter in whole.items():
        assert torch.equal(torch.cat(pieces[name]), parameter), name


@pytest.mark.usefixtures("no_group_left")
def test_column_shards_equal_the_columns_of_the_whole() -> None:
    config = _config()
    spec = decoder_spec(config, VOCAB, 32)
    whole = _whole(config)
    for rank in range(5):
        mesh = _mesh(rank, 5)
        model = Decoder(spec)
        name, linear = "layers.1.mlp.w2.weight", model.layers["1"].mlp.w2
        expected = whole.get_parameter(name).chunk(5, dim=1)[rank]
        linear.weight = torch.nn.Parameter(
            DTensor.from_local(torch.empty_like(expected), mesh, [Shard(1)], shape=(24, 52), stride=(52, 1))
        )
        init_weights(model, spec, config.init, seed=7)
        assert torch.equal(model.get_parameter(name).to_local(), expected)
        dist.destroy_process_group()


_CUT_BY_ROWS = re.compile(r"(embedding|head)\.weight|.*\.(wq|wk|wv|w1|w3)\.\w+")
_CUT_BY_COLUMNS = re.compile(r".*\.(wo|w2)\.weight")


@pytest.mark.first(2)
@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize("replicate,shard,tp", [(1, 0, 2), (1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 3, 4), (3, 1, 2)])
@pytest.mark.parametrize("family", tiers.first(1, ["gpt2", "qwen3"], rest="guard"))
def test_tensor_parallel_shards_equal_pieces_of_the_whole(family: str, replicate: int, shard: int, tp: int) -> None:
    """tp cuts first, then FSDP the piece (0: there is no FSDP); the same on replicas. Many of the cuts are uneven."""
    config = FAMILIES[family].config
    positions = 6  # rows: empty on the last of 4 ranks
    spec = decoder_spec(config, VOCAB, positions)
    whole = Decoder(spec)
    init_weights(whole, spec, config.init, seed=7)
    for rank in range(replicate * max(1, shard) * tp):
        names = [name for name, size in (("replicate", replicate > 1), ("shard", shard), ("tp", True)) if size]
        mesh = _mesh(rank, *({"replicate": replicate, "shard": shard, "tp": tp}[name] for name in names))
        axes = mesh.mesh_dim_names
        assert axes is not None
        with torch.device("meta"):
            model = Decoder(spec)
        apply_tensor_parallel(model, mesh[axes[-1]] if shard else mesh, sequence_parallel=True)
        if shard:
            params = mesh[axes[:-1] if len(axes) > 2 else axes[0]]
            for block in model.layers.values():
                fully_shard(block, mesh=params)
            fully_shard(model, mesh=params)
        model.to_empty(device="cpu")
        init_weights(model, spec, config.init, seed=7)
        for name, parameter in model.named_parameters():
            expected = whole.get_parameter(name).detach()
            shared = re.search(r"\.w[kv]\.", name) and spec.layers[0].mixer.kv_heads < tp
            if _CUT_BY_ROWS.fullmatch(name) and not shared:
                expected = _piece(expected, tp, rank % tp, 0)
            elif _CUT_BY_COLUMNS.fullmatch(name):
                expected = _piece(expected, tp, rank % tp, 1)
            if shard:
                expected = _piece(expected, shard, rank // tp % shard, 0)
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), expected), f"{name} on rank {rank}: {parameter.placements}"
        dist.destroy_process_group()


def test_rows_do_not_depend_on_what_is_drawn_with_them() -> None:
    whole = normal_rows("key", 0, 50, 13)
    assert np.array_equal(normal_rows("key", 17, 9, 13), whole[17:26])
    assert np.array_equal(np.concatenate([normal_rows("key", row, 1, 13) for row in range(50)]), whole)
    # Rows far beyond what fits in memory.
    assert np.array_equal(normal_rows("key", 2**40, 2, 8)[1], normal_rows("key", 2**40 + 1, 1, 8)[0])


def test_bits_are_philox() -> None:
    """Against the generator of the paper written out in Python integers."""
    import hashlib

    key = [int.from_bytes(hashlib.blake2b(b"k", digest_size=16).digest()[at : at + 8], "little") for at in (0, 8)]
    mask = 2**64 - 1

    def block(counter: int) -> list[int]:
        x, k = [counter & mask, counter >> 64, 0, 0], list(key)
        for _ in range(10):
            a, b = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
            x = [(b >> 64) ^ x[1] ^ k[0], b & mask, (a >> 64) ^ x[3] ^ k[1], a & mask]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        return x

    row = normal_rows("k", 5, 1, 16)[0]
    words = [word for counter in (11, 12) for word in block(counter)]  # the generator counts before it draws
    for index, word in enumerate(words):
        radius = math.sqrt(-2 * math.log(((word >> 32) + 1) / 2**32))
        angle = (word & 0xFFFFFFFF) / 2**32 * 2 * math.pi
        assert row[2 * index] == pytest.approx(radius * math.cos(angle), abs=1e-12)
        assert row[2 * index + 1] == pytest.approx(radius * math.sin(angle), abs=1e-12)


def test_draws_are_standard_normal() -> None:
    values = np.sort(normal_rows("0/some.weight", 0, 400, 500).ravel())
    expected = (np.arange(len(values)) + 0.5) / len(values)
    cdf = 0.5 * (1 + torch.erf(torch.from_numpy(values) / math.sqrt(2)).numpy())
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded with probability 0.001; the draw is fixed, so this is no gamble.
    assert np.abs(cdf - expected).max() < 1.95 / math.sqrt(len(values))
    pairs = normal_rows("0/some.weight", 0, 400, 500)
    for shifted in (pairs[:, 1:] * pairs[:, :-1], pairs[1:] * pairs[:-1]):  # neighbours in a row and in a column
        assert abs(shifted.mean()) < 4 / math.sqrt(shifted.size)


def test_schemes_and_what_is_not_drawn() -> None:
    wide = {
        "dim": 256,
        "heads": 4,
        "ffn_dim": 512,
        "bias": "all",
        "norm": "layernorm",
        "layers": 2,
        "positions": "learned",
    }
    residual = ("wo.weight", "w2.weight")
    for init, std, residual_std in (
        ({"scheme": "normal"}, 0.02, 0.02),
        ({"scheme": "depth_scaled"}, 0.02, 0.01),
        ({"scheme": "depth_scaled", "std": 0.1}, 0.1, 0.05),
        ({"scheme": "mup", "mup_base_dim": 64}, 0.01, 0.005),
    ):
        config = _config(init=init, **wide)
        for name, parameter in _whole(config).named_parameters():
            if parameter.ndim == 1:
                assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
                continue
            expected = residual_std if name.endswith(residual) else std if "layers" in name else config.init.std
            assert abs(parameter.std().item() / expected - 1) < 0.03, name


def test_seed_and_name_decide() -> None:
    config = _config()
    one, same, other = (dict(_whole(config, seed).named_parameters()) for seed in (7, 7, 8))
    matrices = [name for name, parameter in one.items() if parameter.ndim == 2]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    assert not torch.equal(one["layers.0.mixer.wk.weight"], one["layers.1.mixer.wk.weight"])
    # A larger vocabulary adds rows and moves none.
    larger = dict(_whole(config, vocab_size=VOCAB + 30).named_parameters())
    assert torch.equal(larger["embedding.weight"][:100], one["embedding.weight"])


def _stream_sizes(config: ModelConfig, steps: int) -> tuple[list[float], float]:
    """Root mean square of what each block writes, and of the logits, after some steps of Adam."""
    spec = decoder_spec(config, 64, 0)
    model = Decoder(spec)
    init_weights(model, spec, config.init, seed=1)
    groups = [
        {"params": [parameter], "lr": 0.01 * lr_scale(name, spec, config.init)}
        for name, parameter in model.named_parameters()
    ]
    optimizer = torch.optim.Adam(groups)
    tokens = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(2))
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1], Context()).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sizes: list[float] = []
    for block in model.layers.values():
        for part in (block.mixer, block.mlp):
            part.register_forward_hook(lambda _module, _inputs, out: sizes.append(out.square().mean().sqrt().item()))
    with torch.no_grad():
        logits = model(tokens[:, :-1], Context())
    return sizes, logits.square().mean().sqrt().item()


@pytest.mark.slow
def test_mup_keeps_activations_over_widths() -> None:
    """The coordinate check of Yang et al. 2022 (appendix D.1): sizes stay O(1) with muP, and grow without it."""

    def growth(init: dict[str, Any]) -> list[float]:
        narrow, wide = (
            _stream_sizes(_config(dim=dim, heads=dim // 16, ffn_dim=2 * dim, vocab_multiple=64, init=init), steps=4)
            for dim in (64, 512)
        )
        return [big / small for big, small in zip((*wide[0], wide[1]), (*narrow[0], narrow[1]), strict=True)]

    mup = growth({"scheme": "mup", "mup_base_dim": 64, "std": 0.1})
    assert all(1 / 2.5 < ratio < 2.5 for ratio in mup), mup
    plain = growth({"scheme": "depth_scaled", "std": 0.1})
    assert max(plain) > 2 * max(mup), (plain, mup)
