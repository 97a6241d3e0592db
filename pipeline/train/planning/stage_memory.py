"""The memory of a stage of a step, and measurements of it that are kept in the cache folder.

To measure a stage takes seconds of imports and Python, and a run asks for the same one at each plan, preview and start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.common import storage
from pipeline.common.hashing import value_hash
from pipeline.common.paths import cache_folder
from pipeline.common.versions import code_hash

DeviceType = Literal["cpu", "cuda"]
Ends = Literal["whole", "first", "middle", "last"]
"""Part of the model that a stage is: with embedding and head, with one of them, or with neither."""

Layers = tuple[int, int]
"""Layers of a stage: the place of the first one in a period of the model's kinds, and how many there are."""

MemoryKind = Literal["parameters", "moments", "batches", "gradients", "unsharded", "activations", "working"]
KINDS: tuple[MemoryKind, ...] = ("parameters", "moments", "batches", "gradients", "unsharded", "activations", "working")

_MOST_KEPT = 1000
"""Files in the cache folder; then the older half is removed."""


@dataclass(frozen=True)
class Shape:
    """The batch of a process in a step."""

    samples: int
    """Samples of a micro-batch."""
    length: int
    """Positions of a sample, of which the process has a share with cp."""
    micro_batches: int
    over_mean: float = 1.0
    """Ratio, with ep, of the rows that the experts of the process get to the mean of all processes."""
    predicted: int | None = None
    """Positions of a sample that the head scores; None: all."""
    encoder: int = 0
    """Positions of a sample that are the encoder's."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage, where in a step which kind of memory takes how many. Linear in the number of layers."""

    points: Mapping[tuple[str, MemoryKind], float]
    """Bytes by part of the step and kind; at the peak of the part, of the activations those of one micro-batch."""
    kept: float
    """Activations of a micro-batch between its forward and its backward pass."""
    count: float
    """Parameters, after the cut by tp and before that by dp_shard."""

    @property
    def labels(self) -> list[str]:
        """Parts of the step."""
        return list(dict.fromkeys(label for label, _ in self.points))

    def at(self, label: str) -> dict[str, float]:
        """Bytes by kind at a part of the step."""
        return {kind: self.points[label, kind] for kind in KINDS}

    @property
    def gradients(self) -> float:
        """Gradients between passes, once there are any."""
        return max(self.points[label, "gradients"] for label in self.labels if label.startswith("backward"))

    @property
    def unsharded(self) -> float:
        """Whole weights between passes."""
        return min(self.points[label, "unsharded"] for label in self.labels if label != "optimizer")

    def plus(self, times: float, less: StageMemory, more: StageMemory) -> StageMemory:
        """This memory, plus `times` the difference between `more` and `less`."""

        def mix(mine: float, without: float, with_it: float) -> float:
            return mine + times * (with_it - without)

        points = {}
        for (label, kind), value in self.points.items():
            # While the head is at work, the layers take what they do while the last one begins.
            measured = label if (label, kind) in more.points else "backward of the last layer"
            points[label, kind] = mix(value, less.points[measured, kind], more.points[measured, kind])
        return StageMemory(points, mix(self.kept, less.kept, more.kept), mix(self.count, less.count, more.count))


def read_kept(about: Sequence[object]) -> StageMemory | None:
    """A kept measurement, or None.

    Args:
        about: All that it depends on besides the code of this package and torch.
    """
    file = _file(about)
    if file is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = storage.read_object(file)
        points = {(label, kind): float(value) for label, kind, value in values["points"]}
        labels = {label for label, _ in points}
        if labels and points.keys() == {(label, kind) for label in labels for kind in KINDS}:
            return StageMemory(points, float(values["kept"]), float(values["count"]))
    return None


def keep(about: Sequence[object], memory: StageMemory) -> None:
    """Keep a measurement, where the cache folder can be written."""
    file = _file(about)
    if file is None:
        return
    points = [[label, kind, value] for (label, kind), value in memory.points.items()]
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        storage.put_json(file, {"points": points, "kept": memory.kept, "count": memory.count})
        files = list(file.parent.glob("*.json"))
        if len(files) > _MOST_KEPT:
            for old in sorted(files, key=lambda each: each.stat().st_mtime)[: _MOST_KEPT // 2]:
                old.unlink(missing_ok=True)


def _file(about: Sequence[object]) -> Path | None:
    """File of a measurement; None where code of a plug-in has a part in it, whose changes no hash here knows."""
    if not all(map(_is_ours, about)):
        return None
    return cache_folder() / "stage-memory" / f"{value_hash([code_hash(), torch.__version__, repr(about)])}.json"


def _is_ours(value: Any) -> bool:
    if is_dataclass(value):
        ours = type(value).__module__.startswith("pipeline.")
        return ours and all(_is_ours(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_ours, value))
    if isinstance(value, Mapping):
        return all(_is_ours(each) for item in value.items() for each in item)
    return value is None or isinstance(value, (str, int, float, bool))
