"""The order in which sources take turns: stride scheduling in exact integers, at any position without a scan.

Source k has an integer weight w_k, all weights summing to 2**32, and an offset v_k. Its m-th sample is due at the
virtual time (m * 2**32 + v_k) / w_k. The order of the run is all samples by due time, ties by the source's name. One
sample is due per unit of virtual time on average, so a position's time is close to the position itself, and the samples
around it are enumerated from there.

Source of the idea: C. Waldspurger and W. Weihl, "Stride scheduling" (1995). `docs/sampler.md` has the bounds and their
proofs. Everything here is part of order_version 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.hashing import key
from pipeline.data.order.permutation import IntArray

UNIT = 2**32
"""Sum of the integer weights."""
_UNLIMITED = 2**127
_MAX_COUNT = 2**30
_MAX_LOOKED_UP = 2**16


def tempered(weights: Mapping[str, float], temperature: float) -> dict[str, Fraction]:
    """Weights to the power of 1 / temperature, up to a common factor; by name.

    With a temperature of 1 shares stay exactly as they are. Powers are computed with 50 decimal digits, since those of
    floats differ between machines.

    Args:
        weights: Positive numbers by source.
        temperature: Above 0. More than 1 evens shares out, less than 1 sharpens them.
    """
    exact = {name: exact_number(weight) for name, weight in weights.items()}
    if temperature == 1:
        return exact
    # A power below 1e-999 is 0: such a share is refused, whatever it is exactly.
    context = Context(prec=50, Emin=-999, Emax=999, traps=[])
    largest = max(exact.values())
    exponent = context.divide(Decimal(1), Decimal(repr(temperature)))
    ratios = {name: weight / largest for name, weight in exact.items()}
    return {
        name: Fraction(context.power(context.divide(Decimal(r.numerator), Decimal(r.denominator)), exponent))
        for name, r in ratios.items()
    }


def integer_weights(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    """Weights as integers that sum to 2**32, by the method of largest remainder; by name, sorted.

    Floats stand for the shortest decimal that denotes them, so 0.1 and 0.3 are exactly 1 to 3. Ties go to the name that
    sorts first.

    Args:
        weights: Positive numbers by source; their order does not matter.

    Raises:
        UserError: A source's share of the whole is too small to get an integer.
    """
    exact = {name: exact_number(weight) for name, weight in sorted(weights.items())}
    total = sum(exact.values())
    if total <= 0 or min(exact.values()) < 0:
        raise UserError(f"weights of the sources must be positive numbers, got {dict(weights)}")
    ideal = {name: weight * UNIT / total for name, weight in exact.items()}
    result = {name: int(share) for name, share in ideal.items()}
    by_remainder = sorted(ideal, key=lambda name: (result[name] - ideal[name], name))
    for name in by_remainder[: UNIT - sum(result.values())]:
        result[name] += 1
    for name, integer in result.items():
        if integer == 0:
            raise UserError(
                f"source {name!r} has weight {float(weights[name]):g} of {float(total):g} in all, less than the "
                f"smallest share of a blend, 1 in {UNIT:,}: raise its weight or leave the source out"
            )
    return result


def exact_number(weight: float | Fraction) -> Fraction:
    """A number of the run file as a fraction: 0.1 means one tenth."""
    return Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight)


def keyed_offset(seed: int, name: str) -> int:
    """v_k at the start of a run: in [0, 2**32), so that equal weights do not move in lockstep."""
    return key("offset", seed, name) % UNIT


class Order:
    """Position -> (source, number of the draw from that source).

    Args:
        names: Names of the sources, all different, in any order: results index this list, but which sample comes when
            does not depend on it.
        weights: Positive integers that sum to 2**32.
        offsets: v_k >= 0.
        caps: Samples that each source has; None for no limit. An exhausted source drops out and the others go on in
            their relative order. No caps at all by default.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[int],
        offsets: Sequence[int],
        caps: Sequence[int | None] | None = None,
    ) -> None:
        assert len(set(names)) == len(names) == len(weights) == len(offsets)
        assert sum(weights) == UNIT and min(weights) > 0 and min(offsets) >= 0
        self.names = list(names)
        self._weights = list(weights)
        self._offsets = list(offsets)
        self._caps = [_UNLIMITED if cap is None else cap for cap in caps or [None] * len(names)]
        self.capacity: int | None = None if _UNLIMITED in self._caps else sum(self._caps)
        """Samples that all sources have together; None for no limit."""
        self._name_rank = np.argsort(np.argsort(np.array(self.names)))

    def at(self, start: int, count: int) -> tuple[IntArray, IntArray]:
        """The samples at positions [start, start + count) of the blend.

        The time to find `start` grows with the number of sources, hardly with the position, so ask for blocks of 1,024
        and more.

        Args:
            start: First position, 0 or more.
            count: Number of positions, below 2**30.

        Returns:
            sources [count]: index into `names`.
            draws [count]: how many samples of that source come before.
        """
        assert start >= 0 and 0 <= count < _MAX_COUNT
        if count == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        assert self.capacity is None or start + count <= self.capacity, (start, count, self.capacity)
        # All draws due in the integer interval [begin, end) of virtual time, which covers the positions asked for.
        begin, end = self._time(start), self._time(start + count - 1) + 1
        before, until = self._due_before(begin), self._due_before(end)
        active = [k for k in range(len(self.names)) if until[k] > before[k]]
        if len(active) == 1:  # it takes all turns, and there is nothing to sort
            first = before[active[0]] + start - sum(before)
            return np.full(count, active[0]), np.arange(first, first + count)
        drawn = np.array([until[k] - before[k] for k in active])
        # Due times relative to `begin`: (d * 2**32 + residue_k) / w_k for the d-th draw of k in the interval.
        residues = [before[k] * UNIT + self._offsets[k] - begin * self._weights[k] for k in active]
        row = np.repeat(np.arange(len(active)), drawn)
        d = np.arange(row.size) - np.repeat(np.cumsum(drawn) - drawn, drawn)
        progress = d.astype(np.uint64) * np.uint64(UNIT) + np.array(residues, np.uint64)[row]
        weight = np.array([self._weights[k] for k in active], np.uint64)[row]
        whole, rest = np.divmod(progress, weight)
        # 64 binary digits of rest / weight. Two such fractions that differ, differ by at least 1 / (w * w') >= 2**-64,
        # so comparing the digits compares the fractions exactly.
        high, rest = np.divmod(rest << np.uint64(32), weight)
        fraction = (high << np.uint64(32)) | ((rest << np.uint64(32)) // weight)
        source = np.array(active)[row]
        chosen = np.lexsort((self._name_rank[source], fraction, whole))
        chosen = chosen[start - sum(before) :][:count]
        return source[chosen], (d + np.array([before[k] for k in active])[row])[chosen]

    def counts(self, position: int) -> list[int]:
        """Samples of each source among the first `position` ones, exactly; in the order of `names`."""
        if position == 0:
            return [0] * len(self.names)
        # The time of the last sample, not of the next one: there may be no next one.
        before = self._due_before(self._time(position - 1))
        source, _ = self.at(sum(before), position - sum(before))
        return [b + int(n) for b, n in zip(before, np.bincount(source, minlength=len(before)), strict=True)]

    def position_of(self, source: int, draws: IntArray) -> IntArray:
        """Positions of draws of a source in the blend: the inverse of `at`.

        Args:
            source: Index into `names`.
            draws [n]: 0 or more.

        Returns:
            [n]: positions; -1 for a draw that never comes, since the source has fewer samples (or, with a tiny weight,
            since its position would need more than 63 bits).
        """
        # The samples before it, by source: those with (x * 2**32 + v) / w below its own due time, compared as integers
        # over both denominators; ties by name. The numbers have up to 130 bits, hence arrays of Python's integers.
        weights, offsets, caps = (np.array(row, object) for row in (self._weights, self._offsets, self._caps))
        ties_first = np.array([name < self.names[source] for name in self.names], object)
        divisor = UNIT * self._weights[source]
        result = np.empty(len(draws), np.int64)
        rows = max(1, _MAX_LOOKED_UP // len(self.names))
        for first in range(0, len(draws), rows):
            part = draws[first : first + rows]
            due = part.astype(object)[:, None] * UNIT + self._offsets[source]
            lead = due * weights - offsets * self._weights[source]
            before = (lead + divisor - 1 + ties_first) // divisor
            positions = np.minimum(np.maximum(before, 0), caps).sum(axis=1)
            never = (part >= self._caps[source]) | (positions >= 2**63)
            result[first : first + rows] = np.where(never, -1, positions)
        return result

    def carry(self, position: int) -> list[int | None]:
        """Offsets of a blend that follows this one after `position` samples: what its sources are owed.

        With the same weights the two together are this blend without an end; with others each source still gets its
        share over both.

        Returns:
            v >= 0 of each source, in the order of `names`; None for an exhausted one.
        """
        if position == self.capacity:
            return [None] * len(self.names)
        time = self._time(position)
        return [
            None if count == cap else count * UNIT + offset - time * weight
            for count, cap, offset, weight in zip(
                self.counts(position), self._caps, self._offsets, self._weights, strict=True
            )
        ]

    def _due_before(self, time: int) -> list[int]:
        """Samples of each source due strictly before an integer time: ceil((t * w - v) / 2**32) within [0, cap]."""
        return [
            min(max(-((v - time * w) // UNIT), 0), cap)
            for w, v, cap in zip(self._weights, self._offsets, self._caps, strict=True)
        ]

    def _time(self, position: int) -> int:
        """The largest integer time before which at most `position` samples are due, fewer than all sources have."""
        # Each source is less than one sample ahead of its share, and caps only take samples away.
        low = high = max(0, position - len(self.names))
        due = self._due_before(high)
        below = above = sum(due)
        while above <= position:
            low, below = high, above
            # Far enough at the pace of the sources that are not exhausted here, unless more of them are there.
            left = [weight for weight, count, cap in zip(self._weights, due, self._caps, strict=True) if count < cap]
            high = low + (position - below + len(left)) * UNIT // sum(left) + 1
            due = self._due_before(high)
            above = sum(due)
        halve = False
        while high - low > 1:
            span = high - low
            # Samples are due at a nearly constant pace; where they are not, at times, every second step halves.
            middle = low + (span // 2 if halve else (position - below) * span // (above - below) + 1)
            middle = min(middle, high - 1)
            count = sum(self._due_before(middle))
            if count <= position:
                low, below = middle, count
            else:
                high, above = middle, count
            halve = not halve and 2 * (high - low) > span
        return low
