"""Dropout by key: its bits, its statistics, where it falls, and that nothing moves it."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.loader import open_loader
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.dropout import Dropout, DropoutPlaces, PlacedDropout, dropped, keep_mask
from tests.train.huggingface.hf_mapping import twin
from tests.train.model.test_recompute import MODES, recompute
from tests.train.models import FAMILIES, LAYERS, VOCAB
from tests.train.runs import exact, train, weights_hash

FAR = 2**40 + 7
"""A sample that needs more than 32 bits."""


def mask(
    rate: float = 0.5, *, seed: int = 1, place: str = "a", samples: list[int], positions: int, channels: int
) -> Tensor:
    placed = DropoutPlaces([place]).draw(Dropout(rate, seed, torch.tensor(samples)), torch.arange(positions))
    return keep_mask(placed.words_2B[place], placed.positions_S, channels, rate)


def element_by_hand(rate: float, seed: int, place: str, sample: int, position: int, channel: int) -> bool:
    """One element, in Python's whole numbers."""

    def mixed(word: int) -> int:
        word = ((word ^ word >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        word = ((word ^ word >> 15) * 0x31848BAB) & 0xFFFFFFFF
        return word ^ word >> 14

    row = []
    for half in (0, 1):
        digest = hashlib.blake2b(f"dropout/{seed}/{place}/{half}".encode(), digest_size=4).digest()
        word = int.from_bytes(digest, "little")
        for part in (sample & 0xFFFFFFFF, sample >> 32):
            word = mixed(word ^ part)
        row.append(mixed(word ^ mixed(position)))
    bits = row[0] ^ mixed(channel)
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & 0xFFFFFFFF ^ row[1]
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & 0xFFFFFFFF
    signed = bits - 2**32 if bits >= 2**31 else bits
    return signed >= round(rate * 2**32) - 2**31


def test_the_bits_are_those_of_whole_numbers_in_python() -> None:
    samples = [0, 5, FAR]
    found = mask(0.3, seed=9, place="layers.3.mlp", samples=samples, positions=7, channels=37)
    for row, position, channel in product(range(3), range(7), range(37)):
        wanted = element_by_hand(0.3, 9, "layers.3.mlp", samples[row], position, channel)
        assert found[row, position, channel] == wanted


@pytest.mark.slow  # compiling takes most of a minute
def test_compiled_code_has_the_same_bits() -> None:
    places = DropoutPlaces(["a", "b"]).draw(Dropout(0.2, 1, torch.tensor([3, FAR])), torch.arange(19))
    compiled = torch.compile(dropped, fullgraph=True, dynamic=False)
    x = torch.randn(2, 19, 45)
    for place in ("a", "b"):
        assert torch.equal(compiled(x, place, places), dropped(x, place, places))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_are_dropped_at_the_rate_and_independently(rate: float) -> None:
    """Bounds are 5 standard deviations of independent draws, times what the number of comparisons adds."""
    samples, positions, channels = [*range(15), FAR], 256, 256
    drawn = [
        mask(rate, seed=seed, place=place, samples=samples, positions=positions, channels=channels).double()
        for seed, place in ((1, "layers.0.mixer"), (1, "layers.0.mlp"), (1, "layers.1.mixer"), (2, "layers.0.mixer"))
    ]
    spread = (rate * (1 - rate)) ** 0.5
    units = torch.stack([(each - (1 - rate)) / spread for each in drawn])  # mean 0, variance 1
    count = units[0].numel()
    assert abs(units.mean().item()) < 5 / (4 * count) ** 0.5
    # Means over everything but one coordinate, and over one coordinate alone.
    for dims in ((0, 2, 3), (0, 1, 3), (0, 1, 2), (1, 2, 3), (3,), (2,)):
        means = units.mean(dim=dims)
        number = units.numel() / means.numel()
        assert means.abs().max() < 6 / number**0.5
        assert (means.square().mean() * number).item() == pytest.approx(1, abs=6 * (2 / means.numel()) ** 0.5)
    # Neighbours along each coordinate, and along several at once.
    for shift in product((0, 1), (0, 1), (0, 1, 16)):
        if any(shift):
            products = units * units.roll(shift, dims=(1, 2, 3))
            assert abs(products.mean().item()) < 5 / units.numel() ** 0.5
    # Other places and seeds.
    flat = units.flatten(1)
    correlation = flat @ flat.T / count - torch.eye(4)
    assert correlation.abs().max() < 5 / count**0.5
    # No direction stands out, as it would if rows had their signs in common.
    matrices = units.flatten(0, 1)
    assert torch.linalg.matrix_norm(matrices, 2).max() < 2.2 * positions**0.5


def test_triples_of_neighbours_are_independent() -> None:
    """What an exclusive or of words by row and column would fail: four corners of a rectangle."""
    units = mask(samples=list(range(16)), positions=256, channels=256).double() * 2 - 1
    for shift in ((1, 1), (2, 8), (128, 128)):
        corners = units * units.roll(shift[0], 1) * units.roll(shift[1], 2) * units.roll(shift, (1, 2))
        assert abs(corners.mean().item()) < 5 / units.numel() ** 0.5
    triples = units * units.roll(1, 2) * units.roll(3, 2)
    assert abs(triples.mean().item()) < 5 / units.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_is_scaled_and_gradients_go_the_same_way(dtype: torch.dtype) -> None:
    placed = DropoutPlaces(["a"]).draw(Dropout(0.25, 3, torch.tensor([4, 5])), torch.arange(6))
    x = torch.randn(2, 6, 8).to(dtype).requires_grad_()
    keep = keep_mask(placed.words_2B["a"], placed.positions_S, 8, 0.25)
    out = dropped(x, "a", placed)
    assert out.dtype == dtype and torch.equal(out, (x * (4 / 3)).masked_fill(~keep, 0))
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 4 / 3).masked_fill(~keep, 0))
    assert dropped(x, "a", None) is x


def test_shards_of_a_sequence_and_single_samples_have_their_part_of_the_mask() -> None:
    places, samples = DropoutPlaces(["a"]), torch.tensor([7, FAR, 2])
    whole = places.draw(Dropout(0.5, 1, samples), torch.arange(12))
    shard = places.draw(Dropout(0.5, 1, samples[1:2]), torch.tensor([10, 11, 3]))
    expected = keep_mask(whole.words_2B["a"], whole.positions_S, 16, 0.5)[1:2, [10, 11, 3]]
    assert torch.equal(keep_mask(shard.words_2B["a"], shard.positions_S, 16, 0.5), expected)


class _Theirs(nn.Module):
    """In place of a dropout of transformers': the mask of a place."""

    def __init__(self, place: str, placed: PlacedDropout) -> None:
        super().__init__()
        self._place, self._placed = place, placed

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self._place, self._placed)


def test_it_falls_where_gpt2_has_it() -> None:
    theirs = FAMILIES["gpt2"].theirs()
    assert isinstance(theirs, GPT2LMHeadModel)
    ours = twin(theirs, FAMILIES["gpt2"].config, VOCAB)
    tokens = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(2))
    dropout = Dropout(0.3, 5, torch.tensor([11, 12, 40]))
    names = ["embedding", *(f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("mixer", "mlp"))]
    placed = DropoutPlaces(names).draw(dropout, torch.arange(40))
    theirs.transformer.drop = _Theirs("embedding", placed)
    for layer, block in enumerate(theirs.transformer.h):
        block.attn.resid_dropout = _Theirs(f"layers.{layer}.mixer", placed)
        block.mlp.dropout = _Theirs(f"layers.{layer}.mlp", placed)
    logits = ours(tokens, Context(dropout=dropout))[..., :VOCAB]
    torch.testing.assert_close(logits, theirs(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, ours(tokens, Context())[..., :VOCAB], atol=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_are_computed_again_drop_the_same(mode: str) -> None:
    shape = {"layers": 4, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 96, "vocab_multiple": 8}
    torch.manual_seed(1)
    model = Decoder(decoder_spec(ModelConfig.model_validate(shape), 61, 24))
    tokens = torch.randint(61, (2, 24))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        logits = model(tokens, Context(dropout=Dropout(0.2, 1, torch.tensor([8, 9]))))[..., :61]
        logits.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    recompute(model, **MODES[mode])
    assert all(torch.equal(*pair) for pair in zip(gradients(), plain, strict=True))


SHORT = (
    *("train.schedule.type=constant", "train.schedule.warmup=0 steps", "train.validation.every_steps=3"),
    "model.dropout=0.2",
)


@pytest.mark.guard
def test_a_resumed_run_drops_what_a_straight_one_does(root: Path) -> None:
    straight = train(root, "straight", *SHORT, "train.duration=6 steps", "train.checkpoint.every_steps=3")
    parts = train(root, "parts", *SHORT, "train.duration=3 steps")
    train(root, "parts", *SHORT, "train.duration=6 steps")
    assert exact(parts) == exact(straight)
    assert weights_hash(parts) == weights_hash(straight)


@pytest.mark.guard
def test_validation_drops_nothing(root: Path) -> None:
    """With weights that stay as they are."""
    values = (*SHORT, "train.duration=2 steps", "train.validation.every_steps=1", "train.optimizer.lr=1e-30")
    dropping, keeping = (exact(train(root, f"rate-{r}", *values, f"model.dropout={r}")) for r in (0.2, 0))
    for one, other in zip(dropping, keeping, strict=True):
        assert one["loss"] != other["loss"]
        assert one["validation_loss"] == other["validation_loss"]


def test_the_size_of_micro_batches_changes_nothing_but_rounding(root: Path) -> None:
    values = (*SHORT, "train.duration=1 steps", "train.precision.compute=fp32")
    (one,), (other,) = (exact(train(root, f"micro-{n}", *values, f"train.micro_batch_size={n}")) for n in (1, 4))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_skips_move_no_sample(root: Path) -> None:
    def samples(*values: str) -> dict[int, list[int]]:
        config = load(root / "run.yaml", values)
        loader = open_loader(config, open_datasets(config, "train"))
        steps = {step: loader.batches(step - 1).micro_batches for step in range(1, 5)}
        return {
            step: [number for batch in batches for number in batch.samples.tolist()] for step, batches in steps.items()
        }

    plain, skipped = samples(), samples('blend.skip=[{steps: 2}, {samples: "9-10"}]')
    assert plain == {step: list(range(4 * step - 4, 4 * step)) for step in range(1, 5)}
    assert skipped == {**plain, 2: []}
