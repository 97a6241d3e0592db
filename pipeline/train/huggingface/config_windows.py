"""Sliding windows of attention in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json

DEFAULT_WINDOW = 4096
"""What transformers takes where the key is missing; null means no window."""


def read_same_window(source: ConfigSource, layers: int, *, windowed: bool) -> int | None:
    """`sliding_window` of `model:`, which all layers must have.

    Args:
        source: the file.
        layers: number of layers.
        windowed: the family can have windows; others only have the keys for them.
    """
    window = source.get_absent("sliding_window", DEFAULT_WINDOW)
    kinds = source.get("layer_types")
    uses, first = source.get("use_sliding_window", False), source.get("max_window_layers", 28)
    if not windowed or not uses:
        window = None
    if kinds is None:
        kinds = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(layers)
        ]
    found = set(kinds)
    if len(found) > 1 or not found <= {"full_attention", "sliding_attention"}:
        source.refuse("layer_types", kinds, "all layers must have the same attention, full or within one window")
    return int(window) if found == {"sliding_attention"} and window is not None else None


def write_same_window(model: ModelConfig) -> Json:
    """The same window in all layers, or none."""
    window = model.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.layers if window is None else 0,
        "layer_types": [kind] * model.layers,
    }
