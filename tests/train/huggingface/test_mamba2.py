"""Families with Mamba-2: what their files may say, what is refused, and what exports have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BambaConfig
from transformers.models.bamba.modeling_bamba import BambaRotaryEmbedding

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.configs import from_hf_config, to_hf_config
from pipeline.train.huggingface.convert import from_hf, to_hf
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.decoder_spec import decoder_spec
from tests.train.huggingface import parity
from tests.train.huggingface.mamba2_rows import ROWS
from tests.train.huggingface.parity import QUIET, tensors_of

SIZES = {"hidden_size": 32, "vocab_size": 99}
OF_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16}
SHAPE = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
BASES: dict[str, dict[str, Any]] = {
    "mamba2": {**SIZES, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8},
    "bamba": {**SHAPE, **OF_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **{**SHAPE, **OF_MAMBA, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
        **{"num_local_experts": 0, "shared_intermediate_size": 48},
    },
    "nemotron_h": {**SHAPE, "hybrid_override_pattern": "M-*-", "mamba_num_heads": 8, "mamba_head_dim": 8},
}


def read(kind: str, **values: Any) -> ModelConfig:
    return from_hf_config({"model_type": kind, **BASES[kind], **values}, "config.json")[1]


@pytest.mark.parametrize("name", ["mamba2-tied-limits", "nemotron-h"])
def test_logits_and_gradients(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    """Of all families and in all respects: `test_parity.py`."""
    parity.check_logits_and_gradients(parity.pair_of(ROWS[name], tmp_path, tokenizer))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mamba2", {"use_bias": True}, "use_bias: True"),
        ("mamba2", {"expand": 3}, "expand: 3.*32 times it must be 8 heads of 8"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("mamba2", {"time_step_limit": [0.1]}, "time_step_limit: .*list of two numbers"),
        ("mamba2", {"time_step_limit": 7}, "time_step_limit: 7.*list of two numbers"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "cannot be built: mamba2: dt_max 0.1 must be more than"),
        ("mamba2", {"n_groups": 3}, "heads 8 must be a multiple of groups 3"),
        ("mamba2", {"num_heads": 10**12}, "num_heads: 1000000000000 "),
        ("mamba2", {"num_hidden_layers": 10**9}, "num_hidden_layers: .*from 1 to 4096"),
        ("mamba2", {"hidden_size": "a"}, "hidden_size: 'a'"),
        ("mamba2", {"state_size": 2**40}, "state_size: 1099511627776 .* whole number from 1 to"),
        ("mamba2", {"norm_before_gate": True}, "norm_before_gate: True"),
        ("bamba", {"num_attention_heads": 3}, "cannot be built: kinds.attention: dim 32 is not divisible by heads 3"),
        ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias: True"),
        (
            "bamba",
            {"mamba_expand": 10**12, "mamba_d_head": "auto"},
            "mamba_expand: 1000000000000 .* whole number",
        ),
        ("bamba", {"mamba_n_heads": 0}, "mamba_n_heads: 0"),
        ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices: 1.*list of numbers"),
        ("bamba", {"attn_layer_indices": [7]}, "attn_layer_indices: .*from 0 to"),
        ("bamba", {"rope_parameters": 3}, "rope_parameters: 3 .* must be an object"),
        ("bamba", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit: .*two numbers"),
        ("bamba", {"time_step_limit": [10**400, 10**400]}, "cannot be read, at or ahead of time_step_limit"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor: 0.25"),
        ("bamba", {"attn_rotary_emb": 8}, "attn_rotary_emb: 8.*4 dimensions"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi'"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias: True"),
        ("granitemoehybrid", {"mlp_bias": True}, "mlp_bias: True"),
        ("granitemoehybrid", {"logits_scaling": 0}, "at or ahead of logits_scaling: 0"),
        ("granitemoehybrid", {"embedding_multiplier": "a"}, "embedding_multiplier: 'a' .* must be a number"),
        ("granitemoehybrid", {"layer_types": []}, "layer_types: .*a list of 2 types"),
        ("granitemoehybrid", {"layer_types": ["mamba", "moe"]}, "layer_types: 'moe'"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*E"}, "hybrid_override_pattern: 'moe'.*experts have no gate"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern: 'M-X'.*text of M"),
        ("nemotron_h", {"hybrid_override_pattern": "M" * 5000}, "from 1 to 4096 layers"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "has no hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}, "layers_block_type: 'moe'.*experts have no gate"),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}, "hybrid_override_pattern: .*layers_block_type differs"),
        ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers: 5.*has 4 layers"),
        ("nemotron_h", {"use_bias": True}, "use_bias: True"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias: True"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias: True"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings: True"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu'"),
        ("nemotron_h", {"sliding_window": 8}, "sliding_window: 8"),
        ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: 1"),
        ("nemotron_h", {"attention_head_dim": 64}, "attention_head_dim: 64"),
        ("nemotron_h", {"mamba_d_state": 64}, "mamba_d_state: 64"),
        ("nemotron_h", {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06"),
        ("nemotron_h", {"mlp_bias": "false"}, "mlp_bias: 'false'.*true or false"),
        ("nemotron_h", {"auto_map": "x.Y"}, "auto_map: 'x.Y'.*its own code"),
        ("nemotron_h", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map: 'x.Y'.*its own code"),
        ("nemotron_h", {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling: "),
    ],
)
def test_what_families_refuse(kind: str, changes: dict[str, Any], message: str) -> None:
    read(kind)
    with pytest.raises(UserError, match=message):
        read(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("falcon_h1", "Mamba-2 and attention beside each other"), ("zamba2", "share the weights of a few with attention")],
)
def test_families_that_are_not_here(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=f"model_type: '{kind}' cannot be converted: its layers .*{message}"):
        from_hf_config({"model_type": kind}, "config.json")


def test_limits_of_steps() -> None:
    """Nemotron-H has time_step_min alone in transformers, and no upper bound."""
    endless = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [-1.0, float("inf")])
    for kind in ("mamba2", "bamba", "granitemoehybrid"):
        for limits in (*endless, [0.1, 0.5]):
            model = read(kind, time_step_limit=limits)
            sizes = model.mamba2 or model.kinds["mamba"].mamba2
            assert sizes is not None
            assert (sizes.dt_min, sizes.dt_max) == ((0.1, 0.5) if limits == [0.1, 0.5] else (0.0, None))
    for changes, least in (
        ({}, 0.001),
        ({"time_step_limit": [0.1, 0.5], "time_step_max": 0.2, "time_step_floor": 0.3}, 0.001),
        ({"time_step_min": 0.02, "mamba_dt_min": 0.02}, 0.02),
    ):
        sizes = read("nemotron_h", **changes).kinds["mamba"].mamba2
        assert sizes is not None and (sizes.dt_min, sizes.dt_max) == (least, None)


def test_types_of_layers() -> None:
    usual = read("nemotron_h")
    assert usual.pattern == ["mamba", "mlp", "attention", "mlp"]
    for types in (["mamba", "mlp", "attention", "mlp"], ["linear_attention", "mlp", "full_attention", "mlp"]):
        for key in ("layers_block_type", "layer_types"):
            assert read("nemotron_h", **{"hybrid_override_pattern": None, key: types}) == usual
    alone = read("mamba2")
    assert alone.pattern is None and (alone.mixer, alone.mlp, alone.heads) == ("mamba2", "none", None)
    dense = read("granitemoehybrid", layer_types=["attention"] * 2)
    assert dense.pattern is None and dense.mamba2 is None and dense.positions == "none"
    only_mamba = read("bamba", attn_layer_indices=None, attention_bias=True)
    assert only_mamba.pattern is None and only_mamba.mixer == "mamba2" and only_mamba.bias == "none"


@pytest.mark.parametrize("share", [None, 0.25])
def test_dimensions_that_bamba_turns(share: float | None) -> None:
    """Other programs read `attn_rotary_emb`, as published files have it, and turn whole heads without it."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": share}
    model = read("bamba", **({} if share is None else {"rope_parameters": rope}))
    values = to_hf_config(model, 99, 64)[1]
    turned = BambaRotaryEmbedding(BambaConfig.from_dict(values)).inv_freq
    assert values["attn_rotary_emb"] == 2 * len(turned) == (4 if share is None else 2)
    assert from_hf_config(values, "config.json")[1] == model


@pytest.mark.parametrize("kind", BASES)
def test_sections_that_write_it_otherwise_are_the_same(kind: str) -> None:
    """Keys of attention and of Mamba-2 may be those of all layers, too."""
    model = read(kind)
    family, values = to_hf_config(model, 99, 64)
    assert family.model_type == kind
    if not model.kinds:
        return
    section = model.model_dump(exclude_unset=True)
    of_all = {key: value for key, value in section["kinds"]["attention"].items() if key != "mlp"}
    of_all["mamba2"] = section["kinds"]["mamba"].pop("mamba2")
    section["kinds"]["attention"] = {"mlp": "none"} if kind == "nemotron_h" else {}
    other = ModelConfig.model_validate({**section, **of_all})
    assert decoder_spec(other, 99, 64) == decoder_spec(model, 99, 64)
    assert to_hf_config(other, 99, 64) == (family, values)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("mamba2", {"mlp": "gelu"}, "model.mlp is 'gelu'"),
        ("mamba2", {"mamba2": {"heads": 4, "norm_groups": 2}}, r"model.mamba2 is .*norm_groups=2"),
        ("bamba", {"norm": "layernorm"}, "model.norm is 'layernorm'"),
        ("granitemoehybrid", {"logit_soft_cap": 3.0}, "model.logit_soft_cap is 3.0"),
        ("nemotron_h", {"tie_embeddings": True}, "model.tie_embeddings is True"),
    ],
)
def test_models_that_no_family_computes(kind: str, keys: dict[str, Any], message: str) -> None:
    section = read(kind).model_dump(exclude_unset=True)
    with pytest.raises(UserError, match=message):
        to_hf_config(ModelConfig.model_validate({**section, **keys}), 99, 64)


def test_heads_that_dim_does_not_divide_are_those_of_nemotron_h() -> None:
    section = read("mamba2").model_dump(exclude_unset=True) | {"mamba2": {"heads": 3, "head_dim": 8}}
    family, values = to_hf_config(ModelConfig.model_validate(section), 99, 64)
    assert family.model_type == "nemotron_h" and values["hybrid_override_pattern"] == "MM"
    assert from_hf_config(values, "config.json")[1].mixer == "mamba2"


@pytest.mark.guard
def test_published_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Vectors of the decay stay in fp32; names may begin otherwise, and JSON have Infinity."""
    pair = parity.pair_of(ROWS["nemotron-h"], tmp_path, tokenizer)
    from_hf(pair.folder, tmp_path / "ours", console=QUIET)
    to_hf(tmp_path / "ours", tmp_path / "again", dtype="bf16", console=QUIET)
    before, after = tensors_of(pair.folder), tensors_of(tmp_path / "again")
    for name, value in after.items():
        kept = name.endswith((".A_log", ".dt_bias", ".D"))
        assert value.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(value, before[name].to(value.dtype)), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    file = tmp_path / "again" / "config.json"
    values = json.loads(file.read_bytes())
    assert values["hybrid_override_pattern"] == "M-M*-M-"
    own = {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}
    storage.put(file, json.dumps({**values, "auto_map": own, "time_step_limit": [0.0, float("inf")]}).encode())
    assert b"Infinity" in file.read_bytes()
    assert HuggingFaceFolder(tmp_path / "again").spec == pair.ours.spec


@pytest.mark.guard
def test_no_least_step_of_nemotron_h(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """transformers draws initial weights between the bounds, and takes the logarithm of the lower one."""
    pair = parity.pair_of(ROWS["nemotron-h"], tmp_path, tokenizer)
    from_hf(pair.folder, tmp_path / "ours", console=QUIET)
    about = json.loads((tmp_path / "ours" / "export.json").read_bytes())
    about["fingerprints"]["model"]["kinds"]["mamba"]["mamba2"]["dt_min"] = 0.0
    storage.put_json(tmp_path / "ours" / "export.json", about)
    to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert loaded.config.time_step_min == 0
    tokens = parity.draw(1, 20)
    with torch.no_grad():
        parity.close(loaded(tokens).logits, pair.theirs(tokens).logits, "logits", tolerance=0.1)
