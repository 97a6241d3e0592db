"""Known vulnerabilities of what is locked: `make audit` asks osv.dev about each version in requirements/*.txt.

Names and versions of packages are sent, nothing else. The database has the advisories of PyPI and GitHub. Exit code 1
if a locked version has one that `ACCEPTED` does not name, or if an entry of `ACCEPTED` is not needed any more.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

FOLDER = Path(__file__).parent
SERVICE = "https://api.osv.dev/v1/querybatch"
SECONDS = 60.0
_BATCH = 500
"""Queries per request; the service allows 1,000."""
ACCEPTED: dict[str, str] = {}
"""By id of an advisory: why it does not concern us, for which SECURITY.md has the rule."""


def locked(folder: Path) -> list[tuple[str, str]]:
    """Names and versions of all locked packages."""
    found = set()
    for file in sorted(folder.glob("*.txt")):
        found |= set(re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s;\\]+)", file.read_text()))
    return sorted(found)


def advisories(packages: list[tuple[str, str]], service: str) -> dict[tuple[str, str], list[str]]:
    """Ids of the advisories of packages that have some."""
    found: dict[tuple[str, str], list[str]] = {}
    queries = [({"package": {"name": n, "ecosystem": "PyPI"}, "version": v}, (n, v)) for n, v in packages]
    while queries:
        batch, queries = queries[:_BATCH], queries[_BATCH:]
        results = _ask(service, [query for query, _ in batch])
        for (query, package), result in zip(batch, results, strict=True):
            ids = [each["id"] for each in result.get("vulns", ())]
            if ids:
                found.setdefault(package, []).extend(ids)
            if token := result.get("next_page_token"):
                queries.append((query | {"page_token": token}, package))
    return found


def _ask(service: str, queries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    body = json.dumps({"queries": queries}).encode()
    with urlopen(Request(service, body, {"Content-Type": "application/json"}), timeout=SECONDS) as answer:
        results: list[dict[str, Any]] = json.load(answer)["results"]
    return results


def main(folder: Path = FOLDER, service: str = SERVICE, accepted: dict[str, str] = ACCEPTED) -> int:
    """Print what was found; returns the exit code."""
    packages = locked(folder)
    found = advisories(packages, service)
    open_ones = {package: ids for package, all_ in found.items() if (ids := sorted(set(all_) - accepted.keys()))}
    for (name, version), ids in open_ones.items():
        print(f"{name} {version}: " + ", ".join(f"https://osv.dev/{each}" for each in ids))
    unneeded = sorted(accepted.keys() - {each for ids in found.values() for each in ids})
    for each in unneeded:
        print(f"{each} is in ACCEPTED, but no locked version has it; remove the entry")
    print(f"{len(packages)} locked packages, {len(open_ones)} with advisories that are not accepted")
    return 1 if open_ones or unneeded else 0


if __name__ == "__main__":
    sys.exit(main())
