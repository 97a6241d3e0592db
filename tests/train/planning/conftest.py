from __future__ import annotations

import pytest

from pipeline.train.parallel.processes import part


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Tests of a whole run may have come before."""
    part()
