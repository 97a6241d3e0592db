from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.torch_compat import pipeline_stage
from tests import tiny
from tests.train.distributed.ranks import Ranks, kept_ranks

# The models here are so small that a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules and plans are tried as if torch could train with every schedule; one test says that it cannot."""
    monkeypatch.setattr(pipeline_stage, "SPLITS_BACKWARD", True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with its run file, preprocessed once for a module."""
    folder = tmp_path_factory.mktemp("corpus")
    preprocess(load(tiny.write_run(folder)))
    return folder


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Ranks]]:
    """So many processes, kept from one test to the next."""
    with kept_ranks() as get:
        yield get


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled or counted before a test, and nothing stays."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
