"""Files mapped into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

# Python's mmap keeps a file descriptor for as long as a mapping lives (before 3.13 always), which limits a process to a
# few hundred mapped files where 1,024 descriptors are allowed. The system itself needs none.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """Memory that a file is mapped to, until the last array over it is gone."""

    def __init__(self, descriptor: int, size: int) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._where = address, size
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self, unmap: Any = _libc.munmap) -> None:
        if hasattr(self, "_where"):
            unmap(*self._where)


def map_file(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of an open file, read-only, without a copy; the descriptor may be closed afterwards.

    If reading fails, or somebody cuts the file, the operating system kills the process that touches what is missing.

    Args:
        descriptor: Of the file.
        size: Of the file, at least 1.

    Raises:
        OSError: The system cannot map it.
    """
    return np.asarray(_Mapping(descriptor, size))
