from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.api.runs import trained

# The models here are so small that a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a trained run, which nobody changes; its run file and its data lie beside it."""
    return trained(tmp_path_factory.mktemp("windows"), "windows")
