"""Shapes of what objectives make of a window."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.objective import ObjectiveConfig


@dataclass(frozen=True)
class StreamShape:
    """Numbers of positions that a window becomes, whatever its text."""

    raw: int
    """Tokens of the window: what data order, resume and counts of tokens go by."""
    encoder: int
    """Positions of the encoder."""
    decoder: int
    """Positions of the decoder, or of the only stack of layers."""
    predicted: int
    """Positions whose targets can count."""

    @property
    def length(self) -> int:
        """Positions of the model's input."""
        return self.encoder + self.decoder


def rounded(number: float) -> int:
    """The nearest whole number, halves to the even one, as `numpy.rint` does."""
    return round(number)


def stream_shape(objective: ObjectiveConfig, length: int) -> StreamShape:
    """The shape of what an objective makes of windows.

    Args:
        objective: `train.objective`, or that of a phase.
        length: Tokens of a window, `train.sequence_length` or a phase's.
    """
    if objective.type == "masked":
        return StreamShape(length, 0, length, rounded(objective.share * length))
    return StreamShape(length, 0, length, length)
