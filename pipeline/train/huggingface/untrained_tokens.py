"""Tokens of a chat template that a model was never trained on, as the norms of their rows show."""

from __future__ import annotations

import torch

from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.foreign_model import ForeignModel

TABLE = "embedding.weight"
_ROWS = 4096
_LEAST_SHARE = 0.5
"""A row that is shorter than this share of nearly all others was not trained: weight decay alone made it small."""


def untrained_note(found: ForeignModel, tokenizer: Tokenizer, template: str) -> str:
    """A warning that names the tokens of a template whose rows look untrained; "" for none.

    Args:
        found: the model.
        tokenizer: its own.
        template: its chat template.
    """
    ids = {token: tokenizer.encode_parsed(token)[0] for token in tokenizer.added_tokens if token in template}
    single = {token: each[0] for token, each in ids.items() if len(each) == 1}
    if not single or TABLE not in found.tensors:
        return ""
    table = {TABLE: found.tensors[TABLE]}
    rows = [
        found.read(table, slice(first, min(first + _ROWS, tokenizer.vocab_size)))[TABLE].float().norm(dim=1)
        for first in range(0, tokenizer.vocab_size, _ROWS)
    ]
    norms = torch.cat(rows)
    usual = norms.kthvalue(1 + len(norms) // 100).values.item()  # a hundredth of the rows is shorter
    short = {token: norms[id].item() for token, id in single.items() if norms[id] < _LEAST_SHARE * usual}
    if not short:
        return ""
    named = ", ".join(f"{token} ({norm:.3g})" for token, norm in short.items())
    return (
        f"\nwarning: tokens of the chat template that look untrained: {named}; rows of the embedding have a norm of "
        f"{norms.median().item():.3g} in the middle. Train on conversations before you rely on them"
    )
