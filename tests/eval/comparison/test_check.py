"""`pipeline convert check`: models side by side, computed by the packages that they came from."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.errors import UserError
from pipeline.eval.comparison import compare, sides
from tests.data.stage import children
from tests.train.foreign.make_megatron import KINDS
from tests.train.foreign.test_megatron import made, write

LETTERS = [*map(chr, range(32, 127)), "\n"]
TEXT = "The quick brown fox jumps over the lazy dog, and 12 more.\n" * 6
SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": len(LETTERS),
}


pytestmark = pytest.mark.guard  # transformers computes in most of them


def write_tokenizer(folder: Path) -> Path:
    """One token for each letter."""
    vocab = {token: i for i, token in enumerate([*LETTERS, "<|end|>", "<unk>"])}
    end = {"id": len(LETTERS), "content": "<|end|>", "special": True, "normalized": False}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": False, "vocab": vocab, "merges": []}
    state = {"version": "1.0", "added_tokens": [end], "decoder": {"type": "Fuse"}, "model": model}
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(state))
    return file


def run(*words: object) -> tuple[int, str]:
    """A command, its code and what it printed."""
    done = CliRunner().invoke(app, ["convert", *map(str, words)], env={"COLUMNS": "500"})
    if isinstance(done.exception, UserError):
        return done.exception.exit_code, done.output + str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def llama(folder: Path, rows: int = 100, change: Callable[[Any], None] | None = None, **shape: Any) -> Path:
    """A model of Hugging Face, equal for equal arguments; more rows come after the others."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | shape), vocab_size=130))
    model.resize_token_embeddings(rows)
    with torch.no_grad():
        if change is not None:
            change(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    (folder / "text").write_text(TEXT)
    llama(folder / "hf")
    code, text = run("from-hf", folder / "hf", folder / "ours")
    assert code == 0, text
    return folder


def check(folder: Path, a: object, b: object, *words: object) -> tuple[int, str]:
    return run("check", folder / str(a), folder / str(b), "--text", folder / "text", *words)


def test_a_conversion_and_what_it_was_made_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = check(folder, "ours", "hf")
    assert code == 0 and "Equal within --tolerance 0.0001" in text, text
    assert "pretraining-pipeline 0" in text and "transformers" in text
    assert f"{len(TEXT):,} tokens" in text and "windows of 48" in text and "0 of 348" in text
    assert "not compared" not in text, "all positions were compared"
    # Chunks of three positions give the same, and so does the loss of transformers itself.
    monkeypatch.setattr(compare, "_CHUNK_BYTES", 4 * 100 * 3)
    chunked = check(folder, "ours", "hf")
    assert chunked[0] == 0 and chunked[1].count("348") == text.count("348")
    assert chunked[1].split("mean loss")[1].split()[:2] == text.split("mean loss")[1].split()[:2]
    model = LlamaForCausalLM.from_pretrained(folder / "hf")
    ids = torch.tensor([[LETTERS.index(letter) for letter in TEXT[:48]]])
    loss = model(ids, labels=ids).loss.item()
    assert f"mean loss {loss:.5f}" in check(folder, "hf", "ours", "--tokens", 48)[1]


def test_the_first_position_that_differs(folder: Path, tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.model.embed_tokens.weight[LETTERS.index("z")] += 0.1

    llama(folder / "other", change=change)
    code, text = check(folder, "ours", "other")
    assert code == 1 and f"first at token {TEXT.index('z')} of the text" in text, text
    assert "jumps over the laz'" in text
    assert check(folder, "other", "ours", "--tokens", TEXT.index("z"))[0] == 0
    assert check(folder, "ours", "other", "--tolerance", 100)[0] == 0
    shutil.rmtree(folder / "other")


def test_what_is_not_a_number_differs(folder: Path) -> None:
    def change(model: Any) -> None:
        model.lm_head.weight[LETTERS.index("q")] = torch.nan

    llama(folder / "nan", change=change)
    code, text = check(folder, "ours", "nan", "--tolerance", 1e9)
    assert code == 1 and "first at token 0" in text and "nan" in text, text


def test_vocabularies_of_other_sizes(folder: Path) -> None:
    llama(folder / "padded", rows=120)
    code, text = check(folder, "ours", "padded")
    assert code == 0 and "first 100 ids" in text and "rows of logits 100 120" in text, text
    own, common = (text.split(name)[1].split()[:3] for name in ("mean loss ", "mean loss over common ids "))
    assert float(own[2]) > 1e-3 > 1e-6 > abs(float(common[2])), "padding that is computed makes a loss higher"
    llama(folder / "short", rows=60)
    assert "60 rows of logits" in check(folder, "ours", "short")[1]


def test_what_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    assert "48 positions; give at most" in check(folder, "ours", "hf", "--length", 49)[1]
    text = check(folder, "ours", "hf", "--length", 7)[1]
    assert "windows of 7," in text and "Positions beyond 7 of a context were not compared" in text
    assert "there is no folder" in check(folder, "none", "hf")[1]
    assert "has no weights" in check(folder, "ours", ".")[1]
    assert "--device" in check(folder, "ours", "hf", "--device", "nonsense")[1]
    assert "--device meta has no numbers" in check(folder, "ours", "hf", "--device", "meta")[1]
    (tmp_path / "text").write_text("a")
    assert "has 1 tokens" in run("check", folder / "ours", folder / "hf", "--text", tmp_path / "text")[1]
    shutil.copytree(folder / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert run("from-hf", tmp_path / "hf", tmp_path / "ours", "--weights-only")[0] == 0
    words = ("check", tmp_path / "ours", tmp_path / "hf", "--text", folder / "text")
    assert "give --tokenizer" in run(*words)[1]
    assert run(*words, "--tokenizer", folder / "hf")[0] == 0
    turned = json.loads((folder / "hf" / "tokenizer.json").read_text())
    vocab = turned["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(turned))
    assert "gives this text other ids" in run("check", folder / "ours", *words[2:])[1]
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, text = run(*words, "--tokenizer", folder / "hf")
    assert code == 2 and "transformers cannot load" in text, text


def changed_config(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a model with other values in its config.json."""
    shutil.copytree(folder / "hf", to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"hidden_size": "24"}, "cannot read.*expected int, got str"),
    "heads": ({"num_attention_heads": 5}, "cannot read.*not a multiple"),
    "no heads": ({"num_attention_heads": 0}, "cannot read.*ZeroDivisionError"),
    "kind": ({"model_type": ["llama"]}, "cannot read.*unhashable"),
    "activation": ({"hidden_act": "nonsense"}, "cannot load.*KeyError: 'nonsense'"),
    "dtype": ({"dtype": "nonsense"}, "cannot .*has no attribute 'nonsense'"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_config_that_transformers_cannot_read_is_named(folder: Path, tmp_path: Path, case: str) -> None:
    changes, reason = BAD_CONFIGS[case]
    bad = changed_config(folder, tmp_path / "bad", **changes)
    code, text = check(folder, "ours", bad)
    assert code == 2 and str(bad) in text and "give another folder" in text, text
    assert re.search(reason, text), text


def test_kernels_that_a_config_names_are_not_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise AssertionError("a kernel is loaded")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", refuse)
    named = {"attn_implementation": "org/kernel", "experts_implementation": "deepgemm"}
    named |= {f"_{key}_internal": value for key, value in named.items()}
    other = changed_config(folder, tmp_path / "other", **named)
    code, text = check(folder, "ours", other)
    assert code == 0 and "Equal within" in text, text
    # transformers itself would load it.
    with pytest.raises(AssertionError, match="a kernel is loaded"):
        LlamaForCausalLM.from_pretrained(other)


def test_without_the_package_only_sums_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight[3, 3] += 0.1

    def narrower(model: Any) -> None:
        model.model.layers[1].self_attn.q_proj.weight[:] = model.model.layers[1].self_attn.q_proj.weight.flip(0)

    llama(folder / "changed", change=change)
    llama(folder / "turned", change=narrower)
    llama(folder / "wide", intermediate_size=48)
    monkeypatch.setattr(sides, "find_spec", lambda name: None)
    code, text = check(folder, "ours", "hf")
    assert code == 3 and "NO PROOF" in text and "no logits were compared" in text, text
    assert "[hf]'" in text
    code, text = check(folder, "ours", "changed")
    assert code == 1 and "layers.1.mlp.w2.weight has the sums" in text, text
    assert "has the shapes [40, 24] and [48, 24]" in check(folder, "ours", "wide")[1]
    assert check(folder, "ours", "turned")[0] == 3, "sums do not see an order: no proof"


# megatron-core computes it on GPUs only.
MEGATRON = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "llama-1p"]


@pytest.mark.parametrize("kind", MEGATRON)
def test_a_checkpoint_of_megatron(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("megatron.core")
    checkpoint = tmp_path / "megatron"
    made(checkpoint, {"kind": kind})
    (tmp_path / "text").write_text(TEXT)
    tokenizer = write_tokenizer(tmp_path)
    assert run("from-megatron", checkpoint, tmp_path / "ours")[0] == 0
    words = ("--tokenizer", tokenizer, "--tokens", 100, "--tolerance", 2e-5)
    code, text = check(tmp_path, "ours", "megatron", *words)
    assert code == 0 and "megatron-core" in text and "windows of 64" in text, text


@pytest.mark.slow
def test_a_checkpoint_that_megatron_cannot_compute_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    write(tmp_path, tensors={"output_layer.weight": None})
    before = children(os.getpid())
    code, text = run("check", tmp_path, folder / "hf", "--text", folder / "text")
    assert code == 2 and "has no tensor output_layer.weight" in text, text
    assert children(os.getpid()) == before
