"""The run files of docs/recurrent.md are accepted, and nothing is said against them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import load
from pipeline.train.layout_check import world_size
from pipeline.train.model.config import decoder_spec
from pipeline.train.parallel.rules.layout import check_layout, layout_warnings
from tests import tiny

PAGE = Path(__file__).parents[2] / "docs/recurrent.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_run_file_of_the_page_is_accepted(block: str, tmp_path: Path) -> None:
    values = {**tiny.values(tmp_path), "train": {"duration": "8 steps", "sequence_length": 64}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values | yaml.safe_load(block)))
    config = load(file)
    layout = check_layout(config, world_size(config, {}))
    assert layout_warnings(config, layout) == []
    layers = decoder_spec(config.model, 32_000, config.max_positions).different_layers
    assert any(layer.mixer is not None and layer.mixer.recurrent for layer in layers)


def test_there_are_run_files_on_the_page() -> None:
    assert len(BLOCKS) >= 3
