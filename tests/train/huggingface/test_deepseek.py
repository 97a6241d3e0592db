"""DeepSeek-V2, V3 and Kimi K2 in Hugging Face's files: published configs, multi-token prediction, fp8, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import tensors
from pipeline.train.checkpoint.state_shapes import is_count
from pipeline.train.checkpoint.weight_source import open_weights
from pipeline.train.huggingface.configs import from_hf_config, to_hf_config
from pipeline.train.huggingface.convert import describe, from_hf, to_hf
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.context import Ahead, Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import num_parameters
from pipeline.train.model.loss import Criterion
from tests import tiny
from tests.train.huggingface import parity
from tests.train.huggingface.parity import QUIET, VOCAB
from tests.train.huggingface.test_parity import ROWS
from tests.train.huggingface.test_quantized import decoded, quantize
from tests.train.runs import train

# As published; what files of this kind share, then what each has.
PUBLISHED = {
    **{"attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "ep_size": 1, "hidden_act": "silu"},
    **{"initializer_range": 0.02, "kv_lora_rank": 512, "moe_layer_freq": 1, "pretraining_tp": 1, "seq_aux": True},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "use_cache": True},
}
YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def own_code(version: str) -> dict[str, Any]:
    return {
        "architectures": [f"Deepseek{version}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_deepseek.Deepseek{version}Config",
            "AutoModel": f"modeling_deepseek.Deepseek{version}Model",
            "AutoModelForCausalLM": f"modeling_deepseek.Deepseek{version}ForCausalLM",
        },
    }


V2_ALIKE = {
    **{**PUBLISHED, **own_code("V2"), "model_type": "deepseek_v2", "vocab_size": 102400, "norm_topk_prob": False},
    **{"first_k_dense_replace": 1, "n_shared_experts": 2, "num_experts_per_tok": 6, "scoring_func": "softmax"},
    **{"max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000},
    "rope_scaling": {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2": {
        **{**V2_ALIKE, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536},
        **{"num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536},
        **{"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
        "routed_scaling_factor": 16.0,
    },
    "DeepSeek-V2-Lite": {
        **{**V2_ALIKE, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
        **{"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
        **{"n_routed_experts": 64, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        "routed_scaling_factor": 1.0,
    },
    "DeepSeek-V3": {
        **{**PUBLISHED, **own_code("V3"), "model_type": "deepseek_v3", "vocab_size": 129280, "norm_topk_prob": True},
        **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "first_k_dense_replace": 3},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
        **{"max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000},
        **{"num_nextn_predict_layers": 1, "quantization_config": FP8},
        "rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "Kimi-K2": {
        **{**PUBLISHED, **own_code("V3"), "model_type": "kimi_k2", "vocab_size": 163840, "norm_topk_prob": True},
        **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
        **{"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "first_k_dense_replace": 1},
        **{"n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.827},
        **{"max_position_embeddings": 131072, "rope_theta": 50000.0, "num_nextn_predict_layers": 0},
        "quantization_config": FP8,
        "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


def section(dense: int, layers: int, *, heads: int, scaling: dict[str, Any], q_rank: int | None, **keys: Any) -> Any:
    mla = {"kv_rank": 512, "q_rank": q_rank, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    return {
        **{"layers": layers, "heads": heads, "mixer": "mla", "mla": mla, "norm_eps": 1e-6, "mlp": "experts"},
        **{"pattern": ["dense"] * dense + ["experts"] * (layers - dense)},
        **{"kinds": {"dense": {"mlp": "swiglu"}, "experts": {}}},
        **{"rope_scaling": {"type": "yarn", "original_max_positions": 4096, **scaling}, **keys},
    }


V3_EXPERTS = {"top_k": 8, "ffn_dim": 2048, "shared_ffn_dim": 2048, "score": "sigmoid", "score_bias": True}
V2_EXPERTS = {"top_k": 6, "normalize": False}
V2_SCALING = {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
SECTIONS = {
    "DeepSeek-V2": section(
        1, 60, heads=128, scaling=V2_SCALING, q_rank=1536, dim=5120, ffn_dim=12288, vocab_size=102400,
        experts={**V2_EXPERTS, "count": 160, "ffn_dim": 1536, "shared_ffn_dim": 3072, "scale": 16.0, "groups": 8}
        | {"top_groups": 3, "group_score": "max"},
    ),
    "DeepSeek-V2-Lite": section(
        1, 27, heads=16, scaling=V2_SCALING, q_rank=None, dim=2048, ffn_dim=10944, vocab_size=102400,
        experts={**V2_EXPERTS, "count": 64, "ffn_dim": 1408, "shared_ffn_dim": 2816},
    ),
    "DeepSeek-V3": section(
        3, 61, heads=128, scaling={"factor": 40.0, "mscale_all_dim": 1.0}, q_rank=1536, dim=7168, ffn_dim=18432,
        vocab_size=129280, mtp={"depth": 1},
        experts={**V3_EXPERTS, "count": 256, "scale": 2.5, "groups": 8, "top_groups": 4},
    ),
    "Kimi-K2": section(
        1, 61, heads=64, scaling={"factor": 32.0, "beta_fast": 1.0, "mscale_all_dim": 1.0}, q_rank=1536, dim=7168,
        ffn_dim=18432, vocab_size=163840, rope_theta=50000.0, experts={**V3_EXPERTS, "count": 384, "scale": 2.827},
    ),
}  # fmt: skip
BILLIONS = {"DeepSeek-V2": 235.74, "DeepSeek-V2-Lite": 15.706, "DeepSeek-V3": 671.03, "Kimi-K2": 1026.4}
"""Parameters without multi-token prediction, as the names of the models and their reports have them."""


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs(name: str) -> None:
    """The section, and again from what is written of it."""
    values = CONFIGS[name]
    family, found = from_hf_config(values, "config.json")
    wanted = ModelConfig.model_validate(SECTIONS[name])
    assert found.model_dump() == wanted.model_dump()
    plain = found.model_copy(update={"mtp": None})
    spec = decoder_spec(plain, values["vocab_size"], 4096)
    assert num_parameters(spec) / 1e9 == pytest.approx(BILLIONS[name], rel=2e-4)

    written_family, written = to_hf_config(found, values["vocab_size"], values["max_position_embeddings"])
    assert written_family is family and written["model_type"] == values["model_type"].replace("kimi_k2", "deepseek_v3")
    _, again = from_hf_config(written, "config.json")
    assert again.model_dump() == wanted.model_dump()
    theirs = transformers.AutoConfig.for_model(**written).to_dict()
    of_files = {"rope_scaling", "rope_theta", "auto_map", "quantization_config", "torch_dtype", "model_type"}
    for key, value in values.items():
        if key in theirs and key not in of_files and not (key in ("n_group", "topk_group") and value == 1):
            assert theirs[key] == value, key


def config_of(name: str, **more: Any) -> dict[str, Any]:
    row = ROWS[name]
    return {**row.config(**{"vocab_size": VOCAB, **row.values}).to_dict(), **more}


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("deepseek-v2", {"attention_bias": True}, "attention_bias: True"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias: True"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob: True"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid'"),
        ("deepseek-v2", {"num_key_value_heads": 2}, "num_key_value_heads: 2 .*as many as num_attention_heads"),
        ("deepseek-v2", {"n_shared_experts": 0}, "n_shared_experts: 0"),
        ("deepseek-v2", {"n_shared_experts": "x"}, "n_shared_experts: 'x' .*whole number"),
        ("deepseek-v3", {"moe_intermediate_size": "x"}, "moe_intermediate_size: 'x' .*whole number"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave: False"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        ("deepseek-v3", {"first_k_dense_replace": 3}, "none of the . layers has experts"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace: -1"),
        ("deepseek-v3", {"n_group": 1, "topk_group": 2}, "topk_group: 2 .*n_group is 1"),
        ("deepseek-v3", {"auto_map": {"AutoModel": "modeling_other.Model"}}, "auto_map: 'modeling_other.Model'"),
        (
            "deepseek-v3",
            {"rope_parameters": {**YARN, "factor": 2.0, "mscale": 0.7}},
            "mscale and mscale_all_dim need each other",
        ),
        ("deepseek-v3", {"model_type": "kimi_k2", "architectures": ["Other"]}, "model_type: 'kimi_k2'"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_key(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hf_config(config_of(name, **keys), "config.json")


V3 = {
    **{"layers": 3, "dim": 32, "heads": 4, "mixer": "mla", "mlp": "experts", "norm_eps": 1e-6},
    "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
    "experts": {"count": 8, "top_k": 2, "ffn_dim": 16, "score": "sigmoid", "score_bias": True, "shared_ffn_dim": 32},
}


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_eps": 1e-5},
        {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 0.7}},
        {"sinks": True},
        {"mlp": "swiglu", "experts": None},
        {"experts": {**V3["experts"], "shared_ffn_dim": None}},
        {"experts": {**V3["experts"], "groups": 4, "top_groups": 2, "group_score": "max"}},
        {"experts": {**V3["experts"], "score_bias": False}},
    ],
)
def test_what_neither_has_is_refused(keys: dict[str, Any]) -> None:
    assert to_hf_config(ModelConfig.model_validate(V3), 100, 64)[0].model_type == "deepseek_v3"
    with pytest.raises(UserError, match=r"model\.m"):
        to_hf_config(ModelConfig.model_validate({**V3, **keys}), 100, 64)


def test_norms_of_latents_have_an_epsilon_of_their_own() -> None:
    other = ModelConfig.model_validate({**V3, "norm_eps": 1e-4, "mla": {**V3["mla"], "norm_eps": 1e-6}})
    values = to_hf_config(other, 100, 64)[1]
    assert values["rms_norm_eps"] == 1e-4
    _, again = from_hf_config(values, "config.json")
    assert (again.norm_eps, again.mla and again.mla.norm_eps) == (1e-4, 1e-6)


# Multi-token prediction

DEPTH = 2


@pytest.fixture(scope="module", params=[name for name in ROWS if name.startswith("deepseek-v3")])
def v3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A folder as published: with layers behind the last one, made of copies and random tensors."""
    folder = tmp_path_factory.mktemp(request.param)
    parity.save(ROWS[request.param].build(), folder, tokenizer)
    with_mtp(folder)
    return folder


def with_mtp(folder: Path) -> None:
    """Add layers of multi-token prediction to a folder."""
    whole = load_file(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_bytes())
    layers, dim = values["num_hidden_layers"], values["hidden_size"]
    generator = torch.Generator().manual_seed(8)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    found = dict(whole)
    last = f"model.layers.{layers - 1}."
    for depth in range(DEPTH):
        name = f"model.layers.{layers + depth}."
        found |= {
            f"{name}{key.removeprefix(last)}": drawn(*value.shape) + (value.ndim == 1 and "norm" in key)
            for key, value in whole.items()
            if key.startswith(last)
        }
        found |= {f"{name}{norm}.weight": 1 + drawn(dim) for norm in ("enorm", "hnorm", "shared_head.norm")}
        found |= {
            f"{name}eh_proj.weight": drawn(dim, 2 * dim),
            f"{name}embed_tokens.weight": whole["model.embed_tokens.weight"].clone(),
            f"{name}shared_head.head.weight": whole.get("lm_head.weight", whole["model.embed_tokens.weight"]).clone(),
        }
    save_file(found, folder / "model.safetensors")
    storage.put_json(folder / "config.json", {**values, "num_nextn_predict_layers": DEPTH})


def model_of(folder: Path) -> Decoder:
    found = HuggingFaceFolder(folder)
    model = Decoder(found.spec)
    missing = model.load_state_dict(found.read(found.tensors), strict=False)
    assert not missing.unexpected_keys and all(map(is_count, missing.missing_keys))
    return model.eval()


@pytest.mark.first(1)
def test_layers_of_multi_token_prediction_both_ways(v3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parity.tensors_of(v3)
    for size in (2**28, 4000):  # some rows at a time are the same
        monkeypatch.setattr(tensors, "_AT_ONCE_BYTES", size)
        from_hf(v3, tmp_path / f"ours-{size}", console=QUIET)
        assert "left out" not in to_hf(tmp_path / f"ours-{size}", tmp_path / f"again-{size}", console=QUIET)
        after = parity.tensors_of(tmp_path / f"again-{size}")
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert json.loads((tmp_path / "again-4000" / "config.json").read_bytes())["num_nextn_predict_layers"] == DEPTH
    found = HuggingFaceFolder(v3)
    assert found.model.mtp is not None and found.model.mtp.depth == DEPTH and not found.left_out
    for name in ("mtp.1.of_embedding.weight", "mtp.0.of_stream.weight", "mtp.1.layer.mixer.wkr.weight"):
        value = found.read(found.tensors)[name]
        piece = torch.full((3, 2), torch.nan)
        found.read_into(piece, name, slice(2, 5), slice(1, 3))
        assert torch.equal(piece, value[2:5, 1:3])


@pytest.mark.first(1)
def test_transformers_loads_the_export_and_computes_the_same_depths(
    v3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    from_hf(v3, tmp_path / "ours", console=QUIET)
    to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    number = theirs.config.num_hidden_layers
    # It knows the number of V3's last layer alone.
    assert all(int(name.split(".")[2]) >= number for name in report["unexpected_keys"])
    ours = model_of(v3)
    length = 30
    tokens = parity.draw(2, length + 1 + DEPTH)
    with torch.no_grad():
        logits = ours(tokens[:, :length], Context())[..., :VOCAB]
        parity.close(logits, theirs.eval()(tokens[:, :length]).logits, "logits")

        if not hasattr(layers, "MtpModel"):
            pytest.skip("this version of transformers has no MtpModel")
        monkeypatch.setattr(theirs, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[34].*"])
        mtp = layers.MtpModel.from_pretrained(theirs).eval()
        ones = torch.ones(2, length)
        targets = [tokens[:, 1 + depth : 1 + depth + length] for depth in range(1 + DEPTH)]
        ahead = Ahead(torch.stack(targets[1:], 1), torch.stack([ones] * DEPTH, 1))
        losses = ours(tokens[:, :length], Context(criterion=Criterion(targets[0], ones), ahead=ahead))
        stream = theirs.model(tokens[:, :length]).last_hidden_state
        for depth, loss in enumerate(losses.of_depths):
            positions = torch.arange(1 + depth, 1 + depth + length)[None]
            stream = mtp.forward_layer(depth, stream, positions, None, input_ids=targets[depth])
            expected = F.cross_entropy(theirs.lm_head(stream).transpose(1, 2), targets[1 + depth], reduction="none")
            torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)


def copied(folder: Path, to: Path, changed: dict[str, Tensor | None], **values: Any) -> Path:
    """A folder with other tensors, or without some (None), and other values in config.json."""
    to.mkdir()
    for path in folder.glob("*.json"):
        (to / path.name).write_bytes(path.read_bytes())
    storage.put_json(to / "config.json", {**json.loads((folder / "config.json").read_bytes()), **values})
    whole = {**load_file(folder / "model.safetensors"), **changed}
    save_file({name: value.clone() for name, value in whole.items() if value is not None}, to / "model.safetensors")
    return to


def test_copies_must_be_the_same_where_they_are_there(v3: Path, tmp_path: Path) -> None:
    whole = load_file(v3 / "model.safetensors")
    copies = [name for name in whole if name.endswith(("shared_head.head.weight", "layers.4.embed_tokens.weight"))]
    assert len(copies) == 3
    without = HuggingFaceFolder(copied(v3, tmp_path / "without", dict.fromkeys(copies)))
    found = HuggingFaceFolder(v3)
    assert without.tensors.keys() == found.tensors.keys() and without.model == found.model
    for number, name in enumerate(copies):
        other = whole[name].clone()
        other[-1, -1] += 1
        with pytest.raises(UserError, match=f"{name} differs from .*set num_nextn_predict_layers to 0"):
            HuggingFaceFolder(copied(v3, tmp_path / f"{number}", {name: other})).tensors  # noqa: B018
    with pytest.raises(UserError, match=r"has no tensor model\.layers\.4\.eh_proj\.weight"):
        HuggingFaceFolder(copied(v3, tmp_path / "part", {"model.layers.4.eh_proj.weight": None})).tensors  # noqa: B018


def test_files_without_those_layers_and_configs_without_them(v3: Path, tmp_path: Path) -> None:
    """transformers leaves them out when it saves a model, and config.json has their number all the same."""
    extra = [
        name for name in load_file(v3 / "model.safetensors") if name.startswith(("model.layers.3", "model.layers.4"))
    ]
    saved = copied(v3, tmp_path / "saved", dict.fromkeys(extra))
    assert HuggingFaceFolder(saved).model.mtp is None
    assert (
        "no layers of multi-token prediction" in describe(saved)
        and "mtp" not in yaml.safe_load(describe(saved))["model"]
    )
    fewer = copied(v3, tmp_path / "fewer", {}, num_nextn_predict_layers=0)
    found = HuggingFaceFolder(fewer)
    assert found.model.mtp is None and found.left_out == [name for name in found.left_out if name in extra]
    assert found.tensors.keys() == HuggingFaceFolder(saved).tensors.keys()
    assert f"{len(extra)} tensors for tokens further ahead are left out" in describe(fewer)


def test_families_without_them_leave_them_out(tmp_path: Path, v3: Path) -> None:
    """V2 has none: its export says so."""
    family, values = to_hf_config(
        ModelConfig.model_validate(
            {**V3, "mtp": {"depth": 1}, "experts": {"count": 8, "top_k": 2, "ffn_dim": 16, **SOFTMAX}}
        ),
        100,
        64,
    )
    assert family.model_type == "deepseek_v2" and not family.names.mtp and "num_nextn_predict_layers" not in values


SOFTMAX = {"normalize": False, "shared_ffn_dim": 16}


# Quantized files


@pytest.mark.first(1)
def test_fp8_in_blocks_is_read_as_what_it_stands_for(v3: Path, tmp_path: Path) -> None:
    """All matrices of layers, as published: those of latents, whose last blocks are not whole, and eh_proj, too."""
    block = (8, 16)
    whole = load_file(v3 / "model.safetensors")
    fp8: dict[str, Tensor | None] = {}
    plain: dict[str, Tensor | None] = {}
    for name, value in whole.items():
        if value.ndim != 2 or name.endswith((".gate.weight", "embed_tokens.weight", "head.weight")):
            kept = value if name.endswith("e_score_correction_bias") else value.bfloat16()
            fp8[name] = plain[name] = kept
            continue
        weight, scales = quantize(value, block)
        fp8 |= {name: weight, f"{name}_scale_inv": scales}
        plain[name] = decoded(weight, scales, block).bfloat16()
    method = {**FP8, "weight_block_size": list(block)}
    of_fp8 = copied(v3, tmp_path / "fp8", fp8, quantization_config=method, dtype="bfloat16")
    of_plain = copied(v3, tmp_path / "plain", plain, dtype="bfloat16")
    for folder in (of_fp8, of_plain):
        from_hf(folder, folder / "ours", console=QUIET)
    one, other = (open_weights(folder / "ours", None, "model") for folder in (of_fp8, of_plain))
    assert one.tensors == other.tensors and one.model == other.model and one.model.mtp is not None
    read = other.read(other.tensors)
    assert all(torch.equal(value, read[name]) for name, value in one.read(one.tensors).items())


# Runs


@pytest.mark.guard
def test_a_run_starts_from_them_and_is_exported(root: Path) -> None:
    """With the layers of multi-token prediction, which are trained and exported."""
    folder = root / "v3-start"
    parity.save(ROWS["deepseek-v3"].build(), folder, run_tokenizer(load(root / "run.yaml")))
    with_mtp(folder)
    part, everything = yaml.safe_load(describe(folder)), tiny.values(root)
    assert part["model"]["mtp"] == {"depth": DEPTH}
    everything |= {"model": part["model"], "train": everything["train"] | part["train"]}
    (root / "v3.yaml").write_text(yaml.safe_dump(everything))
    settings = ("train.precision.compute=fp32", "train.balance.bias_rate=0", "train.duration=2 steps")
    run = train(root, "v3-run", *settings, file="v3.yaml")
    to_hf(run, root / "v3-exported", console=QUIET)
    before, after = parity.tensors_of(folder), parity.tensors_of(root / "v3-exported")
    assert before.keys() == after.keys()
    trained = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert before.keys() - trained == {name for name in before if name.endswith("e_score_correction_bias")}
    assert torch.equal(after["model.layers.4.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(after["model.layers.3.shared_head.head.weight"], after["lm_head.weight"])
