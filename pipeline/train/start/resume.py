"""Keys of the run file that win over a checkpoint, and differences between the two, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from pipeline.common.versions import versions
from pipeline.config import Config
from pipeline.config.base import Section
from pipeline.config.parsing.schema import KeyPath, section_at, written_keys
from pipeline.train.checkpoint.fingerprint import Fingerprints, differences, shown
from pipeline.train.checkpoint.manager import Checkpoint
from pipeline.train.distributed.layout import Layout

Winner = Literal["run file", "from here on", "checkpoint", "place"]

MEANING: dict[Winner, str] = {
    "run file": "the run file wins: it holds from the next step on, for all that is computed from it",
    "from here on": "the run file decides the steps to come; what it says of the steps that are done must be what they "
    "were, or the start is refused",
    "checkpoint": "a difference is refused, unless resume.allow names it",
    "place": "where things lie or are made: may change freely; what counts is what is found there",
}
"""Effects of a key that differs from the checkpoint's."""

WINNERS: dict[str, tuple[Winner, str]] = {
    "run.dir": ("place", "the folder may be moved"),
    "run.seed": ("checkpoint", "cannot be allowed: it decided the order of the data. A new run may have another seed"),
    "launch": ("run file", "any number of processes and threads"),
    "data": ("place", "the datasets are compared by content (resume.allow: data)"),
    "data.loader": ("run file", "how the files are read"),
    "data.sources": ("from here on", "weights, loss weights, slices and limits of sources; new sources may be added"),
    "data.heldout_sources": ("run file", "never trained on"),
    "blend": ("from here on", "phases may be appended, skips added"),
    "heldout_sets": ("run file", ""),
    "stage": ("place", "copies on the node"),
    "tokenizer": ("checkpoint", "by content (resume.allow: tokenizer)"),
    "model": ("checkpoint", "all keys (resume.allow: model, where the weights still fit)"),
    "parallel": ("run file", "any layout resumes from any other"),
    "train.duration": ("run file", "may be raised or lowered; the order of the data does not depend on it"),
    "train.sequence_length": ("from here on", "with a phase that ends at the last trained step or later"),
    "train.batch_size": ("from here on", "with a phase that ends at the last trained step or later"),
    "train.batch_ramp": ("from here on", ""),
    "train.micro_batch_size": ("run file", "changes no result but rounding"),
    "train.optimizer": (
        "run file",
        "learning rate, betas, weight decay, groups, clipping; the moments are the checkpoint's, put into the format "
        "of `states`; with another `type` those of the layers' matrices begin at zero",
    ),
    "train.schedule": (
        "run file",
        "computed anew for the position in the run; if the rate would rise, the start asks or refuses (resume.allow: "
        "schedule)",
    ),
    "train.objective": ("checkpoint", "(resume.allow: objective)"),
    "train.loss": ("run file", ""),
    "train.balance": ("run file", ""),
    "train.precision": ("run file", "master weights are always fp32; the loss scale is the checkpoint's"),
    "train.attention": ("run file", "changes no result but rounding"),
    "train.recurrence": ("run file", "changes no result but rounding"),
    "train.recompute": ("run file", "changes memory and time"),
    "train.compile": ("run file", "changes no result but rounding"),
    "train.deterministic": ("run file", ""),
    "train.validation": ("run file", ""),
    "train.checkpoint": ("run file", ""),
    "train.faults": ("run file", "the history of spikes and the count of rewinds are the checkpoint's"),
    "train.ema": ("run file", "an average that is turned on later starts from the weights"),
    "train.distill": ("checkpoint", "the teacher by content (resume.allow: distill)"),
    "train.preference": ("checkpoint", "the reference by content (resume.allow: preference)"),
    "train.init_from": ("run file", "used only where the run has no checkpoint"),
    "train.metrics": ("run file", ""),
    "train.profile": ("run file", ""),
    "resume": ("run file", ""),
    "eval": ("run file", ""),
    "generate": ("run file", ""),
    "serve": ("run file", ""),
    "slurm": ("run file", "how jobs are sent"),
    "notify": ("run file", ""),
}
"""Winner of two values, and notes, by key; a key stands for all below it that have no entry of their own."""

_SHOWN_CHARACTERS = 100
_COMPARED_BY_FINGERPRINT = ("model", "train.objective", "train.distill", "train.preference")
"""A difference is refused or warned of already."""
_OF_THIS_START = ("run.dir", "data.dir", "stage", "launch", "resume", "slurm", "notify")
"""Keys that say where and how a start is made, and nothing about the run."""
_ABSENT = object()


def table() -> str:
    """`WINNERS` for the documentation."""
    rows = ["| key | if it differs from the checkpoint | |", "|---|---|---|"]
    rows += [f"| `{key}` | {_SHORT[who]} | {note} |" for key, (who, note) in WINNERS.items()]
    return "\n".join(rows) + "\n"


_SHORT: dict[Winner, str] = {
    "run file": "the run file wins",
    "from here on": "the run file wins for later steps; trained steps are compared",
    "checkpoint": "refused, unless `resume.allow` names it",
    "place": "may change freely",
}


THREADS = "threads"
"""Key in state.json: threads of each process, where a CPU trained."""


def resume_lines(
    checkpoint: Checkpoint, config: Config, now: Fingerprints, layout: Layout, threads: int | None
) -> list[str]:
    """`changes` of a run that resumes, under a heading; nothing if nothing has changed.

    Args:
        checkpoint: that it resumes from.
        config: resolved config of now.
        now: what else a resume depends on.
        layout: of this start.
        threads: of each process, on a CPU; None elsewhere.
    """
    lines = changes(checkpoint.state(), config, now, layout)
    before = checkpoint.state().get(THREADS)
    if None not in (before, threads) and before != threads:
        lines.append(f"threads per process: {before} -> {threads}, which changes the last bits of sums")
    if not lines:
        return []
    return [f"train: changed since {checkpoint.path.name} (checkpoint -> now):", *(f"  {line}" for line in lines)]


def changes(state: Mapping[str, Any], config: Config, now: Fingerprints, layout: Layout | None = None) -> list[str]:
    """Differences to the time when a checkpoint was written, a line each; nothing if there are none.

    What would change the meaning of the run is not here: that was refused before, or is among the warnings because
    `resume.allow` names it.

    Args:
        state: of the checkpoint that the run resumes from.
        config: resolved config of now.
        now: what else a resume depends on.
        layout: of this start, if it is known.
    """
    fingerprints = state.get("fingerprints", {})
    before = {key: fingerprints.get(key) for key in ("data", "tokenizer")}
    after: dict[str, Any] = {key: now[key] for key in before}
    # The version of the package is an aspect of its own: code.
    before["versions"], after["versions"] = (
        {name: version for name, version in found.items() if name != "pipeline"}
        for found in (state.get("versions", {}), versions())
    )
    lines = config_differences(state.get("config", {}), config)
    if layout is not None:
        # What the degrees of the run file have come to says it.
        lines = [line for line in lines if not line.startswith(tuple(f"parallel.{axis}:" for axis in layout.degrees))]
        lines += _layout_line(state.get("layout", {}), layout)
    return lines + [_line(name.removeprefix("."), old, new) for name, old, new in differences("", before, after)]


def _layout_line(saved: Mapping[str, Any], layout: Layout) -> list[str]:
    now = {"dp": layout.dp, **layout.degrees, "world_size": layout.world_size}
    changed = [f"{axis} {_shown(saved.get(axis))} -> {now[axis]}" for axis in now if saved.get(axis) != now[axis]]
    return [f"layout: {', '.join(changed)}"] if changed else []


def config_differences(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Keys whose values differ from those that a checkpoint was written with, a line each."""
    return [
        _line(key, old, new)
        for key, old, new in _compared(dict(saved), config.model_dump(mode="json"), (), ())
        if not f"{key}.".startswith(tuple(f"{prefix}." for prefix in (*_COMPARED_BY_FINGERPRINT, *_OF_THIS_START)))
    ]


def _compared(old: Any, new: Any, path: tuple[str, ...], schema: KeyPath) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, old and new value. The entries of a list of sections go by their names, or by their places.

    Args:
        old: value of then.
        new: value of now.
        path: as it is shown.
        schema: as the schema has it, with numbers for the entries of lists.
    """
    entries_of_a_list = _sections(old) and _sections(new)
    if entries_of_a_list:
        named = all(entry.get("name") for entry in [*old, *new])
        old, new = (
            {entry["name"] if named else str(place): entry for place, entry in enumerate(entries)}
            for entries in (old, new)
        )
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            below: KeyPath = (*schema, 0 if entries_of_a_list else key)
            before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
            if before is _ABSENT:
                # A key that there was not yet has meant its default all along.
                before = _default(below)
            yield from _compared(before, after, (*path, key), below)
    elif old != new:
        yield ".".join(path), old, new


def _sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _default(path: KeyPath) -> Any:
    section: type[Section] | None = section_at(Config, path[:-1])
    known = {} if section is None else written_keys(section)
    _, field = known.get(str(path[-1]), ("", None))
    if field is None or field.is_required():
        return _ABSENT
    value = field.get_default(call_default_factory=True, validated_data={})
    return to_jsonable_python(value, by_alias=True)


def _line(key: str, old: Any, new: Any) -> str:
    return f"{key}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "(not there)"
    text = shown(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."
