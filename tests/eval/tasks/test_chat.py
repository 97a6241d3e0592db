"""Tasks of lm-evaluation-harness as conversations, beside the harness's own model of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.chat.kept_template import keep_template
from pipeline.eval.tasks.harness import run_harness
from pipeline.train.checkpoint.manager import Checkpoints
from tests.eval import small

pytestmark = pytest.mark.slow

TEMPLATE = """\
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}
"""
NAMES = ["local_lambada", "local_generate", "local_choice"]


def test_results_equal_those_of_the_hf_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = small.trained(tmp_path, **{"tokenizer.special_tokens": ["<|turn|>", "<|end|>"]})
    small.write_lambada(tmp_path / "lambada.jsonl", engine=small.engine_alone(file))
    small.write_wikitext(tmp_path / "wiki.txt")
    small.write_tasks(tmp_path / "tasks", tmp_path)
    harness = {"tasks": NAMES, "include_path": str(tmp_path / "tasks"), "apply_chat_template": True}
    asked = [f"eval.harness={json.dumps(harness)}"]
    with pytest.raises(UserError, match="has no chat template|have no chat template"):
        run_harness(small.engine_alone(file, asked), Console(quiet=True), keep=False)
    keep_template(Checkpoints.of_run(load(file).run.dir).at(None, lambda _: []).path, TEMPLATE)
    found = run_harness(small.engine_alone(file, asked), Console(quiet=True), keep=False)
    hf = small.exported(load(file), tmp_path / "hf")
    expected = small.harness_figures(hf, tmp_path, tmp_path / "theirs", NAMES, chat=True)
    assert found["results"].keys() == expected.keys()
    for task, figures in expected.items():
        for key, value in figures.items():
            if isinstance(value, float) and not key.startswith("perplexity_stderr"):
                assert found["results"][task][key] == pytest.approx(value, rel=1e-4), (task, key)
    plain = run_harness(small.engine_alone(file, [asked[0].replace("true", "false")]), Console(quiet=True), keep=False)
    assert plain["results"] != found["results"]
