"""Compressed files as plain streams.

All formats may consist of several members (frames, streams) one behind the other, as `cat a.gz b.gz` makes them. A
stream gives what members hold whose checksum is right; then it ends, or raises a `StreamError` that tells a file that
is cut short from one that is damaged. Memory does not depend on what a file claims to hold.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from pipeline.common.errors import UserError
from pipeline.common.format import size
from pipeline.common.objects.stream import ObjectStream
from pipeline.common.objects.urls import is_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_INPUT_BYTES = 2**16
_OUTPUT_BYTES = 2**18
"""Bytes that are decompressed at a time."""
_HELD_BYTES = 2**23
"""A member that holds no more than this is decompressed once; a larger one twice, the first time for its checksum."""
_BEAT_BYTES = 2**25
"""Bytes that are decompressed between two signs of life."""
MAX_ZSTD_WINDOW = 2**27
"""The window that `zstd -d` takes without `--long`: memory to decompress with."""
LARGE_WINDOW = "zstd window above the limit"
_XZ_MEMORY = 2**28
"""Memory that an .xz file may ask for; `xz -9` needs 65 MiB."""

FORMATS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".xz": "xz"}
MOST_EXPANSION = {"gzip": 1032, "zstd": 2**15, "bzip2": 2**23, "xz": 2**19}
"""Most bytes that a byte of each can become: of deflate 258 take 2 bits, and a block of zstd (128 KiB), a block of
bzip2 (46 MB) and a chunk of xz (2 MiB) have at least 4, 10 and 6."""
MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00"}
"""First bytes of files of each."""


class StreamError(Exception):
    """A compressed file ends too early or is damaged.

    Attributes:
        reason: what to count it under, like `truncated gzip file`.
        detail: what was found, and where.
        sound: bytes of the compressed file that lie before the member that is damaged.
        is_cut: whether the file ends in the middle of a member, all of which was right so far as anything tells.
        salvaged: bytes of text that were given of that member without its checksum.
    """

    def __init__(self, reason: str, detail: str, sound: int, *, is_cut: bool = False, salvaged: int = 0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.sound = sound
        self.is_cut = is_cut
        self.salvaged = salvaged


def compression_of(path: str) -> str | None:
    """Name of the format that the end of a file's name stands for; None for plain files."""
    return next((name for suffix, name in FORMATS.items() if path.lower().endswith(suffix)), None)


def open_stream(path: str, raw: io.RawIOBase | None = None, **options: Any) -> io.BufferedReader:
    """Open a file, plain or compressed, for reading what is in it.

    Args:
        path: of the file.
        raw: its bytes, if it is open or lies elsewhere.
        options: as for `Decompressed`.

    Raises:
        UserError: it is the URL of an object, which was not opened.
    """
    if raw is None and is_url(path):
        raise UserError(f"{path}: this reader opens files on a disk alone; copy the object there")
    if (name := compression_of(path)) is None:
        return open(path, "rb") if raw is None else io.BufferedReader(raw, _OUTPUT_BYTES)
    raw = open(path, "rb", buffering=0) if raw is None else raw  # noqa: SIM115  (closed with the stream)
    return io.BufferedReader(Decompressed(raw, name, **options), _OUTPUT_BYTES)


class Decompressed(io.RawIOBase):
    """The content of a compressed file.

    Args:
        file: the compressed bytes.
        name: of the format.
        verify: give nothing of a member before its end was read and its checksum held. Otherwise everything that can
            be decompressed comes at once: for samples of files that are too large to be read to the end.
        beat: called each time that `_BEAT_BYTES` were decompressed, given or not.
        salvage: called before text is given of a member that the end of the file cuts. Without it none is given.
        max_window: bytes of a zstd window; a frame with a larger one is refused.
    """

    def __init__(
        self,
        file: BinaryIO | io.RawIOBase,
        name: str,
        *,
        verify: bool = True,
        beat: Callable[[], None] = lambda: None,
        salvage: Callable[[], None] | None = None,
        max_window: int = MAX_ZSTD_WINDOW,
    ) -> None:
        self._file = file
        self._name = name
        self._input = _Input(file)
        self._object = file if isinstance(file, ObjectStream) else None
        self._beat = beat
        self._salvage = salvage
        self._max_window = max_window
        self._sound = self._seen = 0
        self._chunks = self._members(verify)
        self._rest = memoryview(b"")
        self._error: StreamError | None = None

    @property
    def consumed(self) -> int:
        """Bytes of the compressed file that were read for what was given so far."""
        return self._input.at

    def check_begin(self) -> None:
        """Look at the first bytes alone.

        Raises:
            StreamError: the file is empty, or of another kind.
        """
        self._find_member()

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer with some of what comes next; 0 at the end.

        Raises:
            StreamError: everything that is sound was read before. Raised again at every further call.
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

    def _truncated(self) -> StreamError:
        detail = f"it ends after {self._input.at} bytes, in the middle"
        return StreamError(f"truncated {self._name} file", detail, self._sound, is_cut=True)

    def _damaged(self, detail: str) -> StreamError:
        return StreamError(f"damaged {self._name} file", detail, self._sound)

    def _members(self, verify: bool) -> Iterator[bytes]:
        """Content of the members of the file."""
        while self._found_member():
            start = self._input.at
            if self._object is not None:
                self._object.keep_from(start)
            if not verify:
                yield from self._decoded()
            else:
                held, given, cut = self._verified(start)
                if held is None:
                    self._input.seek(start)
                    yield from self._decoded() if cut is None else self._decoded_until(given)
                else:
                    yield from held
                if cut is not None:
                    raise self._salvaged(cut, given)
            self._sound = self._input.at

    def _verified(self, start: int) -> tuple[list[bytes] | None, int, StreamError | None]:
        """Decompress a member to its end, for its checksum.

        Returns:
            Its content, unless it is large; its bytes; and the error if the end of the file cuts it and it is salvaged.
        """
        before = None
        while True:
            held: list[bytes] | None = []
            given = 0
            try:
                for out in self._decoded():
                    given += len(out)
                    if held is not None:
                        held.append(out)
                        if given > _HELD_BYTES:
                            held = None
                return held, given, None
            except StreamError as error:
                if (now := self._fetched_anew(start, before)) is not None:
                    before = now
                    continue
                if self._salvage is None or not error.is_cut:
                    raise
                self._salvage()
                return held, given, error

    def _found_member(self) -> bool:
        """As `_find_member`; bytes of an object that are not those of a member are asked for once more."""
        at, before = self._input.at, None
        while True:
            try:
                return self._find_member()
            except StreamError:
                if (now := self._fetched_anew(at, before)) is None:
                    raise
                before = now

    def _fetched_anew(self, at: int, before: str | None) -> str | None:
        """Go back to a byte of an object and fetch it anew: the way from the store may have damaged it.

        Args:
            at: place of the byte.
            before: hash of the bytes that came the last time. The same ones again are those of the object.

        Returns:
            Hash of the bytes that were read from there; None if they are not fetched anew.
        """
        now = None if self._object is None else self._object.kept_hash()
        if self._object is None or now == before or not self._object.fetch_again(at):
            return None
        self._input.seek(at)
        return now

    def _salvaged(self, cut: StreamError, given: int) -> StreamError:
        detail = f"{cut.detail}; {given:,} bytes of text before the break are used without a checksum"
        return StreamError(cut.reason, detail, self._input.at, is_cut=True, salvaged=given)

    def _decoded_until(self, end: int) -> Iterator[bytes]:
        """The first `end` bytes of a member that is cut behind them."""
        for out in self._decoded():
            yield out
            end -= len(out)
            if not end:
                return

    def _find_member(self) -> bool:
        """Go to where the next member begins; False at the end of the file."""
        data, magic = self._input.read(), MAGIC[self._name]
        is_first = not self._sound
        # Zeros behind a member are padding, as tapes and `xz` make it.
        while data and self._name != "zstd" and not is_first and not (data := data.lstrip(b"\0")):
            data = self._input.read()
        if not data and not is_first:
            return False
        while len(data) < len(magic) and (more := self._input.read()):
            data += more
        if not _begins(data, magic):
            place = "it begins with" if is_first else f"the data after a {self._name} member begins with"
            raise self._damaged(f"not {self._name}: {place} bytes {data[:4].hex(' ')}")
        if len(data) < len(magic):
            raise self._truncated()
        self._input.unread(data)
        return True

    def _decoded(self) -> Iterator[bytes]:
        """Content of a member, with signs of life."""
        for out in self._decode_zstd() if self._name == "zstd" else self._decode():
            self._seen += len(out)
            if self._seen % _BEAT_BYTES < len(out):
                self._beat()
            yield out

    def _decode(self) -> Iterator[bytes]:
        """Content of a member of a gzip, bzip2 or xz file."""
        decoder, data = _DECODERS[self._name](), self._input.read()
        try:
            while not decoder.eof:
                if out := decoder.decompress(data, _OUTPUT_BYTES):
                    yield out
                # At the end of the file the decoder may still hold output: it is asked until nothing comes.
                data = self._input.read() if decoder.needs_input and not decoder.eof else b""
                if not data and not out and decoder.needs_input and not decoder.eof:
                    raise self._truncated()
        except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk, not the data
            raise self._damaged(f"{error}, before byte {self._input.at} of {self._file_bytes()}") from None
        self._input.unread(decoder.unused_data)

    def _decode_zstd(self) -> Iterator[bytes]:
        """Content of a frame of a zstd file."""
        import zstandard

        self._check_window()
        frame = _Frame(self._input)
        reader = zstandard.ZstdDecompressor(max_window_size=self._max_window).stream_reader(
            cast(BinaryIO, frame), read_size=_INPUT_BYTES, closefd=False
        )
        while True:
            try:
                out = reader.read1(_OUTPUT_BYTES)  # `read` would lose what it has before damage
            except zstandard.ZstdError as error:
                raise self._damaged(f"{error}, before byte {self._input.at} of {self._file_bytes()}") from None
            if not out:
                break
            yield out
        if not frame.is_complete:  # the library takes this for an end
            raise self._truncated()

    def _check_window(self) -> None:
        """Refuse a frame whose window takes more memory than is allowed."""
        import zstandard

        head = self._input.read()
        self._input.unread(head)
        try:
            window = zstandard.get_frame_parameters(head).window_size
        except zstandard.ZstdError:  # cut or damaged, which decompressing it will say
            return
        if window > self._max_window:
            detail = (
                f"a frame of it was compressed with a window of {size(window)} (zstd --long or --ultra), above "
                f"data.preprocess.max_zstd_window ({size(self._max_window)}); each worker that reads such a file takes "
                "so much memory: raise that key where there is enough, or compress the file again without --long"
            )
            raise StreamError(LARGE_WINDOW, detail, self._sound)

    def _file_bytes(self) -> int:
        return self._file.seek(0, io.SEEK_END)


class _Input:
    """The bytes of a compressed file; what was read too far can be given back.

    Attributes:
        at: where the next byte lies in the file.
    """

    def __init__(self, file: BinaryIO | io.RawIOBase) -> None:
        self._file = file
        self._rest = b""
        self.at = 0

    def read(self, size: int = _INPUT_BYTES) -> bytes:
        """Some of the next bytes: what was given back, else `size` at most; none at the end."""
        data, self._rest = self._rest or self._file.read(size) or b"", b""
        self.at += len(data)
        return data

    def unread(self, data: bytes) -> None:
        """Give back the bytes that were read last."""
        self._rest = data + self._rest
        self.at -= len(data)

    def seek(self, at: int) -> None:
        """Go to a byte of the file."""
        self._file.seek(at)
        self._rest, self.at = b"", at


class _Decoder(Protocol):
    """Interface that `bz2` and `lzma` have in common."""

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


class _Frame:
    """Follows the blocks of a zstd frame (RFC 8878, section 3.1) as it is read, to know where it ends or is cut."""

    def __init__(self, source: _Input) -> None:
        self._source = source
        self._state = "magic"
        self._head = b""
        self._skip = 0
        self._checksum = False

    @property
    def is_complete(self) -> bool:
        """Tell whether all of it was read."""
        return self._state == "end" and not self._skip

    def read(self, size: int) -> bytes:
        """The next bytes of the frame, none behind its end."""
        if self.is_complete:
            return b""
        data = self._source.read(size)
        at = 0
        while at < len(data) and self._state != "unknown" and not self.is_complete:
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
        if self.is_complete:
            self._source.unread(data[at:])
            return data[:at]
        return data

    def _advance(self, head: int) -> None:
        if self._state == "magic":
            if head == int.from_bytes(MAGIC["zstd"], "little"):
                self._state = "descriptor"
            else:  # a frame to skip, or something that the library will refuse
                self._state = "size" if head >> 4 == 0x184D2A5 else "unknown"
        elif self._state == "size":
            self._state, self._skip = "end", head
        elif self._state == "descriptor":
            single = head >> 5 & 1
            self._checksum = bool(head >> 2 & 1)
            self._skip = (1 - single) + (0, 1, 2, 4)[head & 3] + (single, 2, 4, 8)[head >> 6]
            self._state = "block"
        else:
            last, type, size = head & 1, head >> 1 & 3, head >> 3
            self._skip = 1 if type == 1 else size
            if last:
                self._state = "end"
                self._skip += 4 * self._checksum


_WANTED = {"magic": 4, "size": 4, "descriptor": 1, "block": 3}
"""Bytes of the field that each state waits for."""


def _begins(data: bytes, magic: bytes) -> bool:
    """Tell whether a member may begin with these bytes, if there are enough of them; in zstd also a frame to skip."""
    head = data[: len(magic)]
    if magic.startswith(head):
        return True
    return magic == MAGIC["zstd"] and head[0] >> 4 == 5 and b"\x2a\x4d\x18".startswith(head[1:])
