"""Profiles of sites: those that ship with the package, and files of the user's own."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from pipeline.common.errors import UserError
from pipeline.common.imports import packaged_folder
from pipeline.config import Config
from pipeline.config.parsing.code_keys import refuse_code_of_others
from pipeline.config.parsing.document import PLACEHOLDER, Problem, parse
from pipeline.config.parsing.problems import secrets_of, translate
from pipeline.config.parsing.schema import dotted, flat
from pipeline.config.slurm import SiteConfig, is_profile_file
from slurm.jobs import Backend
from slurm.site import sbatch_env


def _folder() -> Path:
    return packaged_folder("slurm/profiles")


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(file.stem for file in _folder().glob("*.yaml"))


def site_of(config: Config, backend: Backend = "local", environment: Mapping[str, str] = os.environ) -> SiteConfig:
    """The site that a run sees: its profile, under what the run file and, for jobs of a scheduler, the shell say of it.

    Args:
        config: the run.
        backend: its jobs are to run.
        environment: of the shell that submits, which may name account, partition and qos.

    Raises:
        UserError: as for `load_site`; or others may have written the profile, or options of jobs in the run file.
    """
    refuse_code_of_others(config, "slurm")
    site = load_site(config.slurm.profile, config.slurm.tried)
    found = sbatch_env.resources(environment, site, config.slurm) if backend == "slurm" else {}
    defaults = site.defaults.model_copy(update=found)
    given = config.slurm.gpus_per_node
    gpus = site.gpus_per_node if given is None else given
    return site.model_copy(update={"defaults": defaults, "gpus_per_node": gpus})


def load_site(name: str, tried: Path | None = None) -> SiteConfig:
    """Read and validate a profile.

    Args:
        name: one that ships, or a file: with a `/` in it or `.yaml` at its end.
        tried: where else the file was looked for.

    Raises:
        UserError: there is none, or everything that is wrong in it, a line for each violation.
    """
    file = _find(name, tried)
    try:
        document = parse(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not a UTF-8 text file (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"the profile {file} cannot be read ({error.strerror}); name another one") from None
    problems = list(document.problems)
    plain = document.value if document.value is not None else {}
    if not isinstance(plain, dict):
        raise UserError(f"{file}:1: a profile is a mapping of keys; {_all_keys()}")
    unfilled = {path for path, place in document.places.items() if place.placeholder}
    problems += [
        Problem(document.places[path], f"{dotted(path)} = {PLACEHOLDER}: fill in a value here") for path in unfilled
    ]
    problems += secrets_of(((tuple(key.split(".")), value) for key, value in flat(plain).items()), document.places)
    site: SiteConfig | None = None
    try:
        site = SiteConfig.model_validate(plain)
    except ValidationError as error:
        found = zip(translate(error, SiteConfig, plain, document.places), error.errors(), strict=True)
        problems += [problem for problem, details in found if details["loc"] not in unfilled]
    if problems or site is None:
        problems.sort(key=lambda problem: problem.place.line or 0)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        # The machinery is that of run files, and speaks of one.
        lines = "\n".join(
            f"  {problem}".replace("a run file has the keys", "a profile has the keys") for problem in problems
        )
        raise UserError(f"{file} has {count}:\n{lines}\n{_all_keys()}")
    return site


def _find(name: str, tried: Path | None) -> Path:
    """The file of a profile."""
    if is_profile_file(name):
        file = Path(name).expanduser()
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "is not there"
            if tried is not None:
                what += f" (working directory), and there is no {tried} (folder of the run file) either"
            raise UserError(f"slurm.profile = {name}: the file {what}; {_names()}")
        return file
    if name not in shipped():
        near = difflib.get_close_matches(name, shipped(), n=1)
        guess = f"; did you mean {near[0]}? If not, " if near else "; "
        raise UserError(f"slurm.profile = {name}: no profile has this name{guess}{_names()}")
    return _folder() / f"{name}.yaml"


def _names() -> str:
    return f"those that ship are {', '.join(shipped())}; for a file of your own write its path, like ./site.yaml"


def _all_keys() -> str:
    return f"All keys, with what they mean: {_folder() / 'generic.yaml'}"
