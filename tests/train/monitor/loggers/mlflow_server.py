"""A real MLflow server on this machine, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.train.distributed.ranks import free_port
from tests.waiting import until


class MlflowServer:
    """A server with its database in a folder; `start` and `kill` as often as wanted, at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._folder.mkdir(exist_ok=True)
        store = ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db", "--workers", "1"]
        words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port), *store]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                words,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        until(self._answers, self._process, why=f"see {self._folder / 'log'}", pause=0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it and its workers at once."""
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
