"""Choice of the engine of the counters."""

from __future__ import annotations

import pickle

import pytest

from pipeline.common.errors import UserError
from pipeline.data.curate.measures import engine_choice, numba_counters, python_counters, reference
from pipeline.data.curate.measures.engine_choice import CountersDiffer, choose


def test_numba_where_it_is_right() -> None:
    assert choose("auto")[0].name == choose("numba")[0].name == "numba"
    assert choose("python")[0].name == "python"


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "has_numba", lambda: False)
    engine, note = choose("auto")
    assert engine.name == "python" and "[curate]" in note
    with pytest.raises(UserError, match=r"data\.curate\.engine: numba cannot be used: it is not installed"):
        choose("numba")


def test_numba_that_miscounts_or_fails_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numba_counters.count_batch
    monkeypatch.setattr(numba_counters, "count_batch", lambda *arguments: right(*arguments) + 1)
    engine, note = choose("auto")
    assert engine.name == "python" and "engine numba counts" in note

    def broken(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(numba_counters, "count_batch", broken)
    assert choose("auto")[1] == "it fails: no such instruction"


def test_python_that_miscounts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_counters, "count", lambda text: reference.count(text) | {"words": 7})
    with pytest.raises(UserError, match="engine python counts words as 7"):
        choose("python")


def test_error_is_pickled() -> None:
    error = CountersDiffer("python", "words", 1, 2, "a", 3)
    assert str(pickle.loads(pickle.dumps(error))) == str(error) and "engine: numba" in str(error)
