"""Names of torch that are not public, of what processes have sent one another; see `core.py`."""

from __future__ import annotations

import os
import pickle
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
"""Folder of torch's own code."""
_DISTRIBUTED_FOLDER = os.path.dirname(dist.__file__) + os.sep
_RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
_RECORDED = 1000
"""Collectives that each process remembers, of all its groups together."""
_FRAMES = 6
"""Lines of our own code that are told of each, the innermost ones."""


def record_collectives() -> None:
    """Let torch's flight recorder remember the last collectives; comes before the first process group.

    What that costs is lost in the noise of a collective of gloo (25 us). The size is read once, when the first group is
    made; who has set it keeps it.
    """
    os.environ.setdefault(_RECORDER_SIZE, str(_RECORDED))


def last_collectives() -> dict[str, list[dict[str, Any]]]:
    """Entries of the flight recorder, by backend, oldest first; called from any thread.

    "frames" is where our own code issued it, "retired" whether it has ended. gloo's point-to-point messages are not
    recorded. The two functions are in 2.13, the one for gloo not in every older version.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for backend, name in (("gloo", "_dump_fr_trace"), ("nccl", "_dump_nccl_trace")):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            # Bytes that torch has made in this process just now, and no file.
            entries = pickle.loads(dump(includeStackTraces=True)).get("entries", [])
            found[backend] = [{**entry, "frames": _own_frames(entry.get("frames", []))} for entry in entries]
    return found


def _own_frames(frames: list[dict[str, Any]]) -> list[str]:
    own = [frame for frame in frames if not frame["filename"].startswith(TORCH_FOLDER)]
    return [f"{frame['filename']}:{frame['line']} ({frame['name']})" for frame in own[:_FRAMES]]


def waits_for_ranks(frame: FrameType | None) -> bool:
    """True if a thread is in a collective, by its innermost frame, or the device has one to end.

    With gloo the thread itself waits, in a function of torch.distributed. With NCCL it waits for the device.
    """
    if frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED_FOLDER):
        return True
    return any(not entry["retired"] for entry in last_collectives().get("nccl", []))
