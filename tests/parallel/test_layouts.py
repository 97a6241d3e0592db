"""Every combination of `TESTED` trains as one process does: losses, gradients, norms, weights, and the same data."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.train.parallel.tested import TESTED, Combination
from tests.parallel import layouts

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    layouts.write(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("row", TESTED, ids=lambda row: row.name)
def test_a_layout_computes_what_one_process_does(root: Path, row: Combination, family: str) -> None:
    assert layouts.compare(root, family, row) == []
