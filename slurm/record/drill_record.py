"""The record of a drill's kill, in the log folders of the launch: whoever says why the launch ended reads it first."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from pipeline.common import links, storage
from pipeline.common.errors import UserError

_FILE = "drill.json"
_Word = Annotated[str, Field(max_length=256)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class DrillRecord:
    """A kill by `pipeline drill`."""

    part: _Word
    """`rank`, `node` or `batch`."""
    job: _Word
    host: _Word
    ranks: tuple[_Count, ...]
    """Ranks that were killed; of a batch process none."""
    step: _Count
    """Last step that was trained before."""
    time: Annotated[float, Field(ge=0, lt=2**38)]
    """In seconds since 1970."""

    @property
    def words(self) -> str:
        """Words for the end of what was killed."""
        at = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"was killed by `pipeline drill` at {at}, after step {self.step:,}"

    def write(self, folder: Path) -> None:
        """Write it into a folder of logs."""
        storage.put_json(folder / _FILE, asdict(self))


_RECORD = TypeAdapter(DrillRecord)


def read_drill(folder: Path) -> DrillRecord | None:
    """The record in a folder of logs, to which others may write; None without a sound one."""
    with suppress(OSError, UserError, ValueError):
        return _RECORD.validate_json(storage.read_bytes(folder / _FILE, storage.SMALL_BYTES), strict=True)
    return None


def remove_drill(folder: Path) -> None:
    """Remove it: nothing was killed."""
    links.remove(folder / _FILE, missing_ok=True)
