"""The chat template of a run, from its data to checkpoints, exports and back."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.chat.kept_template import with_tokens
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources.templates.chat_template import template_of_datasets
from pipeline.data.tokenization.chat_prompts import chat_prompts
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import export
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.huggingface.convert import from_hf, to_hf
from tests import tiny
from tests.train.runs import train

QUIET = Console(file=io.StringIO())
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{{- '<|turn|>' + message.role + ' ' }}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant ' }}{% endif %}
"""
TALK = [
    {"role": "user", "content": "the old keeper"},
    {"role": "assistant", "content": "north of the harbour"},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on conversations, whose template names a token that the tokenizer's files give."""
    root = tmp_path_factory.mktemp("kept")
    first = tiny.write_run(root, {"tokenizer.special_tokens": ["<|turn|>", "<|end|>", "<|begin|>"]})
    preprocess(load(first))
    tokenizer = Tokenizer.open(root / "data" / "tokenizer")
    (root / "own").mkdir()
    tokenizer.save(root / "own")
    (root / "own" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>"}))
    (root / "own" / "chat_template.jinja").write_text(TEMPLATE)
    (root / "talks.jsonl").write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(20)))
    values = yaml.safe_load(first.read_text())
    chat = {"format": "openai", "template": "tokenizer", "train_on": "all"}
    talks = {"name": "talks", "type": "jsonl", "paths": [str(root / "talks.jsonl")], "chat": chat, "weight": 1}
    values["data"] |= {"sources": [values["data"]["sources"][0], talks], "dir": str(root / "chats"), "splits": {}}
    del values["train"]["validation"]
    values["tokenizer"] = {
        "path": str(root / "own"),
        "special_tokens": ["<|turn|>", "<|end|>", "<|begin|>"],
    }
    (root / "run.yaml").write_text(yaml.safe_dump(values))
    preprocess(load(root / "run.yaml"))
    return train(root, "run", "train.duration=2 steps", "train.schedule.warmup=0 steps", "train.precision.compute=fp32")


@pytest.mark.guard
def test_every_folder_of_weights_has_it(run: Path) -> None:
    root, checkpoints = run.parent, Checkpoints.of_run(run)
    checkpoint = checkpoints.at(None, lambda _: [])
    tokenizer = Tokenizer.open(checkpoint.path)
    ids = tokenizer.encode_parsed("<|begin|><|turn|>user the old keeper<|end|><|turn|>assistant ")[0]
    end = tokenizer.special_tokens["<|end|>"]
    options = {"step": None, "weights": "model", "max_shard": None, "console": QUIET}
    export.export(checkpoints, root / "exported", **options)  # type: ignore[arg-type]
    to_hf(run, root / "hf", console=QUIET)
    assert "chat_template.jinja" in json.loads((checkpoint.path / "COMMIT").read_text())["files"]
    said = from_hf(root / "hf", root / "back", console=QUIET)
    assert "untrained" not in said
    for folder in (checkpoint.path, root / "exported", root / "back"):
        found = chat_prompts(folder, Tokenizer.open(folder))
        assert found is not None and found.end_tokens == (end,), folder
        assert found.encode(TALK[:1]) == ids
    theirs = AutoTokenizer.from_pretrained(root / "hf")
    assert theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False) == ids
    ends = GenerationConfig.from_pretrained(root / "hf").eos_token_id
    assert ends == [end, tokenizer.end_of_document]


@pytest.mark.guard
def test_rows_that_were_never_trained_are_named(run: Path) -> None:
    folder = run.parent / "untrained"
    to_hf(run, folder, console=QUIET)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = Tokenizer.open(folder)
    model.get_input_embeddings().weight.data[tokenizer.special_tokens["<|end|>"]] *= 1e-3
    model.save_pretrained(folder)
    said = from_hf(folder, run.parent / "untrained-back", console=QUIET)
    assert "look untrained: <|end|> (" in said and "<|turn|>" not in said


def test_two_templates_give_none() -> None:
    tokens: dict[str, str] = {}
    settings = [{"chat_template": text, "chat": {"tokens": tokens}} for text in ("a", "b", "a")]
    assert template_of_datasets([{}, settings[0], settings[2]]) == ("a", None)
    template, note = template_of_datasets(settings)
    assert template is None and note is not None and "2 different" in note
    assert template_of_datasets([{}]) == (None, None)
    assert with_tokens("{{ bos_token }}", {"bos_token": 's"\\', "eos_token": "e"}).endswith("%}\n{{ bos_token }}")


@pytest.mark.guard
def test_a_template_without_messages_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}x{% endfor %}")
    with pytest.raises(UserError, match="leaves out what messages say"):
        to_hf(run, tmp_path / "hf", chat_template=tmp_path / "chat.jinja", console=QUIET)
    assert not (tmp_path / "hf").exists()
