"""Interface of objectives, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import key as hash_key
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.data.order.permutation import IntArray

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
KeyOf = Callable[[int], int]


def sample_key(seed: int, index: int) -> int:
    """64 bits for a sample: all randomness of an objective comes from it, so that it resumes and reshards exactly.

    Args:
        seed: Seed of the run.
        index: Global index of the sample.
    """
    return hash_key("sample", seed, index)


class Arranged(NamedTuple):
    """A window as the model gets it. S positions, see `StreamShape`."""

    tokens: IntArray
    """[S], inputs."""
    targets: IntArray
    """[S], what each position is to predict."""
    weight: FloatArray
    """[S], 0 where a target does not count."""
    begins: IntArray
    """Positions at which documents begin, ascending; 0 is the first, and the first of the decoder is among them."""
    raw: IntArray
    """[S], by position the token of the window that the target is, or stands for; -1 where nothing counts. What a run
    skips is given as tokens of the window."""
    predicted: IntArray | None = None
    """[K] ascending positions, which have all whose targets count; None: all can."""
    prefix: IntArray | None = None
    """[S], by position the one behind the prefix of its document; None: the objective has no prefixes."""

    @property
    def predicted_tokens(self) -> list[tuple[int, int]]:
        """Tokens [first, end) of the window that are predicted, or at which something else is, ascending."""
        tokens = np.unique(self.raw[self.weight > 0])
        first = np.flatnonzero(np.diff(tokens, prepend=-2) > 1)
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(tokens, first[1:]) if len(part)]


class PackRow(NamedTuple):
    """A pack of documents, with padding up to L targets. C chunks, each of one document."""

    targets: IntArray
    """[L] int64, the chunks one after the other, and 0 behind them."""
    begins: IntArray
    """[C] targets at which chunks begin, ascending; 0 is the first."""
    leads: IntArray
    """[C] token ids before the first one of each chunk: of its document, or the end-of-document token."""
    continues: BoolArray
    """[C] whether the chunk continues a document."""
    ends: BoolArray
    """[C] whether the chunk ends its document."""
    size: int
    """Targets that are no padding."""

    @property
    def behind(self) -> IntArray:
        """[C] target behind each chunk."""
        return np.append(self.begins[1:], self.size)

    @property
    def starts(self) -> IntArray:
        """Positions at which chunks begin, or the padding."""
        return self.begins if self.size == len(self.targets) else np.append(self.begins, self.size)

    def inputs(self, targets: IntArray) -> IntArray:
        """[L] inputs: of each target the one before it, of the first one of a chunk its lead, and 0 for padding.

        Args:
            targets: those of the row, or what an objective has made of them.
        """
        inputs = np.empty_like(targets)
        inputs[1:] = targets[:-1]
        inputs[self.begins] = self.leads
        inputs[self.size :] = 0
        return inputs


class PackSizes(NamedTuple):
    """Sizes of packs and of their chunks, without tokens. R packs, C chunks of all of them, pack after pack."""

    length: int
    """L."""
    targets: IntArray
    """[R] targets of each that are no padding."""
    splits: IntArray
    """[R + 1]: chunks of pack r are the ones [splits[r], splits[r + 1])."""
    tokens: IntArray
    """[C] tokens of each chunk."""
    continues: BoolArray
    """[C] whether the chunk continues a document."""
    ends: BoolArray
    """[C] whether the chunk ends its document."""

    def sums(self, values: IntArray | BoolArray) -> IntArray:
        """[R] sums of [C] values over the chunks of each pack."""
        before = np.append(0, np.cumsum(values))
        sums: IntArray = np.diff(before[self.splits])
        return sums


class Objective(Protocol):
    """Prediction task in a window of L + 1 tokens, of which the first is the last target of another window.

    Everything is a function of the tokens, of where documents begin, and of the sample's `sample_key`.
    """

    @property
    def arranges(self) -> bool:
        """False if inputs are the first L tokens and targets the last L, with weights that `arrange` need not make."""

    @property
    def chooses(self) -> bool:
        """True if it chooses which tokens are predicted, False if each of the last L is."""

    @property
    def shifts(self) -> bool:
        """True if the window's first token is an input only, False if its last is none of either."""

    @property
    def reads(self) -> bool:
        """True if the weights depend on the tokens, and not only on where documents begin and on the key."""

    def takes(self, length: int) -> bool:
        """True if windows of L = `length` are long enough."""

    def shape(self, length: int) -> StreamShape:
        """Sizes of what becomes of a window of L = `length`."""

    def fixed_valid(self, length: int) -> int | None:
        """Targets that count in each window of L = `length`; None if their number differs between windows."""

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """Targets that count, by window [R]; without tokens.

        Args:
            begins: Tokens of each window at which documents begin, ascending and with 0; one window after the other.
            splits: [R + 1]: those of window r are begins[splits[r] : splits[r + 1]].
            length: L.
            key_of: The `sample_key` of window r.
        """

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """The window as the model gets it.

        Args:
            ids: [L + 1] int64; they stay as they are. Where `reads` is false, weights and `raw` are right for any.
            begins: Of these the ones at which documents begin, ascending, and 0.
            key: The sample's `sample_key`.
        """


class PackObjective(Objective, Protocol):
    """An objective that also takes packs; the run file is refused where others have to."""

    def valid_packs(self, packs: PackSizes, key_of: KeyOf) -> IntArray:
        """Targets that count, by pack [R]; without tokens.

        Args:
            packs: Which.
            key_of: The `sample_key` of pack r.
        """

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        """The pack as the model gets it. As tokens of a window, targets are numbered from 1.

        Args:
            pack: Of L targets. Where `reads` is false, weights and `raw` are right for any.
            key: The sample's `sample_key`.
        """


def begins_before(begins: IntArray, splits: IntArray, end: int) -> IntArray:
    """Number of documents that begin in the first `end` tokens of each window, after its first token, [R].

    Args:
        begins: As `Objective.valid` has them.
        splits: The same.
        end: Of the tokens.
    """
    inside = np.append(0, np.cumsum(begins[splits[0] : splits[-1]] < end))
    counts: IntArray = np.diff(inside[splits - splits[0]]) - 1
    return counts
