"""Collects what an image with torch lacks for `gpu_evidence.py`: wheels for Python 3.12, without a network there.

    make gpu-kit

The image has Python 3.12, torch 2.11 or newer with CUDA, and NumPy. Everything else comes as wheels of the locked
versions, checked against the locked hashes. Prints the call for the machine with the GPU: the repository with the
folder of wheels, and one command.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from evidence.imported import ROOT
from evidence.machine import commit

FOLDER = ROOT / "build" / "gpu-kit"
LIMIT_MIB = 40
NEEDED = (
    *("pydantic", "pyyaml", "typer", "rich", "orjson", "xxhash", "zstandard", "safetensors", "tokenizers"),
    *("submitit", "transformers", "accelerate", "torchao", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
"""What items import, other than torch and NumPy. Readers of Parquet, the quicker tokenizer, the server and the
report are not among it."""
THERE = ("torch", "numpy")
"""What the image has, with all that it needs itself."""
LEFT_OUT = ("hf-xet",)
"""What a package names as needed and no item uses: downloads from a hub."""


def closure(names: Iterable[str], machine: str, python: str) -> list[str]:
    """Names of distributions that these need, themselves included, by the metadata of what is installed here."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
    }
    found: set[str] = set()
    todo = [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        if name in found or name in THERE or name in LEFT_OUT:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({**environment, "extra": ""}):
                todo.append(canonicalize_name(requirement.name))
    return sorted(found)


def locked(names: Iterable[str]) -> str:
    """The entries of requirements/{run,dev}.txt for them, with hashes.

    Raises:
        KeyError: One is not locked.
    """
    text = "".join((ROOT / "requirements" / f"{file}.txt").read_text() for file in ("build", "run", "dev"))
    entries = {
        str(canonicalize_name(entry.partition("==")[0])): re.sub(r" ;[^\\\n]*", "", entry)
        for entry in re.split(r"(?m)^(?=[\w#])", text)
        if "==" in entry and not entry.startswith("#")
    }
    return "".join(entries[name] for name in names)


def collect(folder: Path, machine: str, python: str) -> int:
    """Download the wheels; returns their bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in (17, 24, 26, 27, 28, 31, 34)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(locked(closure(NEEDED, machine, python)))
        file.flush()
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"),
                *("--only-binary=:all:", "--require-hashes", f"--python-version={python}", "--implementation=cp"),
                *(f"--platform={each}" for each in (*platforms, f"manylinux2014_{machine}")),
                *("-d", str(folder), "-r", file.name),
            ],
            check=True,
        )
    return sum(wheel.stat().st_size for wheel in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=["x86_64", "aarch64"], default="x86_64", help="processor of the image")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="Python of the image (3.12)")
    given = parser.parse_args()
    size = collect(FOLDER, given.machine, given.python) / 2**20
    inside = FOLDER.relative_to(ROOT)
    print(
        f"{inside}: {len(list(FOLDER.iterdir()))} wheels for Python {given.python} on {given.machine}, {size:.1f} MiB"
    )
    if size > LIMIT_MIB:
        sys.exit(f"error: {size:.1f} MiB are more than the limit of {LIMIT_MIB} MiB")
    revision = commit()
    source = f" --commit {revision}" if revision else ""
    print("Copy the repository with this folder to the machine with the GPU, and run there, in the repository:\n")
    print(f"python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/gpu-kit {inside}/*.whl &&")
    print(f"PYTHONPATH=/tmp/gpu-kit python3 benchmarks/gpu_evidence.py --minutes 9{source} --to lines.jsonl\n")
    print("Then append lines.jsonl to benchmarks/gpu_results.jsonl here, and write the page: gpu_evidence.py --page")


if __name__ == "__main__":
    main()
