"""SmolLM3: some layers have no rotary embedding, and any may have the window."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import by_layer, layer_types, read_kinds
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL, SLIDING, has_window, write_windows
from pipeline.train.huggingface.family import Family, anything, only
from pipeline.train.huggingface.llama_like import (
    BIASES,
    LLAMA_NAMES,
    LLAMA_NEEDS,
    read_bias,
    read_llama_like,
    write_bias,
    write_llama_like,
)


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=4, theta=2000000.0, tied=True)
    layers, rope = found["layers"], {"rope_scaling": found.pop("rope_scaling")}
    interval = source.size("no_rope_layer_interval", 4)
    turns = source.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(turns, list) or len(turns) < layers:
        source.refuse("no_rope_layers", turns, f"it must be a list with an entry for each of the {layers} layers")
    source.get("max_window_layers")  # which transformers does not read here
    window = source.size("sliding_window", least=0)
    window = window if source.flag("use_sliding_window", False) else None
    # transformers gives the window to the layers without rope, if the file has no list.
    types = layer_types(
        source, layers, (FULL, SLIDING), lambda index: FULL if window is None or turns[index] else SLIDING
    )
    kinds: dict[str, Json] = {}
    names = []
    for turned, kind in zip(turns, types, strict=False):
        keys = {"sliding_window": window} if kind == SLIDING and window is not None else {}
        names.append(f"{'rope' if turned else 'no_rope'}{'_window' if keys else ''}")
        kinds[names[-1]] = keys | (rope if turned else {"positions": "none"})
    return {**found, "bias": read_bias(source), **read_kinds(names, kinds)}


def _write(model: ModelConfig, positions: int) -> Json:
    turned = next((layer for layer in map(model.layer, model.layer_kinds) if _is_turned(layer)), model)
    turns = by_layer(model, lambda layer: int(_is_turned(layer)))
    return write_llama_like(turned, positions, **write_bias(model), no_rope_layers=turns, **write_windows(model))


def _is_turned(layer: ModelConfig) -> bool:
    return layer.positions == "rope"


def _is_special(layers: Sequence[ModelConfig]) -> bool:
    return len({layer.sliding_window for layer in layers}) > 1 or not all(map(_is_turned, layers))


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    title="SmolLM3",
    what="layers with `positions: rope` or `none`, `sliding_window` or none; `bias` as Llama",
    read=_read,
    write=_write,
    mark="positions",
    needs={
        **LLAMA_NEEDS,
        "positions": only("rope", "none"),
        "bias": only(*BIASES),
        "sliding_window": anything(),
    },
    varies=frozenset({"positions", "sliding_window", "rope_theta", "rope_scaling"}),
    alike={"sliding_window": has_window, "rope_theta": _is_turned, "rope_scaling": _is_turned},
    special=_is_special,
    names=LLAMA_NAMES,
    positions=("max_position_embeddings", 32768),
    pads=True,
)
