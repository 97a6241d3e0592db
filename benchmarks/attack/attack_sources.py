"""Attack `pipeline preprocess` with small source files that claim, or make, far more than a machine has.

    python benchmarks/attack/attack_sources.py [--gigabytes 10] [--only NAME]

Each file is a source of a run of its own, with one worker. Prints how the command ended, the seconds that it took and
the largest memory of one of its processes. Exit code 1 if one ended with a traceback or by a signal, took more memory
than `MOST_MIB`, or longer than `LIMIT_S`.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeline.config.tokenizer import TokenizerConfig, TokenizerTrainConfig
from pipeline.data.tokenization.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
MOST_MIB = 1500
CLAIMED = 2**40
ROWS = 1_000_003
"""Rare enough as a number to be found in a footer."""
RUN = """\
run: {{dir: {folder}/run}}
data:
  sources:
    - {{name: bomb, paths: [{path}], type: {type}}}
  preprocess: {{workers: 1}}
tokenizer: {{{tokenizer}}}
model: {{layers: 1, dim: 32, heads: 4}}
train: {{duration: 1 steps}}
"""


def varint(value: int) -> bytes:
    """A number as Thrift's compact protocol has it, by zigzag."""
    value, found = 2 * value, bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def parquet_claim(path: Path) -> None:
    """A column chunk, and its row group, say that they have 2^40 values."""
    pq.write_table(pa.table({"text": pa.nulls(ROWS, pa.string())}), path)
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -8].replace(varint(ROWS), varint(CLAIMED))
    path.write_bytes(data[: -8 - size] + footer + len(footer).to_bytes(4, "little") + data[-4:])


def parquet_dictionary(path: Path) -> None:
    """A dictionary of one long entry, which brotli makes a millionth of."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int8()), pa.array(["x" * 2**28]))
    pq.write_table(pa.table({"text": column}), path, compression="brotli", store_schema=False)


def arrow_claim(path: Path) -> None:
    """A batch says that it has 2^40 rows; its buffers do, too."""
    batch = pa.record_batch({"text": pa.nulls(ROWS, pa.string())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema) as out:
        out.write_batch(batch)
    data = path.read_bytes()
    path.write_bytes(data.replace(ROWS.to_bytes(8, "little"), CLAIMED.to_bytes(8, "little")))


def arrow_buffers(path: Path) -> None:
    """A compressed buffer says that it has 2^40 bytes."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    batch = pa.record_batch({"text": pa.array(["x" * ROWS])})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema, options=options) as out:
        out.write_batch(batch)
    data = path.read_bytes()
    path.write_bytes(data.replace(ROWS.to_bytes(8, "little"), CLAIMED.to_bytes(8, "little")))


def repeated(
    begin: bytes, size: int, compress: Callable[[bytes], bytes], fill: bytes = b"\0"
) -> Callable[[Path], None]:
    """A compressed file of so many equal bytes, after others."""

    def make(path: Path) -> None:
        block = compress(fill * 2**26)
        with path.open("wb") as file:
            file.write(compress(begin))
            for _ in range(size // 2**26):
                file.write(block)

    return make


def sparse(begin: bytes, size: int) -> Callable[[Path], None]:
    """A file that takes no room."""

    def make(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, size)

    return make


def nested(line: bytes) -> Callable[[Path], int]:
    """Lines of JSON: one that is nested, and one that is not."""
    return lambda path: path.write_bytes(line + b'\n{"text": "all is well"}\n')


def attacks(size: int) -> dict[str, tuple[str, Callable[[Path], Any]]]:
    """By name of a file the type of the source, and how it is made."""
    zstd, deep, half = zstandard.ZstdCompressor().compress, 10**6, size // 5
    csv = b'text,id\ngood,1\n"'
    return {
        "claim.parquet": ("parquet", parquet_claim),
        "dictionary.parquet": ("parquet", parquet_dictionary),
        "claim.arrow": ("arrow", arrow_claim),
        "buffers.arrow": ("arrow", arrow_buffers),
        "field.csv": ("csv", sparse(csv, half)),
        "field.csv.zst": ("csv", repeated(csv, half, zstd, b"a")),
        "quotes.csv.gz": ("csv", repeated(csv, half, gzip.compress, b'""')),
        "zeros.jsonl": ("jsonl", sparse(b"", size)),
        "zeros.jsonl.zst": ("jsonl", repeated(b"", size, zstd)),
        "zeros.jsonl.gz": ("jsonl", repeated(b"", size, gzip.compress)),
        "text.jsonl.zst": ("jsonl", repeated(b'{"text": "', size, zstd, b"a")),
        "lines.jsonl.zst": ("jsonl", repeated(b"", half, zstd, b"\n")),
        "lines.csv.zst": ("csv", repeated(b"text,id\ngood,1\n", half, zstd, b"\r\n")),
        "spaces.jsonl.zst": ("jsonl", repeated(b"", half, zstd, b" \n")),
        "objects.jsonl.zst": ("jsonl", repeated(b"", half // 8, zstd, b"{}\n")),
        "zeros.jsonl.xz": ("jsonl", repeated(b"", size, lzma.compress)),
        "text.txt.zst": ("text", repeated(b"", half, zstd, b"a")),
        "text.txt.gz": ("text", repeated(b"", half, gzip.compress, b"a")),
        "text.txt.xz": ("text", repeated(b"", half, lzma.compress, b"a")),
        "array.jsonl": ("jsonl", nested(b'{"text": "a", "more": ' + b"[" * deep + b"]" * deep + b"}")),
        "object.jsonl": ("jsonl", nested(b'{"text": ' + b'{"a":' * deep + b"1" + b"}" * deep + b"}")),
        "open.jsonl": ("jsonl", nested(b"[" * deep)),
    }


def main() -> int:
    """Run the attacks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    bad = 0
    for name, (kind, make) in attacks(int(arguments.gigabytes * 2**30)).items():
        # The workers' path, and that of the sample which a tokenizer is trained on.
        for tokenizer in ("path: {folder}, end_of_document: <|endoftext|>", "train: {{vocab_size: 300}}"):
            if arguments.only in name:
                with tempfile.TemporaryDirectory() as folder:
                    bad += attack(Path(folder), name, kind, make, tokenizer.format(folder=folder))
    return min(bad, 1)


def attack(folder: Path, name: str, kind: str, make: Callable[[Path], Any], tokenizer: str) -> bool:
    """Whether one of them broke something."""
    make(folder / name)
    Tokenizer.train(iter(["all is well"]), TokenizerConfig(train=TokenizerTrainConfig(vocab_size=300))).save(folder)
    run = folder / "run.yaml"
    run.write_text(RUN.format(folder=folder, path=folder / name, type=kind, tokenizer=tokenizer))
    begin = time.monotonic()
    command = [sys.executable, "-c", MEASURED, sys.executable, "-m", "pipeline", "preprocess", str(run)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT, env=environment
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: longer than {LIMIT_S} s", flush=True)
        return True
    output, _, peak = (done.stdout + done.stderr).rpartition("peak ")
    mebibytes = int(peak) // 1024
    bad = "Traceback" in output or done.returncode not in (0, 1, 2) or "signal" in output or mebibytes > MOST_MIB
    last = " / ".join(line for line in output.strip().splitlines()[-6:])
    what = f"{name} ({tokenizer.partition(':')[0]}): {(folder / name).stat().st_blocks // 2:,} KiB"
    seconds = time.monotonic() - begin
    print(f"{'BAD ' * bad}{what}, code {done.returncode}, {seconds:.0f} s, {mebibytes} MiB: {last}", flush=True)
    return bad


MEASURED = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
"""

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
