"""Layers with Mamba-2 in a `config.json` of Hugging Face's models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.config.layers.mixers import MAX_WIDTH, Mamba2Config
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_hybrid import split
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Need, anything, only

MAMBA, ATTENTION = "mamba", "attention"
"""Our names of these kinds of layers, and those of Hugging Face's older files."""
TYPES = {"linear_attention": MAMBA, "full_attention": ATTENTION, MAMBA: MAMBA, ATTENTION: ATTENTION}
"""Kind by type in a file."""
BAMBA_KEYS = {
    **{"heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_dim": "mamba_d_state", "groups": "mamba_n_groups"},
    **{"conv_size": "mamba_d_conv", "conv_bias": "mamba_conv_bias"},
}
"""Key of Bamba and Granite by key of `mamba2`."""
_DEFAULTS = {"heads": 128, "head_dim": 64, "state_dim": 128, "groups": 8, "conv_size": 4, "conv_bias": True}
"""What transformers takes where a file has none."""
_LIMIT = "time_step_limit"


def read_sizes(source: ConfigSource, keys: Mapping[str, str], **defaults: Any) -> Json:
    """Sizes of `mamba2`.

    Args:
        source: the file.
        keys: by ours theirs.
        defaults: what transformers takes in this family where the file has none, where it differs.
    """
    values = {**_DEFAULTS, **defaults}
    found = {ours: source.count(theirs, values[ours], least=1) for ours, theirs in keys.items() if ours != "conv_bias"}
    return {**found, "conv_bias": source.flag(keys["conv_bias"], values["conv_bias"])}


def read_bamba_sizes(source: ConfigSource) -> Json:
    """`mamba2` of Bamba and Granite."""
    source.must_be("mamba_proj_bias", (False,), False)
    source.get("mamba_chunk_size")  # in what portions it is computed
    expand, dim = source.count("mamba_expand", 2, least=1), source.need_count("hidden_size", MAX_WIDTH)
    heads = source.count(BAMBA_KEYS["heads"], _DEFAULTS["heads"], least=1)
    keys = dict(BAMBA_KEYS)
    found: Json = {"heads": heads}
    if source.get(keys["head_dim"], "auto") == "auto":
        found["head_dim"] = expand * dim // heads
        del keys["head_dim"]
    found |= read_sizes(source, keys, state_dim=256, groups=1)
    check_expand(source, "mamba_expand", found)
    return {**found, **read_limits(source)}


def check_expand(source: ConfigSource, key: str, sizes: Json) -> None:
    """Refuse a factor that is not that of the heads; transformers makes matrices of both."""
    expand, dim = source.count(key, 2, least=1), source.need_count("hidden_size", MAX_WIDTH)
    if expand * dim != sizes["heads"] * sizes["head_dim"]:
        source.refuse(key, expand, f"{dim} times it must be {sizes['heads']} heads of {sizes['head_dim']}")


def read_limits(source: ConfigSource) -> Json:
    """`dt_min` and `dt_max` of `mamba2`."""
    limits = source.get(_LIMIT, [0.0, math.inf])
    # transformers 4 writes Infinity, and 5 an object for it.
    listed = limits if isinstance(limits, (list, tuple)) else []
    found = [math.inf if each == {"__float__": "Infinity"} else each for each in listed]
    if len(found) != 2 or not all(isinstance(each, (int, float)) for each in found) or any(map(math.isnan, found)):
        source.refuse(_LIMIT, limits, "it must be a list of two numbers")
    low, high = map(float, found)
    return {"dt_min": max(0.0, low), "dt_max": None if high == math.inf else high}


def write_limits(sizes: Mamba2Config) -> Json:
    """Write the key that `read_limits` reads, unless there are no bounds: readers of JSON disagree about Infinity."""
    if sizes.dt_min == 0 and sizes.dt_max is None:
        return {}
    return {_LIMIT: [sizes.dt_min, {"__float__": "Infinity"} if sizes.dt_max is None else sizes.dt_max]}


def write_sizes(sizes: Mamba2Config, keys: Mapping[str, str]) -> Json:
    """Keys of config.json for sizes."""
    return {theirs: getattr(sizes, ours) for ours, theirs in keys.items()}


def write_bamba_sizes(model: ModelConfig) -> Json:
    """Keys of config.json of Bamba and Granite."""
    sizes = sizes_of(model)
    expand = sizes.heads * sizes.head_dim // model.dim
    return {**write_sizes(sizes, BAMBA_KEYS), "mamba_expand": expand, "mamba_proj_bias": False, **write_limits(sizes)}


def read_hybrid(found: Json, names: Sequence[str], kinds: Mapping[str, Json], sizes: Json) -> Json:
    """Keys of `model:` for layers of which some have Mamba-2.

    Args:
        found: keys of all layers; those of attention among them go to the layers that have it.
        names: kind of each layer.
        kinds: by kind the keys that it has besides.
        sizes: `mamba2` of `model:`.
    """
    shared, of_attention = split(found)
    own = {MAMBA: {"mixer": "mamba2", "mamba2": sizes}, ATTENTION: of_attention}
    return {**shared, **read_kinds(names, {name: {**own.get(name, {}), **kinds.get(name, {})} for name in set(names)})}


def sizes_of(model: ModelConfig) -> Mamba2Config:
    """Sizes of the layers with Mamba-2; where there are none, of some that nobody has."""
    return layer_with(model, "mamba2").mamba2 or Mamba2Config(heads=1, head_dim=2 * model.dim)


def layer_with(model: ModelConfig, mixer: str) -> ModelConfig:
    """The section with the keys of the layers with a mixer; that of all where there are none."""
    return next((layer for layer in map(model.layer, model.layer_kinds) if layer.mixer == mixer), model)


def needs_sizes(fits: Callable[[Mamba2Config, ModelConfig], bool], has: str) -> Need:
    """The need of `mamba2`.

    Args:
        fits: a condition of the family, given all of `model:` besides.
        has: words for it.
    """

    def fits_all(sizes: Mamba2Config | None, layer: ModelConfig) -> bool:
        if sizes is None or layer.mixer != "mamba2":
            return True
        return sizes.norm_groups in (None, sizes.groups) and fits(sizes, layer)

    return Need(fits_all, f"norms of the result by its groups, and {has}")


def is_whole_factor(sizes: Mamba2Config, layer: ModelConfig) -> bool:
    """True if the heads are together a multiple of dim, as `expand` says it."""
    return sizes.heads * sizes.head_dim % layer.dim == 0


HYBRID_NEEDS: dict[str, Need] = {
    "norm": only("rmsnorm"),
    "mixer": only("attention", "mamba2"),
    "mamba2": needs_sizes(is_whole_factor, "heads that are a multiple of dim together"),
    "kv_heads": anything(),
    "head_dim": anything(),
}
"""See `Family.needs`."""
