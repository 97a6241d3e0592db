"""Shapes of what objectives make of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.objective import DenoiserConfig, ObjectiveConfig, objective_class
from pipeline.config.plugins import is_plugin


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

    @property
    def predicted_share(self) -> float:
        """Share of the positions that the head scores."""
        return self.predicted / self.length


@dataclass(frozen=True)
class SpanSizes:
    """Sizes of span corruption for a window that is one document; with others, encoder and decoder are the same."""

    noise: int
    """N0, tokens that the decoder predicts."""
    spans: int
    """K0, runs of them."""
    encoder: int
    """E: the other tokens, a sentinel for each run, and the end-of-document token; a mode token if there is one."""
    decoder: int
    """T: the noise, a sentinel for each run, and the end-of-document token."""
    fit: bool
    """The window has room: a token before each run, and the end of its document."""


def rounded(number: float) -> int:
    """The nearest whole number, halves to the even one, as `numpy.rint` does."""
    return round(number)


def span_sizes(rate: float, mean_span: float | None, length: int, *, mode: bool = False) -> SpanSizes:
    """Sizes of span corruption.

    Args:
        rate: Share of the tokens that are noise.
        mean_span: Mean length of the runs; None: one, at the end.
        length: L, tokens of the window.
        mode: Whether the encoder's text begins with a mode token.
    """
    noise = min(max(rounded(rate * length), 1), max(length - 1, 1))
    spans = 1 if mean_span is None else max(rounded(noise / mean_span), 1)
    fit = spans <= noise and noise + spans <= length - 1
    return SpanSizes(noise, spans, length - noise + spans + 1 + mode, noise + spans + 1, fit)


def mixture_sizes(denoisers: Sequence[DenoiserConfig], length: int) -> list[SpanSizes]:
    """Sizes of the denoisers of UL2."""
    return [span_sizes(one.rate, one.mean_span, length, mode=one.mode is not None) for one in denoisers]


def denoiser_shares(denoisers: Sequence[DenoiserConfig]) -> list[float]:
    """Shares of the windows that the denoisers of UL2 get."""
    largest = max(one.weight for one in denoisers)  # the sum of weights may be more than a float holds
    total = 0.0  # one after the other: `sum` rounds otherwise from Python 3.12 on
    for one in denoisers:
        total += one.weight / largest
    return [one.weight / largest / total for one in denoisers]


def mixture_is_padded(denoisers: Sequence[DenoiserConfig], length: int) -> bool:
    """True unless all denoisers make windows of one shape."""
    sizes = mixture_sizes(denoisers, length)
    return len({(one.encoder, one.decoder) for one in sizes}) > 1 or any(one.mean_span is None for one in denoisers)


def stream_shape(objective: ObjectiveConfig, length: int) -> StreamShape:
    """The shape of what an objective makes of windows.

    Args:
        objective: `train.objective`, or that of a phase.
        length: Tokens of a window, `train.sequence_length` or a phase's.
    """
    if is_plugin(objective.type):
        shape: StreamShape = objective_class(objective.type).stream_shape(objective.options, length)
        return shape
    if objective.type == "masked":
        return StreamShape(length, 0, length, rounded(objective.share * length))
    if objective.type == "spans":
        sizes = span_sizes(objective.share, objective.mean_span, length)
        return StreamShape(length, sizes.encoder, sizes.decoder, sizes.decoder)
    if objective.type == "ul2":
        every = mixture_sizes(objective.mixture, length)
        # Padding is a document of its own, of at least one position on both sides.
        more = int(mixture_is_padded(objective.mixture, length))
        decoder = max(one.decoder for one in every) + more
        return StreamShape(length, max(one.encoder for one in every) + more, decoder, decoder)
    return StreamShape(length, 0, length, length)


def padding_share(objective: ObjectiveConfig, length: int) -> float:
    """Mean share of the positions that are padding, for windows of one document."""
    if objective.type != "ul2":
        return 0.0
    shape, every = stream_shape(objective, length), mixture_sizes(objective.mixture, length)
    shares = denoiser_shares(objective.mixture)
    used = sum(share * (size.encoder + size.decoder) for share, size in zip(shares, every, strict=True))
    return 1 - used / shape.length
