"""The example package of plug-ins, as if a package manager had installed a version of it."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

EXAMPLE = Path(__file__).parent / "example"


def describe(folder: Path, version: str = "1.0", distribution: str = "example-plugins") -> None:
    """Write into a folder what a package manager would about the package: its name, version and entry points."""
    about = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    groups = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in found.items()) for group, found in groups.items()
    ]
    (about / "entry_points.txt").write_text("".join(lines))


@contextmanager
def installed(folder: Path, version: str = "1.0") -> Iterator[None]:
    """The package is found, by this process and those that are forked of it; `folder` gets what describes it."""
    describe(folder, version)
    with mock.patch.object(sys, "path", [str(folder), str(EXAMPLE), *sys.path]):
        yield
