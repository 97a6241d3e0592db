"""Models with experts in Hugging Face's files: what is refused, what stays in fp32, and what is read at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from pipeline.common.errors import UserError
from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.model import ModelConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import tensors
from pipeline.train.checkpoint.export import export
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.weight_source import open_weights
from pipeline.train.huggingface.configs import from_hf_config, to_hf_config
from pipeline.train.huggingface.convert import describe, from_hf, to_hf
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.huggingface.names import TensorRule
from pipeline.train.huggingface.tensors import map_rules
from tests import tiny
from tests.train.huggingface import parity
from tests.train.huggingface.parity import QUIET
from tests.train.huggingface.test_parity import ROWS
from tests.train.runs import start, train

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def config_of(name: str, **more: Any) -> dict[str, Any]:
    row = ROWS[name]
    return {**row.config(**{"vocab_size": parity.VOCAB, **row.values}).to_dict(), **more}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """GLM with a dense layer, as transformers saves it."""
    folder = tmp_path_factory.mktemp("glm")
    parity.save(ROWS["glm4-moe"].build(), folder, tokenizer)
    return folder


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0"),
        ("olmoe", {"num_local_experts": 7}, "num_local_experts: 7 .*num_experts is 12"),
        ("qwen2-moe", {"use_sliding_window": True}, "use_sliding_window: True"),
        (
            "qwen3-moe",
            {"mlp_only_layers": [0, 1, 2]},
            "mlp_only_layers: .*none of the 3 layers has experts",
        ),
        ("qwen3-moe", {"decoder_sparse_step": 4}, "decoder_sparse_step: 4 .*none of the 3 layers has experts"),
        ("qwen3-next", {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers: .*none of the 4 layers has experts"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        ("qwen3-moe", {"mlp_only_layers": 5}, "mlp_only_layers: 5 .*list"),
        ("qwen3-moe", {"num_experts": 8.5, "num_local_experts": None}, "num_experts: 8.5 .*whole number"),
        ("qwen3-moe", {"num_experts": "many", "num_local_experts": None}, "num_experts: 'many' .*whole number"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": "x"}, "sliding_window"),
        ("glm4-moe", {"first_k_dense_replace": "x"}, "first_k_dense_replace: 'x' .*whole number"),
        ("glm4-moe", {"n_shared_experts": 1.5}, "n_shared_experts: 1.5 .*whole number"),
        ("glm4-moe", {"first_k_dense_replace": 3}, "none of the . layers has experts"),
        ("glm4-moe", {"n_shared_experts": 0}, "n_shared_experts: 0"),
        ("glm4-moe", {"n_group": 5}, "count 12 must be a multiple of groups 5"),
        ("glm4-moe", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hf_config(config_of(name, **keys), "config.json")


@pytest.mark.parametrize(
    "keys",
    [
        {"normalize": False},
        {"score": "sigmoid"},
        {"bias": True},
        {"activation": "clamped_swiglu"},
        {"groups": 2, "top_groups": 1},
        {"shared_ffn_dim": 16},
    ],
)
def test_experts_that_no_family_has_are_refused(keys: dict[str, Any]) -> None:
    shape = {"layers": 2, "dim": 32, "heads": 4, "mlp": "experts"}
    experts = {"count": 8, "top_k": 2, "ffn_dim": 16}
    assert to_hf_config(ModelConfig.model_validate({**shape, "experts": experts}), 100, 64)[0].model_type == "mixtral"
    with pytest.raises(UserError, match=f"model.mlp is 'experts' and model.*{next(iter(keys))}="):
        to_hf_config(ModelConfig.model_validate({**shape, "experts": {**experts, **keys}}), 100, 64)


def test_layers_without_experts_are_kinds() -> None:
    """Also where only a kind of layers has the section; in another order than the family's they are refused."""
    experts = {"count": 8, "top_k": 2, "ffn_dim": 16, "score": "sigmoid", "score_bias": True, "shared_ffn_dim": 32}
    kinds = {"a": {"ffn_dim": 40}, "b": {"mlp": "experts", "experts": experts}}
    model = {"layers": 3, "dim": 32, "heads": 4, "rope_share": 0.5, "pattern": ["a", "b", "b"], "kinds": kinds}
    family, values = to_hf_config(ModelConfig.model_validate(model), 100, 64)
    assert family.model_type == "glm4_moe"
    assert (values["first_k_dense_replace"], values["intermediate_size"], values["n_shared_experts"]) == (1, 40, 2)
    with pytest.raises(UserError, match="model.kinds.b.mlp is 'experts'"):
        to_hf_config(ModelConfig.model_validate({**model, "pattern": ["b", "a", "b"]}), 100, 64)


def test_the_section_of_a_run_file(glm: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = yaml.safe_load(describe(glm))["model"]
    assert model["pattern"] == ["dense", "experts", "experts"]
    assert model["experts"] | {"count": 12, "groups": 4, "score_bias": True, "scale": 2.5} == model["experts"]
    parity.save(ROWS["mixtral"].build(), tmp_path, tokenizer)
    # 0.001 * 2 experts of a token / 3 layers
    assert "# router_aux_loss_coef 0.001 of Mixtral is about train.balance.loss: 0.00067.\n" in describe(tmp_path)


def test_the_bias_of_the_choice_stays_in_fp32(glm: Path, tmp_path: Path) -> None:
    from_hf(glm, tmp_path / "ours", console=QUIET)
    to_hf(tmp_path / "ours", tmp_path / "bf16", dtype="bf16", console=QUIET)
    before, after = parity.tensors_of(glm), parity.tensors_of(tmp_path / "bf16")
    assert after[BIAS].dtype == torch.float32 and torch.equal(after[BIAS], before[BIAS])
    assert {value.dtype for name, value in after.items() if "e_score" not in name} == {torch.bfloat16}
    assert not [name for name in parity.tensors_of(tmp_path / "ours") if name.endswith("loads")]


def test_large_tensors_go_some_rows_at_a_time(glm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are the same, byte for byte, with groups of one small tensor or a few experts."""
    for name, size in (("whole", 2**28), ("pieces", 4000)):
        monkeypatch.setattr(tensors, "_AT_ONCE_BYTES", size)
        from_hf(glm, tmp_path / name / "ours", console=QUIET)
        to_hf(tmp_path / name / "ours", tmp_path / name / "theirs", console=QUIET)
    for folder in ("ours", "theirs"):
        whole, pieces = ((tmp_path / name / folder / "model.safetensors").read_bytes() for name in ("whole", "pieces"))
        assert whole == pieces


def test_a_rank_reads_its_experts_alone() -> None:
    shape = {"w1": (12, 4, 5)}
    numbered = map_rules([TensorRule("t.{e}", ("w1",), experts="numbered")], shape, 0).ours["w1"]
    found = list(numbered.pieces(slice(9, 12), slice(0, 2), slice(0, 5)))
    assert [(theirs, here) for theirs, _, here in found] == [("t.9", 0), ("t.10", 1), ("t.11", 2)]
    assert [piece.source for _, piece, _ in found] == [(slice(0, 2), slice(0, 5))] * 3
    stacked = map_rules([TensorRule("t", ("w1",), transposed=True, experts="stacked")], shape, 0).ours["w1"]
    assert [piece.source for _, piece, _ in stacked.pieces(slice(10, 12), slice(0, 2), slice(0, 5))] == [
        (10, slice(0, 5), slice(0, 2)),
        (11, slice(0, 5), slice(0, 2)),
    ]


def test_layers_behind_the_last_are_left_out(glm: Path, tmp_path: Path) -> None:
    """They predict further tokens, and transformers does not compute them; nothing else is left out."""
    values = load_file(glm / "model.safetensors")
    for path in glm.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2), "model.layers.3.mlp.gate.weight": torch.ones(2, 2)}
    save_file(values | extra, tmp_path / "model.safetensors")
    assert HuggingFaceFolder(tmp_path).tensors.keys() == HuggingFaceFolder(glm).tensors.keys()
    assert "model.layers.3" in describe(tmp_path) and "model.layers.3" not in describe(glm)
    save_file(values | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.2\.eh_proj"):
        HuggingFaceFolder(tmp_path).tensors  # noqa: B018


def test_experts_of_several_types_are_refused(glm: Path, tmp_path: Path) -> None:
    values = load_file(glm / "model.safetensors")
    for path in glm.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = "model.layers.1.mlp.experts.10.up_proj.weight"
    save_file(values | {name: values[name].bfloat16()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"experts\.10\.up_proj\.weight is of torch.bfloat16"):
        HuggingFaceFolder(tmp_path).tensors  # noqa: B018


@pytest.mark.slow
def test_a_run_starts_from_them_and_is_exported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From files, and from what was converted; an average has no bias of its own, so the current one is exported."""
    from pipeline.config.load import load
    from pipeline.data.preprocess.run_tokenizer import run_tokenizer

    folder = root / "glm-start"
    parity.save(ROWS["glm4-moe"].build(), folder, run_tokenizer(load(root / "run.yaml")))
    part, everything = yaml.safe_load(describe(folder)), tiny.values(root)
    everything |= {"model": part["model"], "train": everything["train"] | part["train"]}
    (root / "glm.yaml").write_text(yaml.safe_dump(everything))
    settings = ("train.precision.compute=fp32", "train.balance.loss=0", "train.balance.bias_rate=0")
    settings += ("train.ema.decay=0.5", "train.duration=3 steps")
    run = train(root, "glm-run", *settings, file="glm.yaml")
    bias = parity.tensors_of(folder)[BIAS]
    source, average = open_weights(run, None, "model"), open_weights(run, None, "ema")
    assert source.tensors.keys() == average.tensors.keys()
    ours = "layers.1.mlp.router.score_bias"
    for each in (source, average):
        assert torch.equal(each.read({ours: each.tensors[ours]})[ours], bias)
        assert not [name for name in each.tensors if name.endswith("loads")]

    for weights in ("model", "ema"):
        for size in (2**28, 4000):  # some rows at a time are the same
            monkeypatch.setattr(tensors, "_AT_ONCE_BYTES", size)
            export(
                Checkpoints.of_run(run), root / f"glm-{weights}-{size}", step=None, weights=weights, max_shard=None,
                console=QUIET,
            )  # fmt: skip
            to_hf(run, root / f"glm-hf-{weights}-{size}", weights=weights, console=QUIET)
        for kind in ("glm", "glm-hf"):
            one, other = (parity.tensors_of(root / f"{kind}-{weights}-{size}") for size in (2**28, 4000))
            assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
        assert torch.equal(one[BIAS], bias)
        start_again = (f"train.init_from.path={root / f'glm-{weights}-4000'}", "train.init_from.hf=null")
        code, said = start(root, f"glm-from-{weights}", *settings, *start_again, file="glm.yaml")
        assert code == 0, said
        code, said = start(
            root, f"glm-of-{weights}", *settings, f"train.init_from.path={run}", "train.init_from.hf=null",
            f"train.init_from.weights={weights}", file="glm.yaml",
        )  # fmt: skip
        assert code == 0, said
        both = (parity.column(root / f"glm-{how}-{weights}", "loss") for how in ("from", "of"))
        assert len({tuple(losses) for losses in both}) == 1


PUBLISHED_GPT_OSS = {
    **{"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64},
    **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32},
    **{"num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128, "initial_context_length": 4096},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "swiglu_limit": 7.0},
    **{"attention_bias": True, "attention_dropout": 0.0, "hidden_act": "silu", "tie_word_embeddings": False},
    **{"output_router_logits": False, "router_aux_loss_coef": 0.9, "pad_token_id": 199999, "eos_token_id": 200002},
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False},
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
}
"""Of GPT-OSS 20B, as version 4 of transformers wrote it."""


def test_gpt_oss_as_published() -> None:
    family, model = from_hf_config(PUBLISHED_GPT_OSS, "config.json")
    assert family.model_type == "gpt_oss" and not family.misfits(model)
    assert model.pattern == ["sliding_attention", "full_attention"]
    assert [model.layer(name).sliding_window for name in model.layer_kinds[:2]] == [128, None]
    assert model.sinks and model.bias == "attention" and model.head_dim == 64 and model.kv_heads == 8
    assert model.experts == ExpertsConfig(
        count=32, top_k=4, ffn_dim=2880, activation="clamped_swiglu", bias=True, router_bias=True
    )
    assert model.rope_scaling is not None and not model.rope_scaling.truncate
    # Without a scaling transformers takes the same one.
    rest = {key: value for key, value in PUBLISHED_GPT_OSS.items() if key not in ("rope_scaling", "layer_types")}
    assert from_hf_config(rest, "config.json")[1] == model
    plain = {**PUBLISHED_GPT_OSS, "rope_scaling": {"rope_type": "default"}}
    _, unscaled = from_hf_config(plain, "config.json")
    written = to_hf_config(unscaled, 201088, 131072)[1]
    assert unscaled.rope_scaling is None and written["rope_parameters"]["rope_type"] == "default"
    assert from_hf_config(written, "config.json")[1].rope_scaling is None
    with pytest.raises(UserError, match="experts_per_token: 5"):
        from_hf_config({**PUBLISHED_GPT_OSS, "experts_per_token": 5}, "config.json")
