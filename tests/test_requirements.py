"""The locked requirements: complete, each package once, with hashes and without addresses."""

from __future__ import annotations

import http.server
import importlib.util
import json
import re
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = ("build", "run", "dev", "cuda")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def entries(file: str) -> dict[str, tuple[Requirement, list[str]]]:
    """The locked requirements of a file with their hashes, by name."""
    text = (ROOT / "requirements" / f"{file}.txt").read_text()
    text = re.sub(r"(?m)^#.*\n", "", text).replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        requirement, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
        assert hashes and all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes), line
        parsed = Requirement(requirement)
        assert canonicalize_name(parsed.name) not in found, parsed.name
        found[canonicalize_name(parsed.name)] = parsed, hashes
    return found


def pin(requirement: Requirement) -> str:
    (found,) = requirement.specifier
    assert found.operator == "=="
    return found.version


LOCKED = {file: entries(file) for file in FILES}


def test_a_package_is_locked_once_to_a_version() -> None:
    names = [name for file in FILES for name in LOCKED[file]]
    assert len(names) == len(set(names)) > 100
    for file in FILES:
        for requirement, _ in LOCKED[file].values():
            assert pin(requirement)
            assert requirement.url is None


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (PYPROJECT["build-system"]["requires"], ["build"]),
        (PROJECT["dependencies"], ["build", "run"]),
        (PROJECT["optional-dependencies"]["dev"], ["build", "run", "dev"]),
    ],
    ids=["build", "run", "dev"],
)
def test_what_is_required_is_locked(wanted: list[str], files: list[str]) -> None:
    locked = {name: entry for file in files for name, entry in LOCKED[file].items()}
    for each in map(Requirement, wanted):
        requirement, _ = locked[canonicalize_name(each.name)]
        assert each.specifier.contains(pin(requirement)), each
        for platform in ("linux", "darwin"):
            for machine in ("x86_64", "aarch64"):
                environment = {
                    "sys_platform": platform,
                    "platform_system": platform.capitalize(),
                    "platform_machine": machine,
                    "python_version": "3.11",
                    "python_full_version": "3.11.7",
                }
                if each.marker is None or each.marker.evaluate(environment):
                    assert requirement.marker is None or Marker(str(requirement.marker)).evaluate(environment)


def test_isolated_builds_use_the_locked_version() -> None:
    (build,) = PYPROJECT["build-system"]["requires"]
    assert Requirement(build).specifier == LOCKED["build"]["hatchling"][0].specifier
    # hatchling asks for it when pip builds an editable install, which `make` does without isolation.
    assert "editables" in LOCKED["build"]


def test_cuda_is_apart() -> None:
    """A machine with the CPU build must not download gigabytes."""
    apart = re.compile(r"(nvidia-|cuda-|triton$)")
    assert all(apart.match(name) and requirement.marker for name, (requirement, _) in LOCKED["cuda"].items())
    assert not [name for file in ("build", "run", "dev") for name in LOCKED[file] if apart.match(name)]
    assert {"triton", "nvidia-nccl-cu13"} <= LOCKED["cuda"].keys()


def test_no_addresses() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        assert not re.search(r"://|--(extra-)?index-url|--find-links|@ |/", path.read_text()), path.name


def test_make_installs_nothing_else() -> None:
    text = (ROOT / "Makefile").read_text()
    assert text.count("pip install") == 2, "into .venv, and below into the environments of another torch"
    flags = re.search(r"(?m)^PIP := .* -m pip install (.*)", text)
    assert flags and {"--no-deps", "--no-build-isolation"} <= set(flags[1].split())
    assert re.search(r"(?m)^LOCKED := \$\(PIP\) --require-hashes$", text)
    assert re.findall(r"\$\(PIP\) (?!--require-hashes)(.*)", text) == ["-e ."]
    assert sorted(re.findall(r"\$\(LOCKED\) -r requirements/(\w+)\.txt", text)) == sorted(FILES)


def test_another_torch_has_an_environment_of_its_own() -> None:
    """What is locked is there as it is, all but torch; what pip then picks for that torch goes nowhere else."""
    command = ["make", "--dry-run", "--always-make", "test-torch", "TORCH=2.11.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert all(line.startswith(".venv-torch-2.11.0/bin/python -m pip install ") for line in installs)
    locked, own, torch = (set(line.split()) for line in installs)
    assert {"--no-deps", "--no-build-isolation", "--require-hashes", ".venv-torch-2.11.0/locked.txt"} <= locked
    assert {"--no-deps", "--no-build-isolation", "."} <= own
    assert '"torch==2.11.0"' in torch
    (select,) = (line for line in lines if line.startswith("sed "))
    made = subprocess.run(
        ["sh", "-c", select.rpartition(">")[0]], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    wanted = [line for file in ("build", "run", "dev") for line in _lines(file)]
    torchs = [number for number, line in enumerate(wanted) if line.startswith("torch==")]
    (first,) = torchs
    last = next(number for number in range(first, len(wanted)) if not wanted[number].endswith("\\"))
    assert made.splitlines() == wanted[:first] + wanted[last + 1 :]


def _lines(file: str) -> list[str]:
    return (ROOT / "requirements" / f"{file}.txt").read_text().splitlines()


def test_pip_is_locked_and_installed_first() -> None:
    assert "pip" in LOCKED["build"]
    installed = re.findall(r"\$\(LOCKED\) -r requirements/(\w+)\.txt", (ROOT / "Makefile").read_text())
    in_images = re.findall(r"(?m)^ *locked (\w+)$", (ROOT / "containers/install.sh").read_text())
    assert installed[0] == in_images[0] == "build"


def test_the_audit_asks_about_every_locked_version(capsys: pytest.CaptureFixture[str]) -> None:
    """A service in the place of osv.dev, with two pages of advisories for one version of torch."""
    spec = importlib.util.spec_from_file_location("audit", ROOT / "requirements/audit.py")
    assert spec is not None and spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    torch = pin(LOCKED["run"]["torch"][0])
    asked: set[tuple[str, str]] = set()

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            results: list[dict[str, object]] = []
            for each in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]:
                asked.add((each["package"]["name"], each["version"]))
                assert each["package"]["ecosystem"] == "PyPI"
                if (each["package"]["name"], each["version"]) != ("torch", torch):
                    results.append({})
                elif "page_token" not in each:
                    results.append({"vulns": [{"id": "CVE-1"}], "next_page_token": "more"})
                else:
                    results.append({"vulns": [{"id": "CVE-2"}]})
            body = json.dumps({"results": results}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Service) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{service.server_port}"
        codes = [
            audit.main(service=address, accepted=dict.fromkeys(accepted, "not called"))
            for accepted in ((), ("CVE-1",), ("CVE-1", "CVE-2"), ("CVE-1", "CVE-2", "CVE-3"))
        ]
        service.shutdown()
    assert codes == [1, 1, 0, 1]
    assert asked == {(requirement.name, pin(requirement)) for file in FILES for requirement, _ in LOCKED[file].values()}
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"torch {torch}: ") and "CVE-1" in first and "CVE-2" in first
    assert f"{len(asked)} locked packages" in last
