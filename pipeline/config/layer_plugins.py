"""Checks of layers whose mixer or mlp is a plug-in, by what its class says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pipeline.config.plugins import find_plugin, is_plugin

if TYPE_CHECKING:
    from pipeline.config.model import LayerConfig, ModelConfig


def check_layer_plugins(
    layer: LayerConfig, model: ModelConfig, where: str, own: LayerConfig, of_attention: Iterable[str]
) -> None:
    """Raise a `ValueError` where keys of a layer do not fit the plug-ins that it names.

    A plug-in says which keys it reads and what it can do in the class attributes of `LayerPartSpec` and `MixerSpec`;
    what it does not say is refused.

    Args:
        layer: The keys.
        model: All of the section.
        where: Which kind it is, for messages.
        own: The section with those of the keys that are meant for it alone.
        of_attention: Keys that mixers with attention have.
    """
    for key, kind, unused in (("mixer", "mixers", (*of_attention, "bias")), ("mlp", "mlps", ("ffn_dim", "bias"))):
        name = getattr(layer, key)
        if not is_plugin(name):
            continue
        plugin: Any = find_plugin("mixers" if kind == "mixers" else "mlps", name).load()
        reads = getattr(plugin, "model_keys", ())
        for each in unused:
            if each not in reads and _given(own, each, key):
                raise ValueError(f"{where}{each} is not for {key}: {name}, which does not read it; leave it out")
        if model.init.scheme == "mup":
            raise ValueError(f"{where}init.scheme: mup is not known for {key}: {name}; set depth_scaled or normal")
        if kind == "mlps":
            continue
        if model.document_attention and not getattr(plugin, "documents_apart", False):
            raise ValueError(
                f"{where}document_attention: true is not for {key}: {name}, which does not say that it keeps documents "
                "apart (documents_apart); set document_attention: false"
            )
        if model.direction == "both" and not getattr(plugin, "both_directions", False):
            raise ValueError(
                f"{where}direction: both is not for {key}: {name}, which does not say that it sees both sides "
                "(both_directions); set direction: causal"
            )


def _given(own: LayerConfig, key: str, part: str) -> bool:
    """True if a key is meant for a mixer or mlp; of biases there are those of the other part, too."""
    value = getattr(own, key)
    if key == "bias":
        return value in ({"mixer": ("qkv", "attention", "all"), "mlp": ("mlp", "all")}[part])
    return bool(value != type(own).model_fields[key].default)
