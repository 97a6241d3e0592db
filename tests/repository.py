"""Files of the repository, in a checkout as in an unpacked source archive, which has no git."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LEFT_BY_TOOLS = re.compile(r"(^|/)(\.git|\.venv[^/]*|__pycache__|\.\w+_cache|\.hypothesis)/|^(build|dist|site|runs)/")


def files() -> list[str]:
    """Paths from the root: what git tracks, or without git all that no tool has left."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        listed = ""
    # An archive that is unpacked within another repository is not tracked there.
    tracked = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    found = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
    return tracked or sorted(name for name in found if not _LEFT_BY_TOOLS.search(name))
