"""The message for a plan that gives other steps than a run was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.data.order.blend import UNIT
from pipeline.data.order.segments import DecidedSteps, Interval, Segment, What


class Past(Protocol):
    """The part of a journal that is compared with another one's."""

    @property
    def segments(self) -> Sequence[Segment]:
        """Stretches of the whole run, the ones before the steps that are compared and those after them."""

    def seen(self, step: int) -> DecidedSteps:
        """All that decided the steps before `step`."""

    def samples(self, step: int) -> range:
        """Global indices of the samples of `step`."""

    def tokens(self, step: int) -> int:
        """Targets drawn by all steps before `step`."""


def changed_past(saved: Past, now: Past, step: int) -> str:
    """The message about the first of the first `step` steps that differs."""
    # What decided fewer steps is a part of what decided more, so the first step that differs is found by bisection.
    same, other = 0, step
    while other - same > 1:
        middle = (same + other) // 2
        if saved.seen(middle) == now.seen(middle):
            same = middle
        else:
            other = middle
    old, new = saved.seen(other), now.seen(other)
    differences, advice = _differences(old, new, step)
    keys = [key for name, key in _KEYS.items() if any(difference.startswith(name) for difference in differences)]
    if len(keys) == len(differences) and len(saved.segments) == len(now.segments) == 1:
        advice = _phases(saved.segments[0], now.segments[0], keys, step)
    return (
        f"the run file now gives other data than the run was trained on, from step {other} of the {step} that are done "
        f"(sample {saved.samples(same).start:,}, after {saved.tokens(same):,} tokens): {'; '.join(differences)}. "
        f"{advice}"
    )


def _differences(old: DecidedSteps, new: DecidedSteps, step: int) -> tuple[list[str], str]:
    """Differences between two pasts that are equal but for their last step, and advice."""
    if old.seed != new.seed:
        return [f"run.seed {old.seed} -> {new.seed}"], f"Set run.seed to {old.seed} again."
    one, two = old.stretches[-1], new.stretches[-1]
    found = [
        f"{key} {a} -> {b}"
        for key, a, b in (
            ("batch size", one.batch_size, two.batch_size),
            ("sequence length", one.sequence_length, two.sequence_length),
        )
        if a != b
    ]
    kinds = [stretch.packing for stretch in (one, two)]
    if kinds[0] != kinds[1]:
        found.append(f"data.loader.packing {kinds[0]} -> {kinds[1]}")
    found += [f"source {name!r} is no longer there" for name in sorted(one.sources.keys() - two.sources.keys())]
    found += [f"source {name!r} is new" for name in sorted(two.sources.keys() - one.sources.keys())]
    limits = []
    for name in sorted(one.sources.keys() & two.sources.keys()):
        a, b = one.sources[name], two.sources[name]
        if a.weight != b.weight:
            found.append(f"share of {name!r} {_fraction(a.weight, b.weight)} -> {_fraction(b.weight, a.weight)}")
        if a.loss_weight != b.loss_weight:
            found.append(f"loss_weight of {name!r} {a.loss_weight:g} -> {b.loss_weight:g}")
        if a.document_weights != b.document_weights:
            words = {True: "used", False: "not used"}
            found.append(f"weight_key of {name!r} {words[a.document_weights]} -> {words[b.document_weights]}")
        if a.target_mask != b.target_mask:
            words = {True: "trained parts alone", False: "all tokens"}
            found.append(f"targets of {name!r}: {words[a.target_mask]} -> {words[b.target_mask]}")
        if a.documents != b.documents:
            found.append(f"documents of {name!r} {_slice(a.documents)} -> {_slice(b.documents)}")
        elif a.tokens != b.tokens:
            found.append(f"source {name!r} has {a.tokens:,} -> {b.tokens:,} tokens")
        elif None not in (a.packs, b.packs) and a.packs != b.packs:
            found.append(f"source {name!r} has {a.packs:,} -> {b.packs:,} packs")
        if a.cap != b.cap:
            limits.append(f"source {name!r} reached its max_epochs {_after(a.cap)} then and {_after(b.cap)} now")
    if found:
        return found, (
            "The data of steps that are done cannot change. To change later steps, keep the phase as it was, end it "
            f"with `until: {step} steps` or later in blend.phases, and append another phase."
        )
    if limits:
        return limits, (
            "max_epochs can change until the source reaches it, to any value above the epochs that were read. After "
            "that, a later phase can read another slice of the source."
        )
    if old.skips != new.skips:
        # They differ in one step alone, so one of them has skipped more of it than the other.
        skipped = [
            f"{_what(what)}: skipped {'now, not then' if _count(new, what) > _count(old, what) else 'then, not now'}"
            for what in sorted({*old.skips, *new.skips}, key=str)
            if old.skips.get(what) != new.skips.get(what)
        ]
        return skipped, f"In blend.skip, remove from_step, or set it to {step + 1} or later."
    samples = [sum(stretch.drawn.values()) for stretch in (one, two)]
    if samples[0] != samples[1]:
        return [f"samples of the run until then: {samples[0]:,} -> {samples[1]:,}"], (
            "The last step of whole epochs is filled up with padding. Set train.duration as it was; to train for more "
            "epochs, fork from a checkpoint before that step (pipeline fork)."
        )
    advice = "Continue with the run file and the version of the code that the run had before."
    return ["the positions in its sources"], advice


_KEYS = {"batch size ": "batch_size", "sequence length ": "sequence_length", "data.loader.packing ": "packing"}
"""By the beginning of a difference the key of a phase that makes it."""


def _phases(one: Segment, two: Segment, keys: list[str], step: int) -> str:
    """Advice for a run without phases and ramp: the phases to write for another length, batch size or packing."""
    before = " and ".join(f"{'data.loader' if key == 'packing' else 'train'}.{key}={getattr(one, key)}" for key in keys)
    after = ", ".join(f"{key}: {getattr(two, key)}" for key in keys)
    return (
        f"The data of steps that are done cannot change. To change later steps, leave {before} and, in a run file "
        f"without phases, set blend.phases=[{{until: {step} steps}}, {{{after}}}]."
    )


def _fraction(weight: int, other: int) -> str:
    return f"{weight / UNIT:.4g}" if f"{weight / UNIT:.4g}" != f"{other / UNIT:.4g}" else f"{weight}/2**32"


def _slice(documents: Interval | None) -> str:
    return "all" if documents is None else f"[{documents[0]}, {documents[1]})"


def _after(cap: int | None) -> str:
    return "later" if cap is None else f"after {cap:,} samples of the phase"


def _what(what: What) -> str:
    if isinstance(what, str):
        return {"steps": "the step", "samples": "a sample of the step"}[what]
    source, documents = what
    numbers = ", ".join(f"{first}-{end - 1}" for first, end in documents)
    return f"documents {numbers} of {source!r}" if numbers else f"source {source!r}"


def _count(seen: DecidedSteps, what: What) -> int:
    return sum(end - first for first, end in seen.skips.get(what, []))
