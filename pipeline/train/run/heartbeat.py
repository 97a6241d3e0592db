"""Heartbeats: what each process of a run does now, a line each in a file per node (`RUN/heartbeats/node-0001.jsonl`).

Whoever looks at the run folder sees from them which ranks live, how far they are, and which one the others wait for.
They are signs of life and nothing more: a disk that is full or gone must not end a run because of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import orjson

from pipeline.common import links, process_identity, storage
from pipeline.common.run_files import RunFiles

HUNG = "hang"
"""The phase of a rank whose watchdog is about to end it."""
ENDED = "end"
"""The phase of a rank that has left the training."""
_SLOT = 1024
"""Bytes of a line, which is written in place. A page has a whole number of them."""
_TORN = 3
"""Times that a line is read that is being written."""
_LEAVING = 5.0
"""Seconds that a rank waits, when it ends, for a heartbeat that is being written."""
_NAMED = 8
"""Ranks that a message names, at most."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of a rank."""

    rank: int
    host: str
    pid: int
    attempt: int
    step: int | None
    """The step that it is at, from 1; None before the first one."""
    phase: str
    """A phase of the watchdog, "pause" for what may take as long as it takes, "hang" or "end"."""
    time: float
    """Seconds since 1970, by the clock of its host."""
    place: str | None = None
    """In the phase "hang": the line of code at which its main thread is."""
    waits: bool | None = None
    """In the phase "hang": whether it is in a collective there, in which ranks wait for one another."""


def node_file(run: Path, node: int) -> Path:
    """The heartbeats of the ranks of a node, by its number among the nodes of the run."""
    return RunFiles(run).heartbeats / f"node-{node:04d}.jsonl"


def beat_file(run: Path, rank: int) -> Path:
    """The heartbeat of a rank of an older version, which had a file each."""
    return RunFiles(run).heartbeats / f"rank-{rank:04d}.json"


def read_beat(run: Path, rank: int = 0) -> Beat | None:
    """The last heartbeat of a rank, or None where there is none that can be read."""
    first = [node_file(run, 0), beat_file(run, 0)]
    return _newest(first if rank == 0 else _files(run)).get(rank)


def read_beats(run: Path, attempt: int | None = None) -> dict[int, Beat]:
    """Heartbeats by rank; of one attempt, or whichever is the last of each rank."""
    return {rank: beat for rank, beat in _newest(_files(run)).items() if attempt in (None, beat.attempt)}


def host_of(run: Path, rank: int) -> str | None:
    """The host of a rank, by its last heartbeat."""
    beat = read_beat(run, rank)
    return None if beat is None else beat.host


def _files(run: Path) -> list[Path]:
    folder = RunFiles(run).heartbeats
    return sorted([*folder.glob("node-*.jsonl"), *folder.glob("rank-*.json")])


def _newest(files: Iterable[Path]) -> dict[int, Beat]:
    """The last heartbeat of each rank."""
    found: dict[int, Beat] = {}
    for file in files:
        for beat in _of_file(file):
            if beat.rank not in found or found[beat.rank].time <= beat.time:
                found[beat.rank] = beat
    return found


def _of_file(file: Path) -> list[Beat]:
    """The heartbeats in a file, without what cannot be read."""
    found: list[Beat] = []
    for _ in range(_TORN):
        lines: list[bytes] = []
        with suppress(OSError, ValueError):
            # Lines that nobody has written yet are zeros.
            lines = [
                line
                for line in storage.read_bytes(file, storage.SMALL_BYTES).replace(b"\0", b"").splitlines()
                if line.strip()
            ]
        found = [beat for line in lines if (beat := _parse(line)) is not None]
        if len(found) == len(lines):
            break
    return found


def _parse(line: bytes) -> Beat | None:
    try:
        values = orjson.loads(line)
        beat = Beat(**{name: values[name] for name in Beat.__dataclass_fields__ if name in values})
        float(beat.time)
    except (ValueError, TypeError):
        return None
    return beat if isinstance(beat.rank, int) else None


class Heartbeat:
    """A context manager in which a thread writes the heartbeat of this rank, at once and every so often.

    Enter it only with the lock of the run folder held: a second run that is refused must leave the signs of life of the
    first one alone. The thread is one of its own because a network disk may hold it up for as long as it likes.

    Args:
        run: The run folder.
        rank: Of this process.
        world: Ranks of the run.
        per_node: Ranks on each node.
        attempt: Number of the attempt, asked at each beat: it grows when a run goes back to an earlier step.
        seconds: From one beat to the next.
        place: Phase and step of now.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        world: int,
        per_node: int,
        attempt: Callable[[], int],
        seconds: float,
        place: Callable[[], tuple[str, int | None]],
    ) -> None:
        self.run = run
        self.rank = rank
        self.world = world
        self.attempt = attempt
        self.seconds = seconds
        self._place = place
        self._per_node = per_node
        self._file = node_file(run, rank // per_node)
        self._offset = rank % per_node * _SLOT
        self._host = process_identity.node_name()
        self._one_at_a_time = threading.Lock()
        self._last = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_LEAVING)

    def _beat(self) -> None:
        self._prepare()
        while True:
            phase, step = self._place()
            self.write(phase, step)
            if self._ended.wait(self.seconds):
                self.write(ENDED, step, last=True)
                return

    def _prepare(self) -> None:
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            if self._offset == 0 and self._file.exists():  # if not, another rank may make it now
                if not os.access(self._file, os.W_OK):  # of another member of the group
                    links.remove(self._file, missing_ok=True)
                else:  # lines of a run on more processes
                    storage.cut(self._file, self._per_node * _SLOT)
            if self.rank == 0:  # files of a run on more nodes, or of an older version
                own = {node_file(self.run, node) for node in range(self.world // self._per_node)}
                for file in set(_files(self.run)) - own:
                    links.remove(file, missing_ok=True)

    def write(
        self,
        phase: str,
        step: int | None,
        *,
        place: str | None = None,
        waits: bool | None = None,
        last: bool = False,
    ) -> None:
        """Write the heartbeat now.

        Args:
            phase: What this rank does.
            step: The step it is at.
            place: See `Beat`.
            waits: See `Beat`.
            last: Nothing that comes later replaces it.
        """
        with self._one_at_a_time:
            if self._last:
                return
            self._last = last
            values = asdict(
                Beat(self.rank, self._host, os.getpid(), self.attempt(), step, phase, time.time(), place, waits)
            )
            line = orjson.dumps(values)
            if len(line) >= _SLOT:  # by the line of code; of a long path the end tells more
                values["place"] = str(place)[-_SLOT // 4 :]
                line = orjson.dumps(values)
            # Not flushed to disk: after a crash of the machine it says nothing that was still true.
            with suppress(OSError):
                storage.write_at(self._file, self._offset, line.ljust(_SLOT - 1) + b"\n")

    def others_have_noticed(self, within: float) -> dict[int, Beat]:
        """The heartbeats, when every rank that gives a sign of life has found that it hangs, or after `within` seconds.

        Ranks come to their limits a little apart, and each can say whether it is the one that the others wait for.
        """
        until = time.monotonic() + within
        while True:
            beats = read_beats(self.run, self.attempt())
            alive = {rank for rank in beats if rank not in self.silent(beats)}
            if all(beats[rank].phase in (HUNG, ENDED) for rank in alive) or time.monotonic() > until:
                return beats
            time.sleep(0.1)

    def silent(self, beats: Mapping[int, Beat]) -> set[int]:
        """Ranks without a sign of life lately, of those that have given one in this attempt."""
        # The clocks of hosts differ, and a beat may be late.
        limit = time.time() - 2.5 * self.seconds
        return {rank for rank, beat in beats.items() if beat.time < limit and beat.phase not in (HUNG, ENDED)}


def blocking_ranks_text(
    beats: Mapping[int, Beat], world: int, silent: Iterable[int] = (), *, missing: bool = True, now: float | None = None
) -> str:
    """The ranks that the others wait for, in words, by their heartbeats; "" for one rank.

    Args:
        beats: By rank, of this attempt.
        world: Number of ranks.
        silent: Those that give no sign of life any more: stopped, or lost with their machine.
        missing: Whether a rank without a heartbeat is worth naming.
        now: Seconds since 1970; by default the time it is.
    """
    if world == 1:
        return ""
    now = time.time() if now is None else now
    quiet = set(silent)
    reasons = [
        f"{_who(beats[rank])} has given no sign of life for {max(0.0, now - beats[rank].time):.0f} s; "
        f"the last one came from {_position(beats[rank])}"
        for rank in sorted(quiet)
    ]
    if missing:
        reasons += [f"rank {rank} has given no sign of life at all" for rank in range(world) if rank not in beats]
    lively = [beat for rank, beat in sorted(beats.items()) if rank not in quiet]
    reasons += [
        f"{_who(beat)} is not in a collective, but at {beat.place}"
        for beat in lively
        if beat.waits is False and beat.place
    ]
    reasons += [f"{_who(beat)} has left the training" for beat in lively if beat.phase == ENDED]
    busy = [beat for beat in lively if beat.phase not in (HUNG, ENDED)]
    if not reasons:
        reasons += [f"{_who(beat)} is at {_position(beat)}" for beat in busy]
    if not reasons:
        return "every rank waits for the others; compare the last collectives of each in the flight recorder"
    more = len(reasons) - _NAMED
    return "; ".join([*reasons[:_NAMED], *([f"and {more:,} more"] if more > 0 else [])])


def _who(beat: Beat) -> str:
    return f"rank {beat.rank} on {beat.host} (process {beat.pid})"


def _position(beat: Beat) -> str:
    return f"step {beat.step} (phase {beat.phase})" if beat.step is not None else f'the phase "{beat.phase}"'
