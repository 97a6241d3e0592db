"""Mapped files: what they hold on to, and what they do not."""

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.common.mapped_file import map_file


def mappings(path):
    gc.collect()
    return Path("/proc/self/maps").read_text().count(str(path))


def test_bytes_are_there_until_the_last_array_over_them_is_gone(tmp_path):
    path = tmp_path / "file"
    content = bytes(range(256)) * 100
    path.write_bytes(content)
    before = len(os.listdir("/proc/self/fd"))
    with path.open("rb") as file:
        array = map_file(file.fileno(), len(content))
    assert len(os.listdir("/proc/self/fd")) == before
    view = np.frombuffer(array, "<u2", 100, 7)[10:]
    del array
    assert mappings(path) == 1
    assert view.tobytes() == content[27:207]
    assert not view.flags.writeable
    del view
    assert mappings(path) == 0


def test_what_cannot_be_mapped_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    with (tmp_path / "file").open("ab") as file, pytest.raises(PermissionError):  # not open for reading
        map_file(file.fileno(), 1)
    with pytest.raises(OSError) as error:
        map_file(-1, 1)
    assert error.value.errno == errno.EBADF


def test_a_file_that_is_cut_ends_the_process(tmp_path):
    """As the system does it: better than tokens that were never there."""
    path = tmp_path / "file"
    path.write_bytes(bytes(2**16))
    code = """
import os, sys
from pipeline.common.mapped_file import map_file
file = os.open(sys.argv[1], os.O_RDWR)
array = map_file(file, 2**16)
os.truncate(file, 100)
assert array[50] == 0
array[2**15].item()
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGBUS, done.stderr
