"""Attacks of another user of the same group on servers and on shared run folders; part of `attack_network.py`.

The group may write to the run folder, and the attacker swaps links in it as fast as possible while its owner trains,
removes checkpoints and reports. Another run of the owner, which the group may not write to, has to stay as it is.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from attack_victim import IS_ROOT, OTHER, SECONDS, as_other, done, pipeline, said, steps, victim

ROUTES = ("/v1/models", "/openapi.json", "/guess/", "/guess/report", "/guess/newest")
EVERY = ("train.checkpoint.every_steps=5",)
RACES = 3
"""Commands of the owner during each race."""


def users(root: Path) -> None:
    """All attacks."""
    if not IS_ROOT:
        said("another user of the group", "skipped", "only root can take another user's place")
        return
    file = victim(root, "mine")
    done("preprocess", file)
    code, text = done("train", file)
    assert code == 0, text
    servers(root, file)
    links(root)


def servers(root: Path, file: Path) -> None:
    """What the other user gets from `serve` and `report --live`, by their ports, sockets, files and processes."""
    "localhost".encode("idna")  # imports what the other user may not read
    cases = {
        "serve": ("serve", file, "--port", "0"),
        "serve --socket": ("serve", file, "--socket", root / "s.sock"),
        "report --live": ("report", file, "--live"),
        "report --live --socket": ("report", file, "--live", "--socket", root / "l.sock"),
    }
    for name, words in cases.items():
        with pipeline(*words) as process:
            assert process.stdout
            text, end = "", time.monotonic() + SECONDS
            while not re.search(r"until the server ends|unix:\S+\n|error", text) and time.monotonic() < end:
                text += process.stdout.readline()
            port = int(found[1]) if (found := re.search(r"http://127\.0\.0\.1:(\d+)", text)) else 0
            unix = Path(found[1]) if (found := re.search(r"unix:(\S+)", text)) else None
            link = Path(found[1]) if (found := re.search(r"is in (\S+),", text)) else None
            secret = re.split(r"key=|/", link.read_text().strip().rstrip("/"))[-1] if link else ""

            def look(
                port: int = port, unix: Path | None = unix, link: Path | None = link, pid: int = process.pid
            ) -> dict[str, list[str]]:
                got: dict[str, list[str]] = {"answers": [], "read": []}
                for route in ROUTES if port else ():
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                    connection.request("GET", route)
                    status = connection.getresponse().status
                    got["answers"] += [f"{route} {status}"] if status < 400 else []
                if unix is not None:
                    with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                        client.connect(str(unix))
                        got["answers"].append(f"connected to {unix}")
                for each in filter(None, (link, Path(f"/proc/{pid}/environ"), Path(f"/proc/{pid}/mem"))):
                    with suppress(OSError), each.open("rb") as opened:
                        got["read"] += [str(each)] if opened.read(1) else []
                return got

            with as_other(look) as found_by_other:
                words_of = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
                well = found_by_other == {"answers": [], "read": []} and bool(port or unix)
                well = well and not (secret and (secret in words_of or secret in text))
                said(f"{name}: another user of the machine", well, f"{found_by_other}; {text.strip()[:100]!r}")


def links(root: Path) -> None:
    """Links in a run folder of the group, in place and swapped during writes, reads and removals."""
    shared, precious = root / "team", root / "mine"
    before = content(precious)
    file = victim(root, "team")
    code, text = done("train", file, *EVERY, "train.checkpoint.keep=9")
    assert code == 0, text
    shutil.copytree(shared, root / "copy")
    names = ("checkpoints", "eval")
    for name in names:
        reset(shared, root / "copy")

        def place(name: str = name) -> bool:
            with suppress(FileNotFoundError):
                (shared / name).rename(shared / f"{name}.aside")
            (shared / name).symlink_to(precious / name)
            return True

        with as_other(place):
            ended = [command(file, shared, number) for number in range(RACES)]
        judge(f"links: {name} leads to another run of the owner", precious, before, ended)
    reset(shared, root / "copy")

    def swap() -> bool:
        end = time.monotonic() + 60
        if os.fork() == 0:
            while time.monotonic() < end:
                with suppress(OSError):
                    (shared / "checkpoints").rename(shared / "aside")
                    (shared / "checkpoints").symlink_to(precious / "checkpoints")
                    (shared / "checkpoints").unlink()
                with suppress(OSError):
                    (shared / "aside").rename(shared / "checkpoints")
            os._exit(0)
        return True

    with as_other(swap, 90):
        ended = [command(file, shared, number) for number in range(RACES)]
    judge("links: checkpoints is swapped while the owner works", precious, before, ended)


def command(file: Path, run: Path, number: int) -> str:
    """A command of the owner that writes to, reads or removes from the run folder."""
    commands: list[tuple[object, ...]] = [
        ("checkpoint", "prune", run, "--keep", "1"),
        (
            "train",
            file,
            "train.checkpoint.every_steps=5",
            "train.checkpoint.keep=1",
            f"train.duration={40 + number} steps",
            "resume.allow=[schedule]",
        ),
        ("report", run),
    ]
    words = commands[number % len(commands)]
    code, text = done(*words)
    return f"{words[0]} {code}" + (" with a traceback" if "Traceback" in text else "")


def reset(shared: Path, copy: Path) -> None:
    """The run folder as it was, open to the group."""
    shutil.rmtree(shared)
    shutil.copytree(copy, shared)
    subprocess.run(["chgrp", "-R", str(OTHER), shared], check=True)
    subprocess.run(["chmod", "-R", "g+rwX", shared], check=True)


def content(folder: Path) -> dict[str, str]:
    """Hashes of all files of a run."""
    return {
        str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


def judge(what: str, precious: Path, before: dict[str, str], ended: list[str]) -> None:
    """Whether the other run is as it was; if not, what differs."""
    now = content(precious)
    gone, changed = (
        sorted(before.keys() - now.keys()),
        [name for name in before if now.get(name, before[name]) != before[name]],
    )
    added = sorted(now.keys() - before.keys())
    said(
        what, not gone and not changed, f"gone {gone[:3]}, changed {changed[:3]}, added {added[:3]}; {', '.join(ended)}"
    )
    for name in added:
        (precious / name).unlink()
    assert steps(precious)
