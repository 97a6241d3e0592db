"""`config.json` of Hugging Face's models to the `model:` section and back.

What a config.json says and we do not compute is refused by its name: an unknown key could be a feature, and weights
that load without it would give other numbers without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from pipeline.common.errors import UserError
from pipeline.config.model import MAX_LAYERS, ModelConfig
from pipeline.train.checkpoint.weight_source import validated_model
from pipeline.train.huggingface.families import FAMILIES, Family
from pipeline.train.model.mlps.dense.spec import default_ffn_dim

Json = dict[str, Any]

_NEUTRAL_KEYS = {
    *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "initializer_factor", "pretraining_tp"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("keys_to_ignore_at_inference", "n_ctx", "unk_token_id", "_attn_implementation_autoset", "attn_implementation"),
    # For a head that classifies.
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    # How products are ordered, not what they are.
    *("reorder_and_upcast_attn", "rms_norm_fused"),
    # How text is generated, as older files have it.
    *("max_length", "do_sample", "temperature", "top_p", "top_k", "is_llama_config"),
}
"""Keys that do not change what the weights compute."""
_DROPOUT = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
_WINDOW = 4096
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


class _Source:
    """Values of a config.json, and which of them were looked at."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self._file = file
        self._seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value; `default` where there is none, which is what transformers takes then."""
        self._seen.add(key)
        found = self._values.get(key)
        return default if found is None else found

    def get_absent(self, key: str, absent: Any) -> Any:
        """A value that may be null; `absent` only where the key is not there at all."""
        self._seen.add(key)
        return self._values.get(key, absent)

    def need(self, key: str) -> Any:
        """A value that every such file has."""
        found = self.get(key)
        if found is None:
            raise UserError(f"{self._file} has no {key}")
        return found

    def need_count(self, key: str, most: int) -> int:
        """A number of things that are gone through one by one before the rest is checked."""
        found = self.need(key)
        if not isinstance(found, int) or not 1 <= found <= most:
            self.refuse(key, found, f"it must be a whole number from 1 to {most}")
        return found

    def must_be(self, key: str, wanted: Collection[Any], default: Any) -> None:
        """Refuse what we do not compute."""
        found = self.get(key, default)
        if found not in wanted:
            self.refuse(key, found, f"only {' or '.join(map(repr, wanted))} is supported")

    def refuse(self, key: str, value: Any, why: str) -> NoReturn:
        """Raise an error: this value is nothing that we compute."""
        raise UserError(f"{self._file}: {key}: {value!r} cannot be converted: {why}")

    def finish(self, ignore: Collection[str]) -> None:
        """Refuse what nobody has looked at."""
        for key, value in self._values.items():
            if key in self._seen or key in _NEUTRAL_KEYS or key in _DROPOUT or key in ignore:
                continue
            if value in (None, False, [], {}):
                continue
            why = "it is not supported"
            if key == "auto_map":
                why = "the model needs its own code, and code that comes with weights is never run"
            if key == "quantization_config":
                why = "quantized weights cannot be trained; use the original ones"
            hint = f"pipeline convert from-hf DIR OUT --ignore {key}"
            self.refuse(key, value, f"{why}. If it does not change what the model computes: {hint}")


def from_hf_config(values: Mapping[str, Any], file: str, ignore: Collection[str] = ()) -> tuple[Family, ModelConfig]:
    """The `model:` section that computes what a config.json describes.

    Args:
        values: of the file.
        file: its path, for messages.
        ignore: keys that the user says do not matter.

    Raises:
        UserError: an unsupported architecture or feature, by name.
    """
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"{file}: model_type: {model_type!r} cannot be converted; these can: {', '.join(sorted(FAMILIES))}"
        )
    family, source = FAMILIES[model_type], _Source(values, file)
    model = _from_gpt2(source) if family.model_type == "gpt2" else _from_llama_like(source, family.model_type)
    source.finish(ignore)
    return family, validated_model(model, f"{file} describes a model that cannot be built")


def to_hf_config(model: ModelConfig, vocab_size: int, positions: int) -> tuple[Family, Json]:
    """The family that computes what a `model:` section describes, and its config.json.

    Args:
        model: the section.
        vocab_size: tokens, without padding.
        positions: the longest context that the model was trained with.

    Raises:
        UserError: no family computes this; the message names the key.
    """
    for key, value, why in (
        ("logit_soft_cap", model.logit_soft_cap, "only Gemma 2 has it, together with much that is not supported"),
        ("init.scheme", "mup" if model.init.scheme == "mup" else None, "muP has factors on attention and logits"),
    ):
        if value is not None:
            raise _no_family(f"model.{key} is {value!r}", why)
    family, values = _to_gpt2(model, positions) if model.positions == "learned" else _to_llama_like(model, positions)
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init.std,
        "use_cache": True,
    }
    return family, common | values


# GPT-2


def _from_gpt2(source: _Source) -> Json:
    source.must_be("activation_function", _TANH_GELU, "gelu_new")
    source.must_be("scale_attn_weights", (True,), True)
    source.must_be("scale_attn_by_inverse_layer_idx", (False,), False)
    source.must_be("add_cross_attention", (False,), False)
    return {
        "layers": source.need("n_layer"),
        "dim": source.need("n_embd"),
        "heads": source.need("n_head"),
        "ffn_dim": source.get("n_inner", 4 * source.need("n_embd")),
        "norm": "layernorm",
        "norm_eps": source.get("layer_norm_epsilon", 1e-5),
        "mlp": "gelu",
        "bias": "all",
        "positions": "learned",
        "max_positions": source.get("n_positions", 1024),
        "tie_embeddings": source.get("tie_word_embeddings", True),
        "vocab_size": source.need("vocab_size"),
    }


def _to_gpt2(model: ModelConfig, positions: int) -> tuple[Family, Json]:
    head_dim = model.head_size
    for key, fits in (
        ("norm", model.norm == "layernorm"),
        ("mlp", model.mlp == "gelu"),
        ("bias", model.bias == "all"),
        ("kv_heads", model.kv_heads in (None, model.heads)),
        ("head_dim", head_dim * model.heads == model.dim),
        ("qk_norm", not model.qk_norm),
        ("sliding_window", model.sliding_window is None),
    ):
        if not fits:
            raise _no_family(
                f"model.positions is 'learned' and model.{key} is {getattr(model, key)!r}",
                "GPT-2, which has learned positions, has layernorm, gelu, biases everywhere and plain attention",
            )
    return FAMILIES["gpt2"], {
        "n_layer": model.layers,
        "n_embd": model.dim,
        "n_head": model.heads,
        "n_inner": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "n_positions": model.max_positions or positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


# Llama, Mistral, Qwen2, Qwen3


def _from_llama_like(source: _Source, model_type: str) -> Json:
    source.must_be("hidden_act", ("silu",), "silu")
    dim, heads = source.need("hidden_size"), source.need("num_attention_heads")
    layers = source.need_count("num_hidden_layers", MAX_LAYERS)
    head_dim = source.get("head_dim", 128 if model_type == "qwen3" else None)
    positions, rope = source.get("max_position_embeddings"), _rope(source)
    # What transformers takes where the key is not there; null means as many as heads.
    kv_heads = source.get_absent("num_key_value_heads", {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(model_type))
    return {
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "ffn_dim": source.need("intermediate_size"),
        "norm": "rmsnorm",
        "norm_eps": source.get("rms_norm_eps", 1e-6),
        "mlp": "swiglu",
        "bias": _bias(source, model_type),
        "qk_norm": model_type == "qwen3",
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": _rope_scaling(source, rope, positions),
        "sliding_window": _window(source, model_type, layers),
        "tie_embeddings": source.get("tie_word_embeddings", False),
        "vocab_size": source.need("vocab_size"),
    }


def _bias(source: _Source, model_type: str) -> str:
    if model_type == "qwen2":
        return "qkv"
    if model_type == "llama":
        attention, mlp = source.get("attention_bias", False), source.get("mlp_bias", False)
        if attention != mlp:
            source.refuse("attention_bias", attention, f"mlp_bias is {mlp!r}; only both or none are supported")
        return "all" if attention else "none"
    source.must_be("attention_bias", (False,), False)
    return "none"


def _window(source: _Source, model_type: str, layers: int) -> int | None:
    # Null means no window, a missing key the default of transformers.
    window = source.get_absent("sliding_window", None if model_type == "llama" else _WINDOW)
    kinds = source.get("layer_types")
    if model_type == "mistral":
        return None if window is None else int(window)
    uses, first = source.get("use_sliding_window", False), source.get("max_window_layers", 28)
    if model_type == "llama" or not uses:
        window = None
    uses = uses and window is not None
    if kinds is None:
        kinds = ["sliding_attention" if uses and layer >= first else "full_attention" for layer in range(layers)]
    found = set(kinds)
    if len(found) > 1 or not found <= {"full_attention", "sliding_attention"}:
        source.refuse("layer_types", kinds, "all layers must have the same attention, full or within one window")
    return int(window) if found == {"sliding_attention"} and window is not None else None


def _rope(source: _Source) -> Json:
    """Both ways of writing it: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""
    theta, scaling = source.get("rope_theta"), source.get("rope_scaling", {})
    parameters = source.get("rope_parameters", {})
    if scaling and parameters and scaling != parameters:
        source.refuse("rope_scaling", scaling, f"rope_parameters differs from it ({parameters}); remove one of them")
    found = dict(parameters or scaling)
    if nested := [key for key, value in found.items() if isinstance(value, dict)]:
        source.refuse("rope_parameters", found, f"{nested[0]} has its own; all layers must have the same")
    if found.get("rope_theta") is None:
        found["rope_theta"] = 10000.0 if theta is None else theta
    return found


def _rope_scaling(source: _Source, rope: Json, positions: int | None) -> Json | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    known = {"rope_type", "type", "rope_theta", *_ROPE_KEYS.get(kind, ())}
    if kind == "default":
        return None
    if kind not in _ROPE_KEYS:
        source.refuse("rope_scaling", kind, f"only {', '.join(_ROPE_KEYS)} are supported")
    for key, value in rope.items():
        if key not in known and value not in (None, False) and not (key == "truncate" and value is True):
            source.refuse("rope_scaling", f"{key}: {value}", "it is not supported")
    original = rope.get("original_max_position_embeddings")
    names = {"factor": "factor", "original_max_position_embeddings": "original_max_positions"}
    found = {names.get(key, key): rope[key] for key in _ROPE_KEYS[kind] if rope.get(key) is not None}
    if kind == "yarn" and "factor" not in found and original and positions:
        found["factor"] = positions / original
    if kind != "linear" and original is None:
        if positions is None:
            source.refuse("rope_scaling", kind, "it has no original_max_position_embeddings")
        found["original_max_positions"] = positions
    return {"type": kind, **found}


_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Keys that decide the frequencies of a scaling."""


def _to_llama_like(model: ModelConfig, positions: int) -> tuple[Family, Json]:
    for key, wanted in (("norm", "rmsnorm"), ("mlp", "swiglu")):
        if getattr(model, key) != wanted:
            raise _no_family(f"model.positions is 'rope' and model.{key} is {getattr(model, key)!r}", f"not {wanted}")
    head_dim = model.head_size
    family = _family_with_rope(model, head_dim)
    values: Json = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": head_dim,
        "intermediate_size": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": positions,
        "attention_dropout": 0.0,
        # As version 4 had it, which 5 and all others read, too.
        "rope_theta": model.rope_theta,
        "rope_scaling": _to_rope_scaling(model, positions),
    }
    window = model.sliding_window
    more: dict[str, Callable[[], Json]] = {
        "llama": lambda: {"attention_bias": model.bias == "all", "mlp_bias": model.bias == "all"},
        "mistral": lambda: {"sliding_window": window},
        "qwen2": lambda: _qwen_window(window, model.layers),
        "qwen3": lambda: {"attention_bias": False, **_qwen_window(window, model.layers)},
    }
    return family, values | more[family.model_type]()


def _family_with_rope(model: ModelConfig, head_dim: int) -> Family:
    if model.qk_norm:
        if model.bias != "none":
            raise _no_family(f"model.qk_norm is true and model.bias is {model.bias!r}", "Qwen3 has no biases")
        return FAMILIES["qwen3"]
    if model.bias == "qkv":
        if head_dim * model.heads != model.dim:
            raise _no_family(f"model.bias is 'qkv' and model.head_dim is {head_dim}", "Qwen2 has dim / heads")
        return FAMILIES["qwen2"]
    if model.sliding_window is not None:
        if model.bias == "all":
            raise _no_family("model.sliding_window is set and model.bias is 'all'", "Mistral has no biases")
        return FAMILIES["mistral"]
    return FAMILIES["llama"]


def _qwen_window(window: int | None, layers: int) -> Json:
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": layers if window is None else 0,
        "layer_types": [kind] * layers,
    }


def _to_rope_scaling(model: ModelConfig, positions: int) -> Json | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    for name in ("mscale", "mscale_all_dim"):
        value = getattr(scaling, name)
        if value != type(scaling).model_fields[name].default:
            raise _no_family(f"model.rope_scaling.{name} is {value}", "its factor on attention is DeepSeek's alone")
    names = {"original_max_position_embeddings": scaling.original_max_positions}
    found = {key: names.get(key, getattr(scaling, key, None)) for key in _ROPE_KEYS[scaling.type]}
    if found.get("truncate"):
        del found["truncate"]  # as it is where the key is missing
    return {"rope_type": scaling.type, **{key: value for key, value in found.items() if value is not None}}


def _no_family(what: str, why: str) -> UserError:
    return UserError(f"{what}: no supported family of Hugging Face models computes this ({why})")
