"""The run files of pages on kinds of layers are accepted on their layouts, and nothing is said against them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import load
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.parallel.parallelize import has_recurrence
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.rules.layout_check import world_size
from tests import tiny

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[str, Callable[[DecoderSpec], bool]] = {
    "experts.md": lambda spec: bool(spec.expert_layers),
    "recurrent.md": has_recurrence,
    "objectives.md": lambda spec: True,
}
"""What the models of a page have."""
BLOCKS = [
    pytest.param(page, block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL))
]


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_a_run_file_of_the_page_is_accepted(page: str, block: str, tmp_path: Path) -> None:
    values = {**tiny.values(tmp_path), "model": {}, "train": {"duration": "8 steps", "sequence_length": 64}}
    for section, keys in yaml.safe_load(block).items():
        values[section] = {**values.get(section, {}), **keys}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    config = load(file)
    layout = check_layout(config, world_size(config, {}))
    assert layout_warnings(config, layout) == []
    assert PAGES[page](decoder_spec(config.model, 32_000, config.max_positions))


def test_there_are_run_files_on_the_pages() -> None:
    found = [block.values[0] for block in BLOCKS]
    assert all(found.count(page) >= 3 for page in PAGES)
