"""Locked requirements that have no wheel for a platform: `python requirements/wheels.py` names them, for aarch64.

pip is asked for each one as for that platform, without its dependencies. Nothing is installed, and for most packages
only the metadata is downloaded. It takes some seconds per package.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).parent
OLDEST = 17
"""Minor version of glibc 2 of the oldest wheels."""


def locked(files: list[str], machine: str, python: str) -> Iterator[str]:
    """`NAME==VERSION` of each requirement of these files that Linux on such a machine needs."""
    there = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": machine}
    there |= {"python_version": python, "python_full_version": f"{python}.0"}
    for file in files:
        for line in re.findall(r"(?m)^\w[^\\\n]*", (FOLDER / f"{file}.txt").read_text()):
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate(there):
                yield f"{wanted.name}{wanted.specifier}"


def problem(requirement: str, machine: str, python: str, glibc: int) -> str:
    """The last line in which pip says why there is no wheel; empty where there is one."""
    # A wheel for an older glibc fits a newer one; pip must be told each of them.
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, OLDEST - 1, -1)] + [f"manylinux2014_{machine}"]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--dry-run", "--quiet", "--no-deps", "--only-binary=:all:", f"--target={folder}"]
        wanted = [f"--python-version={python}", *(f"--platform={tag}" for tag in tags)]
        command = [sys.executable, "-m", "pip", "install", *options, *wanted, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def main() -> None:
    """Print what has no wheel, and how many requirements were asked for."""
    parser = argparse.ArgumentParser(description="Locked requirements that have no wheel for a platform.")
    parser.add_argument("files", nargs="*", default=["build", "run", "cuda"], help="of requirements/, without .txt")
    parser.add_argument("--machine", default="aarch64", help="like platform.machine() says (default: aarch64)")
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]), help="default: this one")
    parser.add_argument("--glibc", type=int, default=28, help="minor version of glibc 2 (default: 28)")
    given = parser.parse_args()
    requirements = list(locked(given.files, given.machine, given.python))
    missing = 0
    for requirement in requirements:
        if why := problem(requirement, given.machine, given.python, given.glibc):
            missing += 1
            print(f"{requirement}: {why}", flush=True)
    what = f"{given.machine}, Python {given.python}, glibc 2.{given.glibc}"
    print(f"{len(requirements) - missing} of {len(requirements)} have a wheel for {what}")


if __name__ == "__main__":
    main()
