"""Rotary frequencies in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json

_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Keys that decide the frequencies of a scaling."""
_MSCALE = ("mscale", "mscale_all_dim")
"""DeepSeek's, of YaRN."""
_NUMBERS = {"rope_theta", *_MSCALE, *chain.from_iterable(_SCALING_KEYS.values())} - {"truncate"}
ROPE_SHARE = "partial_rotary_factor"


def read_rope(
    source: ConfigSource,
    theta: float = 10000.0,
    *,
    shared: bool = False,
    theta_key: str = "rope_theta",
    mscale: bool = False,
) -> Json:
    """`rope_theta` and `rope_scaling` of `model:`.

    Args:
        source: the file.
        theta: what transformers takes where the file has none.
        shared: the family can turn a part of a head; see `read_rope_share`.
        theta_key: what version 4 of transformers calls `rope_theta`.
        mscale: the family has DeepSeek's keys of YaRN.
    """
    rope = _parameters(source, theta, theta_key)
    if shared:
        rope.pop(ROPE_SHARE, None)
    return read_rope_values(source, rope, theta, mscale=mscale)


def read_rope_share(source: ConfigSource, key: str, default: float) -> float:
    """`rope_share` of `model:`, in families that can turn a part of a head.

    Args:
        source: the file.
        key: what version 4 of transformers calls it.
        default: what transformers takes where the file has none.
    """
    inner = (source.object("rope_parameters") or source.object("rope_scaling")).get(ROPE_SHARE)
    values = (source.as_number(ROPE_SHARE, inner), source.number(ROPE_SHARE), source.number(key))
    found = {float(value) for value in values if value is not None}
    if len(found) > 1:
        source.refuse(key, source.get(key), f"{ROPE_SHARE} says otherwise: {sorted(found)}; remove one of them")
    return found.pop() if found else default


def read_rope_by_type(
    source: ConfigSource, thetas: Mapping[str, tuple[str, float]], *, scales_all: bool = False
) -> dict[str, Json]:
    """`rope_theta` and `rope_scaling` by type of layer: `rope_parameters` has them so in transformers 5.

    In 4 each type has a key for its theta, and `rope_scaling` is that of the first type alone, or of all.

    Args:
        source: the file.
        thetas: by type of layer the key of its theta in 4, and what transformers takes where nothing is said.
        scales_all: `rope_scaling` is that of all types.
    """
    nested, scaling = source.object("rope_parameters"), source.object("rope_scaling")
    unknown = {key: value for key, value in nested.items() if key not in thetas or not isinstance(value, dict)}
    if unknown:
        source.refuse("rope_parameters", unknown, f"it must have {' and '.join(thetas)}")
    first = next(iter(thetas))
    found = {}
    for name, (key, default) in thetas.items():
        rope = dict(nested.get(name) or {})
        of_type = scaling if scales_all or name == first else {}
        if of_type and len(rope.keys() - {"rope_theta"}) and {**rope, **of_type} != rope:
            source.refuse("rope_scaling", scaling, f"rope_parameters differs from it ({rope}); remove one of them")
        found[name] = read_rope_values(source, rope | of_type, source.number(key, default))
    return found


def write_rope(model: ModelConfig) -> Json:
    """Keys of rotary positions as version 4 of transformers had them, which 5 and all others read, too."""
    return {"rope_theta": model.rope_theta, "rope_scaling": _write_scaling(model)}


def read_rope_values(source: ConfigSource, values: Json, theta: float, *, mscale: bool = False) -> Json:
    """Rotary positions from the values of one type of layers, which `rope_parameters` may have by type.

    Args:
        source: the file.
        values: of this type.
        theta: what transformers takes where they have none.
        mscale: see `read_rope`.
    """
    rope = {key: source.as_number(key, value) if key in _NUMBERS else value for key, value in values.items()}
    rope["rope_theta"] = theta if rope.get("rope_theta") is None else rope["rope_theta"]
    scaling = _read_scaling(source, rope, source.size("max_position_embeddings"), mscale)
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": scaling}


def write_rope_values(layer: ModelConfig) -> Json:
    """Values of the type of a layer."""
    return {"rope_theta": layer.rope_theta, **(_write_scaling(layer) or {"rope_type": "default"})}


def _parameters(source: ConfigSource, default: float, theta_key: str) -> Json:
    """Parameters of rope in either form: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""
    theta, scaling = source.number("rope_theta"), source.object("rope_scaling")
    named = source.number(theta_key, theta)
    if theta not in (None, named):
        source.refuse("rope_theta", theta, f"{theta_key} is {named}; remove one of them")
    theta = named
    parameters = source.object("rope_parameters")
    if scaling and parameters and scaling != parameters:
        source.refuse("rope_scaling", scaling, f"rope_parameters differs from it ({parameters}); remove one of them")
    found = dict(parameters or scaling)
    if nested := [key for key, value in found.items() if isinstance(value, dict)]:
        source.refuse("rope_parameters", found, f"{nested[0]} has its own; all layers must have the same")
    if found.get("rope_theta") is None:
        found["rope_theta"] = default if theta is None else theta
    return found


def _read_scaling(source: ConfigSource, rope: Json, positions: int | None, mscale: bool) -> Json | None:
    kind = next((rope[key] for key in ("rope_type", "type") if rope.get(key) is not None), "default")
    if not isinstance(kind, str):
        source.refuse("rope_type", kind, "it must be a text")
    keys = (*_SCALING_KEYS.get(kind, ()), *(_MSCALE if mscale and kind == "yarn" else ()))
    known = {"rope_type", "type", "rope_theta", *keys}
    if kind == "default":
        return None
    if kind not in _SCALING_KEYS:
        source.refuse("rope_scaling", kind, f"only {', '.join(_SCALING_KEYS)} are supported")
    for key, value in rope.items():
        if key not in known and value not in (None, False) and not (key == "truncate" and value is True):
            source.refuse("rope_scaling", f"{key}: {value}", "it is not supported")
    original = rope.get("original_max_position_embeddings")
    names = {"factor": "factor", "original_max_position_embeddings": "original_max_positions"}
    found = {names.get(key, key): rope[key] for key in keys if rope.get(key) is not None}
    first, second = (found.get(key) for key in _MSCALE)
    if bool(first) != bool(second):  # each of the two has another meaning in transformers without the other
        source.refuse("rope_scaling", rope, f"{' and '.join(_MSCALE)} need each other")
    if kind == "yarn" and "factor" not in found and original and positions:
        found["factor"] = positions / original
    if kind != "linear" and original is None:
        if positions is None:
            source.refuse("rope_scaling", kind, "it has no original_max_position_embeddings")
        found["original_max_positions"] = positions
    return {"type": kind, **found}


def _write_scaling(model: ModelConfig) -> Json | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    names = {"original_max_position_embeddings": scaling.original_max_positions}
    keys = (*_SCALING_KEYS[scaling.type], *(_MSCALE if scaling.mscale_all_dim else ()))
    found = {key: names.get(key, getattr(scaling, key, None)) for key in keys}
    if found.get("truncate"):
        del found["truncate"]  # as it is where the key is missing
    return {"rope_type": scaling.type, **{key: value for key, value in found.items() if value is not None}}
