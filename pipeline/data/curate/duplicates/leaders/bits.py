"""Number of bits of a word, by the instruction that processors have for it."""

from __future__ import annotations

from typing import Any

from pipeline.common.compiled import load_numba

_numba = load_numba()
_intrinsic: Any = _numba.extending.intrinsic


@_intrinsic  # type: ignore[untyped-decorator]
def count_bits(typing: Any, word: Any) -> Any:
    """Number of bits of a uint64 that are 1, as int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return _numba.types.int64(_numba.types.uint64), generate
