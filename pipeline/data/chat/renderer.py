"""Rendering of chat templates of anybody, in a process whose time and memory are bounded."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pipeline.common.errors import MachineError
from pipeline.common.imports import module_command
from pipeline.data.chat.results import BadTemplate, CannotRender, RenderedChat, Used

MAX_TEXT_BYTES = 2**25
"""Text of a conversation at most."""
MAX_SECONDS = 10
"""Seconds of computing for a conversation at most; on a busy machine they take longer."""


class ChatRenderer:
    """A template in a process of its own, which is started with the first use. Safe to use from several threads.

    Attributes:
        date: that `strftime_now` formats.

    Args:
        template: its text.
        date: that `strftime_now` formats, `YYYY-MM-DD`; None if it has none.
        longest: bytes of the text of a conversation at most.
        seconds: of computing for a conversation at most.
    """

    def __init__(
        self, template: str, date: str | None = None, longest: int = MAX_TEXT_BYTES, seconds: int = MAX_SECONDS
    ) -> None:
        self.date = date
        self._head = {"template": template, "date": date, "longest": longest, "seconds": seconds}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: weakref.finalize[Any, Any] | None = None
        self._used: Used | None = None

    @property
    def used(self) -> Used:
        """Names and marks that the template uses.

        Raises:
            BadTemplate: it cannot be compiled.
        """
        with self._lock:
            if self._used is None:
                self._started()
            assert self._used is not None
            return self._used

    def render(self, variables: dict[str, Any]) -> RenderedChat:
        """The text of a conversation.

        Args:
            variables: by name, see `chat_variables`.

        Raises:
            CannotRender: the template refuses the conversation, or takes too much time or memory for it.
            BadTemplate: it cannot be compiled.
            MachineError: no process can be started.
        """
        try:
            request = json.dumps(variables)
        except (TypeError, ValueError) as error:  # a time or bytes of a table
            raise CannotRender(f"JSON has no such value as the record: {error}"[:300]) from None
        with self._lock:
            process = self._started()
            found = self._ask(process, request)
            if found is None:
                self.close()
                raise CannotRender("takes more time or memory than a template may")
        if "error" in found:
            raise CannotRender(found["error"])
        return RenderedChat(found["text"], tuple((start, end) for start, end in found["spans"]))

    def close(self) -> None:
        """End the process, if there is one."""
        self._process = None
        if self._end is not None:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        # A process that was forked has the pipes of its parent, and must not write to them.
        if self._process is not None and self._owner == os.getpid():
            return self._process
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(module_command("pipeline.data.chat.child"), stdin=pipe, stdout=pipe)
        except OSError as error:
            raise MachineError(f"the process that renders chat templates cannot be started: {error}") from None
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, self._owner)
        found = self._ask(process, json.dumps(self._head))
        if found is None or "bad" in found:
            self.close()
            raise BadTemplate("takes too much time or memory" if found is None else found["bad"])
        self._used = Used(found["has_markers"], frozenset(found["variables"]))
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: str) -> Any:
        """The answer of the process; None if it has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process that this one has started: of a process that was forked, it is another's."""
    if owner != os.getpid():
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def chat_variables(
    tokens: Mapping[str, str], messages: Sequence[Mapping[str, Any]], tools: Any = None, *, asks: bool = False
) -> dict[str, Any]:
    """Variables of a template, as transformers has them.

    Args:
        tokens: texts of tokens by the names that templates use.
        messages: of the conversation.
        tools: that it has; None without.
        asks: end with the beginning of the next answer.
    """
    others = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": asks}
    return {**tokens, **others}


@lru_cache(maxsize=8)
def open_renderer(template: str, date: str | None, longest: int) -> ChatRenderer:
    """The renderer of a template, one in a process."""
    return ChatRenderer(template, date, longest)
