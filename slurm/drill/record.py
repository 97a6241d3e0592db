"""The record of a drill's kill, in the log folders of the launch: whoever says why the launch ended reads it first."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.common import links, storage

_FILE = "drill.json"


@dataclass(frozen=True)
class DrillRecord:
    """A kill by `pipeline drill`."""

    part: str
    """`rank`, `node` or `batch`."""
    job: str
    host: str
    ranks: tuple[int, ...]
    """Ranks that were killed; of a batch process none."""
    step: int
    """Last step that was trained before."""
    time: float
    """In seconds since 1970."""

    @property
    def words(self) -> str:
        """Words for the end of what was killed."""
        at = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"was killed by `pipeline drill` at {at}, after step {self.step:,}"

    def write(self, folder: Path) -> None:
        """Write it into a folder of logs."""
        storage.put_json(folder / _FILE, asdict(self))


def read_drill(folder: Path) -> DrillRecord | None:
    """The record in a folder of logs; None without a sound one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        values = storage.read_object(folder / _FILE)
        return DrillRecord(**{**values, "ranks": tuple(values["ranks"])})
    return None


def remove_drill(folder: Path) -> None:
    """Remove it: nothing was killed."""
    links.remove(folder / _FILE, missing_ok=True)
