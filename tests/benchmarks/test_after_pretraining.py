"""The benchmark of programs that come after pretraining, where they are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.config.load import load
from pipeline.train.huggingface.convert import to_hf
from tests.eval import small

TEMPLATE = """\
{%- for message in messages %}
{{- '<|turn|>' + message.role + ' ' }}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant ' }}{% endif %}
"""


@pytest.mark.slow
def test_each_program_takes_an_export(tmp_path: Path) -> None:
    for package in ("trl", "peft"):
        pytest.importorskip(package)
    file = small.trained(tmp_path, **{"tokenizer.special_tokens": ["<|turn|>", "<|end|>"], "model.dim": 64})
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    to_hf(load(file).run.dir, tmp_path / "hf", chat_template=tmp_path / "chat.jinja", console=Console(quiet=True))
    command = [sys.executable, "benchmarks/eval/after_pretraining.py", str(tmp_path / "hf"), "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {row["step"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert found["grpo"]["changed_tensors"] > 0 and found["int8"]["saved_and_loaded_equal"], found
    assert [found[step].get("check") for step in ("grpo", "lora")] == [0, 0], found
    assert found["int8"]["from_hf"] == 2
