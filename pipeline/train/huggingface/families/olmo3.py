"""OLMo 3: an OLMo 2 in which most layers have a window, and those without it may have another rope."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_rope import read_rope_values, write_rope, write_rope_values
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL, SLIDING, has_window, read_periodic, types_of, windows_of
from pipeline.train.huggingface.families.olmo2 import OLMO_NAMES, OLMO_NEEDS, read_olmo
from pipeline.train.huggingface.family import Family, anything
from pipeline.train.huggingface.llama_like import write_llama_like

_THETA = 500000.0


def _read(source: ConfigSource) -> Json:
    full, sliding = _read_ropes(source)
    same = {key: value for key, value in full.items() if sliding[key] == value}
    found = read_olmo(source, same)
    types, window = read_periodic(source, found["layers"], period=4)
    of_full, of_sliding = ({key: rope[key] for key in rope if key not in same} for rope in (full, sliding))
    return {**found, **read_kinds(types, {FULL: of_full, SLIDING: {"sliding_window": window, **of_sliding}})}


def _read_ropes(source: ConfigSource) -> tuple[Json, Json]:
    """Rope of full layers, and of those with a window."""
    by_type, scaling = source.object("rope_parameters"), source.object("rope_scaling")
    theta = source.number("rope_theta", _THETA)
    if by_type and (scaling or not by_type.keys() <= {FULL, SLIDING}):
        source.refuse("rope_parameters", by_type, f"it must have {FULL} and {SLIDING}, without rope_scaling beside it")
    if not by_type:  # as version 4 of transformers wrote it, in which only full layers are scaled
        if theta != _THETA:
            why = f"transformers 4 takes it for all layers, 5 not for {SLIDING}; write rope_parameters with both types"
            source.refuse("rope_theta", theta, why)
        by_type = {FULL: scaling}
    full = read_rope_values(source, by_type.get(FULL) or {}, theta)
    return full, read_rope_values(source, by_type.get(SLIDING) or {}, _THETA)


def _write(model: ModelConfig, positions: int) -> Json:
    layers = {has_window(layer): layer for layer in map(model.layer, model.layer_kinds)}
    full, sliding = (layers.get(kind, model) for kind in (False, True))
    found = write_llama_like(
        model,
        positions,
        attention_bias=model.bias == "attention",
        sliding_window=next(filter(None, windows_of(model))),
        layer_types=types_of(model),
    )
    if full.rope_theta == sliding.rope_theta == _THETA and sliding.rope_scaling is None:
        return found | write_rope(full)  # which transformers 4 reads, too
    del found["rope_theta"], found["rope_scaling"]
    return found | {"rope_parameters": {FULL: write_rope_values(full), SLIDING: write_rope_values(sliding)}}


def _is_special(layers: Sequence[ModelConfig]) -> bool:
    return any(map(has_window, layers))  # else it is an OLMo 2


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    title="OLMo 3",
    what="as OLMo 2, with `sliding_window` in all or some layers, and a rope of those and one of the others",
    read=_read,
    write=_write,
    mark="norm_place",
    needs={**OLMO_NEEDS, "sliding_window": anything()},
    varies=frozenset({"sliding_window", "rope_theta", "rope_scaling"}),
    alike=dict.fromkeys(("sliding_window", "rope_theta", "rope_scaling"), has_window),
    special=_is_special,
    names=OLMO_NAMES,
    pads=True,
)
