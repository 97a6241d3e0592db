"""The code that jobs run: an archive of the packages as they were when the run was submitted, in the run folder.

A job may start days later. What is edited, pulled or upgraded meanwhile does not change what it runs, and what it ran
can be looked up afterwards. The archive is one file on a disk that all nodes read, and has the modules' bytecode, so
that no process compiles them. Python imports from it; its digest is in the job's script.
"""

from __future__ import annotations

import io
import marshal
import os
import platform
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import xxhash

import pipeline
from pipeline.common import imports, storage, trust
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.paths import cache_folder
from pipeline.common.redaction import is_secret_variable, masked
from pipeline.common.run_files import RunFiles
from pipeline.config.load import packaged_configs
from slurm import jobs
from slurm.record import integrity

_RECORDED = re.compile(
    r"^(SLURM_CONF|MODULE.*|LOADEDMODULES|NCCL_.*|TORCH_.*|OMP_.*|CUDA_.*|HIP_.*|ROCR_.*|HSA_.*|GLOO_.*|PYTHON.*|VIRTUAL_ENV"
    r"|CONDA_(PREFIX.*|DEFAULT_ENV|SHLVL|PYTHON_EXE|EXE|CHANNELS|OVERRIDE_.*)|LD_LIBRARY_PATH|PATH)$"
)
"""Names that are kept. conda has more, which may hold the tokens of channels and say nothing of what is computed."""
_GIT_SECONDS = 20.0
_SUFFIX = ".zip"
_HEADER = MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
"""Of bytecode that Python takes without a look at the source (PEP 552), which the digest of the archive vouches for."""


def take(run: Path, modules: Sequence[str] = (), into: Path | None = None) -> Path:
    """Put the packages into an archive of a run folder, unless the same one is there, and note what they run with.

    Only their owner may write to it.

    Args:
        run: folder.
        modules: that jobs load, for the note.
        into: folder for another archive, which jobs run in place of the one in the run folder.

    Returns:
        The archive, for PYTHONPATH.

    Raises:
        UserError: there is an archive with other files than it should have.
    """
    contents = _contents()
    final = _place(RunFiles(run).slurm, contents)
    _write(contents, run, final)
    _note_environment(run, final.stem, modules)
    if into is not None:
        final = _place(into, contents)
        _write(contents, into, final)
    return final


def place(run: Path, into: Path | None = None) -> tuple[Path, str]:
    """The archive that `take` would make now, and its digest; a word for the digest of one that is still to be made."""
    code = _place(into or RunFiles(run).slurm, _contents())
    return code, digest(code) if code.is_file() else "DIGEST"


def digest(code: Path) -> str:
    """Digest of an archive that `take` has made."""
    return integrity.sha256(code.read_bytes())


def _write(contents: Mapping[str, bytes], root: Path, final: Path) -> None:
    """Put the archive below `root`, unless it is there."""
    storage.make_below(root, final.parent)
    if final.is_symlink() or final.exists():
        _refuse_changed(contents, final)
        return
    with integrity.for_owner_alone():
        storage.put(final, _archive(final.name, contents))
    integrity.others_cannot_write(final)


def _archive(name: str, contents: Mapping[str, bytes]) -> bytes:
    """The archive with files and bytecode. It is kept in the user's cache, as compiling takes some seconds."""
    kept = cache_folder() / "code" / name
    with suppress(OSError, UserError):
        trust.refuse_replaceable(kept, "")
        return kept.read_bytes()
    data = _pack(name, contents)
    with suppress(OSError, UserError), integrity.for_owner_alone():
        kept.parent.mkdir(parents=True, exist_ok=True)
        for old in kept.parent.glob(f"*{_SUFFIX}"):
            old.unlink()
        storage.put(kept, data)
    return data


def _pack(name: str, contents: Mapping[str, bytes]) -> bytes:
    """The archive, made anew."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in contents.items():
            archive.writestr(zipfile.ZipInfo(file), data, zipfile.ZIP_DEFLATED)
        for file, data in _bytecode(name, contents):
            archive.writestr(zipfile.ZipInfo(file), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _bytecode(name: str, contents: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files with bytecode; a traceback has the name of the archive before that of a file."""
    for file, data in contents.items():
        if file.endswith(".py"):
            code = compile(data, f"{name}/{file}", "exec", dont_inherit=True, optimize=0)
            # Later versions of the format refer to objects, and the same code has several forms.
            yield f"{file}c", _HEADER + marshal.dumps(code, 2)


def _refuse_changed(contents: Mapping[str, bytes], final: Path) -> None:
    """A `UserError` where an archive is not what it should be."""
    if odd := _difference(contents, final):
        raise UserError(
            f"{final} has changed since the code was copied to it ({odd}); find out by whom, end the jobs that run it, "
            "remove the file, and submit again"
        )


def _difference(contents: Mapping[str, bytes], final: Path) -> str:
    """Difference of an archive from what should be in it, in words; "" where there is none."""
    if final.is_symlink() or not final.is_file():
        return "it is not a file"
    data = final.read_bytes()
    if data == _archive(final.name, contents):
        return ""
    # Another machine may have compressed it otherwise.
    wanted = {**contents, **dict(_bytecode(final.name, contents))}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            odd = sorted(wanted.keys() ^ set(names))
            odd += [name for name in names if names.count(name) > 1]
            odd = odd or [name for name in wanted if archive.getinfo(name).file_size != len(wanted[name])]
            odd = odd or [name for name in wanted if archive.read(name) != wanted[name]]
    except (zipfile.BadZipFile, OSError, zlib.error) as error:
        return f"it cannot be read: {error}"
    return f"{odd[0]!a} was changed, added or removed" if odd else ""


def _place(folder: Path, contents: Mapping[str, bytes]) -> Path:
    digest = xxhash.xxh3_128(f"{sys.implementation.name} {platform.python_version()}".encode())
    for name, data in sorted(contents.items()):
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return folder / jobs.CODE / f"{digest.hexdigest()[:16]}{_SUFFIX}"


def _contents() -> dict[str, bytes]:
    """All files that the archive has, by name, but for bytecode: they are read once, so that the hash is theirs."""
    if (source := imports.archive()) is not None:
        with zipfile.ZipFile(source) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith(".pyc")}
    code = {name: imports.packaged_folder(name) for name in ("pipeline", "slurm")}
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
