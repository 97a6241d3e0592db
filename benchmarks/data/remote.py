"""Read the windows of a dataset in a bucket, once each, as training does: bytes over the wire, requests and seconds.

    python benchmarks/data/remote.py --work /tmp/remote --peer-python /tmp/streaming/bin/python

A SeaweedFS on this machine has the dataset. Sides, each in a fresh process with empty folders, one after the other in
every round:

    disk       the loader of training, with the dataset on the disk
    copy       its `.bin` files, fetched as a whole by obstore, 4 at a time, into files: a plain copy
    local      the loader with `stage.data: local`: ranges ahead, while parts are copied to the node
    shared     the loader with `stage.data: shared`: ranges alone
    streaming  `StreamingDataset` with shuffling, over the same windows in shards of 64 MiB; needs a Python that has
               `mosaicml-streaming` (0.13.0 was tried)

One round goes through a proxy that counts requests and bytes; the seconds are medians of the others, which do not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BATCH = 8
LENGTH = int(os.environ.get("LENGTH", "4096"))
"""Tokens of a window; the processes that this one starts have it from the environment."""
BUCKET = "corpus"
ACCESS = {"concurrency": 8}


def side_disk(data: Path, node: Path, steps: int) -> Iterator[Any]:
    """Steps of the loader on a disk."""
    return _steps(data, node, steps, {})


def side_local(data: Path, node: Path, steps: int) -> Iterator[Any]:
    """Steps of the loader in a bucket, with copies."""
    return _steps(f"s3://{BUCKET}/sets", node, steps, {"data": "local", "dir": str(node)})


def side_shared(data: Path, node: Path, steps: int) -> Iterator[Any]:
    """Steps of the loader in a bucket, without copies."""
    return _steps(f"s3://{BUCKET}/sets", node, steps, {"data": "shared", "dir": str(node)})


def _steps(where: Path | str, node: Path, steps: int, stage: dict[str, Any]) -> Iterator[Any]:
    from pipeline.data.datasets.open import open_datasets
    from pipeline.data.loading.loader import open_loader
    from tests.data.loading.remote import config_of

    keys: Any = {
        "sequence_length": LENGTH,
        "batch_size": BATCH,
        "micro_batch_size": BATCH,
        "duration": f"{steps} steps",
    }
    config = config_of(node, where, "a", stage, remote=ACCESS, **keys)
    yield from open_loader(config, open_datasets(config, "train"), dp_rank=0, dp_size=1).iterate(0, steps)


def side_copy(data: Path, node: Path, steps: int) -> Iterator[Any]:
    """The files of the parts."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, client_options={"allow_http": True}, endpoint=os.environ["AWS_ENDPOINT_URL"])
    keys = [each["path"] for page in obstore.list(store, "sets") for each in page if each["path"].endswith(".bin")]

    def fetch(key: str) -> int:
        with open(node / key.replace("/", "_"), "wb") as file:
            for block in obstore.get(store, key).stream(min_chunk_size=2**20):
                file.write(block)
        return 1

    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(fetch, keys)


def side_streaming(data: Path, node: Path, steps: int) -> Iterator[Any]:
    """Batches of the peer."""
    from streaming import StreamingDataset

    found = StreamingDataset(remote=f"s3://{BUCKET}/mds", local=str(node / "mds"), shuffle=True, batch_size=BATCH)
    batch = []
    for sample in found:
        batch.append(sample["tokens"])
        if len(batch) == BATCH:
            yield batch
            batch = []


SIDES = {
    "disk": side_disk,
    "copy": side_copy,
    "local": side_local,
    "shared": side_shared,
    "streaming": side_streaming,
}


def measure(side: str, data: Path, node: Path, steps: int) -> dict[str, float]:
    """Seconds to the first step and to the last, and of the processor."""
    begin, first, count = time.perf_counter(), 0.0, 0
    for _ in SIDES[side](data, node, steps):
        count += 1
        first = first or time.perf_counter() - begin
    return {"steps": count, "first_s": first, "all_s": time.perf_counter() - begin, "cpu_s": time.process_time()}


def write_shards(data: Path, out: Path, windows: int) -> None:
    """The same windows as shards of the peer."""
    import numpy as np
    from streaming import MDSWriter

    ids = np.concatenate([np.fromfile(path, "<u2") for path in sorted((data / "a" / "train").glob("parts/*/*.bin"))])
    with MDSWriter(out=str(out), columns={"tokens": f"ndarray:uint16:{LENGTH}"}, size_limit=2**26) as writer:
        for number in range(windows):
            writer.write({"tokens": ids[number * LENGTH : (number + 1) * LENGTH]})


def prepare(work: Path, parts: int, tokens: int, peer: str | None, server: Any) -> int:
    """Make the dataset, and write it to the bucket; the number of steps."""
    from pipeline.common.console import Console
    from pipeline.common.objects.access import RemoteAccess
    from pipeline.common.objects.urls import parse_folder
    from pipeline.data.datasets.dataset import Dataset
    from pipeline.data.datasets.remote.push import push
    from tests.data.loading.remote import write_dataset_of_parts

    if not (work / "data").exists():
        write_dataset_of_parts(work / "data" / "a" / "train", parts, tokens)
    push(work / "data", parse_folder(f"s3://{BUCKET}/sets"), RemoteAccess(), Console(quiet=True))
    windows = (Dataset.open(work / "data" / "a" / "train").tokens - 1) // int(os.environ["LENGTH"])
    if peer:
        shutil.rmtree(work / "mds", ignore_errors=True)
        run([peer, __file__, "--shards", str(windows), "--work", str(work)], {})
        for path in (work / "mds").iterdir():
            server.store().put(f"mds/{path.name}", path)
    return windows // BATCH


def run(command: list[str], more: dict[str, str]) -> str:
    """A command in a process of its own, and what it printed last."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path} | more, stdout=subprocess.PIPE)
    return done.stdout.decode().strip().rpartition("\n")[2]


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for all files")
    parser.add_argument("--peer-python", help="Python with mosaicml-streaming")
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of a part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a window")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.shards:
        return write_shards(given.work / "data", given.work / "mds", given.shards)
    if given.side:
        print(json.dumps(measure(given.side, given.work / "data", given.work / "node", given.steps)))
        return None
    from tests.common.objects.faults import faults
    from tests.common.objects.seaweed import environment, seaweed

    os.environ["LENGTH"] = str(given.length)
    given.work.mkdir(parents=True, exist_ok=True)
    sides = [side for side in SIDES if side != "streaming" or given.peer_python]
    shutil.rmtree(given.work / "server", ignore_errors=True)
    with seaweed(given.work / "server") as server, faults(server.port) as proxy:
        os.environ |= environment(server.endpoint)
        steps = prepare(given.work, given.parts, given.tokens, given.peer_python, server)
        seconds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(given.rounds + 1):
            for side in sides:
                shutil.rmtree(given.work / "node", ignore_errors=True)
                (given.work / "node").mkdir()
                proxy.bytes, counted = 0, number == 0
                proxy.requests.clear()
                endpoint = proxy.endpoint if counted else server.endpoint
                python = given.peer_python if side == "streaming" else sys.executable
                command = [str(python), __file__, "--side", side, "--steps", str(steps), "--work", str(given.work)]
                found = json.loads(run(command, environment(endpoint) | {"S3_ENDPOINT_URL": endpoint}))
                row: dict[str, Any] = {"side": side, **found}
                if counted:
                    row |= {"requests": len(proxy.requests), "bytes": proxy.bytes}
                else:
                    seconds[side].append(found)
                print(json.dumps(row), flush=True)
        for side, rows in seconds.items():
            medians = {name: statistics.median(row[name] for row in rows) for name in ("first_s", "all_s", "cpu_s")}
            print(json.dumps({"side": side, "median": medians}), flush=True)
    return None


if __name__ == "__main__":
    main()
