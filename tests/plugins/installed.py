"""The example package of plug-ins, as if a package manager had installed a version of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

EXAMPLE = Path(__file__).parent / "example"


@contextmanager
def installed(folder: Path, version: str = "1.0") -> Iterator[None]:
    """The package is found, by this process and those that are forked of it; `folder` gets what describes it."""
    about = folder / f"example_plugins-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: example-plugins\nVersion: {version}\n")
    (about / "entry_points.txt").write_text((EXAMPLE / "entry_points.txt").read_text())
    with mock.patch.object(sys, "path", [str(folder), str(EXAMPLE), *sys.path]):
        yield
