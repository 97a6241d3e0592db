"""A server of this package in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.eval.server.stoppable import StoppableServer
from tests.waiting import until


@contextmanager
def in_thread(server: StoppableServer) -> Iterator[None]:
    """Run a server from its start to the end of the block."""
    thread = threading.Thread(target=server.run, args=(server.listening,))
    thread.start()
    try:
        until(lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
