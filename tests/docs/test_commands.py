"""Every command in the README and in docs/ is run: lines that begin with `$ ` in blocks marked `console`.

They run without a shell, in a folder with a finished run of a tiny `quickstart.yaml`, so that commands about it take
seconds. A block that is meant to fail is marked with its exit code: `console exit=2`; one that needs a cluster with
`console slurm`, and is run by `tests/slurm/test_docs.py`. Commands that set up a machine (make, git, pip) are checked
without being run. A block marked `yaml NAME` is the file NAME in that folder. A server goes on until its page ends, on
a free port: what is asked of port 5000 is asked of that.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from pipeline.cli.main import main
from pipeline.config.load import load
from pipeline.train.distributed.process_group import destroy
from slurm.local.stages import run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# The shipped file with everything made small; the keys are replaced, never added.
TINY = f"""\
include: {ROOT / "configs/quickstart.yaml"}
launch: {{threads: 1}}
data:
  sources:
    - name: stdlib
      paths: ["${{sysconfig:stdlib}}/json/*.py", "${{sysconfig:stdlib}}/email/*.py"]
  splits: {{heldout: 0.3}}
  preprocess: {{workers: 1}}
tokenizer: {{train: {{vocab_size: 300}}}}
model: {{layers: 1, dim: 32, heads: 2, kv_heads: 1, ffn_dim: 64}}
train:
  duration: 3 steps
  sequence_length: 64
  batch_size: 2
  schedule: {{warmup: 1 steps}}
  validation: {{every_steps: 3, samples: 2}}
  checkpoint: {{every_steps: 1}}
generate: {{max_tokens: 8}}
"""


@dataclass(frozen=True)
class Command:
    """A command line of a page."""

    page: Path
    line: int
    text: str
    exit_code: int
    slurm: bool
    """Whether it needs a cluster."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: $ {self.text}"


def commands(page: Path) -> list[Command]:
    found: list[Command] = []
    exit_code: int | None = None
    slurm = False
    unfinished = ""
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if fence := re.match(r"\s*```(.*)", line):
            words = fence[1].split()
            opens = exit_code is None and words[:1] == ["console"]
            slurm = opens and "slurm" in words[1:]
            options = dict(word.split("=") for word in words[1:] if word != "slurm") if opens else {}
            assert options.keys() <= {"exit"}, f"{page.name}:{number}: unknown annotation {options}"
            exit_code = int(options.get("exit", 0)) if opens else None
        elif exit_code is not None and (unfinished or line.startswith("$ ")):
            text = unfinished + line.removeprefix("$ ").strip()
            unfinished = text[:-1] if text.endswith("\\") else ""
            if not unfinished:
                found.append(Command(page, number, text, exit_code, slurm))
    assert not unfinished
    return found


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `quickstart.yaml` and its finished run."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "configs").mkdir()
    for name in ("quickstart.yaml", "configs/quickstart.yaml"):
        (folder / name).write_text(TINY)
    with contextlib.chdir(folder):
        run(load(Path("quickstart.yaml")))
    return folder


TIERS = {
    **dict.fromkeys(("README.md", "llama3-8b.md", "report.md", "serving.md", "slurm.md"), pytest.mark.guard),
    **dict.fromkeys(("planning.md", "long-context.md"), pytest.mark.slow),
}
"""Pages whose commands take long; what they call is in other tests as well."""


@pytest.mark.guard
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=TIERS.get(page.name, ())) for page in PAGES if commands(page)],
)
def test_commands_of(page: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_commands(finished, [command for command in commands(page) if not command.slurm], tmp_path / "folder", capfd)


def run_commands(finished: Path, wanted: Sequence[Command], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The commands of a page in order, since later ones may use what earlier ones wrote."""
    shutil.copytree(finished, folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    for page in {command.page for command in wanted}:
        for name, content in re.findall(r"^```yaml (\S+)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            (folder / name).write_text(content)
    url = ""
    with contextlib.ExitStack() as stack:
        for command in wanted:
            words = shlex.split(command.text, comments=True)
            match words:
                case ["make", *targets]:
                    _check_exit(ROOT, ["make", "--dry-run", *targets], command.exit_code, str(command), capfd)
                case ["git", "clone", _]:
                    pass
                case ["pip", "install", *wanted]:
                    _check_requirements(wanted, str(command))
                case ["python", "-m", "slurm.devcluster", *_] | ["eval", _]:
                    pass  # the cluster of the tests, which is up
                case ["cd", _]:
                    # Into the clone: the folder where everything runs already.
                    pass
                case ["pipeline", "serve", *_]:
                    url = stack.enter_context(_served(folder, words))
                case ["curl", *_]:
                    asked = [word.replace("localhost:5000", url.removeprefix("http://")) for word in words]
                    _check_exit(folder, [*asked, "--silent", "--show-error"], command.exit_code, str(command), capfd)
                case ["pipeline", *_]:
                    _check_exit(folder, words, command.exit_code, str(command), capfd)
                case _:
                    pytest.fail(f"{command}: this test does not know how to check that; teach it or change the page")


def test_the_parser_sees_commands() -> None:
    """Nothing above would fail if no command was ever found."""
    assert [command.text for command in commands(ROOT / "README.md")][:1] == ["make quickstart"]
    assert {command.exit_code for command in commands(ROOT / "docs/config.md")} == {0, 2}


def _check_exit(folder: Path, words: list[str], wanted: int, label: str, capfd: pytest.CaptureFixture[str]) -> None:
    if words[:2] == ["pipeline", "plan"]:
        destroy()
    if words[0] == "pipeline":
        # In this process: a new one would spend its time on imports. tests/cli/test_main.py starts real ones.
        with contextlib.chdir(folder), mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
    else:
        code = subprocess.run(words, cwd=folder).returncode
    out, err = capfd.readouterr()
    assert code == wanted, f"{label}\nexit code {code}\n{out}{err}"
    assert "Traceback" not in err, f"{label}\n{err}"


@contextlib.contextmanager
def _served(folder: Path, words: list[str]) -> Iterator[str]:
    """A server that runs until the end of the page, on a port that is free; yields its URL.

    Its key is in the file `header`, for curl.
    """
    key = secrets.token_hex(16)
    (folder / "header").write_text(f"Authorization: Bearer {key}\n")
    command = [sys.executable, "-m", *words, "--port", "0"]
    environment = os.environ | {"PIPELINE_API_KEY": key}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            found = next((each for line in process.stdout if (each := re.search(r"http://\S+", line))), None)
            assert found, "it ended without an address"
            yield found[0]
            process.terminate()
            assert process.wait(60) == 0, process.stdout.read()
        finally:
            process.kill()


def _check_requirements(wanted: list[str], label: str) -> None:
    """`pip install` names this project and extras that it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in wanted:
        if word.startswith("-"):
            continue
        named = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?", word)
        assert named and named[1] in (".", project["name"]), f"{label}: {word}"
        extras = set(named[2].split(",")) if named[2] else set()
        assert extras <= project["optional-dependencies"].keys(), f"{label}: {word}"
