"""Decoders of tests, and what holds for those of any kind of layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.init import init_weights


def uneven_decoder(config: ModelConfig, vocab: int, seed: int) -> Decoder:
    """A model for sequences of up to 64 tokens none of whose parameters is all zeros or ones."""
    spec = decoder_spec(config, vocab, 64)
    model = Decoder(spec)
    init_weights(model, spec, config.init, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    return model


@torch.no_grad()
def check_states(model: Decoder, tokens_2S: Tensor, *, atol: float | None = None, rtol: float | None = None) -> None:
    """Rows of unequal lengths, of which one joins and one leaves, against whole passes. S is 10 or more."""
    whole = model(tokens_2S, Context())
    states, more = model.new_states(1), model.new_states(1)
    model(tokens_2S[:1, :9], Context(states=states))
    model(tokens_2S[1:, :4], Context(states=more))
    states.join(more)
    padded = torch.stack((F.pad(tokens_2S[0, 9:10], (0, 2)), tokens_2S[1, 4:7]))
    logits = model(padded, Context(states=states, counts=[1, 3]))
    torch.testing.assert_close(logits[0, :1], whole[0, 9:10], atol=atol, rtol=rtol)
    torch.testing.assert_close(logits[1], whole[1, 4:7], atol=atol, rtol=rtol)
    states.remove(0)
    logits = model(tokens_2S[1:, 7:8], Context(states=states))
    torch.testing.assert_close(logits[0], whole[1, 7:8], atol=atol, rtol=rtol)
