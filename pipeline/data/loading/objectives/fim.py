"""Fill-in-the-middle: causal prediction of documents whose pieces stand in another order."""

from __future__ import annotations

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.hashing import mix
from pipeline.data.loading.objectives.base import Arranged, PackRow
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.making import Making
from pipeline.data.order.permutation import IntArray

_DRAWS = 4
"""Numbers drawn for each piece: whether, in which order, and two cuts."""
_SENTINELS = 3
_SHORTEST = 2 * _SENTINELS
"""Three tokens make room for the sentinels, and three are left, so that prefix, middle and suffix can have one each."""


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

    arranges = True

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

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """Causal prediction of the window with the pieces rearranged that the key chooses."""
        return super().arrange(self._rearranged(ids, begins, len(ids), key), begins, key)

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        """Causal prediction of the pack with the chunks rearranged that the key chooses."""
        return self._arranged_pack(pack, self._rearranged(pack.targets, pack.begins, pack.size, key))

    def _rearranged(self, ids: IntArray, begins: IntArray, end: int, key: int) -> IntArray:
        """Tokens of which some pieces are rearranged.

        Args:
            ids: All.
            begins: Of the pieces.
            end: Of the last one.
            key: The sample's.
        """
        ids = ids.copy()
        draws = mix(np.arange(_DRAWS * len(begins), dtype=np.uint64), key).reshape(-1, _DRAWS)
        fractions = draws[:, :2] >> np.uint64(11)
        ends = np.append(begins[1:], end)
        for piece in np.flatnonzero(fractions[:, 0] < self._rate).tolist():
            text = ids[begins[piece] : ends[piece]]
            if text[-1] == self._end:
                text = text[:-1]
            if len(text) >= _SHORTEST:
                self._rearrange(text, bool(fractions[piece, 1] < self._spm_rate), draws[piece, 2:].tolist())
        return ids

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


def make_fill_in_the_middle(making: Making) -> FillInTheMiddle:
    """The objective of a run file, see `Making`."""
    objective = making.use.objective
    sentinels = objective.sentinel_tokens
    for number, token in enumerate(sentinels):
        if token in sentinels[:number]:
            raise UserError(
                f"{making.use.key}.sentinels.{number}: {token!r} is given twice; prefix, suffix and middle need three "
                "different tokens"
            )
    prefix, suffix, middle = (making.special(f"sentinels.{n}", token, "three") for n, token in enumerate(sentinels))
    return FillInTheMiddle(
        objective.share,
        objective.spm_rate,
        (prefix, suffix, middle),
        making.tokenizer.end_of_document,
        mask_document_start=making.config.train.loss.mask_document_start,
    )
