"""Every name of torch that is not public, in one place, with the versions it was checked on (2.11, 2.13)."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh


class _HashingStream(io.RawIOBase):
    """An append-only file that hashes the bytes as they are handed to the kernel."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_64()
        self._size = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = error
            raise
        self._hash.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # Asked for by the fsync that follows the last write; what is buffered must be in the file by then.
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            super().close()

    def written(self) -> tuple[int, str]:
        """Bytes written and their xxh3."""
        return self._size, self._hash.hexdigest()


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        stream = _HashingStream(Path(path))
        try:
            yield stream
        except Exception as error:
            # torch's writer turns what goes wrong in a write into a RuntimeError of its own about positions.
            raise stream.failure or error from None
        finally:
            stream.close()
        self.files[Path(path).name] = stream.written()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    """DCP's file writer, one fsynced file a rank, that knows size and xxh3 of each file as it was written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.fs = _HashingFileSystem()

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """File name -> (bytes, xxh3) of what this rank wrote."""
        return cast(_HashingFileSystem, self.fs).files


def guard_optimizer_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Let the next step of a fused optimizer leave weights and states as they are where `found_inf` is 1.

    torch.amp's GradScaler hands the flag over by the same attribute. The decision is made on the device.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Several axes as one, outermost first; the same mesh each time. Every process calls this."""
    return mesh._flatten(name)
