"""ModernBERT: pre-norm without biases, gated gelu, windows to both sides with a theta of their own."""

from __future__ import annotations

from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import layer_types, read_kinds
from pipeline.train.huggingface.config_rope import read_rope_by_type, write_rope_values
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL, SLIDING, has_window, types_of, windows_of
from pipeline.train.huggingface.family import Family, Need, anything, only, where
from pipeline.train.huggingface.llama_like import BIASES, LLAMA_NEEDS, read_bias, write_bias
from pipeline.train.huggingface.names import Names, TensorRule
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec, default_ffn_dim

_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
_GELUS = {"gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu"}
_WINDOW, _PERIOD = 128, 3
_HAS = "plain attention to both sides"
_OF_OTHER_HEADS = (
    *("classifier_dropout", "classifier_pooling", "mlp_dropout", "cls_token_id", "sep_token_id"),
    # How it is computed and how it was drawn.
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "gradient_checkpointing"),
    *("initializer_cutoff_factor", "sparse_prediction", "sparse_pred_ignore_index"),
    # Files of the first version have them, and nothing reads them.
    *("position_embedding_type", "layer_norm_eps"),
)


def _read(source: ConfigSource) -> Json:
    source.must_be("hidden_activation", _GELUS, "gelu")
    source.must_be("classifier_activation", _GELUS, "gelu")
    for key in _OF_OTHER_HEADS:
        source.get(key)
    layers, bias = source.need_count("num_hidden_layers", MAX_LAYERS), read_bias(source)
    if source.flag("classifier_bias", False) != (bias == "all"):
        source.refuse("classifier_bias", source.get("classifier_bias", False), "all matrices have biases, or none")
    period = source.count("global_attn_every_n_layers", _PERIOD, least=1)
    types = layer_types(source, layers, (FULL, SLIDING), lambda index: SLIDING if index % period else FULL)
    window = source.count("local_attention", _WINDOW, least=1)
    ropes = read_rope_by_type(source, _THETAS, scales_all=True)
    return {
        "direction": "both",
        "layers": layers,
        "dim": source.need_size("hidden_size"),
        "heads": source.need_size("num_attention_heads"),
        "ffn_dim": source.need_size("intermediate_size"),
        "norm": "layernorm",
        "norm_eps": source.number("norm_eps", 1e-5),
        "norm_bias": source.flag("norm_bias", False),
        "mlp": _GELUS[source.get("hidden_activation", "gelu")].replace("gelu", "geglu"),
        "bias": bias,
        "embedding_norm": True,
        "first_norm": False,
        "head_transform": _GELUS[source.get("classifier_activation", "gelu")],
        "head_bias": source.flag("decoder_bias", True),
        "tie_embeddings": source.flag("tie_word_embeddings", True),
        "vocab_size": source.need_size("vocab_size"),
        **read_kinds(types, {FULL: ropes[FULL], SLIDING: {"sliding_window": window, **ropes[SLIDING]}}),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    layers = {has_window(layer): layer for layer in map(model.layer, dict.fromkeys(model.layer_kinds))}
    types = {FULL: layers.get(False), SLIDING: layers.get(True)}
    ropes = {name: write_rope_values(layer) for name, layer in types.items() if layer is not None}
    # Version 4 of transformers reads the thetas alone.
    thetas = {key: ropes[name]["rope_theta"] if name in ropes else theta for name, (key, theta) in _THETAS.items()}
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_dim or default_ffn_dim(model.mlp, model.dim),
        "max_position_embeddings": positions,
        "norm_eps": model.norm_eps,
        "norm_bias": model.norm_bias,
        "hidden_activation": _name_of(model.mlp.replace("geglu", "gelu")),
        **write_bias(model),
        "layer_types": types_of(model),
        "global_attn_every_n_layers": _period(types_of(model)),
        "local_attention": next(filter(None, windows_of(model)), _WINDOW),
        **thetas,
        "rope_parameters": ropes,
        "classifier_activation": _name_of(str(model.head_transform)),
        "classifier_bias": model.bias == "all",
        "decoder_bias": model.head_bias,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def _name_of(gelu: str) -> str:
    return next(theirs for theirs, ours in _GELUS.items() if ours == gelu)


def _period(types: list[str]) -> int:
    """Distance of layers that see everything, which version 4 of transformers reads in place of `layer_types`."""
    periods = range(1, len(types) + 1)
    return next(
        (each for each in periods if [SLIDING if index % each else FULL for index in range(len(types))] == types),
        len(types),
    )


MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    title="ModernBERT",
    pads=True,
    what="`direction: both`, `norm: layernorm`, `embedding_norm` without `first_norm`, `mlp: geglu_exact`, "
    "`head_transform`, `head_bias` or none; layers with a `sliding_window` and a `rope_theta` of their own",
    read=_read,
    write=_write,
    mark="direction",
    needs={
        "direction": only("both"),
        "positions": only("rope"),
        "norm": only("layernorm"),
        "norm_bias": anything(),
        "embedding_norm": only(True),
        "first_norm": only(False, has="no first_norm"),
        "mlp": only("geglu", "geglu_exact"),
        "bias": only(*BIASES),
        "head_transform": only("gelu", "gelu_exact"),
        "head_bias": anything(),
        "kv_heads": where(lambda model: model.kv_heads in (None, model.heads), _HAS),
        "head_dim": where(lambda model: model.heads_fill_dim, _HAS),
        "rope_theta": anything(),
        "rope_scaling": LLAMA_NEEDS["rope_scaling"],
        "sliding_window": Need(lambda value, model: True, "one window, or none, for each layer"),
    },
    names=Names(
        style="llama",
        layer="model.layers.{i}.",
        before=(
            TensorRule("model.embeddings.tok_embeddings.weight", ("embedding.weight",)),
            TensorRule("model.embeddings.norm.weight", ("embedding_norm.weight",)),
            TensorRule("model.embeddings.norm.bias", ("embedding_norm.bias",)),
        ),
        norms={"attn_norm": "mixer_norm", "mlp_norm": "mlp_norm"},
        after=(
            TensorRule("model.final_norm.weight", ("norm.weight",)),
            TensorRule("model.final_norm.bias", ("norm.bias",)),
            TensorRule("head.dense.weight", ("head.dense.weight",)),
            TensorRule("head.dense.bias", ("head.dense.bias",)),
            TensorRule("head.norm.weight", ("head.norm.weight",)),
            TensorRule("head.norm.bias", ("head.norm.bias",)),
            TensorRule("decoder.weight", ("head.weight",)),
            TensorRule("decoder.bias", ("head.bias",)),
        ),
        norm_bias=True,
        tables={
            AttentionSpec: (("attn.Wqkv", ("wq", "wk", "wv")), ("attn.Wo", ("wo",))),
            MlpSpec: (("mlp.Wi", ("w1", "w3")), ("mlp.Wo", ("w2",))),
        },
    ),
    varies=frozenset({"sliding_window", "rope_theta", "rope_scaling"}),
    alike=dict.fromkeys(("sliding_window", "rope_theta", "rope_scaling"), has_window),
    positions=("max_position_embeddings", 8192),
)
