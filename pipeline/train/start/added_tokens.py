"""Rows of tokens that a run's tokenizer adds to the tokenizer of the weights it begins with.

In embedding and head the row of an added token is the mean of the rows of all tokens that the weights know, which
bounds how far the probabilities of the others move (Hewitt 2021, "Initializing new word embeddings for pretrained
language models"). The mean is of whole numbers: every layout begins with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import torch
import torch.distributed as dist

from pipeline.common.errors import UserError
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.exported_loading import local_shards, named_weights
from pipeline.train.parallel.parallelize import ParallelModel

TABLES = ("embedding.weight", "head.weight", "head.bias")
"""Parameters with a row for each token."""
_UNIT = 2.0**32
_MOST = 512
"""Values below this are summed: with a vocabulary of a million, sums have less than 63 bits."""


def added_tokens(trained_with: Tokenizer, tokenizer: Tokenizer) -> range | None:
    """The ids that a tokenizer has behind those of another one; None if it changes the others.

    Args:
        trained_with: Tokenizer of the weights.
        tokenizer: Of the run.
    """
    theirs, ours = (orjson.loads(each.definition) for each in (trained_with, tokenizer))
    known = {each["id"]: each["content"] for each in theirs.pop("added_tokens")}
    own = {each["id"]: each["content"] for each in ours.pop("added_tokens")}
    decisive = ("model", "pre_tokenizer", "normalizer")
    same = all(theirs.get(name) == ours.get(name) for name in decisive)
    kept = {id: token for id, token in own.items() if id < trained_with.vocab_size}
    if not same or kept != known or trained_with.end_of_document != tokenizer.end_of_document:
        return None
    return range(trained_with.vocab_size, tokenizer.vocab_size)


def fill_added_rows(model: ParallelModel, added: range) -> None:
    """Set the rows of added tokens; every rank calls this.

    Args:
        model: Has the weights of all other tokens.
        added: Ids, the first of which is the number of tokens that the weights know.

    Raises:
        UserError: A weight is not finite, or absurdly large.
    """
    for name in TABLES:
        shards = list(_shards(model, name))
        device = next(model.named_parameters())[1].device
        width = torch.zeros((), dtype=torch.int64, device=device)
        for _, columns, local in shards:
            width.fill_(max(int(width), columns.stop if local.ndim > 1 else 1))
        dist.all_reduce(width, dist.ReduceOp.MAX)
        if not int(width):
            continue  # tied to the embedding, or without a bias
        # Of each column: the sum in units of 2^-32, the rows in it, and the values that cannot be summed.
        sums = torch.zeros(3, int(width), dtype=torch.int64, device=device)
        for rows, columns, local in shards:
            known = local[: max(0, min(rows.stop, added.start) - rows.start)].reshape(-1, local[:1].numel())
            for first in range(0, len(known), 4096):
                some = known[first : first + 4096]
                values = some.detach().double()
                bad = ~(values.abs() < _MOST)
                sums[0, columns] += (values.masked_fill(bad, 0) * _UNIT).round().to(torch.int64).sum(0)
                sums[1, columns] += len(some)
                sums[2, columns] += bad.sum(0)
        dist.all_reduce(sums)
        total, counted, wrong = sums
        if int(wrong.sum()):
            raise UserError(f"train.init_from: {name} has values that are not finite, or {_MOST} and more")
        # Replicas counted everything as often as there are of them.
        mean = total.div(counted // added.start, rounding_mode="floor").double() / (_UNIT * added.start)
        with torch.no_grad():
            for rows, columns, local in shards:
                mine = slice(max(rows.start, added.start) - rows.start, min(rows.stop, added.stop) - rows.start)
                if mine.start < mine.stop:
                    local[mine] = (mean[columns] if local.ndim > 1 else mean[0]).to(local.dtype)


def _shards(model: ParallelModel, name: str) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Shards of a table on this rank: rows, columns, and the tensor that holds them."""
    for found, rows, others, local in local_shards(named_weights(model)):
        if found == name:
            yield rows, others[0] if others else slice(0, 1), local
