"""Room on the disk of a run for its checkpoints, before the run is sent to a cluster or starts here."""

from __future__ import annotations

from contextlib import suppress

from pipeline.common.capacity import room_of
from pipeline.common.errors import MachineError, UserError
from pipeline.common.format import size
from pipeline.config import Config
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.rules.layout_check import planned_spec
from slurm.submit.course import Course, Disk, checkpoints_disk, read_course

_TIGHT = 2
"""Times the room that checkpoints need, below which it is tight."""


def checkpoints_room(config: Config, disk: Disk, course: Course | None) -> tuple[str | None, str | None]:
    """A problem, where not even one checkpoint fits, or a warning, where not all of them do; None: there is none.

    Args:
        config: the run.
        disk: what its checkpoints take.
        course: how long it is; None where that is not known.
    """
    if course is not None and not course.steps_left:
        return None, None
    room, folder = room_of("run.dir", config.run.dir, disk.free), Checkpoints.of_run(config.run.dir).folder
    if folder.is_symlink():
        room = f"{folder} -> {folder.resolve()} has {size(disk.free)} free"
    todo = "make room, or set run.dir to a folder on another disk"
    if disk.free < disk.each:
        return f"{room}, and a checkpoint needs {size(disk.each)}; {todo}", None
    if disk.free >= _TIGHT * disk.needed:
        return None, None
    rules = config.train.checkpoint
    fewer = "lower train.checkpoint.keep"
    if rules.keep_every is not None:
        fewer += ", raise train.checkpoint.keep_every"
    if rules.export is not None:
        fewer += ", lower train.checkpoint.export.keep"
    what = "checkpoints and exports" if disk.exports else "checkpoints"
    less = "less" if disk.free < disk.needed else "not much more"
    return None, (
        f"{room}, {less} than the {size(disk.needed)} that {what} still take (up to {disk.most:,} checkpoints at a "
        f"time, {disk.there:,} are there): {todo}, or {fewer}"
    )


def check_room(config: Config) -> list[str]:
    """Check the room for a training that starts on this machine; returns warnings.

    Raises:
        MachineError: not even one checkpoint fits.
    """
    course: Course | None = None
    try:
        spec = planned_spec(config)
        with suppress(UserError, OSError):  # what is wrong with the data is told by the training
            course = read_course(config, None)
        problem, warning = checkpoints_room(config, checkpoints_disk(config, spec, course), course)
    except (UserError, OSError):
        return []  # no tokenizer yet, or a disk that does not answer
    if problem:
        raise MachineError(problem)
    return [warning] if warning else []
