"""The command `pipeline`, in a module whose name is ours alone: other packages may be called `pipeline` or `slurm`.

It imports nothing of the suite before it knows what it would import. `python -m pretraining_pipeline` is the same
command.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

_NAME = "pretraining-pipeline"
_MARKS = {"pipeline": os.path.join("cli", "main.py"), "slurm": os.path.join("job", "batch_entry.py")}
"""A file that our package of each name has. Not compared with this file's folder: jobs run a copy of the packages."""
_EXIT_REFUSED = 2


def main() -> None:
    """Run the command line; where another package has the name of one of ours, say which file, with exit code 2."""
    for package in _MARKS:
        if problem := _foreign(package):
            _refuse(problem)
    try:
        from pipeline.cli.main import main as command
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _MARKS or os.environ.get("PIPELINE_DEBUG") == "1":
            raise
        _refuse(f"`{package}` lacks files of ours, or has some of another package ({error}). {_advice(package)}")
    command()


def _foreign(package: str) -> str | None:
    """Message where the package that an import would find is not ours."""
    spec = find_spec(package)
    if spec is None:
        return f"the package `{package}` of {_NAME} is not found. {_advice(package)}"
    folders = list(spec.submodule_search_locations or ())
    if spec.origin and any(_has(spec.loader, os.path.join(folder, _MARKS[package])) for folder in folders):
        return None
    found = spec.origin or ", ".join(folders)
    return f"`{package}` is {found} here, which is not the package of {_NAME}. {_advice(package, found)}"


def _has(loader: object, file: str) -> bool:
    """True if the loader of a package, which may be that of an archive, has a file."""
    try:
        return bool(loader.get_data(file))  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return False


def _advice(package: str, found: str = "") -> str:
    """What to do about a file or folder, by the entry of the path that it was found in."""
    folder, name = os.path.split(found)
    entry = os.path.realpath(os.path.dirname(folder) if name.startswith("__init__.") else folder) if found else None
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if any(os.path.realpath(path) == entry for path in given) and not sys.flags.ignore_environment:
        return f"Take {entry} out of PYTHONPATH"
    if entry == os.path.realpath(os.curdir):
        return "Rename that file or folder, or run the command in another folder"
    others = sorted(set(_distributions(package)) - {_NAME})
    first = f"Uninstall {' and '.join(others)}, and then install" if others else "Install"
    return f"{first} {_NAME} again (pip install --force-reinstall --no-deps), or use a virtual environment for it alone"


def _distributions(package: str) -> list[str]:
    from importlib.metadata import packages_distributions

    return list(packages_distributions().get(package, ()))


def _refuse(problem: str) -> None:
    sys.stderr.write(f"error: {problem}\n")
    sys.exit(_EXIT_REFUSED)


if __name__ == "__main__":
    main()
