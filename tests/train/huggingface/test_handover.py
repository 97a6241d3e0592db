"""Files of an export for other programs: padding, sampling, chat template, model card."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer, GenerationConfig

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.card import llama_cpp_pre_tokenizer
from pipeline.train.huggingface.configs import to_hf_config
from pipeline.train.huggingface.convert import _sampling, from_hf, to_hf
from tests import tiny
from tests.train.huggingface.parity import QUIET
from tests.train.huggingface.test_convert import theirs_in
from tests.train.models import FAMILIES, VOCAB
from tests.train.runs import train

TEMPLATE = "{% for each in messages %}<|{{ each.role }}|>{{ each.content }}<|endoftext|>{% endfor %}"


def told(folder: Path, name: str) -> dict[str, Any]:
    """An object in a JSON file of an export."""
    found: dict[str, Any] = json.loads((folder / name).read_bytes())
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A Llama of transformers as ours."""
    folder = tmp_path_factory.mktemp("handover")
    theirs_in(folder / "theirs", "llama", tokenizer)
    from_hf(folder / "theirs", folder / "ours", console=QUIET)
    return folder / "ours"


def test_what_is_not_known_is_not_said(converted: Path, tmp_path: Path) -> None:
    to_hf(converted, tmp_path / "hf", console=QUIET)
    assert told(tmp_path / "hf", "generation_config.json") == {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    again = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again.chat_template is None and again.pad_token is None
    assert (again.bos_token, again.eos_token, again.model_max_length) == ("<|endoftext|>", "<|endoftext|>", 64)
    card = (tmp_path / "hf" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert "| converted from | `theirs` |" in card and "base model" in card and "## Data" not in card
    assert str(tmp_path) not in card and str(converted.parent) not in card


def test_a_chat_template(converted: Path, tmp_path: Path) -> None:
    """AutoTokenizer renders a conversation with it; marks that the tokenizer lacks are named."""
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE + "<|end_of_turn|>")
    said = to_hf(converted, tmp_path / "hf", chat_template=file, console=QUIET)
    assert "warning: " in said and "has <|end_of_turn|>, which the tokenizer splits" in said
    again = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = again.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert text == "<|user|>the cat<|endoftext|><|end_of_turn|>"
    assert "chat_template.jinja" in (tmp_path / "hf" / "README.md").read_text()
    for content, message in ((b"\xff", "cannot be read"), (b"hello", "leaves out what messages say")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"--chat-template.*{message}"):
            to_hf(converted, tmp_path / "other", chat_template=file, console=QUIET)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({"temperature": 0.8, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1}, {}),
        ({"temperature": 0.0}, {"do_sample": False}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9, "do_sample": True}),
        ({"temperature": 0, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2, "do_sample": False}),
    ],
)
def test_sampling_that_the_run_sets(section: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = _sampling({"generate": section})
    assert found == wanted
    assert GenerationConfig(**found).to_diff_dict().items() >= {k: v for k, v in wanted.items() if v}.items()


def test_how_llama_cpp_calls_the_split(tokenizer: Tokenizer) -> None:
    """Of ours, of Llama 3's file and GPT-2's, which have these names in llama.cpp; of others none."""
    state = json.loads(tokenizer.definition)
    assert llama_cpp_pre_tokenizer(tokenizer.definition) == "smaug-bpe"
    assert (
        llama_cpp_pre_tokenizer(json.dumps({**state, "model": {**state["model"], "ignore_merges": True}}))
        == "llama-bpe"
    )
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    assert llama_cpp_pre_tokenizer(json.dumps({**state, "pre_tokenizer": {**level, "use_regex": True}})) == "gpt-2"
    for other in ({**level, "use_regex": False}, {**level, "add_prefix_space": True, "use_regex": True}, None):
        assert llama_cpp_pre_tokenizer(json.dumps({**state, "pre_tokenizer": other})) is None
    assert llama_cpp_pre_tokenizer(json.dumps({**state, "normalizer": {"type": "NFC"}})) is None
    three = json.loads(json.dumps(state).replace("{1,3}", "{1,2}"))
    assert three != state and llama_cpp_pre_tokenizer(json.dumps(three)) is None


def test_keys_that_other_programs_read_and_transformers_does_not() -> None:
    """llama.cpp's converter needs `n_ctx` of a GPT-2, which published files have."""
    values = to_hf_config(FAMILIES["gpt2"].config, VOCAB, 64)[1]
    assert values["n_ctx"] == values["n_positions"] == 64


@pytest.mark.slow
def test_the_card_of_a_run(root: Path, tmp_path: Path) -> None:
    """Its sources, tokens and hashes, and no path; declared padding is that of the tokenizer's files."""
    name = "handover.yaml"
    changes = {"data.dir": str(tmp_path / "data"), "tokenizer.special_tokens": ["<|pad|>"], "generate.top_k": 5}
    tiny.write_run(root, changes, name)
    assert tiny.pipeline("preprocess", root / name).returncode == 0
    run = train(root, "handover", file=name)
    done = tiny.pipeline("convert", "to-hf", run, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    state = told(run / "checkpoints" / "step-00000008", "state.json")
    card = (tmp_path / "hf" / "README.md").read_text()
    data = state["fingerprints"]["data"]
    assert sorted(data) == ["land", "sea"]
    for source, share in (("land", "25.00 %"), ("sea", "75.00 %")):
        tokens = state["journal"]["segments"][0]["sources"][source]["tokens"]
        assert f"| `{source}` | {share} | {tokens:,} | `{data[source]}` |" in card
    assert f"| trained on | {state['tokens']:,} tokens |" in card and "| checkpoint | step 8 (" in card
    assert str(root) not in card and str(tmp_path) not in card
    with contextlib.chdir(run):
        to_hf(".", tmp_path / "by-itself", console=QUIET)
    assert (tmp_path / "by-itself" / "README.md").read_text() == card.replace("# hf\n", "# by-itself\n")
    tokenizer = run_tokenizer(load(root / name))
    pad = tokenizer.special_tokens["<|pad|>"]
    values = told(tmp_path / "hf", "generation_config.json")
    assert values == {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": pad, "top_k": 5, "do_sample": True}
    again = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again.pad_token == "<|pad|>" and again(["the", "the cat"], padding=True).input_ids[0][-1] == pad
    assert again.encode("the cat") == tokenizer.encode("the cat")
    assert tiny.pipeline("checkpoint", "export", run, "--to", tmp_path / "ours").returncode == 0
    to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    for file in ("generation_config.json", "tokenizer_config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    assert "## Data" not in (tmp_path / "again" / "README.md").read_text()
