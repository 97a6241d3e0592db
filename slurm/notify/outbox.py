"""Delivery of notices: each notification has a thread of its own, and what it starts is ended after its time.

Nothing here raises or waits but `deliver` and `Outbox.close`, which have limits.
"""

from __future__ import annotations

import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE

import orjson

from pipeline.common.imports import module_command
from pipeline.config.notify import NotifyConfig
from slurm.notify.notice import Notice

_POLL = 0.2
"""Seconds between looks at whether a command has ended."""
_WAITING = 100
"""Notices that wait for a notification that is slow; more are dropped."""
_AT_END = 60.0
"""Seconds for which the end of a job, which holds its nodes, waits for notifications at most."""
_GIVEN_UP = "it was not over when the job or command ended, and was killed"
_LEAVING = 2.0
"""Seconds for which it is waited that what was killed is gone."""


def _escaped(text: str) -> str:
    """A text in which Slack and others see no markup: `<!channel>` in a file's name would call everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def deliver(entry: NotifyConfig, notice: Notice, *, give_up: threading.Event | None = None, show: bool = False) -> str:
    """Tell a command or a webhook of an event; returns what went wrong, "" for nothing.

    Args:
        entry: the notification.
        notice: the event.
        give_up: ends what was started before its time, when it is set.
        show: let a command print to this terminal; by default it is discarded, as it may print secrets.
    """
    if problem := unusable(entry):
        return problem
    name, output = entry.webhook_env, None if show else DEVNULL
    words = entry.command or [*module_command("slurm.notify.webhook"), str(name)]
    try:
        process = subprocess.Popen(
            words,
            stdin=PIPE,
            stdout=output if name is None else PIPE,
            stderr=output if name is None else DEVNULL,
            env={**os.environ, **notice.environment},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"it cannot be started ({getattr(error, 'strerror', None) or type(error).__name__})"
    try:
        values = notice.to_json()
        if name is not None:
            values["text"] = _escaped(notice.text)
        data: bytes | None = orjson.dumps(values)
        until = time.monotonic() + entry.timeout_seconds
        while True:
            try:
                printed, _ = process.communicate(data, timeout=_POLL)
                break
            except subprocess.TimeoutExpired:
                data = None  # it has begun to read it
            if time.monotonic() > until:
                _kill(process)
                return f"it did not end within timeout_seconds ({entry.timeout_seconds:g}) and was killed"
            if give_up is not None and give_up.is_set():
                _kill(process)
                return _GIVEN_UP
    except BaseException:
        _kill(process)
        raise
    if process.returncode == 0:
        return ""
    if name is not None and printed:
        return str(printed.decode(errors="replace"))
    return f"it exited with code {process.returncode}; what it prints is discarded"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not been waited for, and all of its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    process.wait()


def unusable(entry: NotifyConfig) -> str:
    """The reason why a notification cannot work in this environment, "" for none."""
    if entry.command is not None:
        program = entry.command[0]
        return "" if shutil.which(program) else f"there is no program {program!r} on the path"
    return "" if os.environ.get(str(entry.webhook_env)) else f"the variable {entry.webhook_env} is not set"


def describe(number: int, entry: NotifyConfig) -> str:
    """A notification in words, by its place in the run file: `notify.0 (webhook of SLACK_WEBHOOK)`."""
    way = f"webhook of {entry.webhook_env}" if entry.command is None else f"command {shlex.quote(entry.command[0])}"
    return f"notify.{number} ({way})"


class Outbox:
    """Hands notices on to the notifications that want them, in the background.

    Args:
        entries: `notify` of the run file.
        warn: gets the first failure of each notification.
    """

    def __init__(self, entries: Sequence[NotifyConfig], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._give_up = threading.Event()
        self._lanes = [_Lane(number, entry, self._failed, self._give_up) for number, entry in enumerate(entries)]
        self._warned: set[int] = set()

    def wants(self, event: str) -> bool:
        """True if any notification is about an event."""
        return any(event in lane.entry.on for lane in self._lanes)

    def send(self, notice: Notice) -> None:
        """Hand a notice on; returns at once."""
        for lane in self._lanes:
            if notice.event in lane.entry.on:
                lane.put(notice)

    def wait(self, seconds: float) -> bool:
        """Wait until all is delivered or given up.

        Args:
            seconds: to wait at most. It waits no longer than a notification may take.

        Returns:
            True if nothing is left.
        """
        longest = max((lane.entry.timeout_seconds for lane in self._lanes), default=0.0) + 1.0
        until = time.monotonic() + min(seconds, longest)
        return all(lane.wait(until - time.monotonic()) for lane in self._lanes)

    def close(self, seconds: float | None = None) -> None:
        """Wait, a minute by default, and end what still runs then."""
        if not self.wait(_AT_END if seconds is None else seconds):
            self._give_up.set()
            self.wait(_LEAVING)

    def _failed(self, number: int, entry: NotifyConfig, notice: Notice, problem: str) -> None:
        if number not in self._warned:
            self._warned.add(number)
            self._warn(
                f"{describe(number, entry)} was not told that {notice.event}: {problem}. Later failures of this "
                "notification are not reported"
            )


class _Lane:
    """Notices for one notification, in their order."""

    def __init__(
        self,
        number: int,
        entry: NotifyConfig,
        failed: Callable[[int, NotifyConfig, Notice, str], None],
        give_up: threading.Event,
    ) -> None:
        self.entry = entry
        self._number, self._failed, self._give_up = number, failed, give_up
        self._queue: queue.Queue[Notice] = queue.Queue()
        self._left = threading.Condition()
        self._open = 0
        self._thread: threading.Thread | None = None

    def put(self, notice: Notice) -> None:
        with self._left:
            if self._open >= _WAITING:
                return
            self._open += 1
        self._queue.put(notice)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"notify-{self._number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the limit of the user's processes
                self._queue.get_nowait()
                self._over(notice, "no thread can be started")
            else:
                self._thread = thread

    def wait(self, seconds: float) -> bool:
        with self._left:
            return self._left.wait_for(lambda: self._open == 0, max(0.0, seconds))

    def _run(self) -> None:
        while True:
            notice = self._queue.get()
            try:
                over = self._give_up.is_set()
                problem = _GIVEN_UP if over else deliver(self.entry, notice, give_up=self._give_up)
            except Exception as error:  # the job must not suffer from whatever it is
                problem = f"it failed ({type(error).__name__})"
            self._over(notice, problem)

    def _over(self, notice: Notice, problem: str) -> None:
        try:
            if problem:
                self._failed(self._number, self.entry, notice, problem)
        except Exception:  # where the warning goes to: nobody can be told
            pass
        with self._left:
            self._open -= 1
            self._left.notify_all()
