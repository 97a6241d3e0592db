"""Leaders of small clusters, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.compiled import njit
from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CANNOT_LEAD,
    EXACT,
    MUST_LEAD,
    NEAR,
    URL,
    LeaderChoice,
    Members,
    empty_choice,
)


@njit
def equal_values(one: Any, other: Any) -> int:
    """Number of equal values. A loop over all of them is vectorized: nine times as fast as one that may end early."""
    equal = 0
    for place in range(len(one)):
        equal += one[place] == other[place]
    return equal


@njit
def share_band(one: Any, other: Any, bands: int) -> bool:
    """Tell whether all values of a band are equal."""
    rows = len(one) // bands
    for band in range(bands):
        same = True
        for row in range(band * rows, band * rows + rows):
            if one[row] != other[row]:
                same = False
                break
        if same:
            return True
    return False


@njit
def _choose(
    signatures: Any,
    signed: Any,
    ids: Any,
    roles: Any,
    bounds: Any,
    bands: int,
    fewest: int,
    leader: Any,
    rule: Any,
    equal: Any,
) -> None:
    exact, url = ids
    largest = 0
    for cluster in range(len(bounds) - 1):
        largest = max(largest, bounds[cluster + 1] - bounds[cluster])
    kept = np.zeros(largest, np.int64)
    for cluster in range(len(bounds) - 1):
        count = 0
        for place in range(bounds[cluster], bounds[cluster + 1]):
            if roles[place] != MUST_LEAD:
                for slot in range(count):
                    other = kept[slot]
                    if exact[other] == exact[place]:
                        leader[place], rule[place] = other, EXACT
                        break
                if rule[place] == 0:
                    for slot in range(count):
                        other = kept[slot]
                        if url[other] == url[place]:
                            leader[place], rule[place] = other, URL
                            break
                if rule[place] == 0 and bands > 0 and signed[place]:
                    for slot in range(count):
                        other = kept[slot]
                        if not signed[other]:
                            continue
                        same = equal_values(signatures[other], signatures[place])
                        if same >= fewest and share_band(signatures[other], signatures[place], bands):
                            leader[place], rule[place], equal[place] = other, NEAR, same
                            break
            if rule[place] == 0 and roles[place] != CANNOT_LEAD:
                kept[count] = place
                count += 1


def choose_compiled(members: Members, bounds: npt.NDArray[np.int64], bands: int, fewest: int) -> LeaderChoice:
    """Compare each document with all kept ones of its cluster; arguments are those of `ChooseSmall`."""
    choice = empty_choice(len(members))
    ids = members.exact, members.url
    _choose(
        members.signatures,
        members.signed,
        ids,
        members.roles,
        bounds,
        bands,
        fewest,
        choice.leader,
        choice.rule,
        choice.equal,
    )
    return choice
