"""Checks of layers whose mixer or mlp is a plug-in, by what its class says of itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from pipeline.config.plugins import find_plugin


def check_layer_plugin(
    key: Literal["mixer", "mlp"], name: str, where: str, given: Collection[str], needs: Collection[str]
) -> None:
    """Raise a `ValueError` where keys of a layer do not fit its plug-in.

    A plug-in says which keys it reads and what it can do in class attributes of `LayerPartSpec` and `MixerSpec`; what
    it does not say is refused.

    Args:
        key: `mixer`, or `mlp`.
        name: Name of the plug-in.
        where: Which kind of layers it is, for messages.
        given: Keys that the layer sets, and that only some mixers or mlps have.
        needs: `mup`, `documents`, `both`: what the model asks of its layers.
    """
    plugin: Any = find_plugin("mixers" if key == "mixer" else "mlps", name).load()
    for each in given:
        if each not in getattr(plugin, "model_keys", ()):
            raise ValueError(f"{where}{each} is not for {key}: {name}, which does not read it; leave it out")
    if "mup" in needs:
        raise ValueError(f"{where}init.scheme: mup is not known for {key}: {name}; set depth_scaled or normal")
    if key == "mlp":
        return
    if "documents" in needs and not getattr(plugin, "documents_apart", False):
        raise ValueError(
            f"{where}document_attention: true is not for {key}: {name}, which does not say that it keeps documents "
            "apart (documents_apart); set document_attention: false"
        )
    if "both" in needs and not getattr(plugin, "both_directions", False):
        raise ValueError(
            f"{where}direction: both is not for {key}: {name}, which does not say that positions see those behind them "
            "(both_directions); set direction: causal"
        )
