from __future__ import annotations

import gc
import itertools
import signal
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from pipeline.data.work import worker_pool

# No test depends on how fast the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all processes that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `first(n)`, the instances after the n-th are slow.

    Those whose parameters have a tier are neither counted nor changed. `tests.tiers.first` divides a single list.
    """
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("first")
        if (
            mark is None
            or not hasattr(item, "callspec")
            or any(own.name in ("slow", "guard") for own in item.callspec.marks)
        ):
            continue
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if seen[name] > mark.args[0]:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def gpu_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is marked `gpu` is skipped where there is none, and finds the settings and the memory of a new process."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # A training in this process may have left others: TF32 by what a CPU chose, deterministic kernels.
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """Python's collector looks at what a test makes, not at the million objects of all modules that were imported.

    A training collects once, and leaves nothing frozen. What tests leave behind in cycles is freed now and then.
    """
    if next(_TESTS) % 150 == 149:
        gc.unfreeze()
        gc.collect()
    gc.freeze()  # it takes no time; to ask whether there is something frozen would


_TESTS = itertools.count()


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


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Workers of stages are forked, as those of commands are: spawned ones start slowly, and many tests start some.

    What has threads here, NumPy and torch among others, does nothing in them at that moment.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "can_fork", lambda: True)
        yield
