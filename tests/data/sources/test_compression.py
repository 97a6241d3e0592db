"""Compressed streams against what the standard library and the command line tools say is in them."""

import bz2
import gzip
import lzma
import random
import shutil
import subprocess
import sys

import pytest
import zstandard

from pipeline.data.sources import compression
from pipeline.data.sources.compression import Decompressed, StreamError, compression_of, open_stream
from tests import tiers

FORMATS = {
    ".gz": ("gzip", gzip.compress),
    ".zst": ("zstd", zstandard.ZstdCompressor(write_checksum=True).compress),
    ".bz2": ("bzip2", bz2.compress),
    ".xz": ("xz", lambda data: lzma.compress(data, preset=0)),
}
ALL = pytest.mark.parametrize("suffix", FORMATS)


def some_bytes(size, seed=0):
    """Neither random nor empty: about half of it compresses away."""
    chance = random.Random(seed)
    return bytes(chance.choices(b"abcdefgh\n\x00\xff", k=size))


def write(tmp_path, suffix, data):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    return str(path)


def read_all(path, size=2**16):
    """(everything that can be read, the error at the end)."""
    out = bytearray()
    with open_stream(path) as stream:
        try:
            while chunk := stream.read1(size):
                out += chunk
        except StreamError as error:
            return bytes(out), error
    return bytes(out), None


def test_names():
    assert [compression_of(f"x.jsonl{s}") for s in (".gz", ".ZST", ".bz2", ".xz", "", ".gz.txt")] == [
        *("gzip", "zstd", "bzip2", "xz"),
        *(None, None),
    ]


@ALL
@pytest.mark.parametrize("size", tiers.first(5, [0, 1, 1000, 2**18, 2**18 + 1, 3_000_000], rest="guard"))
def test_the_content(tmp_path, suffix, size):
    data = some_bytes(size)
    path = write(tmp_path, suffix, FORMATS[suffix][1](data))
    assert read_all(path) == (data, None)
    assert read_all(path, 777) == (data, None)
    with open_stream(path) as stream:
        assert b"".join(iter(stream.readline, b"")) == data
        assert isinstance(stream.raw, Decompressed)
        assert stream.raw.consumed == len(FORMATS[suffix][1](data))


@ALL
def test_members_one_behind_the_other(tmp_path, suffix):
    compress = FORMATS[suffix][1]
    parts = [some_bytes(n, n) for n in (10, 0, 300_000, 70_000, 1)]
    assert read_all(write(tmp_path, suffix, b"".join(map(compress, parts)))) == (b"".join(parts), None)


@pytest.mark.parametrize(("suffix", "zeros"), [(".gz", 100), (".gz", 200_000), (".xz", 8), (".bz2", 4)])
def test_padding_with_zeros(tmp_path, suffix, zeros):
    compress = FORMATS[suffix][1]
    assert read_all(write(tmp_path, suffix, compress(b"abc") + bytes(zeros) + compress(b"def") + bytes(zeros))) == (
        b"abcdef",
        None,
    )


@pytest.mark.first(2)
@pytest.mark.parametrize("level", [-5, 1, 19])
@pytest.mark.parametrize("options", [{}, {"write_checksum": True}, {"write_content_size": False}, {"threads": 2}])
def test_zstd_of_every_kind(tmp_path, level, options):
    data = some_bytes(400_000) + bytes(300_000)
    compressor = zstandard.ZstdCompressor(level=level, **options)
    streamed = compressor.compressobj()
    frames = [compressor.compress(data), streamed.compress(data) + streamed.flush(), compressor.compress(b"")]
    skipped = b"\x5a\x2a\x4d\x18" + (1000).to_bytes(4, "little") + bytes(1000)
    path = write(tmp_path, ".zst", skipped + frames[0] + skipped + frames[1] + frames[2] + skipped)
    assert read_all(path) == (data + data, None)


@pytest.mark.skipif(shutil.which("gzip") is None, reason="needs gzip")
def test_the_gzip_command(tmp_path):
    data = some_bytes(500_000)
    packed = subprocess.run(["gzip", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout
    assert read_all(write(tmp_path, ".gz", packed)) == (data, None)


@ALL
def test_cut_anywhere(tmp_path, suffix):
    """Every proper beginning of a file is truncated, but where one of its members ends; what is there is right."""
    name, compress = FORMATS[suffix]
    data = some_bytes(400)
    one, two = compress(data), compress(b"second")
    whole = one + two
    for end in range(len(whole)):
        got, error = read_all(write(tmp_path, suffix, whole[:end]))
        assert (data + b"second").startswith(got)
        if end == len(one):
            assert (got, error) == (data, None)
            continue
        assert error is not None, end
        assert error.reason == f"truncated {name} file"
        assert got.startswith(data) or end < len(one)


@pytest.mark.first(3)
@ALL
def test_a_member_that_is_cut(tmp_path, suffix):
    """Nothing of it is given, however much could be decompressed; a sample may have that."""
    name, compress = FORMATS[suffix]
    data = some_bytes(4_000_000)
    first, packed = compress(b"first"), compress(data)
    path = write(tmp_path, suffix, first + packed[: len(packed) * 3 // 4])
    got, error = read_all(path)
    assert (got, error.reason, error.sound) == (b"first", f"truncated {name} file", len(first))
    assert f"ends after {len(first) + len(packed) * 3 // 4} bytes" in error.detail
    with open_stream(path, verify=False) as stream:
        got = stream.read(2_100_000)
    # A block of bzip2 is 900 kB.
    assert len(data) // 2 < len(got)
    assert (b"first" + data).startswith(got)


@ALL
def test_members_that_are_too_large_to_be_held(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(compression, "_HELD_BYTES", 1000)
    compress = FORMATS[suffix][1]
    parts = [some_bytes(n, n) for n in (10, 0, 300_000, 1001, 70_000, 1)]
    packed = [compress(part) for part in parts]
    assert read_all(write(tmp_path, suffix, b"".join(packed))) == (b"".join(parts), None)
    got, error = read_all(write(tmp_path, suffix, b"".join(packed)[: -len(packed[-1]) - 9]))
    assert (got, error.sound) == (b"".join(parts[:4]), sum(map(len, packed[:4])))


@ALL
@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_byte(tmp_path, suffix, seed):
    """Nothing is read to the end as if it were sound; the checksum finds what nothing else does."""
    name, compress = FORMATS[suffix]
    packed = bytearray(compress(some_bytes(200_000)))
    # Behind the header, whose time and name mean nothing in gzip.
    packed[random.Random(seed).randrange(20, len(packed) - 20)] ^= 0x41
    _, error = read_all(write(tmp_path, suffix, bytes(packed)))
    assert error is not None
    # A wrong length may send the decoder behind the end.
    assert error.reason in (f"damaged {name} file", f"truncated {name} file")


@ALL
def test_damage_is_told_again(tmp_path, suffix):
    packed = bytearray(FORMATS[suffix][1](some_bytes(2000)))
    packed[-6] ^= 0xFF
    with open_stream(write(tmp_path, suffix, bytes(packed))) as stream:
        for _ in range(3):
            with pytest.raises(StreamError, match="damaged"):
                stream.read()


@ALL
@pytest.mark.parametrize("content", [b'{"text": "plain"}\n' * 3, b"PK\x03\x04 another"])
def test_what_is_not_compressed(tmp_path, suffix, content):
    got, error = read_all(write(tmp_path, suffix, content))
    assert (got, error.reason) == (b"", f"damaged {FORMATS[suffix][0]} file")


@ALL
def test_garbage_behind(tmp_path, suffix):
    name, compress = FORMATS[suffix]
    got, error = read_all(write(tmp_path, suffix, compress(b"whole") + b"garbage"))
    assert (got, error.reason) == (b"whole", f"damaged {name} file")


def test_an_empty_file_is_cut_short(tmp_path):
    assert [read_all(write(tmp_path, s, b""))[1].reason for s in FORMATS] == [
        f"truncated {name} file" for name, _ in FORMATS.values()
    ]


def test_zstd_with_a_window_that_is_too_large(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    streamed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = streamed.compress(some_bytes(1000)) + streamed.flush()
    _, error = read_all(write(tmp_path, ".zst", packed))
    assert error.reason == "zstd window above the limit"
    assert "without --long" in error.detail


@pytest.mark.guard
@ALL
def test_a_bomb_takes_no_memory(tmp_path, suffix):
    """300 MB of zeros, which are a few kB: the highest memory is that of a process that reads nothing."""
    zeros = bytes(10_000_000)
    bomb = write(tmp_path, suffix, FORMATS[suffix][1](zeros) * 30)
    small = write(tmp_path, "small" + suffix, FORMATS[suffix][1](b"x"))
    code = """
import sys
from pipeline.data.sources.compression import open_stream
size = 0
with open_stream(sys.argv[1]) as stream:
    while chunk := stream.read(2**16):
        size += len(chunk)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(size, peak)
"""
    peaks = []
    for path, size in ((bomb, 300_000_000), (small, 1)):
        out = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
        assert int(out.split()[0]) == size
        peaks.append(int(out.split()[1]))
    assert peaks[0] - peaks[1] < 30_000  # kB


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(("members", "verify", "beats"), [(1, True, 8), (1, False, 4), (64, True, 4), (64, False, 4)])
def test_signs_of_life(tmp_path, suffix, members, verify, beats, monkeypatch):
    """They come by what is decompressed: a member that is too large to be held is decompressed twice."""
    monkeypatch.setattr(compression, "_BEAT_BYTES", 2**20)
    monkeypatch.setattr(compression, "_HELD_BYTES", 2**20)
    path, seen = write(tmp_path, suffix, FORMATS[suffix][1](bytes(2**22 // members)) * members), []
    with open_stream(path, verify=verify, beat=lambda: seen.append(None)) as stream:
        assert len(stream.read()) == 2**22
    assert len(seen) == beats
