"""The smallest run file that is valid, a writer for variants of it, and how bad ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config.load import load

MINIMAL = """\
run:
  dir: runs/small
data:
  sources:
    - name: words
      paths: [words.txt]
tokenizer:
  train: {vocab_size: 300}
model:
  layers: 2
  dim: 32
  heads: 4
train:
  duration: 10 steps
"""


def write(folder: Path, text: str = MINIMAL, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(path: Path, *overrides: str) -> str:
    """The message with which the run file and its overrides are refused."""
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return str(caught.value)
