"""Reading ahead in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import TypeVar

Step = TypeVar("Step")

TOGETHER_S = 0.001
"""Steps that are read within this time are handed over together: waking the other thread takes as long as reading a
small step."""


def read_ahead(read: Callable[[int], Step], first: int, last: int, depth: int) -> Generator[Step, None, None]:
    """Steps [first, last) in order; one thread reads ahead.

    What goes wrong in the thread is raised here, where the step is taken. The thread ends with the iterator, also when
    it is closed early.

    Args:
        read: Makes a step.
        first: First step.
        last: The one behind the last step.
        depth: Steps that are read ahead at most, or so many times what is read in `TOGETHER_S` if that is more.
    """
    ready: queue.SimpleQueue[list[Step | BaseException]] = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    closed = threading.Event()

    def run() -> None:
        step = first
        while step < last:
            room.acquire()
            found: list[Step | BaseException] = []
            until = time.perf_counter() + TOGETHER_S
            try:
                while step < last and not closed.is_set():
                    found.append(read(step))
                    step += 1
                    if time.perf_counter() >= until:
                        break
            except BaseException as error:
                found.append(error)
                step = last
            ready.put(found)
            if closed.is_set():
                return

    thread = threading.Thread(target=run, name="loader", daemon=True)
    thread.start()
    try:
        given = first
        while given < last:
            items = ready.get()
            room.release()
            for item in items:
                if isinstance(item, BaseException):
                    raise item
                given += 1
                yield item
    finally:
        closed.set()
        room.release()
        thread.join()
