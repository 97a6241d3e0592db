"""Hardware errors of the nodes of a run: counters of network cards, memory and GPUs that rise while it trains.

One process per node reads the counters in a thread, and notes what rose in a file per node (`RUN/hardware`). Rank 0
collects the notes of all nodes for the metrics and warns. Nothing here needs another rank, nor ends a run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from pipeline.common import links, process_identity, storage
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.run_files import RunFiles
from pipeline.train.distributed.rank import Processes
from pipeline.train.host.nvidia_smi import query_gpus
from pipeline.train.run.folder import RunFolder

_SYS = Path("/sys")
_KERNEL_LOG = Path("/dev/kmsg")
_MINOR_OF_PORT = {
    *("symbol_error", "port_rcv_errors", "port_xmit_discards"),
    *("packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans"),
}
_OF_PORT = {
    *("link_downed", "link_error_recovery", "local_link_integrity_errors", "excessive_buffer_overrun_errors"),
    *_MINOR_OF_PORT,
}
"""Counters of an InfiniBand or RoCE port, in `counters` and `hw_counters`."""
_MINOR = {"corrected memory errors", "rx_errors", "tx_errors", *_MINOR_OF_PORT}
"""Counters that also rise on sound hardware, under load: hardware corrected or repeated what went wrong."""
_GPU = (
    {
        "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors",
        "ecc.errors.corrected.volatile.total": "corrected memory errors",
    },
    {
        "clocks_throttle_reasons.hw_thermal_slowdown": "slowed down by heat",
        "clocks_throttle_reasons.hw_power_brake_slowdown": "slowed down by the power supply",
    },
)
"""Fields of nvidia-smi, and what they count. A driver that does not know one field refuses its whole query."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_LEAVING = 1.0
"""Seconds that a rank waits, when it ends, for counters that are being read."""
_NAMED = 5
"""Counters that a message names, at most."""
_RECORD = 8192
"""Bytes of a record of the kernel's log, at most."""


@dataclass(frozen=True)
class Rise:
    """A counter of a node that rose."""

    time: float
    """Time of the sample, in seconds since 1970."""
    attempt: int
    host: str
    counter: str
    """Device and name, like "mlx5_0 port 1: link_downed"."""
    by: int
    minor: bool
    """Hardware corrected or repeated what went wrong."""

    def __str__(self) -> str:
        return f"{self.host}: {self.counter} +{self.by}"


def rises_text(rises: list[Rise]) -> str:
    """Rises in a line, the first ones by name."""
    named = "; ".join(map(str, rises[:_NAMED]))
    return named if len(rises) <= _NAMED else f"{named}; and {counted(len(rises) - _NAMED, 'other counter')}"


def read_rises(run: Path) -> list[Rise]:
    """The rises of all nodes of a run, by time; lines that are damaged or still written are left out."""
    found: list[Rise] = []
    for file in sorted(RunFiles(run).hardware.glob("node-*.jsonl")):
        with suppress(OSError, UserError):
            found += _parse(storage.read_bytes(file, storage.SMALL_BYTES))
    return sorted(found, key=lambda rise: rise.time)


def _parse(data: bytes) -> list[Rise]:
    rises = []
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        with suppress(KeyError):
            values = storage.json_object(line) or {}
            rise = Rise(**{name: values[name] for name in Rise.__dataclass_fields__})
            if all(isinstance(each, int) for each in (rise.attempt, rise.by)) and isinstance(rise.time, float):
                rises.append(rise)
    return rises


class HardwareWatch(AbstractContextManager["HardwareWatch"]):
    """A context in which the first process of each node notes counters that rise, and rank 0 collects the notes.

    Args:
        folder: of the run.
        ranks: place of this process.
        seconds: from one look to the next; None: nothing is looked at.
    """

    def __init__(self, folder: RunFolder, ranks: Processes, seconds: float | None) -> None:
        self._folder, self._rank, self._seconds = folder, ranks.rank, seconds
        self._file = RunFiles(folder.path).hardware / f"node-{ranks.rank // ranks.local_world_size:04d}.jsonl"
        self._wanted = seconds is not None and ranks.local_rank == 0
        self._host = process_identity.node_name()
        self._sizes: dict[Path, int] = {}
        self._found: list[Rise] = []
        self._lock = threading.Lock()
        self.ready = threading.Event()
        """Set once the counters have been read for the first time."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hardware", daemon=True)

    def __enter__(self) -> HardwareWatch:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_LEAVING)

    def take(self) -> list[Rise]:
        """Rises on all nodes that were noted since the last call; on rank 0."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def _watch(self) -> None:
        with suppress(OSError, UserError):
            if self._rank == 0:  # what was noted before this attempt is not news
                self._collect()
                self.take()
        counters = NodeCounters()
        try:
            while True:
                rises = counters.rises()
                with suppress(OSError, UserError):  # a full disk must not end this thread
                    self._note(rises)
                    if self._rank == 0:
                        self._collect()
                self.ready.set()
                if self._ended.wait(self._seconds):
                    return
        finally:
            counters.close()

    def _note(self, rises: Mapping[str, int]) -> None:
        now = time.time()
        for counter, by in rises.items():
            links.make_folder(self._file.parent)
            rise = Rise(now, self._folder.attempt, self._host, counter, by, counter.rpartition(": ")[2] in _MINOR)
            storage.add_json_line(self._file, asdict(rise))

    def _collect(self) -> None:
        for file in sorted(self._file.parent.glob("node-*.jsonl")):
            with suppress(OSError, UserError), storage.open_regular(file) as opened:
                begin = self._sizes.get(file, 0)
                opened.seek(begin)
                data = opened.read(storage.SMALL_BYTES)
                self._sizes[file] = begin + data.rfind(b"\n") + 1
                with self._lock:
                    self._found += _parse(data)


class NodeCounters:
    """Error counters of this node, and how far each has risen since it was read last."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        """Counters at the last look."""
        self._queries = [fields for fields in _GPU if shutil.which("nvidia-smi")]
        self._log: int | None = None
        with suppress(OSError):  # most sites let only root read it
            self._log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the kernel's log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def rises(self) -> dict[str, int]:
        """Counters that rose since the last call, and by how much; at the first call what fails alone."""
        events = Counter[str]()
        now = {**_card_counters(), **_memory_counters(), **self._gpu_counters(events)}
        # A device that comes later has its history, which is not news; a reset is no rise.
        risen = {name: value - self._last[name] for name, value in now.items() if value > self._last.get(name, value)}
        self._last |= now
        events.update(self._xids())
        return {**risen, **events}

    def _gpu_counters(self, events: Counter[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for fields in list(self._queries):
            try:
                answer = query_gpus(["index", *fields])
            except (OSError, subprocess.TimeoutExpired):
                failure = "no answer"
            else:
                if answer.is_unknown_field:
                    self._queries.remove(fields)
                    continue
                if answer.code == 0:
                    found |= _gpu_values(answer.rows, list(fields.values()))
                    continue
                failure = answer.text[:200] or f"code {answer.code}"
            self._queries = []  # what hangs would hang again
            events[f"nvidia-smi: {failure}"] += 1
            break
        return found

    def _xids(self) -> Iterator[str]:
        """Errors of GPUs that the kernel has logged since the last call."""
        while self._log is not None:
            try:
                record = os.read(self._log, _RECORD)
            except BrokenPipeError:  # older records were overwritten
                continue
            except OSError:  # nothing new
                return
            if not record:  # the end of a file, which only a test has
                return
            for gpu, number in _XID.findall(record.decode(errors="replace")):
                yield f"GPU {gpu}: Xid {number}"


def _gpu_values(rows: list[list[str]], names: list[str]) -> dict[str, int]:
    """Counters of all GPUs from rows of nvidia-smi; "[N/A]" and the like are left out."""
    found = {}
    for row in rows:
        for name, value in zip(names, row[1:], strict=False):
            if value.isdecimal() or value in ("Active", "Not Active"):
                found[f"GPU {row[0]}: {name}"] = int(value) if value.isdecimal() else int(value == "Active")
    return found


def _card_counters() -> dict[str, int]:
    """Counters of InfiniBand, RoCE and Ethernet cards."""
    found = {}
    for file in _SYS.glob("class/infiniband/*/ports/*/*counters/*"):
        if file.name in _OF_PORT and (value := _number(file)) is not None:
            found[f"{file.parts[-5]} port {file.parts[-3]}: {file.name}"] = value
    for device in _SYS.glob("class/net/*/device"):  # virtual interfaces have none
        interface = device.parent
        for name in ("statistics/rx_errors", "statistics/tx_errors", "carrier_down_count"):
            if (value := _number(interface / name)) is not None:
                found[f"{interface.name}: {name.rpartition('/')[2]}"] = value
    return found


def _memory_counters() -> dict[str, int]:
    """Memory errors of the node (EDAC) and of AMD's GPUs (RAS)."""
    found = {}
    kinds = {"ue": "uncorrected memory errors", "ce": "corrected memory errors"}
    for short, kind in kinds.items():
        for file in _SYS.glob(f"devices/system/edac/mc/mc*/{short}_count"):
            if (value := _number(file)) is not None:
                found[f"memory controller {file.parent.name}: {kind}"] = value
    for file in _SYS.glob("class/drm/card*/device/ras/*_err_count"):
        with suppress(OSError):
            for short, value in re.findall(r"(ue|ce):\s*(\d+)", file.read_text(errors="replace")):
                block = file.name.removesuffix("_err_count")
                found[f"GPU {file.parts[-4]} {block}: {kinds[short]}"] = int(value)
    return found


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
