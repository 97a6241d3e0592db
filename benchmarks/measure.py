"""Run a command and measure it: wall time, CPU time of all its processes, peak memory, what others did meanwhile."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUIET = 0.15
"""The share of the machine that others may use during a run that counts."""


def adopt_orphans() -> None:
    """Processes whose parent has ended become children of this one, so that their CPU time can be counted."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@dataclass
class Memory:
    """Peaks of the processes of a command in MB: of the one that was started, of the largest of its descendants."""

    main_rss: float = 0.0
    worker_rss: float = 0.0
    main_pss: float = 0.0
    worker_pss: float = 0.0
    all_pss: float = 0.0
    """Of all processes together: what they share counts once."""


@dataclass
class Watch:
    """Polls the processes of a command: resident memory as the kernel's own high-water mark, PSS as samples."""

    root: int
    memory: Memory = field(default_factory=Memory)
    ended: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> None:
        for number in itertools.count():
            together = 0.0
            for pid in _tree(self.root):
                rss, pss = _value(pid, "status", "VmHWM:"), 0.0
                if number % 4 == 0:
                    pss = _value(pid, "smaps_rollup", "Pss:")
                who = "main" if pid == self.root else "worker"
                setattr(self.memory, f"{who}_rss", max(rss, getattr(self.memory, f"{who}_rss")))
                setattr(self.memory, f"{who}_pss", max(pss, getattr(self.memory, f"{who}_pss")))
                together += pss
            self.memory.all_pss = max(together, self.memory.all_pss)
            if self.ended.wait(0.05):
                return


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _tree(int(child))


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process and its descendants until now, with those of children that have been waited for."""
    seconds = 0.0
    for each in _tree(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _value(pid: int, file: str, key: str) -> float:
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) / 1e3
    except OSError:
        pass
    return 0.0


def machine() -> tuple[float, float]:
    """CPU seconds that the machine's processes have used, and all there were."""
    user, nice, system, idle, wait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    ticks = os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + wait) / ticks


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def wait_until_quiet(patience: float) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        (busy, every), own = machine(), _own()
        time.sleep(0.5)
        (busy_after, every_after), own_after = machine(), _own()
        if busy_after - busy - (own_after - own) < QUIET / 2 * (every_after - every):
            return


def measure(command: list[str], cwd: Path, log: Path, patience: float, may_fail: bool = False) -> dict[str, Any]:
    """Run a command; its wall time and the CPU time of all its processes, memory, and what others did meanwhile."""
    wait_until_quiet(patience)
    with log.open("wb") as output:
        (busy, every), own = machine(), _own()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT)
        watch = Watch(process.pid)
        poller = threading.Thread(target=watch.poll)
        poller.start()
        code = process.wait()
        wall = time.perf_counter() - start
        watch.ended.set()
        poller.join()
        _reap()
    (busy_after, every_after), own_after = machine(), _own()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code and not may_fail:
        sys.exit(f"error: exit code {code}: {' '.join(command)}\n{log.read_text(errors='replace')[-3000:]}")
    others = max(0.0, busy_after - busy - (own_after - own)) / max(every_after - every, 0.01)
    memory = watch.memory
    return {
        "wall_s": round(wall, 3),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "worker_rss_mb": round(memory.worker_rss or memory.main_rss),
        "worker_pss_mb": round(memory.worker_pss or memory.main_pss),
        "main_rss_mb": round(memory.main_rss),
        "all_pss_mb": round(memory.all_pss),
        "others": round(others, 3),
        "quiet": others <= QUIET,
        **({"exit_code": code} if code else {}),
    }


def _reap() -> None:
    """Wait for processes that the command left behind; they are ours by `adopt_orphans`, and their CPU time counts."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        except ChildProcessError:
            return
