"""Sliding windows of attention in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from typing import Any

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import by_layer, layer_types, read_kinds
from pipeline.train.huggingface.config_source import ConfigSource, Json

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, and our names of these kinds."""
DEFAULT_WINDOW = 4096
"""What transformers takes where the key is missing; null means no window."""


def read_windows(source: ConfigSource, layers: int, *, windowed: bool) -> Json:
    """`sliding_window` of `model:`, or `pattern` and `kinds` where only some layers have one (Qwen).

    Args:
        source: the file.
        layers: number of layers.
        windowed: the family can have windows; others only have the keys for them.
    """
    window = source.size_or_null("sliding_window", DEFAULT_WINDOW, least=0)
    uses, first = source.flag("use_sliding_window", False), source.size("max_window_layers", 28, least=0)
    if not windowed or not uses:
        window = None
    names = layer_types(
        source, layers, (FULL, SLIDING), lambda index: SLIDING if window is not None and index >= first else FULL
    )
    if window is None:
        return {"sliding_window": None}
    return read_kinds(names, {FULL: {}, SLIDING: {"sliding_window": int(window)}})


def read_periodic(
    source: ConfigSource, layers: int, period: int, default: int = DEFAULT_WINDOW
) -> tuple[list[str], int | None]:
    """Type of each layer, and the window of those that have one (Cohere 2, Gemma, OLMo 3, GPT-OSS).

    Args:
        source: the file.
        layers: number of layers.
        period: number of layers of which the last one sees everything, where the file has no list.
        default: the window that transformers takes where the key is missing.
    """
    types = layer_types(source, layers, (FULL, SLIDING), lambda index: SLIDING if (index + 1) % period else FULL)
    window: int | None = source.size_or_null("sliding_window", default, least=0)
    if window is None and SLIDING in types:
        source.refuse("sliding_window", window, f"layers of the type {SLIDING} need one")
    return types, window


def write_windows(model: ModelConfig) -> Json:
    """Keys for one window, and for which layers have it (Qwen)."""
    windows = windows_of(model)
    window = next((each for each in windows if each is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": windows.index(window) if window is not None else model.layers,
        "layer_types": types_of(model),
    }


def windows_of(model: ModelConfig) -> list[int | None]:
    """The window of each layer."""
    return by_layer(model, lambda layer: layer.sliding_window)


def types_of(model: ModelConfig) -> list[str]:
    """The type of each layer."""
    return [FULL if window is None else SLIDING for window in windows_of(model)]


def has_window(layer: ModelConfig) -> Any:
    """A type of layers for `Family.alike`: all windows are equal."""
    return layer.sliding_window is not None
