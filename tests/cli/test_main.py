from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pipeline import __version__
from pipeline.cli.main import main
from pipeline.common.errors import NumericalError, Stopped, UnsavedError, UserError
from pipeline.config.load import dump, load
from tests.config.runfile import MINIMAL, write

HEAVY = {
    "torch",
    "datasets",
    "pyarrow",
    "numpy",
    "transformers",
    "tokenizers",
    "pandas",
    "submitit",
    "obstore",
}


def pipeline(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *arguments]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "PYTHONPATH": path})


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process; returns exit code, output and error output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeline", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        assert isinstance(left.value.code, int)
        return (left.value.code, *capfd.readouterr())

    return run


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """An interrupted command ignores further interrupts, which must not last beyond the test."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stands in for `slurm.local.stages`: what is tested is what the command line makes of what a stage raises."""
    write(tmp_path)
    module = types.ModuleType("slurm.local.stages")
    monkeypatch.setitem(sys.modules, "slurm.local.stages", module)
    return module


COMMANDS = [
    *("", "preprocess", "train", "eval", "run", "generate", "init"),
    *("config", "config show", "config keys", "config schema", "data", "data inspect", "data verify"),
    *("data plan", "data where", "data when"),
    *(f"checkpoint {name}".strip() for name in ("", "list", "show", "verify", "prune", "average", "export")),
]


def test_help_imports_nothing_heavy() -> None:
    """In a process of its own, since the tests here import everything."""
    probe = f"""
import sys
from pipeline.cli.main import main
for command in {COMMANDS!r}:
    sys.argv = ["pipeline", *command.split(), "--help"]
    try:
        main()
    except SystemExit as left:
        assert not left.code
print("imported:", *sorted({{name.split(".")[0] for name in sys.modules}}))
"""
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    imported = set(result.stdout.split("imported:")[1].split())
    assert "typer" in imported
    assert HEAVY & imported == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(call: Callable[..., tuple[int, str, str]], command: str) -> None:
    code, out, _ = call(*command.split(), "--help")
    assert code == 0
    assert f"Usage: pipeline {command}".strip() in out


def test_version() -> None:
    assert pipeline("--version").stdout == f"pipeline {__version__}\n"


def test_bad_run_file_is_one_message_and_exit_2(tmp_path: Path) -> None:
    path = write(tmp_path)
    result = pipeline("train", str(path), "train.bach_size=3", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: run.yaml has a problem:\n")
    assert "command line: train.bach_size: unknown key; did you mean train.batch_size?" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_folder_stands_for_what_it_was_trained_with(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    trained = dump(load(write(tmp_path), ["train.precision.compute=fp32"]))
    (tmp_path / "run/config.yaml").write_text(trained)
    code, out, err = call("config", "show", str(tmp_path / "run"), "train.batch_size=3")
    assert code == 0, err
    assert "compute: fp32" in out and "batch_size: 3" in out


def test_config_show_prints_sections_alone(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = str(write(tmp_path))
    words = ("train.optimizer", "run", "train.batch_size", "train.batch_size=3")
    code, out, err = call("config", "show", file, *words)
    assert code == 0, err
    shown = yaml.safe_load(out)
    assert shown.keys() == {"train", "run"} and shown["train"].keys() == {"optimizer", "batch_size"}
    assert shown["train"]["batch_size"] == 3 and "lr" in shown["train"]["optimizer"]
    code, _, err = call("config", "show", file, "train.nothing")
    assert code == 2 and "train.nothing: there is no key 'nothing'; the section has " in err
    assert call("config", "show", file, "train.batch_size.x")[0] == 2


@pytest.mark.parametrize("command", ["preprocess", "train", "eval", "run", "generate", "config show"])
def test_missing_run_file(call: Callable[..., tuple[int, str, str]], command: str) -> None:
    code, _, err = call(*command.split(), "nowhere.yaml")
    assert code == 2
    assert "error: no run file or run folder nowhere.yaml" in err


def test_an_unknown_option_is_answered_with_the_key(call: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = call("train", "run.yaml", "--micro-batch-size", "2")
    assert code == 2
    assert "train.micro_batch_size=VALUE" in " ".join(err.replace("│", " ").split())
    assert call("train", "run.yaml", "--nonsense")[0] == 2


def test_unknown_command_names_the_nearest(call: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = call("trian", "run.yaml")
    assert code == 2
    assert "train" in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("data.x is wrong"), 2, "error: data.x is wrong"),
        (UserError("[red]brackets[/red] stay"), 2, "error: [red]brackets[/red] stay"),
        (NumericalError("not finite"), 77, "error: not finite"),
        (UnsavedError("no room"), 79, "error: no room"),
        (Stopped("stopped at step 3"), 75, "stopped: stopped at step 3"),
        (KeyboardInterrupt(), 130, "interrupted: "),
        (
            OSError(errno.ENOSPC, "No space left on device", "/full/part-0.bin"),
            1,
            "error: /full/part-0.bin: No space left",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "free some space"),
        (
            OSError(errno.EROFS, "Read-only file system", "/ro/x"),
            1,
            "error: /ro/x: Read-only file system; point run.dir",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "check the permissions"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), 1, "error: /x: No such file or directory"),
        (OSError("something about a disk"), 1, "error: something about a disk"),
    ],
)
def test_messages_and_exit_codes(
    call: Callable[..., tuple[int, str, str]], stages: types.ModuleType, error: BaseException, code: int, message: str
) -> None:
    def run(config: object) -> None:
        raise error

    stages.run = run  # type: ignore[attr-defined]
    got, out, err = call("run", "run.yaml")
    assert got == code
    assert message in err
    assert err.count("\n") == 1, "one message"
    assert out == ""


def test_mistakes_of_the_program_keep_their_traceback(
    call: Callable[..., tuple[int, str, str]], stages: types.ModuleType
) -> None:
    def run(config: object) -> None:
        raise KeyError("what")

    stages.run = run  # type: ignore[attr-defined]
    code, _, err = call("run", "run.yaml")
    assert code == 1
    assert "Traceback" in err
    assert "KeyError: this is a bug in the program" in err


def test_debug_shows_the_traceback_of_a_user_error(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_DEBUG", "1")
    code, _, err = call("run", "nowhere.yaml")
    assert code == 2
    assert "Traceback" in err
    assert "error: no run file" in err


@pytest.mark.first(1)
@pytest.mark.parametrize("arguments", [["config", "schema"], ["config", "show", "quickstart.yaml"]])
def test_closed_pipe_is_quiet(arguments: list[str]) -> None:
    """Both with more output than a buffer holds, and with less."""
    read, write_end = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipeline", *arguments]
    with os.fdopen(write_end) as out:
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_the_output() -> None:
    command = [sys.executable, "-m", "pipeline", "config", "schema"]
    with open("/dev/full", "w") as out:
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 1
    assert result.stderr.startswith("error: No space left on device; free some space")
    assert "Traceback" not in result.stderr


def test_options_stand_for_config_keys(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    seen = []
    module = types.ModuleType("pipeline.eval.text")
    module.continue_prompt = lambda config, step, **_: seen.append((config.generate, step))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.eval.text", module)
    call("generate", "run.yaml", "generate.top_p=0.5", "--prompt", "${x: ???", "--top-k", "5", "--step", "7")
    options, step = seen[0]
    assert (options.prompt, options.top_k, options.top_p, options.temperature, step) == ("${x: ???", 5, 0.5, 0.8, 7)


def test_stages_of_data_need_no_section_about_training(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, stages: types.ModuleType
) -> None:
    write(tmp_path, MINIMAL.partition("model:")[0])
    seen = []
    stages.preprocess = lambda config, **_: seen.append(config.data.sources[0].name)  # type: ignore[attr-defined]
    assert call("preprocess", "run.yaml")[0] == 0 and seen == ["words"]
    assert call("curate", "run.yaml", "--status")[2].startswith("error: data.curate")
    code, _, error = call("train", "run.yaml")
    assert code == 2 and "model: required" in error and "train: required" in error
    # The length of packs is that of the training's windows.
    code, _, error = call("preprocess", "run.yaml", "data.loader.packing=best_fit")
    assert code == 2 and "train: required" in error and "model: required" not in error
    code, _, error = call("preprocess", "run.yaml", "modle.layers=2")
    assert code == 2 and "modle" in error
