"""The files of containers/: both describe the same image, and what it is built from is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "containers"
SECTIONS = {"arguments", "files", "post", "environment", "labels", "test"}


def dockerfile() -> list[list[tuple[str, str]]]:
    """Instructions with their arguments, by stage; those before the first stage are the first entry."""
    text = re.sub(r"(?m)^#.*\n", "", (FOLDER / "Dockerfile").read_text()).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = [[]]
    for line in text.splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            if word == "FROM":
                stages.append([])
            stages[-1].append((word, " ".join(rest.split())))
    return stages


def definition() -> list[dict[str, list[str]]]:
    """Lines by section and stage of the file for Apptainer; "" has the head of a stage."""
    stages: list[dict[str, list[str]]] = []
    section = ""
    for line in (FOLDER / "pipeline.def").read_text().splitlines():
        if line.startswith("Bootstrap:"):
            stages.append({})
            section = ""
        if line.startswith("%"):
            section = line[1:]
        elif line.strip() and not line.startswith("#"):
            stages[-1].setdefault(section, []).append(line.strip())
    return stages


def install_steps(lines: list[str]) -> list[list[str]]:
    """Arguments of install.sh; those of the build as NAME, which both files write differently."""
    steps = [shlex.split(part) for line in lines for part in re.split(r" && ", line) if "install.sh" in part]
    return [[re.sub(r"^\$\{(\w+)\}$|^\{\{ (\w+) \}\}$", r"\1\2", word) for word in step] for step in steps]


def arguments(lines: list[str]) -> dict[str, str]:
    found = [line.partition("=") for line in lines]
    return {name: value for name, _, value in found}


def test_both_files_describe_the_same_image() -> None:
    (before, build, final), (first, last) = dockerfile(), definition()
    for stage, other in ((build, first), (final, last)):
        assert install_steps([rest for word, rest in stage if word == "RUN"]) == install_steps(other["post"])
        given = arguments([rest for word, rest in [*before, *stage] if word == "ARG"])
        assert arguments(other["arguments"]).items() <= given.items()
    # `Name value` there, `name="value"` here; and words of `export` are those of ENV.
    text = " ".join(rest for word, rest in final if word == "LABEL")
    labels = dict(word.split("=") for word in shlex.split(text))
    for line in last["labels"]:
        name, value = line.split(maxsplit=1)
        assert re.sub(r"\{\{ (\w+) \}\}", r"${\1}", value) == labels.pop(name)
    assert not labels
    assert [f"export {rest}" for word, rest in final if word == "ENV"] == last["environment"]


def test_sections_are_those_that_apptainer_knows() -> None:
    for stage in definition():
        assert {section.split()[0] for section in stage if section} <= SECTIONS
        head = dict(line.split(": ") for line in stage[""])
        assert head["Bootstrap"] == "docker"
        used = set(re.findall(r"\{\{ (\w+) \}\}", str(stage)))
        assert used <= set(arguments(stage["arguments"]))


def test_the_build_gets_what_the_package_is_built_from_and_nothing_else() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[1] == "*"
    for name in allowed:
        assert list(ROOT.glob(name)), name
    copied = {line.split()[0] for line in definition()[0]["files"]}
    assert copied == {name.removesuffix("/*.txt") for name in allowed}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"], *wheel["shared-data"]} <= allowed


def test_no_version_of_a_package_is_written_by_hand() -> None:
    for file in (FOLDER / "Dockerfile", FOLDER / "pipeline.def", FOLDER / "install.sh"):
        assert "==" not in file.read_text()


def test_the_final_user_is_a_number_and_not_root() -> None:
    users = [rest for word, rest in dockerfile()[-1] if word == "USER"]
    assert users and users[-1].isdecimal() and users[-1] != "0"


def test_the_shell_accepts_the_script() -> None:
    subprocess.run(["sh", "-n", str(FOLDER / "install.sh")], check=True)
    done = subprocess.run([str(FOLDER / "install.sh"), "other"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: " in done.stderr


def test_base_images_without_digests_are_refused_where_digests_are_asked_for() -> None:
    digest = "@sha256:" + "0" * 64
    cases = {
        "": False,
        "BASE=debian:12 BUILD_BASE=debian:12": False,
        f"BASE=debian{digest}": False,
        f"BUILD_BASE=debian{digest} XBASE=debian{digest}": False,
        f"BASE=debian{digest} BUILD_BASE=debian{digest[:-1]}": False,
        f"BASE=debian{digest} EXTRAS=te BUILD_BASE=debian{digest}": True,
    }
    for given, accepted in cases.items():
        for asked in (["DIGESTS=1"], []):
            command = ["make", "--silent", "image", "ENGINE=true", f"IMAGE_ARGS={given}", *asked]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert (done.returncode == 0) is (accepted or not asked), (given, asked, done.stderr)
            assert done.returncode == 0 or "@sha256:DIGEST" in done.stderr
