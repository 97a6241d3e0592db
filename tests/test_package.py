"""The wheel, as somebody gets it who has no checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from pipeline import __version__
from tests.repository import files

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, that finds the requirements where this environment has them."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars={"base": str(folder)}))
    # A path file, not an install: the requirements are hundreds of megabytes. The checkout's own editable install is a
    # path file too, and those are not followed from here.
    site.joinpath("requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", f"--python={folder}/bin/python", "install", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-compile"]
    result = subprocess.run([*pip, *offline, str(wheel)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def run(installed: Path, *command: str, cwd: Path, code: int = 0) -> str:
    result = subprocess.run(
        [installed / "bin" / command[0], *command[1:]], capture_output=True, text=True, cwd=cwd, env={"PATH": ""}
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("pipeline", "slurm"):
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert {source for source in sources if not source.startswith("slurm/devcluster/")} <= names
    assert {"pipeline/py.typed", "slurm/py.typed", "pretraining_pipeline.py"} <= names
    assert not [name for name in names if "devcluster" in name]
    shipped = {f"pipeline/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert {"pipeline/configs/quickstart.yaml", "pipeline/configs/starter.yaml"} <= shipped <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    assert [name for name in names if name.endswith(".data/data/share/doc/pretraining-pipeline/plugins.md")]
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def build(source: Path, out: Path) -> dict[str, bytes]:
    """A source archive, and the wheel that is made from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1795737600"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return {file.name: file.read_bytes() for file in out.iterdir()}


@pytest.mark.slow
def test_packages_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    """Also those that are built elsewhere, from the source archive: so it is whole, and what is in it is enough."""
    first = build(ROOT, tmp_path / "first")
    (archive,) = (name for name in first if name.endswith(".tar.gz"))
    with tarfile.open(tmp_path / "first" / archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert not set(files()) - names
    assert build(next((tmp_path / "unpacked").iterdir()), tmp_path / "second") == first
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, (tmp_path / "first").iterdir())],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_bill_of_materials(tmp_path: Path) -> None:
    """Every locked requirement with its hashes and its licence, read here from the lines of the locks.

    That it follows the schema is checked by the program, which fails otherwise.
    """
    command = [sys.executable, str(ROOT / "requirements/sbom.py"), str(tmp_path)]
    subprocess.run(command, capture_output=True, check=True)
    (file,) = tmp_path.iterdir()
    assert file.name == f"pretraining-pipeline-{__version__}.cdx.json"
    bill = json.loads(file.read_text())
    assert bill["metadata"]["component"]["version"] == __version__
    found = {
        (each["name"], each["version"]): {
            value["content"] for reference in each["externalReferences"] for value in reference.get("hashes", ())
        }
        for each in bill["components"]
    }
    wanted: dict[tuple[str, str], set[str]] = {}
    for name in ("run", "cuda"):
        for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines():
            if match := re.match(r"([a-z0-9.-]+)==(\S+)", line):
                latest = wanted.setdefault((match[1], match[2]), set())
            elif match := re.match(r" +--hash=sha256:(\w+)", line):
                latest.add(match[1])
    assert found == wanted
    assert all(each["licenses"] and each["purl"].startswith("pkg:pypi/") for each in bill["components"])


def test_licences() -> None:
    """Every locked requirement has one, and the page has each."""
    lines = (ROOT / "requirements/licences.txt").read_text().splitlines()[1:]
    known = dict(line.split(" ", 1) for line in lines)
    locks = "".join((ROOT / f"requirements/{name}.txt").read_text() for name in ("run", "cuda"))
    missing = set(re.findall(r"(?m)^([a-z0-9.-]+)==", locks)) - known.keys()
    assert not missing, f"run `make licences`: {sorted(missing)}"
    page = (ROOT / "docs/dependencies.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    shown = {(name, row[1]) for row in rows for name in [row[0]]} | {
        (name, row[0]) for row in rows if len(row) == 2 for name in row[1].split(", ")
    }
    assert not known.items() - shown
    # GPL without another choice would be news for whoever passes this on.
    assert not [name for name, licence in known.items() if re.search(r"\bA?GPL", licence) and " OR " not in licence]


def test_the_version_is_that_of_the_tag() -> None:
    """A release is a commit with a tag, whose file has the version."""
    words = ["git", "tag", "--points-at", "HEAD", "--list", "v*", "--sort=-version:refname"]
    tags = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tags:
        pytest.skip("this commit has no tag v*")
    assert tags[0] == f"v{__version__}"


def test_citation() -> None:
    """What the format requires, equal to pyproject.toml; the version is the last one of the changelog."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["cff-version"] == "1.2.0" and cited["message"]
    released = re.search(r"(?m)^## (\d\S*) – (\S+)$", (ROOT / "CHANGELOG.md").read_text())
    assert released and (cited["version"], str(cited["date-released"])) == released.groups()
    assert "dev" in __version__ or cited["version"] == __version__
    keys = (cited["title"], cited["abstract"], cited["authors"], cited["license"], cited["keywords"])
    assert keys == tuple(project[name] for name in ("name", "description", "authors", "license", "keywords"))
    assert re.search(f"^ +Copyright .* {re.escape(cited['authors'][0]['name'])}$", (ROOT / "LICENSE").read_text(), re.M)


@pytest.mark.guard
def test_installed(installed: Path, tmp_path: Path) -> None:
    assert run(installed, "pipeline", "--version", cwd=tmp_path) == f"pipeline {__version__}\n"
    assert "Usage: pipeline" in run(installed, "pipeline", "--help", cwd=tmp_path)
    places = run(
        installed, "python", "-c", "import pipeline, slurm; print(pipeline.__file__, slurm.__file__)", cwd=tmp_path
    )
    assert all(Path(place).is_relative_to(installed) for place in places.split())


@pytest.mark.guard
def test_shipped_run_files_are_found(installed: Path, tmp_path: Path) -> None:
    assert "train:" in run(installed, "pipeline", "config", "show", "quickstart.yaml", cwd=tmp_path)
    run(installed, "pipeline", "init", "my-run", cwd=tmp_path)
    assert (tmp_path / "my-run/run.yaml").read_bytes() == (ROOT / "configs/starter.yaml").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_run_on_own_text(installed: Path, tmp_path: Path) -> None:
    """What docs/tutorial-first-run.md does with a wheel, in a folder with a space, without HOME, PATH or a locale."""
    folder = tmp_path / "a ü"
    folder.joinpath("my text").mkdir(parents=True)
    for number in range(60):
        text = f"Document {number}. " + "The quick brown fox jumps over the lazy dog. " * (20 + number)
        folder.joinpath("my text", f"{number}.txt").write_text(text)
    said = run(installed, "pipeline", "init", "mine", "--from", "starter-small", cwd=folder)
    assert "???" in said and "pipeline run mine/run.yaml" in said
    path = folder / "mine/run.yaml"
    path.write_text(path.read_text().replace("paths: ???", 'paths: ["my text/*.txt"]'))
    assert "60" in run(installed, "pipeline", "preprocess", "mine/run.yaml", "--dry-run", cwd=folder)
    small = ["tokenizer.train.vocab_size=300", "model.layers=1", "model.dim=32", "model.heads=2", "model.ffn_dim=64"]
    small += ["train.sequence_length=32", "train.schedule.warmup=1 steps", "generate.max_tokens=5"]
    small += ["train.checkpoint.every_steps=2", "data.splits.heldout=5 documents", "resume.allow=[schedule]"]
    run(installed, "pipeline", "train", "mine/run.yaml", *small, "train.duration=2 steps", cwd=folder, code=2)
    run(installed, "pipeline", "run", "mine/run.yaml", *small, "train.duration=2 steps", cwd=folder)
    said = run(installed, "pipeline", "run", "mine/run.yaml", *small, "train.duration=4 steps", cwd=folder)
    assert "bits per byte" in said and (folder / "runs/mine/checkpoints/step-00000004").is_dir()
    run(installed, "pipeline", "data", "verify", "runs/mine/data", cwd=folder)
    run(installed, "pipeline", "report", "runs/mine", cwd=folder)
    assert "<svg" in (folder / "runs/mine/report.html").read_text()
    assert "done" in run(installed, "pipeline", "status", "runs/mine", cwd=folder)
    run(installed, "pipeline", "generate", "runs/mine", "--prompt", "The", cwd=folder)
    run(installed, "pipeline", "checkpoint", "export", "runs/mine", "--to", "exported", cwd=folder)
    batch = "from pipeline import api; print(api.Run('runs/mine').batch(3).ids.shape)"
    assert run(installed, "python", "-c", batch, cwd=folder) == "torch.Size([8, 32])\n"
