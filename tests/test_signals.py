"""Signals that come at the wrong moment."""

import subprocess
import sys

PROGRAM = """
import os, signal
from pipeline.signals import ignore

signal.signal(signal.SIGTERM, lambda *_: None)
here = os.getpid()
sender = os.fork()
if not sender:
    while os.getppid() == here:
        os.kill(here, signal.SIGTERM)
    os._exit(0)
for _ in range(5_000):
    signal.signal(signal.SIGTERM, lambda *_: None)
    ignore(signal.SIGTERM)
os.kill(sender, signal.SIGKILL)
os.waitpid(sender, 0)
"""


def test_a_signal_that_is_ignored_while_it_comes_prints_nothing() -> None:
    """Python says "Signal 15 ignored due to race condition" of one that comes while its handler is replaced."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
