"""Compressed files as plain streams.

All formats may consist of several members (frames, streams) one behind the other, as `cat a.gz b.gz` makes them. A
stream gives everything that can be decompressed; then it ends, or raises a `StreamError` that tells a file that is cut
short from one that is damaged. Memory does not depend on what a file claims to hold.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_INPUT_BYTES = 2**16
_OUTPUT_BYTES = 2**18
"""What is decompressed at a time. What lies less than this before damage may be lost with it."""
_XZ_MEMORY = 2**28
"""What an .xz file may ask for; `xz -9` needs 65 MiB."""

FORMATS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00"}
"""What files of each begin with."""


class StreamError(Exception):
    """A compressed file ends too early or is damaged.

    Attributes:
        reason: what to count it under, like `truncated gzip file`.
        detail: what was found, and where.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def compression_of(path: str) -> str | None:
    """Name of the format that the end of a file's name stands for; None for plain files."""
    return next((name for suffix, name in FORMATS.items() if path.lower().endswith(suffix)), None)


def open_stream(path: str) -> io.BufferedReader:
    """Open a file, plain or compressed, for reading what is in it."""
    if (name := compression_of(path)) is None:
        return open(path, "rb")
    return io.BufferedReader(Decompressed(open(path, "rb", buffering=0), name), _OUTPUT_BYTES)


class Decompressed(io.RawIOBase):
    """The content of a compressed file.

    Attributes:
        consumed: bytes of the compressed file that were read so far.
    """

    def __init__(self, file: BinaryIO | io.RawIOBase, name: str) -> None:
        self._file = file
        self._name = name
        self._chunks = self._zstd() if name == "zstd" else self._members()
        self._rest = memoryview(b"")
        self._error: StreamError | None = None
        self.consumed = 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer with some of what comes next; 0 at the end.

        Raises:
            StreamError: everything that could be decompressed was read before. Raised again at every further call.
        """
        if self._error is not None:
            raise self._error
        try:
            while not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    return 0
                self._rest = memoryview(chunk)
        except StreamError as error:
            self._error = error
            raise
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Close the file below, too."""
        self._file.close()
        super().close()

    def read_input(self, size: int = _INPUT_BYTES) -> bytes:
        """The next bytes of the compressed file."""
        data = self._file.read(size) or b""
        self.consumed += len(data)
        return data

    def _truncated(self) -> StreamError:
        return StreamError(f"truncated {self._name} file", f"it ends after {self.consumed} bytes, in the middle")

    def _damaged(self, detail: str) -> StreamError:
        return StreamError(f"damaged {self._name} file", detail)

    def _members(self) -> Iterator[bytes]:
        """What the members of a gzip, bzip2 or xz file hold."""
        magic = MAGIC[self._name]
        data, first = self.read_input(), True
        if not data:
            raise self._truncated()
        while True:
            # Zeros behind a member are padding, as tapes and `xz` make it.
            while not first and not (data := data.lstrip(b"\0")):
                if not (data := self.read_input()):
                    return
            while len(data) < len(magic) and magic.startswith(data):
                if not (more := self.read_input()):
                    raise self._truncated()
                data += more
            if not data.startswith(magic):
                place = "it begins with" if first else f"what follows behind a {self._name} member begins with"
                raise self._damaged(f"no {self._name}: {place} bytes {data[:4].hex(' ')}")
            first = False
            decoder = _DECODERS[self._name]()
            try:
                while not decoder.eof:
                    if out := decoder.decompress(data, _OUTPUT_BYTES):
                        yield out
                    # At the end of the file the decoder may still hold output: it is asked until nothing comes.
                    data = self.read_input() if decoder.needs_input and not decoder.eof else b""
                    if not data and not out and decoder.needs_input and not decoder.eof:
                        raise self._truncated()
            except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the disk, not the data
                raise self._damaged(f"{error}, before byte {self.consumed} of {self._file_bytes()}") from None
            data = decoder.unused_data

    def _zstd(self) -> Iterator[bytes]:
        """What the frames of a zstd file hold."""
        import zstandard

        frames = _Frames(self)
        reader = zstandard.ZstdDecompressor().stream_reader(
            cast(BinaryIO, frames), read_size=_INPUT_BYTES, read_across_frames=True, closefd=False
        )
        while True:
            try:
                out = reader.read1(_OUTPUT_BYTES)  # `read` would lose what it has before damage
            except zstandard.ZstdError as error:
                advice = "; compress it again without --long" if "too much memory" in str(error) else ""
                detail = f"{error}{advice}, before byte {self.consumed} of {self._file_bytes()}"
                raise self._damaged(detail) from None
            if not out:
                break
            yield out
        if not frames.complete:  # the library takes this for an end
            raise self._truncated()

    def _file_bytes(self) -> int:
        return self._file.seek(0, io.SEEK_END)


class _Decoder(Protocol):
    """What `bz2` and `lzma` have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """One gzip member, with the methods of a `_Decoder`."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
}


class _Frames:
    """Follows the frames and blocks of a zstd file (RFC 8878, section 3.1) as it is read, to know where one is cut."""

    def __init__(self, source: Decompressed) -> None:
        self._source = source
        self._state = "magic"
        self._head = b""
        self._skip = 0
        self._held = b""
        self._checksum = False
        self._any = False

    @property
    def complete(self) -> bool:
        """Whether what was read so far ends with a frame."""
        return self._any and self._state == "magic" and not self._head and not self._skip

    def read(self, size: int) -> bytes:
        """The next bytes of the file, at most to the end of a frame: damage behind it must not take it along."""
        data, self._held = self._held or self._source.read_input(size), b""
        at = 0
        while at < len(data) and self._state != "unknown":
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
            else:
                step = min(_WANTED[self._state] - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                if len(self._head) == _WANTED[self._state]:
                    self._advance(int.from_bytes(self._head, "little"))
                    self._head = b""
            at += step
            if self.complete:
                self._held = data[at:]
                return data[:at]
        return data

    def _advance(self, head: int) -> None:
        if self._state == "magic":
            self._any = True
            if head == int.from_bytes(MAGIC["zstd"], "little"):
                self._state = "descriptor"
            else:  # a frame to skip, or something that the library will refuse
                self._state = "size" if head >> 4 == 0x184D2A5 else "unknown"
        elif self._state == "size":
            self._state, self._skip = "magic", head
        elif self._state == "descriptor":
            single = head >> 5 & 1
            self._checksum = bool(head >> 2 & 1)
            self._skip = (1 - single) + (0, 1, 2, 4)[head & 3] + (single, 2, 4, 8)[head >> 6]
            self._state = "block"
        else:
            last, type, size = head & 1, head >> 1 & 3, head >> 3
            self._skip = 1 if type == 1 else size
            if last:
                self._state = "magic"
                self._skip += 4 * self._checksum


_WANTED = {"magic": 4, "size": 4, "descriptor": 1, "block": 3}
"""Bytes of the field that each state waits for."""
