"""Work on files that several threads do: the first failure ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")


def in_threads(
    work: Callable[[Item], object],
    items: Iterable[Item],
    threads: int,
    name: str,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[Item]:
    """Do a piece of work for each item; yields the items as they are done.

    Args:
        work: for an item, in a thread.
        items: of the work.
        threads: number of threads.
        name: of the threads.
        stop: called after a failure, here or in a thread: it lets work end that has begun. The rest is not begun.

    Raises:
        BaseException: the first one of the work.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        running = {pool.submit(work, item): item for item in items}
        try:
            for done in as_completed(running):
                done.result()
                yield running[done]
        except BaseException:
            stop()
            pool.shutdown(cancel_futures=True)
            raise
