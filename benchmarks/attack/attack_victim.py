"""What the attacks of `attack_network.py` share: a tiny victim, another user, listening sockets, lines of results."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

OTHER = 65534
SECONDS = 180.0
"""For each command of the victim."""
STEPS = 30
IS_ROOT = os.geteuid() == 0
broken: list[str] = []


def said(what: str, verdict: bool | str, fact: str) -> None:
    """Print the line of an attack; True stands for held, False for broken."""
    word = verdict if isinstance(verdict, str) else ("held" if verdict else "broken")
    if word == "broken":
        broken.append(what)
    print(f"{word:8} {what}: {fact}", flush=True)


def victim(root: Path, name: str, **changes: Any) -> Path:
    """The run file of a victim, and its corpus."""
    corpus = root / "corpus"
    corpus.mkdir(exist_ok=True)
    for number in range(40):
        (corpus / f"{number:02d}.txt").write_text(f"a boat {number} sails by the old light north of the harbour. " * 20)
    values: dict[str, Any] = {
        "run": {"dir": str(root / name)},
        "launch": {"threads": 1, "device": "cpu", "time_limits": {"init_seconds": 60, "step_seconds": 60}},
        "data": {
            "dir": str(root / "data"),
            "sources": [{"name": "sea", "paths": [f"{corpus}/*.txt"]}],
            "splits": {"heldout": 0.2},
            "preprocess": {"workers": 1, "engine": "tokenizers"},
        },
        "tokenizer": {"train": {"vocab_size": 300}},
        "model": {"layers": 1, "dim": 32, "heads": 2, "vocab_multiple": 16},
        "train": {
            "duration": f"{STEPS} steps",
            "sequence_length": 32,
            "batch_size": 4,
            "micro_batch_size": 2,
            "validation": {"samples": 0},
            "metrics": {"log_every_steps": 1, "tensorboard": False},
        },
    } | changes
    file = root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@contextmanager
def pipeline(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A command of the package in the background; it is interrupted at the end."""
    command = [sys.executable, "-m", "pipeline", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
        if process.poll() is None:
            process.kill()


def done(*words: object) -> tuple[int, str]:
    """Code and output of a command of the package."""
    with pipeline(*words) as process:
        try:
            text = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            return -1, f"had not ended after {SECONDS:.0f} s"
        return process.returncode, text


@contextmanager
def as_other(does: Callable[[], Any], seconds: int = 60) -> Iterator[Any]:
    """What a function returns to another user (JSON), whose process lives as long as the context."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal.alarm(seconds)
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            os.write(writing, json.dumps(does()).encode())
            os.close(writing)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with open(reading) as answers:
            text = answers.read()
        yield json.loads(text) if text else "the attack itself failed"
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def family(folder: Path) -> list[int]:
    """Processes whose command names a folder, and those that they have started."""
    parents, found = {}, set()
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            if str(folder) in (each / "cmdline").read_text():
                found.add(int(each.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Address and port of each socket that these processes listen on."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            links = set()
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    links.add(os.readlink(each))
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                        host, port = words[1].split(":")
                        raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
                        found.add((str(ipaddress.ip_address(raw)), int(port, 16)))
    return found


def outer_addresses() -> list[str]:
    """Addresses of this machine other than the loopback's."""
    text = subprocess.run(["ip", "-json", "addr"], capture_output=True, text=True, check=True).stdout
    of_all = [each["local"] for link in json.loads(text) for each in link["addr_info"] if each["scope"] == "global"]
    return [each for each in of_all if not ipaddress.ip_address(each).is_loopback]


def reached(address: str, port: int) -> bool:
    """Whether a port answers to a connection."""
    with suppress(OSError), socket.create_connection((address, port), timeout=2):
        return True
    return False


def steps(run: Path) -> list[tuple[int, float]]:
    """Step and loss of each line of metrics so far."""
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [(each["step"], each["loss"]) for each in map(json.loads, lines) if "loss" in each]


def watch(folder: Path, until: Callable[[], bool], attack: Callable[[int, list[int]], None]) -> set[tuple[str, int]]:
    """Where processes of a folder listen; each port is attacked as soon as it is seen."""
    seen: set[tuple[str, int]] = set()
    end = time.monotonic() + SECONDS
    while not until() and time.monotonic() < end:
        pids = family(folder)
        for place in sorted(listeners(pids) - seen):
            attack(place[1], pids)
            seen.add(place)
        time.sleep(0.05)
    return seen
