"""Reading ahead in a thread, and copying to a GPU while it computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from pipeline.data.loading.batch import StepData

Step = TypeVar("Step")

TOGETHER_S = 0.0004
"""Steps that are read within this time are handed over together: waking the other thread takes as long as reading a
small step. In more time steps are read than a core's cache holds, and reading slows down."""


def read_ahead(
    read: Callable[[int], Step], first: int, last: int, depth: int, give_up: Callable[[], object] = lambda: None
) -> Generator[Step, None, None]:
    """Steps [first, last) in order; one thread reads ahead.

    What goes wrong in the thread is raised here, where the step is taken. The thread ends with the iterator, also when
    it is closed early.

    Args:
        read: Makes a step.
        first: First step.
        last: The one behind the last step.
        depth: Steps that are read ahead at most, or `depth` times the steps read in `TOGETHER_S` if that is more.
        give_up: Ends what `read` may be waiting for, when nobody takes steps any more.
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
            items.reverse()
            while items:
                item = items.pop()
                if isinstance(item, BaseException):
                    raise item
                given += 1
                yield item
                # A step that nobody has any more is freed now, and not beside the thread that reads.
                del item
    finally:
        closed.set()
        give_up()
        room.release()
        thread.join()


def copied(steps: Iterable[StepData], device: torch.device) -> Iterator[StepData]:
    """Steps with their batches on a device.

    To a GPU, a step is copied when it is asked for, on a stream of its own: while the GPU computes the step before, if
    who asks has issued that and has not waited for it. The current stream waits for the copies, and the host does not.

    Args:
        steps: For a GPU, in page-locked memory.
        device: Where they go; for a CPU they are given as they are.
    """
    if device.type != "cuda":
        yield from steps
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for step in steps:
        with torch.cuda.stream(copies):
            batches = [batch.to(device, non_blocking=True) for batch in step.micro_batches]
        computes = torch.cuda.current_stream(device)
        computes.wait_stream(copies)
        for batch in batches:
            batch.used_by(computes)
        yield replace(step, micro_batches=batches)
