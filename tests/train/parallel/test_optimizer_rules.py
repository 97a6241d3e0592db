"""What optimizers demand of the run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.train.rules.layout import check_layout, layout_warnings
from tests.config.runfile import write

MUON = "train.optimizer.type=muon"


def test_muon_has_no_rates_of_mup(tmp_path: Path) -> None:
    file, mup = write(tmp_path), "model.init={scheme: mup, mup_base_dim: 16}"
    with pytest.raises(UserError, match="type=muon with model.init.scheme=mup: .* set model.init.scheme=depth_scaled"):
        check_layout(load(file, [MUON, mup]), 1)
    for values in ([MUON], [MUON, "model.init.scheme=depth_scaled"], [mup]):
        check_layout(load(file, values), 1)


def test_keys_of_muon_without_it(tmp_path: Path) -> None:
    file, steps = write(tmp_path), "train.optimizer.muon.steps=6"

    def warnings(*values: str) -> list[str]:
        config = load(file, values)
        return [each for each in layout_warnings(config, check_layout(config, 1)) if "optimizer" in each]

    assert warnings(steps) == ["train.optimizer.muon has no effect with train.optimizer.type=adamw"]
    assert warnings(steps, MUON) == warnings() == []
