"""Locked requirements with hashes: `make lock` writes requirements/{build,run,dev,cuda}.txt from pyproject.toml.

Versions stay as they are where they can; `make lock UPGRADE=--upgrade` takes the newest, `UPGRADE="--upgrade-package
torch"` those of one package. A package is in one file, the first of those that need it, so that it has one version.
The hashes are those of all files of a version: other platforms and later versions of Python find theirs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
FILES = {
    "build": "What builds packages: this one, and requirements that come as source.",
    "run": "What the package needs, whatever the machine.",
    "dev": "What tests and linters need besides.",
    "cuda": "What the CUDA build of torch needs besides. Its CPU build needs none of it.",
}
CUDA = re.compile(r"(nvidia-|cuda-|triton$)")
TORCH_CPU = {
    "2.13.0": ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",),  # cp311, manylinux x86_64
}
"""By version of torch: sha256 of its CPU builds.

For Linux the package registry has the CUDA build alone. PyTorch's own index has a CPU build of the same version, a
tenth of its size, which pip takes (as 2.13.0+cpu) where that index is configured. So hashes of both have to be locked.
"""


def compile(output: Path, *options: str) -> dict[str, str]:
    """Resolve requirements for all platforms and versions of Python; returns the entries of the output by package."""
    uv = [str(Path(sys.executable).with_name("uv")), "--no-config", "--quiet", "pip", "compile"]
    # One version of a package for all versions of Python, so that a name has one entry.
    fixed = ["--universal", "--python-version=3.11", "--fork-strategy=fewest", "--no-annotate", "--no-header"]
    subprocess.run([*uv, *fixed, f"--output-file={output}", *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    entries = [entry for entry in re.split(r"(?m)^(?=\w)", output.read_text()) if entry]
    found = {entry.partition("==")[0]: entry for entry in entries}
    if len(found) < len(entries):
        sys.exit(f"error: {output} has more than one version of a package; add a bound to pyproject.toml")
    return found


def main(upgrade: list[str]) -> None:
    """Write all files."""
    project, build = "pyproject.toml", "requirements/build.in"
    inputs = {"build": [build], "run": [project], "dev": [project, "--extra=dev"], "cuda": [project]}
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "together.txt"
        # An output file that is there says which versions to stay at. Without hashes, which uv would keep.
        before = [file.read_text() for file in map(_file, FILES) if file.exists()]
        together.write_text("\n".join(re.findall(r"(?m)^\w[^\\\n]*", "\n".join(before))))
        # Entries are those of all inputs together: one of them may need a package on fewer platforms than another.
        left = compile(together, project, build, "--extra=dev", "--generate-hashes", *upgrade)
        left["torch"] = _with_cpu_builds(left["torch"])
        for file, about in FILES.items():
            needed = compile(Path(folder) / f"{file}.txt", *inputs[file], f"--constraints={together}")
            chosen = [name for name in needed if name in left and bool(CUDA.match(name)) == (file == "cuda")]
            _file(file).write_text(f"# {about} Written by `make lock`.\n" + "".join(map(left.pop, chosen)))
    assert not left, left


def _file(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def _with_cpu_builds(entry: str) -> str:
    """The entry of torch with the hashes of its CPU builds."""
    version = entry.split(maxsplit=1)[0].partition("==")[2]
    if version not in TORCH_CPU:
        sys.exit(f"error: TORCH_CPU in {__file__} has no hashes for torch {version}; add those of PyTorch's CPU index")
    first, rest = entry.split("\n", 1)
    cpu = "".join(f"    --hash=sha256:{each} \\\n" for each in TORCH_CPU[version])
    return f"# The first hashes are those of PyTorch's CPU builds; see lock.py.\n{first}\n{cpu}{rest}"


if __name__ == "__main__":
    main(sys.argv[1:])
