from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config.load import load
from tests.eval.server.running import Running, running
from tests.eval.small import trained


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a small run that has been trained."""
    return trained(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def config(run_file: Path) -> Config:
    """Its config, for a free port."""
    return load(run_file, ["serve.port=0", "serve.slots=4", "serve.max_length=128"])


@pytest.fixture(scope="session")
def server(config: Config) -> Iterator[Running]:
    """A server that tests share."""
    with running(config) as found:
        yield found
