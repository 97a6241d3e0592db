"""Encoders: what they are not asked for, what one beside a decoder reads, and their pseudo-perplexity.

Salazar et al. 2020, "Masked Language Model Scoring": each token is masked alone and predicted from all others of its
window. The mean of these losses is to an encoder what the loss is to a decoder, though no chain of probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.loading.batch import Batch


def refuse_encoder(model: ModelConfig, what: str) -> None:
    """Refuse what needs a model that writes text.

    Args:
        model: The section.
        what: What is asked for, with the way to leave it out.

    Raises:
        UserError: The model is an encoder.
    """
    if model.direction == "both":
        raise UserError(
            f"{what}: model.direction=both is an encoder, which fills in masked tokens and writes no text; evaluate it "
            "by its held-out loss and pseudo-perplexity, or export it (pipeline convert to-hf)"
        )


def refuse_tasks(config: Config) -> None:
    """Refuse benchmarks of an encoder, which all score how texts continue.

    Raises:
        UserError: `eval` names some.
    """
    for key, given in (("eval.tasks", config.eval.tasks), ("eval.harness", config.eval.harness)):
        if given:
            refuse_encoder(config.model, f"{key} scores how texts continue; leave it out")
    if config.eval.continuations is not None:
        refuse_encoder(config.model, "eval.continuations continues texts; leave it out")


def document(tokens: Sequence[int], end: int) -> list[int]:
    """A text as an encoder beside a decoder reads it: as a document that ends, as in training.

    Args:
        tokens: Of the text, at least one.
        end: The end-of-document token, which they may have already.
    """
    return list(tokens) if tokens[-1] == end else [*tokens, end]


class MaskedAlone:
    """Tokens of a held-out split, each masked alone in the window that it is in.

    It stands in for a `HeldOut` in `heldout_loss`: its windows are tokens, by their place among those of the split.

    Args:
        dataset: The split.
        length: Positions of a window, L.
        mask_token: Id in place of the token.
    """

    def __init__(self, dataset: Dataset, length: int, mask_token: int) -> None:
        self._dataset = dataset
        self._length = length
        self._mask_token = mask_token

    def spread(self, count: int) -> list[int]:
        """At most `count` tokens at equal distances, the same ones whenever the split is the same.

        Ends of documents are left out, as in training.
        """
        total, end = self._dataset.tokens, self._dataset.manifest.tokenizer.end_of_document
        count = min(count, total)
        places = [place * total // count for place in range(count)]
        return [place for place in places if int(self._dataset.read(place, 1)[0]) != end]

    def longest_first(self, tokens: Sequence[int]) -> Sequence[int]:
        """All are of one length."""
        return tokens

    def length_of(self, tokens: Sequence[int], multiple: int) -> int:
        """L."""
        return self._length

    def batch(self, tokens: Sequence[int], length: int | None = None) -> Batch:
        """A row for each token, [len(tokens), L]; a window at the end is filled up with another document."""
        length = self._length
        end = self._dataset.manifest.tokenizer.end_of_document
        targets = np.full((len(tokens), length), end, dtype=np.int64)
        places, starts = np.asarray(tokens) % length, []
        for row, token in enumerate(tokens):
            first = token // length * length
            count = min(length, self._dataset.tokens - first)
            targets[row, :count] = self._dataset.read(first, count)
            begins = self._dataset.document_starts(first, count) - first
            begins = np.union1d(0, begins if count == length else np.append(begins, count))
            starts.append(row * length + begins)
        rows = np.arange(len(tokens))
        weight = np.zeros((len(tokens), length), dtype=np.float32)
        weight[rows, places] = 1
        inputs = targets.copy()
        inputs[rows, places] = self._mask_token
        return Batch(
            tokens=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            weight=torch.from_numpy(weight),
            starts=torch.from_numpy(np.concatenate(starts).astype(np.int32)),
            sources=torch.zeros(len(tokens), dtype=torch.int64),
            extras={},
            predicted=torch.from_numpy(places[:, None]),
        )


def masked_alone(config: Config, name: str, dataset: Dataset) -> MaskedAlone:
    """Tokens of a source, which are masked as its objective does it."""
    token = config.train.objective.of(name).mask_token
    return MaskedAlone(dataset, config.train.sequence_length, dataset.manifest.tokenizer.special_tokens[token])
