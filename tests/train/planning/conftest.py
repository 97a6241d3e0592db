from __future__ import annotations

import pytest

from tests.groups import leave_group


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Tests of a whole run may have come before."""
    leave_group()
