"""What is printed obeys nobody but us: control characters of files, hosts and logs are spelled out."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from pipeline.cli.main import main
from pipeline.common.console import (
    VERBOSE,
    Console,
    alarm,
    detail,
    echo,
    let_go_of_terminal,
    progress,
    say,
    spell_out_what_cannot_be_encoded,
    verbatim,
    visible,
    visible_log,
)
from pipeline.config.parsing.document import parse, render
from tests import tiny

ROOT = Path(__file__).parents[2]
EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b8m\u202edeb\u2066\r\x7f[red]m[/red][link=x]:bomb:"
SHOWN = r"a\u001b]0;owned\u0007\u001b[2J\u009b8m\u202edeb\u2066\u000d\u007f[red]m[/red][link=x]:bomb:"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
OURS = re.compile("\x1b\\[\\??[0-9;]*[mhlAK]|\r\x1b|\r$")
"""Colours and the cursor of progress bars, which are rich's; none is in `EVIL`."""


def test_text() -> None:
    assert visible(EVIL) == SHOWN
    assert visible("line\n\tß漢🙂👨‍👩‍👧 שלום\n") == "line\n\tß漢🙂👨‍👩‍👧 שלום\n"
    assert visible("not\udcff UTF-8") == r"not\udcff UTF-8"
    assert UNSAFE.search(visible("".join(map(chr, range(0x3000))))) is None
    assert visible_log("\x1b[1;31mred\x1b[0m\r\n 1%\r 2%\x1b[A\n") == "red\n 1%\n 2%\\u001b[A\n"


def test_what_is_json_stays_it() -> None:
    value = {EVIL: [EVIL]}
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value)):
        assert json.loads(visible(text)) == value


def test_what_is_a_run_file_stays_it() -> None:
    value = {"name": EVIL, "plain": "ß"}
    text = render(value)
    assert visible(text) == text
    assert parse(text, "x").value == value
    assert render({"plain": "ß"}) == "plain: ß\n"


def printed(*objects: object, **how: Any) -> str:
    console = Console(file=io.StringIO(), width=300, force_terminal=True, color_system="standard", highlight=False)
    console.print(*objects, **how)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_our_own_styles_are_kept() -> None:
    assert printed(Text("red", style="red")) == "\x1b[31mred\x1b[0m\n"
    assert printed(Text("\x1b[0mred", style="red")) == "\x1b[31m\\u001b[0mred\x1b[0m\n"
    console = Console(file=io.StringIO(), force_terminal=True)
    with Progress(console=console) as bar:
        bar.add_task("x")
    assert "\x1b[?25l" in console.file.getvalue()  # type: ignore[attr-defined]


def test_everything_that_rich_prints() -> None:
    table = Table("x", title=EVIL, caption=EVIL)
    table.add_row(EVIL)
    table.add_row(Text(EVIL))
    text = OURS.sub("", printed(table))
    assert UNSAFE.search(text) is None
    assert text.count(SHOWN) == 3
    assert f"│ {SHOWN} │" in text
    assert len({len(line) for line in text.splitlines() if line[0] in "│┏┡└"}) == 1
    for each in (printed(EVIL), printed(EVIL, end=EVIL), printed(EVIL, style="bold", soft_wrap=True)):
        assert SHOWN in OURS.sub("", each)
        assert UNSAFE.search(OURS.sub("", each)) is None


def test_lines_and_errors(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    say(Console(), EVIL)
    alarm("error:", EVIL)
    echo(EVIL)
    echo(EVIL, error=True)
    with progress(Console(), EVIL, 1):
        pass
    for text in capfd.readouterr():
        assert "\\u009b" in text
        assert UNSAFE.search(OURS.sub("", text)) is None


class Screen(io.StringIO):
    """The file of a terminal."""

    def isatty(self) -> bool:
        return True


def test_long_messages_on_a_terminal() -> None:
    """At most 100 columns, no path cut; in a file a message stays one line."""
    path = f"/{'folder/' * 30}file"
    message = f"{'a message of many words ' * 8}{path} {'and more ' * 12}\n  a second line"
    terminal, file = Screen(), io.StringIO()
    say(Console(file=terminal, width=300), message)
    say(Console(file=file), message)
    assert file.getvalue() == f"{message}\n"
    lines = terminal.getvalue().splitlines()
    assert [line.strip() for line in lines if len(line) > 100] == [path]
    assert " ".join(" ".join(lines).split()) == " ".join(message.split()) and lines[-1] == "  a second line"


def test_colours_do_not_make_a_file_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR, as services for tests set it, and jobs inherit it: their logs are searched line by line."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO())
    assert console.is_terminal
    say(console, "a word " * 40)
    assert console.file.getvalue() == f"{'a word ' * 40}\n"  # type: ignore[attr-defined]


def test_a_terminal_of_no_width() -> None:
    """COLUMNS=0: nothing can be shown, and nothing fails."""
    say(Console(file=Screen(), width=0, height=25), "a word " * 40)


def test_texts_as_they_are() -> None:
    """Scripts, JSON, tables and documents: their lines mean something, also on a terminal."""
    text = f"  {{'key':  {'word  ' * 40}}} \n\n#SBATCH {'--option=value ' * 20}"
    terminal = Screen()
    verbatim(Console(file=terminal, width=80), text)
    assert terminal.getvalue() == f"{text}\n"


def test_details_are_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VERBOSE, raising=False)
    console = Console(file=io.StringIO())
    detail(console, "threads")
    monkeypatch.setenv(VERBOSE, "1")
    detail(console, "kernels")
    assert console.file.getvalue() == "kernels\n"  # type: ignore[attr-defined]


def test_output_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal or a file in ASCII: JSON keeps its values, and nothing fails."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    spell_out_what_cannot_be_encoded()
    echo(json.dumps({"path": "é 𝄞"}, ensure_ascii=False))
    Console(width=80).print("é")
    first, second = raw.getvalue().splitlines()
    assert json.loads(first) == {"path": "é 𝄞"} and second == b"\\u00e9"


def test_readers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe of which nobody reads, and a terminal that has hung up: lines and alarms are dropped."""
    pipe, terminal = os.pipe(), pty.openpty()
    for ours, theirs in (pipe, terminal):
        os.close(ours)
        with os.fdopen(theirs, "w", buffering=1) as stream:
            console = Console(file=stream)
            for _ in range(2):
                say(console, "a line")
            monkeypatch.setattr(sys, "stderr", stream)
            alarm("error:", "a message")
            assert not console._buffer, "kept for the next one"
            os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)


def test_a_terminal_that_hangs_up_is_let_go() -> None:
    """What libraries print fails no more, either; another terminal and a file are kept."""
    ours, theirs = pty.openpty()
    kept, others = pty.openpty()
    before = [os.dup(stream) for stream in (0, 1, 2)]
    try:
        for stream, new in zip((0, 1, 2), (theirs, others, theirs), strict=True):
            os.dup2(new, stream)
        os.close(ours)
        assert let_go_of_terminal()
        gone = [os.path.samestat(os.fstat(stream), os.stat(os.devnull)) for stream in (0, 1, 2)]
        echo("text", error=True, flush=True)
        assert not let_go_of_terminal()
    finally:
        for stream, old in zip((0, 1, 2), before, strict=True):
            os.dup2(old, stream)
        for each in (theirs, kept, others, *before):
            os.close(each)
    assert gone == [True, False, True]


def test_nothing_prints_past_it() -> None:
    """A scan of the source: no `print`, no console of rich's own, no direct writes to a stream."""
    allowed = {
        ("pipeline/common/console.py", "print"),
        ("pipeline/common/console.py", "Console"),
        # A protocol between two of our processes, on a pipe.
        ("pipeline/common/limited_child.py", "sys.stdout.buffer.write"),
        ("slurm/notify/webhook.py", "sys.stdout.write"),
        ("pipeline/data/chat/child.py", "sys.stdout.buffer.write"),
        ("slurm/doctor/health.py", "print"),
        # Sanitized by `visible_log`.
        ("slurm/logs/follow.py", "console.file.write"),
    }
    found = set()
    for path in [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("slurm/**/*.py")]:
        text = path.read_text()
        if re.search(r"print|Console\(|sys\.(__)?std|echo|file\.write", text):
            found |= {(path.relative_to(ROOT).as_posix(), call) for call in prints(ast.parse(text))}
    assert found == allowed


def prints(tree: ast.Module) -> Iterator[str]:
    """Calls that print in another way than through `pipeline.common.console`."""
    ours = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "pipeline.common.console"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if re.fullmatch(
                r"print|(traceback|rich)\.print.*|(typer|click)\.s?echo|Console|rich\.console\.Console|get_console"
                r"|(.*console\.file|sys\.(__)?std(out|err)(__)?)(\.buffer)?\.write(lines)?",
                called,
            ) and not (called == "Console" and "Console" in ours):
                yield called


def test_an_error_on_a_terminal(tmp_path: Path) -> None:
    """A real command whose error output is a terminal, with a run file of a stranger."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({EVIL: 1, "run": {"dir": 1, EVIL: 2}}))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pipeline", "train", "run.yaml"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color"}
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with os.fdopen(theirs, "wb", buffering=0) as error:
            process = subprocess.Popen(command, cwd=tmp_path, stdout=error, stderr=error, env=environment)
        written = bytearray()
        with suppress(OSError):  # how Linux says that nobody has the other end open any more
            while piece := terminal.read(2**16):
                written += piece
        assert process.wait() == 2
    text = written.decode().replace("\r\n", "\n")
    assert text.startswith("\x1b[1;31merror:\x1b[0m")
    assert r"a\u001b]0;owned\u0007" in text
    assert UNSAFE.search(OURS.sub("", text)) is None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is done, `run.yaml`, `run` and `data`."""
    root = tmp_path_factory.mktemp("made")
    file = tiny.write_run(root, {"train.duration": "4 steps"})
    for stage in ("preprocess", "train", "eval"):
        done = tiny.pipeline(stage, file)
        assert done.returncode == 0, done.stderr
    return root


def poisoned(value: Any, keys: frozenset[str] | None, key: str = "") -> Any:
    """A JSON value with hostile texts, everywhere or under some keys."""
    if isinstance(value, dict):
        return {name: poisoned(each, keys, name) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, keys, key) for each in value]
    return EVIL if isinstance(value, str) and (keys is None or key in keys) else value


def poison(place: Path, keys: frozenset[str] | None) -> int:
    """Rewrite a JSON file, or all that are below a folder; returns how many have changed."""
    changed = 0
    for path in [path for path in (place, *place.rglob("*")) if path.is_file() and not path.is_symlink()]:
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            whole = False
        except ValueError:
            try:
                lines, whole = [json.loads(path.read_text())], True
            except ValueError:
                continue
        now = [poisoned(line, keys) for line in lines]
        if now != lines:
            path.write_text("".join(json.dumps(each, indent=2 if whole else None) + "\n" for each in now))
            changed += 1
    return changed


COMMANDS = [
    "status run",
    "status run --json",
    "logs run",
    "logs run --first-error",
    "checkpoint list run",
    "checkpoint show run",
    "checkpoint verify run",
    "data inspect data",
    "data verify data",
    "data where run --step 1",
    "data where run --step 1 --json",
    "eval run.yaml --table",
    "config show run/config.yaml",
    "train run.yaml",
    "preprocess run.yaml --status",
    "generate run.yaml",
    "report run --out report.html",
]


NAMES = frozenset({"host", "hostname", "node", "nodes", "user", "job", "reason", "gpu", "device", "source", "git"})


@pytest.fixture(params=["names", "everything"])
def hostile(
    request: pytest.FixtureRequest, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A copy of it whose files somebody else has written."""
    root = tmp_path / "root"
    shutil.copytree(made, root, symlinks=True)
    for path in (root / "run.yaml", root / "run" / "config.yaml"):
        path.write_text(path.read_text().replace(str(made), str(root)))
    if request.param == "names":
        # What is in checkpoints has hashes, and a checkpoint that differs is not looked into.
        assert poison(root / "data", NAMES) + sum(poison(path, NAMES) for path in root.glob("run/*.jsonl")) > 3
    else:
        assert poison(root, None) > 10
    monkeypatch.chdir(root)
    monkeypatch.setenv("FORCE_COLOR", "1")
    yield root


@pytest.mark.slow
def test_hostile_files(hostile: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    shown = 0  # commands that came to the hostile text
    for command in COMMANDS:
        monkeypatch.setattr(sys, "argv", ["pipeline", *command.split()])
        with pytest.raises(SystemExit):
            main()
        for text in capfd.readouterr():
            assert UNSAFE.search(OURS.sub("", text)) is None, (command, text)
            shown += any(form in text for form in (r"a\u001b]0;owned", r"a\x1b]0;owned"))  # ours, and that of repr
    assert shown >= 1
