"""Conversion to Hugging Face's format and from it, against transformers and its own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.configs import from_hf_config, to_hf_config
from pipeline.train.huggingface.convert import describe, from_hf, to_hf
from pipeline.train.model.decoder_spec import decoder_spec
from tests.train.huggingface.hf_mapping import randomize
from tests.train.huggingface.parity import QUIET, tensors_of
from tests.train.models import FAMILIES, VOCAB


def theirs_in(folder: Path, family: str, tokenizer: Tokenizer, **save: Any) -> PreTrainedModel:
    """A model of transformers with every tensor random, as it saves it itself."""
    model = FAMILIES[family].theirs()
    randomize(model, seed=3)
    model.save_pretrained(folder, **save)
    tokenizer.save(folder)
    storage.put_json(folder / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_several_files_and_types(tmp_path: Path, family: str, tokenizer: Tokenizer) -> None:
    model = FAMILIES[family].theirs().to(torch.bfloat16)
    randomize(model, seed=3)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    tokenizer.save(tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    from_hf(tmp_path / "theirs", tmp_path / "ours", end_of_document="<|endoftext|>", max_shard=30_000, console=QUIET)
    to_hf(tmp_path / "ours", tmp_path / "again", max_shard=10_000, console=QUIET)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_bytes())
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "again")
    assert index["weight_map"].keys() == before.keys() == after.keys()
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, after[name]) for name, value in before.items())
    to_hf(tmp_path / "ours", tmp_path / "fp32", dtype="fp32", console=QUIET)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    assert loaded.dtype == torch.float32
    for name, value in tensors_of(tmp_path / "fp32").items():
        assert torch.equal(value, before[name].float()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_section_is_what_the_config_says(family: str) -> None:
    """Both ways, and read from what version 4 of transformers wrote as from what 5 does."""
    wanted = FAMILIES[family].config
    hf, values = to_hf_config(wanted, VOCAB, 64)
    assert {"model_type": hf.model_type}.items() <= values.items()
    for given in (values, FAMILIES[family].theirs().config.to_dict()):
        found_family, found = from_hf_config(given, "config.json")
        assert found_family is hf
        spec = decoder_spec(found.model_copy(update={"vocab_multiple": 20}), 90, 64)
        assert spec == decoder_spec(wanted, VOCAB, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba' cannot be converted; these can: .*.*gpt2, .*llama"),
        ({"model_type": "gemma3"}, "model_type: 'gemma3' cannot be converted: it reads images"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map.*needs its own code, and code .* is never run"),
        (
            {"quantization_config": {"bits": 4}},
            "quant_method: None.*only mxfp4 and fp8 in blocks are read",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' cannot be converted: only 'silu'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types: 'chunked_attention'.*only full_attention and"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: 'dynamic'.*linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "rope_scaling: 'mscale: 0.7'"),
        (
            {"some_new_gate": 7},
            "some_new_gate: 7 cannot be converted: it is not supported.*--ignore some_new_gate",
        ),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_key_value_heads": 3}, "describes a model that cannot be built.*multiple of kv_heads 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling: .*rope_parameters differs",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention has its own"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    base = FAMILIES["llama"].theirs().config.to_dict()
    base.pop("rope_parameters")
    with pytest.raises(UserError, match=message):
        from_hf_config({**base, **changes}, "config.json")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_in_some_layers_are_a_kind(kind: str) -> None:
    base = {**FAMILIES[kind].theirs().config.to_dict(), "use_sliding_window": True, "sliding_window": 8}
    base |= {"max_window_layers": 2, "layer_types": None, "num_hidden_layers": 5}
    _, mixed = from_hf_config(base, "config.json")
    assert [mixed.layer(name).sliding_window for name in mixed.layer_kinds] == [None, None, 8, 8, 8]
    _, listed = from_hf_config(
        {**base, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}, "c"
    )
    assert listed.pattern == ["sliding_attention", "full_attention"]
    _, windowed = from_hf_config({**base, "max_window_layers": 0}, "config.json")
    assert windowed.sliding_window == 8 and windowed.pattern is None
    for model in (mixed, listed, windowed):
        family, values = to_hf_config(model, VOCAB, 64)
        assert family.model_type == kind
        _, again = from_hf_config(values, "config.json")
        assert again.pattern == model.pattern
        assert decoder_spec(again, VOCAB, 64).layers == decoder_spec(model, VOCAB, 64).layers
    two = {"pattern": ["a", "b"], "kinds": {"a": {"sliding_window": 8}, "b": {"sliding_window": 4}}}
    unlike = ModelConfig.model_validate({**windowed.model_dump(), **two})
    with pytest.raises(UserError, match=r"model.sliding_window differs.*has the same sliding_window in .* of a type"):
        to_hf_config(unlike, VOCAB, 64)


@pytest.mark.parametrize(
    ("kind", "values", "window", "kv_heads"),
    [
        ("mistral", {}, 4096, 8),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 4}, None, 4),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096, 32),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, None, 32),
        ("qwen3", {"num_key_value_heads": None, "head_dim": 4}, None, 16),
    ],
)
def test_what_is_not_said_is_what_transformers_takes(
    kind: str, values: dict[str, Any], window: int | None, kv_heads: int
) -> None:
    heads = 32 if kv_heads == 32 else 16
    base = {"hidden_size": 64, "num_attention_heads": heads, "num_hidden_layers": 2, "intermediate_size": 64}
    given = {"model_type": kind, "vocab_size": 99, **base, **values}
    _, found = from_hf_config(given, "config.json")
    assert (found.sliding_window, found.kv_heads) == (window, kv_heads)
    theirs = transformers.AutoConfig.for_model(kind, **{**base, **values})
    assert theirs.num_key_value_heads == kv_heads and theirs.sliding_window == window


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling: 'longrope'"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: 'linear'.*none but longrope"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.75}, "says otherwise"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta: 10000.0.*transformers 4 takes it for all layers, 5 not for"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "it must have full_attention and sliding_attention"),
        ("olmo3", {"sliding_window": None}, "sliding_window: None.*sliding_attention need one"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block: False"),
        ("cohere2", {"sliding_window": None}, "sliding_window: None.*sliding_attention need one"),
        ("gpt_neox", {"rope_theta": 1e4, "rotary_emb_base": 500.0}, "rope_theta: 10000.0.*rotary_emb_base is 500.0"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: .*entry for each of the 2 layers"),
    ],
)
def test_what_families_refuse(kind: str, changes: dict[str, Any], message: str) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    base = {"model_type": kind, "vocab_size": 99, **shape}
    from_hf_config(base, "config.json")
    with pytest.raises(UserError, match=message):
        from_hf_config({**base, **changes}, "config.json")


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (
            "smollm3",
            {"max_window_layers": 28, "no_rope_layer_interval": 4, "sliding_window": None, "rope_theta": 5e6},
            {"pattern": ["rope", "rope", "rope", "no_rope"], "rope_theta": 5e6, "tie_embeddings": True},
        ),
        (
            "cohere2",
            {"use_parallel_block": True, "position_embedding_type": "rope_gptj", "layer_switch": 4, "rotary_pct": 1.0}
            | {"cache_implementation": "hybrid", "sliding_window_pattern": 4, "logit_scale": 0.25},
            {"pattern": ["sliding_attention"] * 3 + ["full_attention"], "logit_scale": 0.25, "norm_bias": False},
        ),
        (
            "gpt_neox",
            {"hidden_act": "gelu_fast", "rotary_emb_base": 500, "rotary_pct": 0.5, "attention_probs_dropout_prob": 0},
            {"mlp": "gelu", "rope_theta": 500.0, "rope_share": 0.5, "residual": "parallel", "bias": "all"},
        ),
        ("gpt_neox", {}, {"mlp": "gelu_exact", "rope_theta": 10000.0, "rope_share": 0.25}),
        ("olmo2", {}, {"norm_eps": 1e-5, "bias": "none", "qk_norm": "full"}),
        ("olmo3", {"rope_theta": 500000}, {"pattern": ["sliding_attention"] * 3 + ["full_attention"]}),
        ("phi3", {"sliding_window": 2047, "embd_pdrop": 0.0}, {"sliding_window": 2047, "norm_eps": 1e-5}),
        (
            "granite",
            {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
            {"attention_scale": 0.0078125, "embedding_scale": 12.0, "logit_scale": 1 / 16, "residual_scale": 1.0},
        ),
    ],
)
def test_keys_that_published_files_have(kind: str, values: dict[str, Any], wanted: dict[str, Any]) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "intermediate_size": 64}
    _, found = from_hf_config({"model_type": kind, "vocab_size": 99, **shape, **values}, "config.json")
    assert {key: getattr(found, key) for key in wanted} == wanted


def test_yarn_of_olmo_3_is_in_full_layers_alone() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 64}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    for rope in (
        {"rope_theta": 500000, "rope_scaling": yarn},
        {"rope_parameters": {"full_attention": {**yarn, "rope_theta": 500000}, "sliding_attention": {}}},
    ):
        _, model = from_hf_config({"model_type": "olmo3", "vocab_size": 99, **shape, **rope}, "config.json")
        found = [model.layer(name) for name in model.layer_kinds]
        assert [layer.rope_scaling is not None for layer in found] == [False, False, False, True]
        assert {layer.rope_theta for layer in found} == {500000.0}
        written = to_hf_config(model, 99, 64)[1]
        assert written["rope_scaling"]["factor"] == 8.0 and "rope_parameters" not in written


def test_ignored_keys() -> None:
    values = {**FAMILIES["llama"].theirs().config.to_dict(), "some_new_gate": 7}
    from_hf_config(values, "config.json", ignore=["some_new_gate"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"logit_soft_cap": 30.0}, "model.positions is 'rope' and model.logit_soft_cap is 30.0"),
        ({"init": {"scheme": "mup", "mup_base_dim": 16}}, "model.init.scheme is 'mup'"),
        ({"norm": "layernorm"}, "model.positions is 'rope' and model.norm is 'layernorm'"),
        ({"mlp": "gelu"}, "model.mlp is 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 0.7}}, r"model.rope_scaling is .*mscale=0.7"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale_all_dim": 1}},
            r"model.rope_scaling is .*mscale_all_dim=1.0",
        ),
        ({"positions": "learned"}, "model.positions is 'learned' and model.norm is 'rmsnorm'"),
        ({"qk_norm": True, "bias": "qkv"}, "model.qk_norm is true and model.bias is 'qkv'"),
        ({"bias": "all", "sliding_window": 4}, "model.sliding_window is 4 and model.bias is 'all'"),
        ({"bias": "qkv", "head_dim": 16}, "model.bias is 'qkv' and model.head_dim is 16"),
    ],
)
def test_a_model_that_no_family_computes_is_refused_by_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        to_hf_config(ModelConfig.model_validate({"layers": 2, "dim": 32, "heads": 4, **keys}), 100, 64)


OTHER_VALUES: dict[str, Any] = {
    "direction": "both",
    "encoder": {"layers": 2},
    "token_types": 2,
    "embedding_norm": True,
    "first_norm": False,
    "final_norm": False,
    "head_transform": "gelu",
    "head_bias": True,
    "layers": 3,
    "dim": 64,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 192,
    "norm": "layernorm",
    "norm_eps": 1e-4,
    "mlp": "gelu",
    "bias": "qkv",
    "positions": "learned",
    "rope_theta": 500.0,
    "rope_scaling": {"type": "linear", "factor": 2},
    "qk_norm": True,
    "sliding_window": 4,
    "tie_embeddings": True,
    "logit_soft_cap": 30.0,
    "mixer": "none",
    "rope_share": 0.5,
    "attention_scale": 0.3,
    "attention_soft_cap": 50.0,
    "sinks": True,
    "output_gate": True,
    "norm_place": "both",
    "residual": "parallel",
    "norm_bias": False,
    "norm_offset": 1.0,
    "embedding_scale": 5.0,
    "residual_scale": 0.3,
    "logit_scale": 0.5,
    "init": {"scheme": "mup", "mup_base_dim": 16},
}
"""By key of `model:` one that computes something else."""
NOT_CONVERTED = {
    "relative": "needs an encoder; see the tests of T5",
    "max_positions": "not read with rope",
    "document_attention": "a text alone is computed alike",
    "dropout": "of training alone",
    "mtp": "of training alone; see the tests of DeepSeek",
    "mla": "needs mixer: mla; see the tests of DeepSeek",
    "mamba2": "needs mixer: mamba2; see the tests of Mamba-2",
    "delta": "needs mixer: gated_delta or kda; see their tests",
    "experts": "needs mlp: experts; see the tests of experts",
    "mixer_options": "of plug-ins, which are refused; see their tests",
    "mlp_options": "the same",
    "pattern": "see the test of layers of several kinds",
    "kinds": "the same",
    "vocab_size": "given as an argument",
    "vocab_multiple": "padding is left out",
}


@pytest.mark.parametrize("key", sorted(ModelConfig.model_fields.keys() - NOT_CONVERTED.keys()))
def test_each_key_of_the_model_is_written_or_refused(key: str) -> None:
    assert key in OTHER_VALUES, "give the new key a value here, or say in NOT_CONVERTED why it needs none"
    base = {"layers": 2, "dim": 32, "heads": 4}
    plain = to_hf_config(ModelConfig.model_validate(base), 100, 64)[1]
    try:
        assert to_hf_config(ModelConfig.model_validate({**base, key: OTHER_VALUES[key]}), 100, 64)[1] != plain
    except UserError as error:
        assert f"model.{key}" in str(error)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"mlp": "gelu"}, "model.kinds.b.mlp is 'gelu'"),
        ({"sinks": True}, "model.kinds.b.sinks is True"),
        ({"mlp": "none"}, "model.kinds.b.mlp is 'none'"),
        ({"kv_heads": 2}, "model.kv_heads differs between layers"),
    ],
)
def test_layers_of_several_kinds_are_refused_by_families_that_have_one(kind: dict[str, Any], message: str) -> None:
    shape = {"layers": 2, "dim": 32, "heads": 4, "pattern": ["a", "b"], "kinds": {"a": {}, "b": kind}}
    with pytest.raises(UserError, match=message):
        to_hf_config(ModelConfig.model_validate(shape), 100, 64)
    same = ModelConfig.model_validate({**shape, "kinds": {"a": {}, "b": {"sliding_window": None}}})
    assert to_hf_config(same, 100, 64) == to_hf_config(ModelConfig(layers=2, dim=32, heads=4), 100, 64)


def test_folders_that_are_no_models(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def refused(message: str, folder: Path = tmp_path / "theirs") -> None:
        with pytest.raises(UserError, match=message):
            from_hf(folder, tmp_path / "ours", console=QUIET)
        assert not (tmp_path / "ours").exists()

    refused(r"has no config\.json", tmp_path)
    theirs_in(tmp_path / "theirs", "llama", tokenizer)
    weights = tmp_path / "theirs" / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(weights).items()}  # the file is written over
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused("model.safetensors is not a valid safetensors file.*is the download complete")
    save_file({name: value for name, value in tensors.items() if name != "model.norm.weight"}, weights)
    refused("has no tensor model.norm.weight")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, weights)
    refused("model.norm.weight is 3, but by config.json it is 32")
    save_file({**tensors, "model.layers.0.extra.weight": torch.ones(3)}, weights)
    refused("1 tensors that a llama with this config.json does not have, such as model.layers.0.extra.weight")
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, weights)
    assert "llama" in describe(tmp_path / "theirs").lower(), "buffers of old versions are skipped"
    weights.rename(tmp_path / "theirs" / "pytorch_model.bin")
    refused("pytorch_model.bin, a pickle, which could run code and is not read")
    (tmp_path / "theirs" / "pytorch_model.bin").unlink()
    refused(r"has no \*.safetensors files")
    weights.write_bytes(whole)
    (tmp_path / "theirs" / "tokenizer_config.json").unlink()
    values = json.loads((tmp_path / "theirs" / "config.json").read_bytes())
    storage.put_json(tmp_path / "theirs" / "config.json", {**values, "eos_token_id": None})
    refused("name it with --end-of-document")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    refused("has no tokenizer.json")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "file").touch()
    with pytest.raises(UserError, match="ours exists already"):
        from_hf(tmp_path / "theirs", tmp_path / "ours", console=QUIET)


def test_a_head_beside_a_tied_embedding(tmp_path: Path, tokenizer: Tokenizer) -> None:
    theirs_in(tmp_path / "theirs", "llama-tied-full-heads", tokenizer)
    weights = tmp_path / "theirs" / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(weights).items()}
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, weights)
    assert "llama" in describe(tmp_path / "theirs").lower()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, weights)
    with pytest.raises(
        UserError, match=r"lm_head.weight differs from model.embed_tokens.weight.* set tie_word_embeddings to false"
    ):
        describe(tmp_path / "theirs")


def test_no_token_is_added_to_a_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Not even where the tokenizer that a model came with adds one."""
    theirs_in(tmp_path / "theirs", "llama", tokenizer)
    file = tmp_path / "theirs" / "tokenizer.json"
    state = json.loads(file.read_bytes())
    template = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template * 1,
        "special_tokens": tokens,
    }
    file.write_text(json.dumps(state))
    from_hf(tmp_path / "theirs", tmp_path / "ours", console=QUIET)
    to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.encode("the cat") == tokenizer.encode("the cat")


def test_names_without_the_prefix_of_the_head(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As the first GPT-2 files have them, with masks among the tensors."""
    theirs_in(tmp_path / "theirs", "gpt2", tokenizer)
    from_hf(tmp_path / "theirs", tmp_path / "one", console=QUIET)
    weights = tmp_path / "theirs" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value.clone() for name, value in load_file(weights).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, weights)
    from_hf(tmp_path / "theirs", tmp_path / "other", console=QUIET)
    one, other = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "other")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_multi_token_prediction_is_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    theirs_in(tmp_path / "theirs", "llama", tokenizer)
    from_hf(tmp_path / "theirs", tmp_path / "ours", end_of_document="<|endoftext|>", console=QUIET)
    plain = to_hf(tmp_path / "ours", tmp_path / "plain", console=QUIET)
    about = json.loads((tmp_path / "ours" / "export.json").read_bytes())
    about["fingerprints"]["model"]["mtp"] = {"depth": 2}
    storage.put_json(tmp_path / "ours" / "export.json", about)
    said = to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    assert "2 layers of multi-token prediction" in said and "multi-token" not in plain
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
