"""Objectives of other packages: the class that they extend, and checks of what they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np

from pipeline.common.errors import UserError
from pipeline.config.base import Section
from pipeline.config.plugins import find_plugin
from pipeline.data.loading.objectives.base import Arranged, KeyOf, PackObjective, PackRow, PackSizes
from pipeline.data.loading.objectives.making import Making
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.data.order.permutation import IntArray

_REPEATED = 2
"""Windows that are arranged twice, to see that the result is the same."""


class CustomObjective(ABC):
    """An objective of another package; an `Objective` that is named as `type` in the run file.

    All that it makes of a window is a function of the tokens, of where documents begin, and of the sample's key: so a
    run resumes exactly, and every rank makes the same. `pipeline.data.loading.objectives.draws` has random numbers of a
    key. See `docs/plugins.md`.

    Attributes:
        Options: Section of the keys below `options`.
        direction: `model.direction` of the models that it trains.
        encoder: True if these have a `model.encoder`.
        packs: True if it also takes packs (`data.loader.packing: best_fit`), by the last two methods.
        chooses: True if it chooses which tokens are predicted; validation and evaluation score by it then, and text as
            it is otherwise.
        shifts: True if the first token of a window is an input only, False if its last one is left aside.
        reads: False if the weights are right whatever the tokens are, so that they need not be read for a skip.
        options: Values of `Options`.
    """

    Options: ClassVar[type[Section] | None] = None
    direction: ClassVar[Literal["causal", "both"]] = "causal"
    encoder: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    shifts: ClassVar[bool] = True
    reads: ClassVar[bool] = True

    def __init__(self, making: Making) -> None:
        """Make it for a section of the run file.

        Args:
            making: That section, with the tokenizer; `making.special` finds special tokens.

        Raises:
            UserError: The tokenizer lacks a token, or values do not fit.
        """
        self.options: Any = making.use.objective.options

    @classmethod
    def stream_shape(cls, options: Any, length: int) -> StreamShape:
        """Sizes of what becomes of a window of L = `length` tokens; by default as many positions, all predicted."""
        return StreamShape(length, 0, length, length)

    def takes(self, length: int) -> bool:
        """True if windows of L = `length` are long enough."""
        return length >= 1

    def fixed_valid(self, length: int) -> int | None:
        """Targets that count in each window of L = `length`; None if their number differs between windows."""
        return None

    @abstractmethod
    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        """Targets that count, by window [R], without tokens; see `Objective.valid`."""

    @abstractmethod
    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        """The window as the model gets it; see `Objective.arrange`. `ids` cannot be written to."""

    def valid_packs(self, packs: PackSizes, key_of: KeyOf) -> IntArray:
        """Targets that count, by pack [R]; see `PackObjective.valid_packs`."""
        raise NotImplementedError(f"{type(self).__name__}.valid_packs, which packs = True needs")

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        """The pack as the model gets it; see `PackObjective.arrange_pack`."""
        raise NotImplementedError(f"{type(self).__name__}.arrange_pack, which packs = True needs")


def open_custom(making: Making) -> PackObjective:
    """The objective of a plug-in, which is checked whenever it is used.

    Raises:
        UserError: Its own, or windows are too short.
    """
    use = making.use
    plugin = find_plugin("objectives", use.objective.type)
    made = plugin.load(CustomObjective)(making)
    if not made.takes(use.length):
        raise UserError(
            f"{use.key}.type: {plugin} does not take windows of {use.length:,} tokens: raise sequence_length"
        )
    return _Checked(made, str(plugin), making.tokenizer.vocab_size)


class _Checked:
    """An objective whose windows are compared with what it says of them: the loss is divided by what it says."""

    arranges = True

    def __init__(self, made: CustomObjective, name: str, vocab_size: int) -> None:
        self._made = made
        self._name = name
        self._vocab_size = vocab_size
        self._seen = 0
        self.chooses = made.chooses
        self.shifts = made.shifts
        self.reads = made.reads

    def takes(self, length: int) -> bool:
        return self._made.takes(length)

    def shape(self, length: int) -> StreamShape:
        return self._made.stream_shape(self._made.options, length)

    def fixed_valid(self, length: int) -> int | None:
        return self._made.fixed_valid(length)

    def valid(self, begins: IntArray, splits: IntArray, length: int, key_of: KeyOf) -> IntArray:
        return self._made.valid(begins, splits, length, key_of)

    def valid_packs(self, packs: PackSizes, key_of: KeyOf) -> IntArray:
        return self._made.valid_packs(packs, key_of)

    def arrange(self, ids: IntArray, begins: IntArray, key: int) -> Arranged:
        length, kept = len(ids) - 1, ids.view()
        kept.flags.writeable = False
        made = self._made.arrange(kept, begins, key)
        if self._seen < _REPEATED:
            self._seen += 1
            self._compare(made, self._made.arrange(kept, begins, key))
        counts = self._made.valid(begins, np.array([0, len(begins)]), length, lambda row: key)
        fixed = self._made.fixed_valid(length)
        self._check(made, self.shape(length), {"valid": int(counts[0]), "fixed_valid": fixed})
        return made

    def arrange_pack(self, pack: PackRow, key: int) -> Arranged:
        made = self._made.arrange_pack(pack, key)
        length, splits = len(pack.targets), np.array([0, len(pack.begins)])
        sizes = PackSizes(length, np.array([pack.size]), splits, pack.behind - pack.begins, pack.continues, pack.ends)
        counts = self._made.valid_packs(sizes, lambda row: key)
        self._check(made, self.shape(length), {"valid_packs": int(counts[0])})
        return made

    def _compare(self, first: Arranged, second: Arranged) -> None:
        for name, one, other in zip(Arranged._fields, first, second, strict=True):
            if not np.array_equal(one, other):  # type: ignore[arg-type]
                raise self._error(f"{name} differs where the same window is arranged twice with the same key")

    def _check(self, made: Arranged, shape: StreamShape, counts: dict[str, int | None]) -> None:
        """Compare what it made with the sizes, and with the numbers of targets, that it gives elsewhere."""
        length = shape.length
        for name, whole in (("tokens", True), ("targets", True), ("weight", False), ("raw", True), ("prefix", True)):
            values = getattr(made, name)
            if values is not None and (values.shape != (length,) or (values.dtype.kind in "iu") is not whole):
                kind = "whole numbers" if whole else "numbers"
                raise self._error(f"{name} must be {length} {kind}, and is {values.dtype} of shape {values.shape}")
        for name, least, most in (
            ("tokens", 0, self._vocab_size - 1),
            ("targets", 0, self._vocab_size - 1),
            ("raw", -1, shape.raw),
        ):
            values = getattr(made, name)
            if values.min() < least or values.max() > most:
                found = f"from {values.min()} to {values.max()}"
                raise self._error(f"{name} must be from {least} to {most}, and has values {found}")
        counted = made.weight != 0
        if not np.array_equal(made.weight, counted):
            raise self._error("weight must be 0 or 1 everywhere")
        if (made.raw[counted] < 0).any() or counted[: shape.encoder].any():
            raise self._error("a target with a weight must be a token of the window, and behind the encoder's part")
        sides = {0, shape.encoder}
        if not sides <= set(made.begins.tolist()) or (np.diff(made.begins) < 1).any() or made.begins[-1] >= length:
            raise self._error(f"begins must ascend below {length} and have {sorted(sides)}, and is {made.begins}")
        if made.predicted is None and shape.predicted != shape.decoder:
            raise self._error(f"predicted is missing, and stream_shape has {shape.predicted} of {shape.decoder}")
        if made.predicted is not None:
            inside = np.zeros(length, bool)
            if len(made.predicted) == shape.predicted and (np.diff(made.predicted, prepend=-1) > 0).all():
                inside[made.predicted[made.predicted < length]] = True
            if inside.sum() != shape.predicted or (counted & ~inside).any():
                raise self._error(
                    f"predicted must be {shape.predicted} ascending positions with all targets that count"
                )
        count = int(counted.sum())
        for name, value in counts.items():
            if value not in (None, count):
                raise self._error(f"{name}() gives {value} targets that count, and weight has {count}")

    def _error(self, what: str) -> UserError:
        return UserError(f"the objective {self._name}: {what}; this is an error of the plug-in, see docs/plugins.md")
