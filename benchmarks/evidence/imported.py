"""Which files of this repository a measurement rests on: those that its processes imported, with their hashes."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = "EVIDENCE_FILES"
"""Environment variable: the folder in which each process of an item leaves the paths that it imported."""
_OUTSIDE = (".venv", "build")
_RUNNER = {
    "benchmarks/gpu_evidence.py",
    *(f"benchmarks/evidence/{name}.py" for name in ("__init__", "catalog", "imported", "item", "machine")),
}
"""What all items go through, which no figure depends on; an item's shapes are compared on their own."""


def imported() -> list[str]:
    """Paths of the modules of this process, relative to the repository, that are in it."""
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        path = Path(file).resolve()
        if path.is_relative_to(ROOT) and path.suffix == ".py":
            inside = path.relative_to(ROOT)
            if inside.parts[0] not in _OUTSIDE and "site-packages" not in inside.parts:
                found.add(inside.as_posix())
    return sorted(found - _RUNNER)


def record(more: Iterable[str] = ()) -> None:
    """Leave the list of this process, and other files that it read, where the item looks for it."""
    if FOLDER in os.environ:
        file = Path(os.environ[FOLDER], f"{os.getpid()}.json")
        file.write_text(json.dumps(sorted({*imported(), *more})))


def record_at_exit() -> None:
    """The same when this process ends."""
    atexit.register(record)


def collect(folder: Path) -> dict[str, str]:
    """Hashes of all files that processes of an item listed."""
    return hashes(path for file in folder.glob("*.json") for path in json.loads(file.read_text()))


def hashes(paths: Iterable[str]) -> dict[str, str]:
    """By path; a file that is not there has none."""
    found = {}
    for path in sorted(set(paths)):
        if (ROOT / path).is_file():
            found[path] = hashlib.blake2b((ROOT / path).read_bytes(), digest_size=6).hexdigest()
    return found


def unchanged(files: Mapping[str, str]) -> bool:
    """Whether all of them are there as they were."""
    return bool(files) and hashes(files) == dict(files)
