"""Masks, documents, windows, the cache, and what happens to logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents
from pipeline.train.model.part_spec import Reach
from tests.train.huggingface.hf_mapping import randomize
from tests.train.models import FAMILIES, VOCAB

# Two rows of 20 positions whose documents begin elsewhere; a document of one token is among them.
STARTS = [[0, 7, 8, 15], [0, 12]]
SEQUENCE = 20


def decoder(config: ModelConfig, max_positions: int = 64) -> Decoder:
    model = Decoder(decoder_spec(config, VOCAB, max_positions))
    randomize(model, seed=3)
    return model


def draw_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(4))


def bounds_of(starts: list[list[int]], length: int) -> Tensor:
    return torch.tensor([[max(start for start in row if start <= q) for q in range(length)] for row in starts])


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_do_not_see_each_other(family: str) -> None:
    """Logits and gradients equal those of a forward pass for each document alone, positions from zero."""
    model = decoder(FAMILIES[family].config)
    tokens = draw_tokens(2, SEQUENCE)
    logits = model(tokens, Context(bounds_BS=bounds_of(STARTS, SEQUENCE)))
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row, starts in enumerate(STARTS):
        for start, end in zip(starts, [*starts[1:], SEQUENCE], strict=True):
            document = tokens[row : row + 1, start:end]
            alone = model(document, Context())
            torch.testing.assert_close(logits[row : row + 1, start:end], alone, rtol=1e-4, atol=1e-4)
            F.cross_entropy(alone.flatten(0, 1), document.flatten(), reduction="sum").backward()
    scale = max(gradient.abs().max() for gradient in together.values())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - together[name]).abs().max() < 1e-4 * scale, name


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_are_taken_as_given(family: str) -> None:
    model = decoder(FAMILIES[family].config)
    tokens, bounds = draw_tokens(2, SEQUENCE), bounds_of(STARTS, SEQUENCE)
    positions = torch.arange(SEQUENCE) - bounds
    restarting = model(tokens, Context(bounds_BS=bounds))
    assert torch.equal(restarting, model(tokens, Context(bounds_BS=bounds, positions_BS=positions)))
    running = model(tokens, Context(bounds_BS=bounds, positions_BS=torch.arange(SEQUENCE).expand(2, -1)))
    if family == "llama":  # rotary positions are relative: within documents only differences matter
        torch.testing.assert_close(running, restarting, rtol=1e-3, atol=1e-3)
    else:
        assert not torch.allclose(running, restarting, rtol=1e-2)


@pytest.mark.parametrize("window", [None, 1, 4, 20, 50])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("queries", [SEQUENCE, 1, 6])
def test_mask_equals_its_definition(window: int | None, documents: bool, queries: int) -> None:
    bounds = bounds_of(STARTS, SEQUENCE)[:, -queries:] if documents else None
    piece, reach = (SEQUENCE - queries, SEQUENCE), Reach.window(window)
    of_batch = Documents(bounds_of(STARTS, SEQUENCE)) if documents else None
    mask = AttentionMask.of(2, piece, reach, torch.device("cpu"), of_batch).mask()
    expected = torch.zeros(2, 1, queries, SEQUENCE, dtype=torch.bool)
    for row in range(2):
        for index, q in enumerate(range(SEQUENCE - queries, SEQUENCE)):
            for k in range(SEQUENCE):
                first = 0 if bounds is None else int(bounds[row, index])
                expected[row, 0, index, k] = first <= k <= q and (window is None or k > q - window)
    if mask is None:
        causal = torch.ones(queries, SEQUENCE, dtype=torch.bool).tril(SEQUENCE - queries)
        assert torch.equal(expected, causal.expand_as(expected))
        assert queries in (1, SEQUENCE)
    else:
        assert torch.equal(expected, mask.expand_as(expected))


def test_plain_causal_attention_needs_no_mask() -> None:
    def mask(reach: Reach) -> Tensor | None:
        return AttentionMask.of(1, (0, 8), reach, torch.device("cpu")).mask()

    assert mask(Reach()) is None and mask(Reach(7)) is None
    assert mask(Reach(6)) is not None
    both = mask(Reach(None, None))
    assert both is not None and both.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_queries_equal_repeated_keys(dtype: torch.dtype, masked: bool) -> None:
    """The kernel's own grouping against explicit copies of keys and values, gradients too."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 70, 16, generator=generator).to(dtype).requires_grad_() for heads in (6, 2, 2))
    mask = torch.rand(2, 1, 70, 70, generator=generator) < 0.5 if masked else None
    if mask is not None:
        mask = mask | torch.eye(70, dtype=torch.bool)
    grouped = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    repeated = F.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=mask, is_causal=not masked
    )
    weight = torch.randn(grouped.shape, generator=generator).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(
        (grouped, *torch.autograd.grad(grouped, (q, k, v), weight)),
        (repeated, *torch.autograd.grad(repeated, (q, k, v), weight)),
        strict=True,
    ):
        assert (one - other).abs().max() < tolerance * other.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_equal_a_whole_forward_pass(family: str) -> None:
    model = decoder(FAMILIES[family].config)
    tokens = draw_tokens(2, SEQUENCE)
    states = model.new_states(rows=2)
    with torch.no_grad():
        whole = model(tokens, Context())
        # A prompt, then pieces of several tokens and of one.
        pieces = [model(piece, Context(states=states)) for piece in tokens.split([6, 5, 1, 1, 7], dim=1)]
    assert states.lengths == [SEQUENCE, SEQUENCE]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_cached_logits_have_sinks_and_caps(cap: float | None, sinks: bool) -> None:
    """Rows of equal and of unequal lengths, prompts and single tokens."""
    config = FAMILIES["llama"].config
    plain, model = decoder(config), decoder(config.model_copy(update={"attention_soft_cap": cap, "sinks": sinks}))
    model.load_state_dict(plain.state_dict(), strict=False)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    tokens = draw_tokens(2, SEQUENCE)
    with torch.no_grad():
        whole = model(tokens, Context())
        assert torch.allclose(whole, plain(tokens, Context()), atol=1e-4) == (cap is None and not sinks)
        states = model.new_states(rows=2)
        pieces = [model(piece, Context(states=states)) for piece in tokens.split([6, 5, 1, 1, 7], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)
        states = model.new_states(rows=2)
        model(tokens[:, :6], Context(states=states, counts=[6, 3]))
        one = model(torch.stack((tokens[0, 6:7], tokens[1, 3:4])), Context(states=states))
        more = model(torch.stack((tokens[0, 7:11], tokens[1, 4:8])), Context(states=states))
    found = torch.cat((one, more), 1)
    torch.testing.assert_close(found[0], whole[0, 6:11], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], whole[1, 3:8], rtol=1e-4, atol=1e-4)


def test_soft_cap() -> None:
    config = FAMILIES["llama"].config
    tokens = draw_tokens(2, SEQUENCE)
    plain = decoder(config)(tokens, Context())[..., :VOCAB]
    capped = decoder(config.model_copy(update={"logit_soft_cap": 1.5}))(tokens, Context())
    torch.testing.assert_close(capped[..., :VOCAB], 1.5 * torch.tanh(plain / 1.5))
    assert torch.isneginf(capped[..., VOCAB:]).all()
    F.cross_entropy(capped.flatten(0, 1), tokens.flatten()).backward()


def test_vocabulary_padding_changes_no_loss() -> None:
    config = FAMILIES["llama"].config.model_copy(update={"vocab_multiple": 1})
    plain, padded = decoder(config), Decoder(decoder_spec(FAMILIES["llama"].config, VOCAB, 64))
    assert (plain.spec.vocab_padded, padded.spec.vocab_padded) == (97, 100)
    state = plain.state_dict()
    for name in ("embedding.weight", "head.weight"):
        state[name] = torch.cat((state[name], torch.full((3, state[name].shape[1]), 5.0)))
    padded.load_state_dict(state)
    tokens = draw_tokens(2, SEQUENCE)
    losses = [F.cross_entropy(model(tokens, Context()).flatten(0, 1), tokens.flatten()) for model in (plain, padded)]
    torch.testing.assert_close(losses[0], losses[1])
    losses[1].backward()
    assert all(parameter.grad.isfinite().all() for parameter in padded.parameters())


def test_too_many_positions_for_a_learned_embedding() -> None:
    model = decoder(FAMILIES["gpt2"].config, max_positions=16)
    with pytest.raises(UserError, match=r"model\.max_positions is 16, but there are 17 positions"):
        model(draw_tokens(1, 17), Context())


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_bf16_is_near_fp32(family: str) -> None:
    """As mixed precision runs it: parameters and activations bf16, rotary tables and statistics fp32."""
    model = decoder(FAMILIES[family].config)
    tokens, context = draw_tokens(2, SEQUENCE), Context(bounds_BS=bounds_of(STARTS, SEQUENCE))
    expected = model(tokens, context)[..., :VOCAB]
    logits = model.bfloat16()(tokens, context)
    assert logits.dtype == torch.bfloat16
    assert torch.isneginf(logits[..., VOCAB:]).all()
    # By norm: of thousands of elements the one that is off the most is another on each processor.
    assert (logits[..., :VOCAB].float() - expected).norm() < 0.05 * expected.norm()


def test_names_and_the_absence_of_buffers() -> None:
    with torch.device("meta"):
        model = Decoder(decoder_spec(FAMILIES["qwen3"].config, VOCAB, 64))
    names = set(model.state_dict())
    assert "head.weight" not in names
    assert not list(model.buffers())
    layer = "mixer.wq mixer.wk mixer.wv mixer.wo mixer.q_norm mixer.k_norm mixer_norm mlp_norm mlp.w1 mlp.w2 mlp.w3"
    assert names == {"embedding.weight", "norm.weight"} | {
        f"layers.{index}.{part}.weight" for index in range(3) for part in layer.split()
    }
