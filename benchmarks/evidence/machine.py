"""What a measurement ran on: the GPU with its driver, clocks and power limit, the processor, the versions."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from evidence.imported import ROOT

_ASKED = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "power_limit_w": "power.limit",
    "power_w": "power.draw",
    "clock_mhz": "clocks.sm",
    "clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "slowdown": "clocks_event_reasons.active",
}
"""Our names of what `nvidia-smi --query-gpu` prints."""
MOVING = ("power_w", "clock_mhz", "memory_clock_mhz", "temperature_c", "slowdown")
"""Those that change while something runs."""
PACKAGES = ("torch", "triton", "transformers", "torchao", "flash-attn", "transformer-engine", "numpy")


def gpu() -> dict[str, Any]:
    """The first GPU as the driver describes it; where no `nvidia-smi` is found, its name by torch in another process.

    Raises:
        RuntimeError: No GPU is seen.
    """
    if shutil.which("nvidia-smi"):
        # Older drivers have another name for the last one, and answer nothing where one is unknown.
        for asked in (_ASKED, {key: _ASKED[key] for key in list(_ASKED)[:-1]}):
            words = ["nvidia-smi", f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits", "--id=0"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            values = [value.strip() for value in done.stdout.strip().split(",")]
            if done.returncode == 0 and len(values) == len(asked):
                return {key: _number(value) for key, value in zip(asked, values, strict=True)}
    ask = "import torch; print(torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"torch sees no GPU ({' '.join(last)}); --rehearse runs every item on a CPU")
    return {"name": done.stdout.strip()}


def moving() -> dict[str, Any]:
    """The values of the first GPU that change while something runs; nothing where `nvidia-smi` does not answer."""
    if not shutil.which("nvidia-smi"):
        return {}  # torch in another process would take memory of the GPU that is measured
    try:
        found = gpu()
    except (RuntimeError, subprocess.TimeoutExpired):
        return {}
    return {key: found[key] for key in MOVING if key in found}


def ranges(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Of each value the smallest and the largest; of words, like reasons of a slowdown, all that were seen."""
    found = {}
    for key in MOVING:
        values = [sample[key] for sample in samples if key in sample]
        numbers = [value for value in values if isinstance(value, float)]
        if values:
            found[key] = [min(numbers), max(numbers)] if len(numbers) == len(values) else sorted(set(map(str, values)))
    return found


def without_paths(value: Any, work: str) -> Any:
    """A value of JSON in whose texts no path tells of this machine.

    Args:
        value: A result or an error.
        work: The temporary folder of the item.
    """
    if isinstance(value, str):
        places = {work: "WORK", str(ROOT): ".", sys.prefix: "PYTHON", str(Path.home()): "~"}
        for path, name in places.items():
            if len(path) > 1:
                value = re.sub(rf"(?<![\w./~-]){re.escape(path)}(?![\w.-])", name, value)
        return value
    if isinstance(value, dict):
        return {without_paths(key, work): without_paths(each, work) for key, each in value.items()}
    return [without_paths(each, work) for each in value] if isinstance(value, list) else value


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def cpu() -> dict[str, Any]:
    """The processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"name": names[0] if names else platform.processor(), "cores": len(os.sched_getaffinity(0))}


def versions() -> dict[str, str]:
    """Of Python and the packages that figures depend on; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of the repository, with `+` behind it where files differ from it; None outside of a checkout or without git."""
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    status = [*git, "status", "--porcelain", "-uno"]
    changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    return done.stdout.strip()[:12] + ("+" if changed else "")
