from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu_of_the_test(request: pytest.FixtureRequest) -> None:
    """What is marked `gpu` is skipped where there is none."""
    if request.node.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP is not ignored, by this process and those that it starts, also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module", autouse=True)
def cache_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's cache folder alone; and what one module proves of an engine is nothing to another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
