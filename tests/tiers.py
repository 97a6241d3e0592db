"""In which tier the cases of a grid are, see CONTRIBUTING.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(quick: int, cases: Iterable[Any], *, rest: str) -> list[Any]:
    """Cases of `pytest.mark.parametrize` of which the first are quick, and the rest in another tier.

    Args:
        quick: How many have no further mark.
        cases: Values, tuples of values, or `pytest.param`.
        rest: The mark of the others: "guard" or "slow".
    """
    mark = getattr(pytest.mark, rest)
    marked = []
    for number, case in enumerate(cases):
        values, marks, name = (
            case if hasattr(case, "marks") else (case if isinstance(case, tuple) else (case,), (), None)
        )
        marked.append(pytest.param(*values, marks=marks if number < quick else [*marks, mark], id=name))
    return marked
