"""Tensor and sequence parallelism: losses, weights and gradients equal those of one process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Context, Decoder, ModelPart
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.model.init import init_weights, local_range
from pipeline.train.model.loss import VocabShard, token_loss
from pipeline.train.parallel.tensor import apply_tensor_parallel
from tests.train.distributed import ranks
from tests.train.models import VOCAB

LENGTH, BATCH, MICRO_BATCHES = 16, 4, 2
SHAPE = {"layers": 2, "dim": 32, "heads": 4, "ffn_dim": 48, "vocab_multiple": 20, "init": {"std": 0.2}}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "mlp": "gelu", "bias": "all", "positions": "learned", "tie_embeddings": True},
    "llama": {"kv_heads": 2},
    "qwen3": {"head_dim": 16, "kv_heads": 2, "qk_norm": True, "bias": "qkv", "tie_embeddings": True},
    # One rank of four has nothing but padding of the vocabulary.
    "mup": {
        "init": {"scheme": "mup", "mup_base_dim": 16, "std": 0.2},
        "logit_soft_cap": 3.0,
        "sliding_window": 5,
        "vocab_multiple": 160,
    },
    "full-bias": {"kv_heads": 1, "bias": "all", "qk_norm": True},
}


@dataclass(frozen=True)
class Case:
    family: str
    axes: dict[str, int]
    """Of the mesh; tp is the last one, and parameters are sharded over the others."""
    sequence_parallel: bool
    documents: bool = False
    masked: bool = False
    z_loss: float = 0.0
    parts: int = 1
    compute: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.family} {self.axes} sp={self.sequence_parallel} {self.compute}"


def _spec(case: Case) -> tuple[ModelConfig, DecoderSpec]:
    config = ModelConfig.model_validate({**SHAPE, **FAMILIES[case.family]})
    return config, decoder_spec(config, VOCAB, 32)


def _batches(case: Case) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
        first = torch.randint(1, LENGTH, (BATCH, 1), generator=generator)
        positions = torch.arange(LENGTH)
        kept = torch.rand(BATCH, LENGTH, generator=generator) < (0.7 if case.masked else 1.0)
        batches.append(
            {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "bounds": torch.where(positions >= first, first, 0),
                "weight": kept.float(),
            }
        )
    return batches


def _vary(model: torch.nn.Module) -> None:
    """Norm weights and biases that are neither 1 nor 0, so that leaving one out or adding it twice is seen."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
            noise = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            rows = local_range(parameter, 0)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            with torch.no_grad():
                local += noise[rows.start : rows.stop]


def _parts(spec: DecoderSpec, parts: int) -> list[ModelPart]:
    if parts == 1:
        return [ModelPart.whole(spec)]
    assert parts == 3  # the embedding and a block, a block, the head alone
    return [
        ModelPart(range(1), first=True, last=False),
        ModelPart(range(1, 2), first=False, last=False),
        ModelPart(range(0), first=False, last=True),
    ]


def _backward(
    models: list[Decoder], case: Case, batches: list[dict[str, torch.Tensor]], shard: VocabShard | None
) -> torch.Tensor:
    """Accumulates gradients of all batches; the loss of these rows, over the targets of all rows."""
    targets = sum(batch["weight"].sum() for batch in _batches(case))
    total = torch.zeros(())
    for batch in batches:
        x = batch["tokens"]
        for model in models:
            x = model(x, Context(bounds_BS=batch["bounds"] if case.documents else None, length=LENGTH))
        _, objective = token_loss(x, batch["targets"], case.z_loss, shard)
        loss = (objective * batch["weight"]).sum() / targets
        loss.backward()
        total += loss.detach()
    return total


def _reference(case: Case) -> tuple[Decoder, torch.Tensor]:
    config, spec = _spec(case)
    model = Decoder(spec)
    init_weights(model, spec, config.init, seed=5)
    _vary(model)
    return model, _backward([model], case, _batches(case), None)


def _parallel_parts(case: Case, mesh: DeviceMesh) -> list[Decoder]:
    config, spec = _spec(case)
    names = tuple(axis for axis in case.axes if axis != "tp")
    params = mesh[names if len(names) > 1 else names[0]]
    models = []
    for part in _parts(spec, case.parts):
        with torch.device("meta"):
            model = Decoder(spec, part)
        apply_tensor_parallel(model, mesh["tp"], sequence_parallel=case.sequence_parallel)
        policy = MixedPrecisionPolicy(param_dtype=case.compute, reduce_dtype=torch.float32)
        for block in model.layers.values():
            fully_shard(block, mesh=params, mp_policy=policy)
        fully_shard(model, mesh=params, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu")
        init_weights(model, spec, config.init, seed=5)
        models.append(model)
    return models


def _full(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def check(case: Case) -> None:
    """On every rank: the parallel model against the same model in one process."""
    torch.manual_seed(dist.get_rank())  # nothing may depend on it
    mesh = init_device_mesh("cpu", tuple(case.axes.values()), mesh_dim_names=tuple(case.axes))
    tp = mesh["tp"]
    models = _parallel_parts(case, mesh)
    spec = models[0].spec
    reference, expected = _reference(case)
    for model in models:
        _vary(model)
    weights = dict(reference.named_parameters())
    gradients: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert torch.equal(_full(parameter), weights[name]), f"weights of {name}"

    dp = dist.get_world_size() // tp.size()
    rows = BATCH // dp
    first = dist.get_rank() // tp.size() * rows  # tp is the innermost axis
    batches = [{key: value[first : first + rows] for key, value in batch.items()} for batch in _batches(case)]
    shard = VocabShard(tp.get_group(), models[-1].head.first_row)
    loss = _backward(models, case, batches, shard)

    losses = [torch.zeros(()) for _ in range(tp.size())]
    dist.all_gather(losses, loss, group=tp.get_group())
    assert all(torch.equal(other, loss) for other in losses), "ranks of one tp group have different losses"
    dist.all_reduce(loss)
    # bf16 is compared with fp32: what it leaves of the digits is enough to see a sum left out, or taken twice.
    loss_error, gradient_error = (1e-5, 1e-4) if case.compute == torch.float32 else (5e-3, 0.1)
    torch.testing.assert_close(loss / tp.size(), expected, rtol=loss_error, atol=0)
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.placements == parameter.placements, f"{name}: {parameter.grad.placements}"
            gradients[name] = gradients.get(name, 0) + _full(parameter.grad)
    assert gradients.keys() == weights.keys()
    wanted_by_name = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    largest = max(wanted.abs().max().item() for wanted in wanted_by_name.values())
    for name, gradient in gradients.items():
        wanted = wanted_by_name[name]
        # A bias of all keys changes no softmax, unless they are rotated after it: its gradient is rounding alone.
        size = max(wanted.abs().max().item(), 1e-3 * largest)
        error = (gradient - wanted).abs().max().item() / size
        assert error < gradient_error, f"gradient of {name} is off by {error:.1e} of its maximum"
    assert spec.vocab_padded % tp.size() == 0


def check_all(cases: list[Case]) -> None:
    for case in cases:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


TWO = {"dp_shard": 1, "tp": 2}
FOUR = {"dp_shard": 1, "tp": 4}
MIXED = {"dp_shard": 2, "tp": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}


@pytest.mark.slow
@pytest.mark.parallel
def test_two_ranks_equal_one_process() -> None:
    cases = [
        Case(family, TWO, sequence_parallel, documents=documents, masked=masked, z_loss=z_loss)
        for sequence_parallel in (False, True)
        for family, documents, masked, z_loss in (
            ("gpt2", True, False, 0.0),
            ("llama", False, True, 1e-2),
            ("qwen3", True, True, 0.0),
            ("mup", False, False, 1e-2),
        )
    ]
    # All query heads have one key head, which both ranks compute; the head shares no weight here.
    cases += [Case("full-bias", TWO, True, masked=True), Case("full-bias", TWO, False)]
    cases += [Case(family, TWO, True, masked=True, compute=torch.bfloat16) for family in ("qwen3", "full-bias")]
    ranks.run(2, check_all, cases)


@pytest.mark.parallel
@pytest.mark.slow
def test_four_ranks_equal_one_process() -> None:
    ranks.run(
        4,
        check_all,
        [
            Case("llama", FOUR, True, documents=True, masked=True),  # fewer key heads than ranks
            Case("qwen3", FOUR, True, masked=True, z_loss=1e-2),
            Case("qwen3", FOUR, False, documents=True),
            Case("full-bias", FOUR, True),
            Case("mup", FOUR, True, masked=True, z_loss=1e-2),  # a rank whose logits are all padding
            Case("gpt2", FOUR, True),
            Case("gpt2", MIXED, True, documents=True, masked=True),
            Case("qwen3", MIXED, True, masked=True),
            Case("llama", MIXED, False, masked=True),
            Case("full-bias", MIXED, True, masked=True),
            Case("llama", HYBRID, True, masked=True),
        ],
    )


@pytest.mark.guard
@pytest.mark.parallel
def test_parts_of_a_decoder() -> None:
    """The parts one after the other: the last one's copy of the embedding has the head's share of the gradient."""
    ranks.run(
        2,
        check_all,
        [
            Case("gpt2", TWO, True, documents=True, parts=3),
            Case("qwen3", TWO, False, parts=3),
            Case("llama", TWO, True, parts=3),
        ],
    )
