"""Objectives: what a model is asked to predict in an instance, and how the tokens are arranged for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.hashing import key as hash_key
from pipeline.common.hashing import mix
from pipeline.data.order.permutation import IntArray

if TYPE_CHECKING:
    from pipeline.config.root import Config
    from pipeline.data.datasets.manifest import TokenizerInfo

FloatArray = npt.NDArray[np.float32]

_DRAWS = 4
"""Numbers drawn for each piece: whether, in which order, and two cuts."""
_SENTINELS = 3
_SHORTEST = 2 * _SENTINELS
"""Three tokens make room for the sentinels, and three are left, so that prefix, middle and suffix can have one each."""


def sample_key(seed: int, index: int) -> int:
    """64 bits for a sample: all randomness of an objective comes from it, so that it resumes and reshards exactly.

    Args:
        seed: Seed of the run.
        index: Global index of the sample.
    """
    return hash_key("sample", seed, index)


class Objective(Protocol):
    """Prediction task in an instance: of L + 1 tokens, each of the last L from those before it."""

    @property
    def masks(self) -> bool:
        """True if a target can have weight 0."""

    @property
    def rearranges(self) -> bool:
        """True if `rearrange` does anything."""

    def weight(self, bounds: IntArray, key: int) -> FloatArray:
        """Loss weights [L]; 0 where a target does not count. Known without the tokens.

        Args:
            bounds: [L + 1], from `Instances.bounds`.
            key: The sample's `sample_key`.
        """

    def rearrange(self, ids: IntArray, bounds: IntArray, key: int) -> None:
        """Change the tokens in place. Bounds, and what `weight` says, stay right.

        Args:
            ids: [L + 1] int64.
            bounds: [L + 1], from `Instances.bounds`.
            key: The sample's `sample_key`.
        """


class Causal:
    """Predict each token from those before it; an `Objective`.

    Args:
        mask_document_start: Give the first token of each document weight 0: nothing of its document comes before it.
    """

    rearranges = False

    def __init__(self, *, mask_document_start: bool = False) -> None:
        self.masks = mask_document_start

    def weight(self, bounds: IntArray, key: int) -> FloatArray:
        """Loss weights [L]: 1, or 0 for a masked first token of a document."""
        if not self.masks:
            return np.ones(len(bounds) - 1, np.float32)
        weight: FloatArray = (bounds[1:] != np.arange(1, len(bounds))).astype(np.float32)
        return weight

    def rearrange(self, ids: IntArray, bounds: IntArray, key: int) -> None:
        """The tokens stay as they are."""


class FillInTheMiddle(Causal):
    """Causal prediction with pieces of documents in the order prefix, suffix, middle; an `Objective`.

    Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle", with the token-level cuts and
    the document-level transformation of that paper. A piece is what the window has of a document. With PRE, SUF and MID
    for the sentinels, and END for the end-of-document token if the piece has it as its last, a piece becomes

        PSM: PRE prefix SUF suffix MID middle END
        SPM: PRE SUF suffix MID prefix middle END     (the paper's variant 2, which it trains with)

    Two cuts, each uniform over all places between the tokens and at both ends, bound the middle. Any of the three may
    be empty.

    The length of a piece stays, so the first three tokens make room for the sentinels, as if the piece had been cut off
    a little later at its left. Not the last three: where a piece ends, the end-of-document token says that the text is
    complete, and a suffix that breaks off before it would be a wrong lesson. Nothing says where a piece begins, and the
    first tokens are those that have the least before them to be predicted from.

    All draws are functions of the sample's key and the number of the piece in the window.

    Args:
        rate: Share of the pieces that are rearranged. Those of fewer than six tokens besides END never are.
        spm_rate: Share of these in the order SPM.
        sentinels: Ids of PRE, SUF and MID.
        end_of_document: Id of END.
        mask_document_start: Give the first token of each document weight 0, also where it is PRE.
    """

    rearranges = True

    def __init__(
        self,
        rate: float,
        spm_rate: float,
        sentinels: tuple[int, int, int],
        end_of_document: int,
        *,
        mask_document_start: bool = False,
    ) -> None:
        super().__init__(mask_document_start=mask_document_start)
        # Fractions in units of 2**-53, of which any float from 0 to 1 is a whole number or rounds to one.
        self._rate = np.uint64(rate * 2**53)
        self._spm_rate = np.uint64(spm_rate * 2**53)
        self._prefix, self._suffix, self._middle = sentinels
        self._end = end_of_document

    def rearrange(self, ids: IntArray, bounds: IntArray, key: int) -> None:
        """Rearrange the pieces that the key chooses."""
        starts = np.flatnonzero(bounds == np.arange(len(bounds)))
        draws = mix(np.arange(_DRAWS * len(starts), dtype=np.uint64), key).reshape(-1, _DRAWS)
        fractions = draws[:, :2] >> np.uint64(11)
        ends = np.append(starts[1:], len(ids))
        for piece in np.flatnonzero(fractions[:, 0] < self._rate).tolist():
            text = ids[starts[piece] : ends[piece]]
            if text[-1] == self._end:
                text = text[:-1]
            if len(text) >= _SHORTEST:
                self._rearrange(text, bool(fractions[piece, 1] < self._spm_rate), draws[piece, 2:].tolist())

    def _rearrange(self, text: IntArray, is_spm: bool, cuts: list[int]) -> None:
        """Rearrange one piece in place, given without its end-of-document token."""
        kept = text[_SENTINELS:].copy()
        low, high = sorted(cut * (len(kept) + 1) >> 64 for cut in cuts)
        suffix = len(kept) - high
        text[0] = self._prefix
        if is_spm:
            text[1] = self._suffix
            text[2 : 2 + suffix] = kept[high:]
            text[2 + suffix] = self._middle
            text[3 + suffix :] = kept[:high]
        else:
            text[1 : 1 + low] = kept[:low]
            text[1 + low] = self._suffix
            text[2 + low : 2 + low + suffix] = kept[high:]
            text[2 + low + suffix] = self._middle
            text[3 + low + suffix :] = kept[low:high]


def make_objective(config: Config, tokenizer: TokenizerInfo) -> Objective:
    """The objective of a run.

    Args:
        config: The run file.
        tokenizer: Of its datasets, from their manifests.

    Raises:
        UserError: The tokenizer lacks a sentinel.
    """
    return OBJECTIVES[config.train.objective.type](config, tokenizer)


def _causal(config: Config, tokenizer: TokenizerInfo) -> Causal:
    return Causal(mask_document_start=config.train.loss.mask_document_start)


def _fill_in_the_middle(config: Config, tokenizer: TokenizerInfo) -> FillInTheMiddle:
    objective = config.train.objective
    prefix, suffix, middle = (_sentinel(config, tokenizer, number) for number in range(_SENTINELS))
    return FillInTheMiddle(
        objective.rate,
        objective.spm_rate,
        (prefix, suffix, middle),
        tokenizer.end_of_document,
        mask_document_start=config.train.loss.mask_document_start,
    )


OBJECTIVES: dict[str, Callable[[Config, TokenizerInfo], Objective]] = {
    "causal": _causal,
    "fim": _fill_in_the_middle,
}
"""Constructors by `train.objective.type`. `ObjectiveConfig.type` lists the same names: the config is read without the
data pipeline."""


def _sentinel(config: Config, tokenizer: TokenizerInfo, number: int) -> int:
    """Id of a sentinel."""
    sentinels = config.train.objective.sentinels
    token = sentinels[number]
    key = f"train.objective.sentinels.{number}: {token!r}"
    if token in sentinels[:number]:
        raise UserError(f"{key} is given twice; prefix, suffix and middle need three different tokens")
    if token in config.tokenizer.allow_special:
        raise UserError(
            f"{key} is in tokenizer.allow_special, so documents may contain it; a sentinel must not occur in a "
            "text: choose another token"
        )
    if token not in tokenizer.special_tokens:
        have = ", ".join(map(repr, tokenizer.special_tokens)) or "none"
        raise UserError(
            f"{key} is not a special token of the tokenizer; besides the end-of-document token it has {have}. Use "
            f"three of these; or add the sentinels to the tokenizer: {_how_to_get_sentinels(config)}; or set "
            "train.objective.type: causal"
        )
    return tokenizer.special_tokens[token]


def _how_to_get_sentinels(config: Config) -> str:
    if all(source.dataset is not None for source in config.data.sources):
        return (
            "make the datasets with tokenizer.special_tokens in the run file, or `pipeline data adopt --special-token`"
        )
    if config.tokenizer.train is not None:
        return (
            "list them in tokenizer.special_tokens and run `pipeline preprocess` with another data.dir, since the "
            "tokenizer is trained with them"
        )
    return (
        "if its file has them, list them in tokenizer.special_tokens, remove the copy of the tokenizer in "
        f"{config.data_dir / 'tokenizer'}, and run `pipeline preprocess`, which keeps the existing token ids"
    )
