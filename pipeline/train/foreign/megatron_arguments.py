"""Arguments of a run of Megatron-LM, and the `model:` section that computes the same.

A run has some 800 arguments. Those that change what its weights compute are translated, or refused by name if they are
set to something that is not computed here. One of a name that is unknown here is refused if it may be such an argument.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.train.checkpoint.inert_pickle import InertObject
from pipeline.train.foreign.pickles import read_saved
from pipeline.train.huggingface.config_source import ConfigSource, Json

COMMON = "common.pt"
_ARCHITECTURE = re.compile(
    r"(moe|mtp|rotary|rope|yarn|mrope|attention|linear|mamba|qk|dsa|window|multi_latent|[qkv]_lora|v_head|activation|glu|"
    r"softmax|norm|layernorm|experimental|position|hybrid|is_hybrid|heterogeneous|embedding|logit|mup|residual|swiglu|"
    r"squared|quick|openai|onnx|num_(layers|attention|query|expert|moe)|hidden|ffn|kv_|add_|untie|apply_|use_rope|"
    r"group_query|no_rope|nope|beta_|mscale|scale_|clone|share_|bias_|gated|attn|parallel_attn|sliding|swa|post_|pre_|"
    r"query_pre|hyper|mhc|sandwich|use_qk)"
)
"""Arguments that may change the result, by their beginnings. All others are of training, data, files and machines."""
_NEUTRAL = {
    # Training: losses of routers, dropout, initial weights.
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_router_bias_update_rate"),
    "mtp_loss_scaling_factor",
    *("attention_dropout", "hidden_dropout", "moe_router_force_load_balancing"),
    *("moe_enable_routing_replay", "embedding_init_method_std", "embedding_init_method", "moe_upcycling_granularity"),
    # The way in which it is computed.
    *("moe_router_dtype", "moe_router_padding_for_fp8", "moe_router_padding_for_quantization", "moe_router_fusion"),
    "moe_token_drop_policy",
    *("moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_per_layer_logging"),
    "moe_grouped_gemm",
    *("moe_permute_fusion", "moe_layer_recompute", "moe_shared_expert_overlap", "moe_extended_tp"),
    "moe_deepep_num_sms",
    *("moe_hybridep_num_sms", "moe_use_device_initiated_grouped_gemm", "attention_backend"),
    "attention_softmax_in_fp32",
    *("apply_query_key_layer_scaling", "apply_rope_fusion", "bias_swiglu_fusion", "bias_dropout_fusion"),
    "bias_activation_fusion",
    *("add_position_embedding", "clone_scatter_output_in_embedding", "num_layers_per_virtual_pipeline_stage"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "hidden_size_per_attention_head"),
    # Sizes of parts that are refused where they are used.
    *("qk_clip_alpha", "qk_clip_threshold", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups"),
    "mamba_num_heads",
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    "linear_num_value_heads",
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
    "rotary_scaling_factor",
}


class ArgumentSource(ConfigSource):
    """Arguments of a run, and which of them were looked at."""

    def unused(self, prefix: str) -> None:
        """Leave out arguments of a part that the model does not have."""
        self._seen.update(key for key in self._values if key.startswith(prefix))

    def overlooked(self) -> list[str]:
        """Arguments that may change the result, and that nobody has looked at."""
        found = [key for key in self._values if key not in self._seen and key not in _NEUTRAL]
        return [key for key in found if _ARCHITECTURE.match(key)]

    def finish(self, ignore: Collection[str]) -> None:
        """Refuse what nobody has looked at, if it is set."""
        for key in self.overlooked():
            value = self._values[key]
            if key not in ignore and value not in (None, False, 0, 0.0, "", [], (), {}):
                self.refuse(
                    key, value, f"it is not supported. If it does not change what the model computes: --ignore {key}"
                )


def read_model(source: ArgumentSource) -> Json:
    """Values of `model:` that compute what the arguments of a run describe."""
    norm = source.need("normalization")
    if norm not in ("RMSNorm", "LayerNorm"):
        source.refuse("normalization", norm, "only RMSNorm and LayerNorm are supported")
    heads = source.need_size("num_attention_heads")
    groups = source.size("num_query_groups", heads)
    for key, wanted in (("window_attn_skip_freq", None), ("softmax_type", "vanilla"), ("glu_linear_offset", 0.0)):
        source.must_be(key, (wanted,), wanted)
    found: Json = {
        "layers": source.need_count("num_layers", MAX_LAYERS),
        "dim": source.need_size("hidden_size"),
        "heads": heads,
        "kv_heads": groups if source.flag("group_query_attention", False) else heads,
        "head_dim": source.size("kv_channels"),
        "norm": norm.lower(),
        "norm_eps": source.number("norm_epsilon", 1e-5),
        "norm_offset": 1.0 if source.flag("apply_layernorm_1p", False) else 0.0,
        "bias": "all"
        if source.flag("add_bias_linear", True)
        else "qkv"
        if source.flag("add_qkv_bias", False)
        else "none",
        "qk_norm": source.flag("qk_layernorm", False),
        "sliding_window": _window(source),
        "tie_embeddings": not source.flag("untie_embeddings_and_output_weights", False),
        # Megatron's softmax has the rows of the padding, too.
        "vocab_size": source.need_size("padded_vocab_size"),
        **_positions(source),
    }
    experts = source.get("num_experts", source.get("num_moe_experts"))
    if experts is None:
        source.unused("moe_")
        return {**found, "mlp": _activation(source), "ffn_dim": source.need_size("ffn_hidden_size")}
    return {**found, "mlp": "experts", "experts": _experts(source)}


def _positions(source: ArgumentSource) -> Json:
    kind = source.get("position_embedding_type", "learned_absolute")
    share = source.number("rotary_percent", 1.0)
    base, scaled = source.number("rotary_base", 10000), source.flag("use_rope_scaling", False)
    factor = source.number("rope_scaling_factor", 8.0)
    source.must_be("rotary_seq_len_interpolation_factor", (None, 1), None)
    if kind == "learned_absolute":
        return {"positions": "learned", "max_positions": source.need_size("max_position_embeddings")}
    if kind == "none":
        return {"positions": "none"}
    if kind != "rope":
        source.refuse("position_embedding_type", kind, "only rope, learned_absolute and none are supported")
    scaling = {"type": "llama3", "factor": factor, "original_max_positions": 8192}
    return {
        "positions": "rope",
        "rope_theta": float(base),
        "rope_share": share,
        "rope_scaling": scaling if scaled else None,
    }


def _window(source: ArgumentSource) -> int | None:
    window = source.get("window_size")
    if window is None:
        return None
    match window:
        case (int(before), 0) if before > 0:
            return before + 1  # there a token sees so many before itself
    source.refuse("window_size", window, "it must be a number of tokens above 0, and 0 behind")


def _activation(source: ArgumentSource) -> str:
    gated, squared = source.flag("swiglu", False), source.flag("squared_relu", False)
    fused = source.flag("bias_gelu_fusion", True)
    source.must_be("openai_gelu", (False,), False)
    source.must_be("quick_geglu", (False,), False)
    source.must_be("activation_func_clamp_value", (None,), None)
    source.must_be("onnx_safe", (None, False), None)
    if gated:
        return "swiglu"
    # The fused kernel has the approximation by tanh, the other one is exact.
    return "relu2" if squared else "gelu" if fused else "gelu_exact"


def _experts(source: ArgumentSource) -> Json:
    if _activation(source) != "swiglu":
        source.refuse("swiglu", False, "experts without a gate are not supported")
    layers = source.get("moe_layer_freq", 1)
    if layers != 1 and not (isinstance(layers, list) and all(each == 1 for each in layers)):
        source.refuse("moe_layer_freq", layers, "only models whose layers all have experts are supported")
    key = "num_experts" if source.get("num_experts") is not None else "num_moe_experts"
    for name in ("moe_shared_expert_intermediate_size", "moe_expert_capacity_factor", "moe_latent_size"):
        source.must_be(name, (None,), None)
    source.must_be("moe_router_score_function", ("softmax",), "softmax")
    balancing = source.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing if isinstance(balancing, list | tuple) else [balancing]):
        source.refuse("moe_router_load_balancing_type", balancing, "sinkhorn has other weights of experts")
    source.must_be("moe_router_topk_scaling_factor", (None, 1.0), None)
    source.must_be("moe_use_legacy_grouped_gemm", (False,), False)
    source.must_be("moe_apply_probs_on_input", (False,), False)
    dense, ffn_dim = source.need_size("ffn_hidden_size"), source.size("moe_ffn_hidden_size")
    return {
        "count": source.need_size(key),
        "top_k": source.size("moe_router_topk", 2),
        "ffn_dim": dense if ffn_dim is None else ffn_dim,
        # Otherwise the softmax is over the chosen experts, which is the same as to divide by their sum.
        "normalize": not source.flag("moe_router_pre_softmax", False),
    }


def read_common(path: Path) -> dict[Any, Any]:
    """Settings that a checkpoint has besides tensors; most are the arguments of the run.

    Raises:
        UserError: the file is missing or damaged.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; the checkpoint is not complete, or not one of Megatron Core")
    found = read_saved(path)
    return found if isinstance(found, dict) else {}


def read_arguments(path: Path, common: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """The arguments of the run that wrote a checkpoint.

    Args:
        path: of the file.
        common: its content, if it has been read.

    Raises:
        UserError: the file is missing or damaged, or has none.
    """
    arguments: Any = (read_common(path) if common is None else common).get("args")
    state = arguments.state if isinstance(arguments, InertObject) else None
    if not isinstance(state, dict):
        raise UserError(
            f"{path} has no args, the arguments of the run; it was saved by something else than pretrain_gpt"
        )
    return {key: value for key, value in state.items() if isinstance(key, str)}
