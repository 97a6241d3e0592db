"""A check of what the layers of a model promise, for the tests of plug-ins."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.init import init_weights

_VOCABULARY = 64
_TOLERANCE = 1e-4


@torch.no_grad()
def check_layers(model: ModelConfig, length: int = 24) -> None:
    """Compare a model with itself on other inputs, in fp32 on the CPU.

    Without `direction: both`, no position may see one after it, and texts that are continued token by token must get
    the logits of whole ones. With `document_attention`, no document may see another.

    Args:
        model: The `model:` section, of a small model.
        length: Tokens of the sequence.

    Raises:
        UserError: It does not keep one of these.
    """
    spec = decoder_spec(model, _VOCABULARY, length)
    built = Decoder(spec)
    init_weights(built, spec, model.init, 0)
    noise = torch.Generator().manual_seed(0)
    for parameter in built.parameters():
        # Values of some size, so that nothing is hidden by small or equal ones.
        parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.2)
    tokens = torch.randint(_VOCABULARY, (1, length), generator=noise)
    half = length // 2
    whole = built(tokens, Context())
    if model.direction == "causal":
        _compare(whole[:, :half], built(tokens[:, :half], Context()), "positions see those behind them")
        _compare(whole, _continued(built, tokens), "texts that are continued get other numbers than whole ones")
    if model.document_attention:
        bounds = torch.zeros(1, length, dtype=torch.int64)
        bounds[:, half:] = half
        apart = built(tokens, Context(bounds_BS=bounds))
        for document in (slice(0, half), slice(half, length)):
            alone = built(tokens[:, document], Context())
            _compare(apart[:, document], alone, "documents of a sequence see each other")


def _continued(model: Decoder, tokens_1S: Tensor) -> Tensor:
    """Logits of a text of which some tokens come together, and the rest one by one."""
    states, length = model.new_states(1), tokens_1S.shape[1]
    pieces = [slice(0, length // 3), *(slice(place, place + 1) for place in range(length // 3, length))]
    return torch.cat([model(tokens_1S[:, piece], Context(states=states)) for piece in pieces], dim=1)


def _compare(found: Tensor, expected: Tensor, problem: str) -> None:
    difference = (found - expected)[..., :_VOCABULARY].abs().max().item()
    scale = expected[..., :_VOCABULARY].abs().max().item()
    if not difference <= _TOLERANCE * scale:
        raise UserError(
            f"layers of the model do not keep what docs/plugins.md demands: {problem} (logits of up to {scale:.3g} "
            f"differ by {difference:.3g})"
        )
