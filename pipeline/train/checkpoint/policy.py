"""Pure functions of numbers that decide when a run saves and which checkpoints it keeps.

They speak of the checkpoints of one folder. Whoever keeps copies in several (on the node, on a shared disk) asks once a
folder, with the rules of that folder.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pipeline.config.checkpoint import CheckpointConfig


def due(config: CheckpointConfig, step: int, total: int) -> bool:
    """True if a run saves after `step` of `total` steps. What the clock asks for is not known here."""
    return step == total or any(step % every == 0 for every in cadences(config))


def is_exported(config: CheckpointConfig, step: int, total: int) -> bool:
    """True if the checkpoint of `step` of `total` steps is written in Hugging Face's format, too."""
    return config.export is not None and (step == total or step % config.export.every_steps == 0)


def is_mirrored(config: CheckpointConfig, step: int, total: int) -> bool:
    """True if the checkpoint of `step` of `total` steps is uploaded to the mirror."""
    mirror = config.mirror
    if mirror is None:
        return False
    chosen = [every for every in (mirror.every_steps, mirror.keep_every) if every is not None]
    return mirror.every_steps is None or step == total or any(step % every == 0 for every in chosen)


def mirror_rules(config: CheckpointConfig) -> CheckpointConfig:
    """The numbers of checkpoints that stay in the mirror, for `to_prune`."""
    assert config.mirror is not None
    kept = {"keep": config.mirror.keep, "keep_every": config.mirror.keep_every, "keep_best": None, "best_of": None}
    return config.model_copy(update=kept)


def to_export(config: CheckpointConfig, steps: Collection[int], exported: Collection[int], total: int) -> list[int]:
    """Steps whose checkpoints are still to be exported, ascending: none that would be removed at once.

    Args:
        config: which ones, and how many exports stay.
        steps: of the checkpoints.
        exported: steps of the exports.
        total: steps of the run.
    """
    missing = [step for step in steps if step not in exported and is_exported(config, step, total)]
    gone = exports_to_prune(config, {*missing, *exported})
    return [step for step in sorted(missing) if step not in gone]


def exports_to_prune(config: CheckpointConfig, exported: Collection[int]) -> list[int]:
    """Steps of the exports that are to be removed, ascending: all but the newest."""
    keep = None if config.export is None else config.export.keep
    return [] if keep is None else sorted(exported)[:-keep]


def most_exports(config: CheckpointConfig, total: int) -> int:
    """The most exports that a run of `total` steps has at a time, including the one that is being written."""
    if config.export is None:
        return 0
    everything = -(-total // config.export.every_steps)
    return everything if config.export.keep is None else min(everything, config.export.keep + 1)


def cadences(config: CheckpointConfig) -> list[int]:
    """Steps between two saves, by each of the keys that say so."""
    export = None if config.export is None else config.export.every_steps
    mirror = () if config.mirror is None else (config.mirror.every_steps, config.mirror.keep_every)
    return [steps for steps in (config.every_steps, config.keep_every, export, *mirror) if steps is not None]


def is_permanent(config: CheckpointConfig, step: int) -> bool:
    """True if the checkpoint of a step is kept permanently."""
    return config.keep_every is not None and step % config.keep_every == 0


def to_prune(
    config: CheckpointConfig, steps: Sequence[int], latest: int | None, good: Collection[int] = ()
) -> list[int]:
    """Steps of the committed checkpoints that are to be removed, ascending.

    None goes before a newer one has taken its place: at least `latest` is newer than each of them. Without a `latest`
    none goes.

    Args:
        config: how many stay, and which ones permanently.
        steps: of all of them, in any order.
        latest: the one that the run resumes from, which stays.
        good: others that must stay: the last one that can be trusted, and the `best`.
    """
    if latest is None:
        return []
    stay = {latest, *good, *sorted(steps)[-config.keep :]}
    return [step for step in sorted(steps) if step < latest and step not in stay and not is_permanent(config, step)]


def best(config: CheckpointConfig, losses: Mapping[int, float | None]) -> list[int]:
    """Steps of the `keep_best` checkpoints with the lowest validation loss, the earlier one of equals.

    Args:
        config: how many.
        losses: of the set that decides, by step; None, or no number, where it is not known.
    """
    known = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return sorted(known, key=lambda step: (known[step], step))[: config.keep_best or 0]


def saves_lost(config: CheckpointConfig, step: int, reached: int, saved: Collection[int]) -> int:
    """Saves that a run loses which resumes from an older checkpoint than its last one.

    Args:
        config: says how often the run saves, which counts where the record does not go back to `step`.
        step: of the checkpoint that it resumes from.
        reached: step that it saved last.
        saved: steps of its saves, as far as they were recorded.
    """
    if reached <= step:
        return 0
    recorded = 1 + sum(step < each < reached for each in saved)
    return recorded if step in saved else max(recorded, math.ceil((reached - step) / config.every_steps))
