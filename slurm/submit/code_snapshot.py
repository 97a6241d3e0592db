"""The code that jobs run: a copy of the packages as they were when the run was submitted, in the run folder.

A job may start days later. What is edited, pulled or upgraded meanwhile does not change what it runs, and what it ran
can be looked up afterwards.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

import pipeline
import slurm
from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.redaction import is_secret_variable, masked
from pipeline.common.run_files import RunFiles
from pipeline.config.load import packaged_configs
from slurm import jobs
from slurm.submit import integrity

_RECORDED = re.compile(
    r"^(SLURM_CONF|MODULE.*|LOADEDMODULES|NCCL_.*|TORCH_.*|OMP_.*|CUDA_.*|HIP_.*|ROCR_.*|HSA_.*|GLOO_.*|PYTHON.*|VIRTUAL_ENV"
    r"|CONDA_(PREFIX.*|DEFAULT_ENV|SHLVL|PYTHON_EXE|EXE|CHANNELS|OVERRIDE_.*)|LD_LIBRARY_PATH|PATH)$"
)
"""Names that are kept. conda has more, which may hold the tokens of channels and say nothing of what is computed."""
_GIT_SECONDS = 20.0


def take(run: Path, modules: Sequence[str] = (), into: Path | None = None) -> Path:
    """Copy the packages into a run folder, unless the same copy is there, and note what they run with.

    Only their owner may write to the files. A list of them with their digests is beside the copy.

    Args:
        run: folder.
        modules: that jobs load, for the note.
        into: folder for another copy, which jobs run in place of the one in the run folder.

    Returns:
        Folder of the copy, for PYTHONPATH.

    Raises:
        UserError: there is a copy with other files than it should have.
    """
    contents = _contents()
    final = _place(RunFiles(run).slurm, contents)
    _write(contents, run, final)
    _note_environment(run, final.name, modules)
    if into is not None:
        final = _place(into, contents)
        _write(contents, into, final)
    return final


def place(run: Path, into: Path | None = None) -> tuple[Path, str]:
    """The folder into which `take` would copy now, and the digest of its list."""
    contents = _contents()
    return _place(into or RunFiles(run).slurm, contents), integrity.sha256(integrity.listing(contents))


def digest(code: Path) -> str:
    """Digest of the list of a copy that `take` has made."""
    return integrity.sha256(integrity.list_file(code).read_bytes())


def _write(contents: Mapping[str, bytes], root: Path, final: Path) -> None:
    """Put the files into a folder below `root`, unless they are there."""
    storage.make_below(root, final.parent)
    with integrity.for_owner_alone():
        _write_for_owner(contents, final)


def _write_for_owner(contents: Mapping[str, bytes], final: Path) -> None:
    if final.is_dir():
        _refuse_changed(contents, final)
    else:
        temporary = storage.temporary(final)
        temporary.mkdir()
        for name, data in contents.items():
            file = temporary / name
            storage.make_below(temporary, file.parent)
            with storage.naming(final):  # a full disk names no file
                file.write_bytes(data)
        integrity.others_cannot_write(temporary, *temporary.rglob("*"))
        try:
            storage.commit(temporary, final)
        except OSError:
            if not final.is_dir():
                raise
            shutil.rmtree(temporary)  # somebody else was faster
    wanted = integrity.listing(contents)
    listed = integrity.list_file(final)
    if not listed.exists() or listed.read_bytes() != wanted:
        storage.put(listed, wanted)
        integrity.others_cannot_write(listed)


def _refuse_changed(contents: Mapping[str, bytes], final: Path) -> None:
    """A `UserError` where a copy is not what it should be; bytecode that somebody's Python left is removed."""
    for cache in list(final.rglob("__pycache__")):
        shutil.rmtree(cache)
    found = {str(file.relative_to(final)): file for file in final.rglob("*") if file.is_symlink() or not file.is_dir()}
    odd = sorted(contents.keys() ^ found.keys())
    odd += [name for name, data in contents.items() if name in found and not _is(found[name], data)]
    if odd:
        raise UserError(
            f"{final} has changed since the code was copied to it ({odd[0]!a} was changed, added or removed); "
            "find out by whom, end the jobs that run it, remove the folder, and submit again"
        )


def _is(file: Path, data: bytes) -> bool:
    return file.is_file() and not file.is_symlink() and file.read_bytes() == data


def _place(folder: Path, contents: Mapping[str, bytes]) -> Path:
    digest = xxhash.xxh3_128()
    for name, data in sorted(contents.items()):
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return folder / jobs.CODE / digest.hexdigest()[:16]


def _contents() -> dict[str, bytes]:
    """All files that the copy has, by name: they are read once, so that the hash is that of what is written."""
    code = {name: Path(str(module.__file__)).parent for name, module in (("pipeline", pipeline), ("slurm", slurm))}
    found = {}
    # In a checkout the run files that ship are beside the packages, in an installation inside.
    for name, folder in {**code, "configs": packaged_configs()}.items():
        if name == "configs" and folder.is_relative_to(code["pipeline"]):
            continue
        for file in _files(folder):
            found[f"{name}/{file.relative_to(folder)}"] = file.read_bytes()
    return found


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder).parts
        if file.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in inner):
            yield file


def _note_environment(run: Path, code: str, modules: Sequence[str]) -> None:
    """Record the environment of jobs: `environment-HASH.json`, and the changes since the commit beside it."""
    revision, changes = _git()
    values: dict[str, Any] = {
        "code": code,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "distributions": _distributions(),
        "modules": [masked(each) for each in modules],
        "environment": _environment(os.environ),
        "git": {"revision": revision, "changed": bool(changes)} if revision else None,
    }
    name = f"environment-{value_hash([values, changes])[:16]}"
    file = RunFiles(run).slurm / f"{name}.json"
    if file.exists():
        return
    if changes:
        storage.put(file.with_suffix(".diff"), masked(changes).encode())
    storage.put_json(file, values)


def _distributions() -> dict[str, str]:
    """Versions of all that is installed, by name."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        if name := each.metadata["Name"]:
            found.setdefault(name, each.version)  # the first one on the path is the one that is imported
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that may change what is computed, and no secrets: by their names, and in addresses."""
    return {
        name: masked(given[name]) for name in sorted(given) if _RECORDED.match(name) and not is_secret_variable(name)
    }


def _git() -> tuple[str | None, str]:
    """Commit of the packages if they are a checkout, and how they differ from it."""
    top = Path(pipeline.__file__).resolve().parents[1]
    if not (top / ".git").exists():  # an installed package may lie below the checkout of something else
        return None, ""
    revision = _ask(top, "rev-parse", "HEAD")
    changes = _ask(top, "diff", "HEAD", "--", "pipeline", "slurm", "configs", "pyproject.toml")
    return (revision.strip() if revision else None), changes or ""


def _ask(folder: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
