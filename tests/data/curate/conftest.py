"""Workers of the curation stage are forked, though NumPy has threads, which are idle: spawned ones start slowly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.data.work import worker_pool


@pytest.fixture(scope="package", autouse=True)
def _fork() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(worker_pool, "can_fork", lambda: True)
    yield
    patch.undo()
