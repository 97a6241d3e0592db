"""Addresses of trackers: nothing secret stands in a run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config.load import load
from tests.tiny import write_run


@pytest.mark.parametrize(
    "address",
    ["https://user:hunter2@host", "https://hunter2@host", "https://host?key=hunter2", "mlruns", "sqlite:///x"],
)
def test_addresses_with_secrets_or_relative_paths_are_refused(tmp_path: Path, address: str) -> None:
    file = write_run(tmp_path, {"train.metrics.mlflow": {"experiment": "e", "tracking_uri": address}})
    with pytest.raises(UserError, match="train.metrics.mlflow.tracking_uri") as refused:
        load(file)
    assert "hunter2" not in str(refused.value)


def test_addresses_without_are_taken(tmp_path: Path) -> None:
    for address in ("https://host:5000/path", "sqlite:////x/y.db", "databricks", "databricks://profile"):
        file = write_run(tmp_path, {"train.metrics.mlflow": {"experiment": "e", "tracking_uri": address}})
        mlflow = load(file).train.metrics.mlflow
        assert mlflow is not None and mlflow.tracking_uri == address
    file = write_run(tmp_path, {"train.metrics.mlflow": {"experiment": "e", "tags": {"mlflow.user": "me"}}})
    with pytest.raises(UserError, match="names that begin with"):
        load(file)
