"""Licences of what the package needs: writes requirements/licences.txt and docs/dependencies.md.

`python requirements/licences.py` in the environment of `make install-dev`. A licence is what the metadata of an
installed package says, as an SPDX expression. What is not installed there keeps its line of `licences.txt`, or is in
`BY_HAND`. A package without either ends the command.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import deque
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
TABLE = FOLDER / "licences.txt"
PAGE = ROOT / "docs/dependencies.md"
MARKS = "<!-- licences: written by `python requirements/licences.py` -->", "<!-- end of licences -->"

BY_HAND = {
    # The metadata has no licence, or a name that fits several; read in the files that come with the package.
    "alabaster": "BSD-3-Clause",
    "chardet": "LGPL-2.1-or-later",
    "colorama": "BSD-3-Clause",
    "cycler": "BSD-3-Clause",
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "docutils": "LicenseRef-Public-Domain AND BSD-2-Clause AND BSD-3-Clause AND 0BSD",
    "fastokens": "Apache-2.0",
    "gitdb": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "numba": "BSD-2-Clause",
    "pyasn1-modules": "BSD-2-Clause",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    **dict.fromkeys(  # no file either: of the team of Sphinx, as sphinxcontrib-jsmath, which has one
        (
            f"sphinxcontrib-{name}"
            for name in ("applehelp", "devhelp", "htmlhelp", "jsmath", "qthelp", "serializinghtml")
        ),
        "BSD-2-Clause",
    ),
    "sqlparse": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "torchao": "BSD-3-Clause",
    "uvloop": "Apache-2.0 OR MIT",
    "word2number": "MIT",
    # Not in the environment of the tests; as their own pages and metadata say.
    "einops": "MIT",
    "fla-core": "MIT",
    "httpx2-jsfetch": "BSD-3-Clause",
    "flash-attn": "BSD-3-Clause",
    "transformer-engine": "Apache-2.0",
}
NOT_HERE = {"fla-core": ["einops"], "flash-attn": ["einops"]}
"""What packages need that are not in the environment of the tests. That of Transformer Engine is not followed."""
NAMES = {
    "3-clause bsd license": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "the bsd 2-clause license": "BSD-2-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "isc license": "ISC",
    "mit license": "MIT",
    "nvidia proprietary software": "LicenseRef-NVIDIA-Proprietary",
    "psfl": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
}
"""What metadata without an SPDX expression says, in lower case."""
SPDX = re.compile(r"\(?(LicenseRef-)?[A-Za-z0-9.-]+\)?( (AND|OR|WITH) \(?[A-Za-z0-9.-]+\)?)*")
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EPL|CDDL)\b")


def normal(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(*files: str) -> dict[str, str]:
    """Versions of locked requirements by package, of `run` and `cuda`, say."""
    text = "\n".join((FOLDER / f"{file}.txt").read_text() for file in files)
    return {normal(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", text)}


def written() -> dict[str, str]:
    """Licences by package, as `licences.txt` has them."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))


def stated(found: Distribution) -> str | None:
    """The SPDX expression of an installed package; None if its metadata has none, and nothing that stands for one."""
    metadata = found.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    short = (metadata.get("License") or "").strip().splitlines()[:1]
    classifiers = [each.rpartition(" :: ")[2] for each in metadata.get_all("Classifier") or () if "License" in each]
    for text in [*short, *(classifiers if len(classifiers) == 1 else ())]:
        if name := NAMES.get(text.lower()):
            return name
        # "BSD" alone and "Dual License" are no identifiers.
        if SPDX.fullmatch(text) and ("-" in text or text in ("MIT", "ISC")):
            return text
    return None


def of_extra(extra: str) -> Iterator[str]:
    """Packages that an extra needs besides the locked ones, on Linux."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left = deque(Requirement(each) for each in project["optional-dependencies"][extra])
    seen, done = set(locked("run", "cuda")), set[tuple[str, ...]]()
    while left:
        wanted = left.popleft()
        name = normal(wanted.name)
        if (name, *wanted.extras) in done:
            continue
        done.add((name, *wanted.extras))
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            requires = NOT_HERE.get(name, [])
        for below in map(Requirement, requires):
            if any(not below.marker or below.marker.evaluate({"extra": each}) for each in ("", *wanted.extras)):
                left.append(below)
        if name not in seen:
            seen.add(name)
            yield name


def main() -> None:
    """Write both files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"run": set(locked("run")), "cuda": set(locked("cuda"))}
    groups |= {extra: set(of_extra(extra)) for extra in project["optional-dependencies"] if extra != "dev"}
    before, found = written(), dict[str, str]()
    for name in sorted(set().union(*groups.values())):
        try:
            licence = BY_HAND.get(name) or stated(distribution(name))
        except PackageNotFoundError:
            licence = before.get(name)
        if licence is None:
            sys.exit(f"error: {name} states no licence; read its files and add it to BY_HAND in {__file__}")
        found[name] = licence
    TABLE.write_text(
        "# Licences of requirements and of those of the extras, as SPDX expressions. Written by licences.py.\n"
        + "".join(f"{name} {licence}\n" for name, licence in found.items())
    )
    page = PAGE.read_text()
    start, end = (page.index(mark) for mark in MARKS)
    PAGE.write_text(f"{page[:start]}{MARKS[0]}\n\n{tables(groups, found)}\n{page[end:]}")


def tables(groups: dict[str, set[str]], licences: dict[str, str]) -> str:
    """The tables of the page: those that ask for more than a notice, all others by licence, and packages by extra."""
    extras = {name: members for name, members in groups.items() if name not in ("run", "cuda")}
    needs = {name: [group for group, members in groups.items() if name in members] for name in licences}
    special = [name for name in licences if COPYLEFT.search(licences[name]) or "Proprietary" in licences[name]]
    lines = ["| package | licence | needed by |", "| --- | --- | --- |"]
    shown = {"run": "the package", "cuda": "the CUDA build of torch"}
    lines += [
        f"| {name} | {licences[name]} | {', '.join(shown.get(each, f'extra `{each}`') for each in needs[name])} |"
        for name in special
    ]
    lines += ["", "| licence | packages |", "| --- | --- |"]
    others = sorted({licences[name] for name in licences if name not in special})
    lines += [
        f"| {licence} | {', '.join(name for name in licences if licences[name] == licence)} |" for licence in others
    ]
    lines += ["", "| extra | installs besides |", "| --- | --- |"]
    lines += [f"| `{extra}` | {', '.join(sorted(members)) or '-'} |" for extra, members in extras.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
