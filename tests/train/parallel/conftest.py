"""What tests of layouts have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.parallel import layouts


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, its datasets, and a run file of each family."""
    folder = tmp_path_factory.mktemp("layouts")
    layouts.write(folder)
    return folder
