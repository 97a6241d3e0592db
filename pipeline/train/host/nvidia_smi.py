"""Questions to NVIDIA's driver about the GPUs of this machine, by its program nvidia-smi."""

from __future__ import annotations

import csv
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 20.0
"""Seconds for nvidia-smi, which hangs where a GPU does."""
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class GpuAnswer:
    """Exit code and output of nvidia-smi."""

    code: int
    """Exit code."""
    output: str

    @property
    def text(self) -> str:
        """The output in a line."""
        return " ".join(self.output.split())

    @property
    def is_unknown_field(self) -> bool:
        """True if this version of nvidia-smi does not know a field, so that it refuses the whole query."""
        return "not a valid field" in self.text.lower()

    @property
    def rows(self) -> list[list[str]]:
        """Values of each GPU, in the order of the fields."""
        return list(csv.reader(self.output.splitlines(), skipinitialspace=True))


def query_gpus(fields: Sequence[str]) -> GpuAnswer:
    """Ask for fields of all GPUs.

    Raises:
        OSError: nvidia-smi cannot be run.
        subprocess.TimeoutExpired: it does not answer. It is not waited for: inside of the driver nothing can be killed.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        output.seek(0)
        return GpuAnswer(code, output.read(_MOST_BYTES).decode(errors="replace"))
