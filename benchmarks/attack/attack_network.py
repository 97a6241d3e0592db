"""Attacks on runs and the server of this machine, from its own network address and as another user of it.

    sudo python benchmarks/attack/attack_network.py
    sudo python benchmarks/attack/attack_network.py --only serve group

It trains victims of some thousand parameters in a temporary folder with the package's own commands, and attacks them as
the user 65534. Nothing beyond this machine is contacted. A line for each attack: `held`, `broken`, `remains` for
what is known and documented, or `skipped`. Exit code 1 if something is broken. Takes some minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import ipaddress
import os
import pickle
import re
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import attack_group
import attack_server
import attack_users
from attack_victim import (
    IS_ROOT,
    OTHER,
    SECONDS,
    STEPS,
    as_other,
    broken,
    done,
    family,
    outer_addresses,
    pipeline,
    reached,
    said,
    steps,
    victim,
    watch,
)

TWO = ("launch.processes=2", "parallel.dp_shard=2")
CONNECTIONS = 40
"""To each port."""
ENDLESS = "train.duration=100000 steps"


class Evil:
    """Its pickle makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def put_pickle(port: int, pids: list[int], marker: Path) -> bool:
    """Whether torch's store takes the pickle that its elastic agent would read."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        keys = [f"torch.rendezvous.launch-{pid}" for pid in pids]
        for each in keys:
            store.set(each, pickle.dumps(Evil(marker)))
        # `set` waits for no answer, so that gloo's ports seem to take it, too.
        return bool(store.check(keys))
    except Exception:
        return False


def ports(root: Path) -> None:
    """Who listens where, who reaches it, and whether a store takes a pickle."""
    train, alone = victim(root, "two"), victim(root, "one")
    local, marker = victim(root, "local"), root / "marker-of-a-pickle"
    done("train", victim(root, "evaluated"))
    cases: list[tuple[str, Path, tuple[object, ...]]] = [
        ("train, launch.processes=2", root / "two", ("train", train, *TWO, ENDLESS)),
        ("train, one process", root / "one", ("train", alone, ENDLESS)),
        ("train --local, launch.processes=2", root / "local", ("train", local, "--local", *TWO, ENDLESS)),
        ("eval, eval.processes=2", root / "evaluated", ("eval", root / "evaluated.yaml", "eval.processes=2")),
        ("doctor", root / "evaluated", ("doctor", root / "evaluated.yaml")),
    ]
    for name, run, words in cases:
        outer, taken, tried = [], [], []

        def attack(port: int, pids: list[int], outer: Any = outer, taken: Any = taken, tried: Any = tried) -> None:
            outer += [f"{each}:{port}" for each in outer_addresses() if reached(each, port)]
            if IS_ROOT:
                with as_other(lambda: put_pickle(port, pids, marker), 10) as took:
                    tried.append(port)
                    taken += [port] if took is True else []  # a store answers at once

        with pipeline(*words) as process:

            def over(process: Any = process, run: Path = run, words: Any = words) -> bool:
                if words[0] == "train" and len(steps(run)) >= 5:
                    return True
                return process.poll() is not None and ("--local" not in words or process.returncode != 0)

            places = watch(run, over, attack)
            if "--local" in words:
                done("cancel", run, "--now")
        beyond = [each for each in places if not ipaddress.ip_address(each[0]).is_loopback]
        well = not beyond and not outer and not taken and not marker.exists()
        if words[0] == "train":
            well = well and len(steps(run)) >= 5
        elif process.returncode:
            well = False
        where = ", ".join(f"{host}:{port}" for host, port in sorted(places)) or "nothing"
        said(
            f"ports of {name}",
            well,
            f"listens on {where}; reached at another address: {outer or 'none'}; a pickle was put into the store by "
            f"another user: {taken or f'none of {len(tried)} ports'}; it ran: {marker.exists()}",
        )


def gloo(root: Path) -> None:
    """Garbage to the ports of two ranks, while they connect and while they train."""
    reference = victim(root, "untouched")
    code, text = done("train", reference, *TWO)
    assert code == 0, text
    kinds: dict[str, Callable[[int], bytes]] = {
        "random bytes": lambda number: secrets.token_bytes(4096),
        "a handshake with a guessed number": lambda number: struct.pack("<q", number),
        "an HTTP request": lambda number: b"GET / HTTP/1.1\r\n\r\n",
        "nothing, held open": lambda number: b"",
    }
    for moment in ("while they connect", "while they train"):
        for number, (kind, make) in enumerate(kinds.items()):
            send_garbage(root, f"gloo-{moment[-5:]}-{number}", f"gloo, {moment}: {kind}", make)


def send_garbage(root: Path, name: str, what: str, make: Callable[[int], bytes]) -> None:
    """One kind of garbage to all ports of one run; it either ends with a message or with the right losses."""
    run, late = root / name, "train:" in what
    sent: list[int] = []
    held: list[socket.socket] = []

    def attack(port: int) -> None:
        for number in range(CONNECTIONS):
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                held[-1].sendall(make(number))
                sent.append(port)

    with pipeline("train", victim(root, name), *TWO) as process:

        def ready() -> bool:
            return process.poll() is not None or (late and len(steps(run)) >= 3)

        for _, port in watch(run, ready, lambda port, _: None if late else attack(port)):
            if late:
                attack(port)
        text = ""
        with suppress(subprocess.TimeoutExpired):
            text = process.communicate(timeout=SECONDS)[0]
        code = process.poll()
    for each in held:
        each.close()
    same = steps(run) == steps(root / "untouched")
    if code == 0:
        said(what, same and bool(sent), f"{len(sent)} connections; the run ends, all {STEPS} losses equal: {same}")
        return
    last = next((line for line in text.splitlines() if "error" in line), text.strip()[-200:])
    clear = code not in (None, 1) and "Traceback" not in text and bool(last)
    said(what, "remains" if clear else False, f"{len(sent)} connections; the run ends with {code}: {last[:200]}")


def user(root: Path) -> None:
    """What another user of the machine reads, blocks and plants."""
    if not IS_ROOT:
        said("another user", "skipped", "only root can take another user's place")
        return
    run, file = root / "watched", victim(root, "watched")
    os.environ["HF_TOKEN"] = secret = f"hf_{secrets.token_hex(8)}"
    with pipeline("train", file, *TWO, ENDLESS) as process:
        watch(run, lambda: len(steps(run)) >= 3 or process.poll() is not None, lambda *_: None)
        pids = family(run)
        store = {
            each
            for pid in pids
            for each in re.findall(r"PIPELINE_STORE=([^\0]+)", Path(f"/proc/{pid}/environ").read_text())
        }

        def look() -> dict[str, Any]:
            found: dict[str, Any] = {"read": [], "memory": []}
            for path in [f"/proc/{pid}/{each}" for pid in pids for each in ("environ", "mem", "maps")] + sorted(store):
                with suppress(OSError), open(path, "rb") as opened:
                    found["read"] += [path] if opened.read(1) else []
            for top in ("/dev/shm", "/tmp"):
                for each in Path(top).iterdir():
                    with suppress(OSError):
                        if each.name.startswith(("pipeline-", "torch", "pymp")):
                            found["memory"] += [str(inner) for inner in each.iterdir()]
                        elif top == "/dev/shm" and each.stat().st_uid != OTHER:
                            found["memory"] += [str(each)] if os.access(each, os.R_OK) else []
            words = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
            found["secret"] = [each for each in words if secret in each]
            return found

        with as_other(look) as found:
            well = bool(store) and found == {"read": [], "memory": [], "secret": []}
            said(
                "another user reads environment, memory, store, /dev/shm, /tmp",
                well,
                f"{found} of {len(pids)} processes",
            )

    def hold() -> list[str]:
        got = []
        for each in [root, *root.rglob("*")]:
            with suppress(OSError):
                descriptor = os.open(each, os.O_RDONLY | os.O_NONBLOCK)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                got.append(each.name)
        return got

    with as_other(hold, 200) as got:
        began = time.monotonic()
        code, text = done("train", file, *TWO)
        took, guarded = time.monotonic() - began, "lock.guard" not in got
        fact = f"not lock.guard: {guarded}; the next start ended with {code} after {took:.0f} s"
        said(f"another user holds flock on all {len(got)} readable files", code == 0 and guarded, fact)
    leaks = [str(each) for each in root.rglob("*") if each.is_file() and secret.encode() in each.read_bytes()]
    said("a token of the environment in files of the run", not leaks, f"{leaks or 'in none'}")

    shared, precious = root / "shared", root / "precious"
    shared.mkdir()
    shared.chmod(0o1777)
    precious.mkdir()
    (precious / "file").write_text("precious")
    with as_other(lambda: (shared / "linked").symlink_to(precious)):
        code, text = done("train", victim(root, "linked", run={"dir": str(shared / "linked")}))
        well = [each.name for each in precious.iterdir()] == ["file"] or code == 0
        wrote = sorted(each.name for each in precious.iterdir())
        said(
            "a link in place of the run folder, in a folder like /tmp",
            "remains" if len(wrote) > 1 else well,
            f"code {code}, {wrote}",
        )

    def plant() -> None:
        os.umask(0)
        (shared / "theirs").mkdir()
        for name in ("metrics.jsonl", "lock", "lock.guard", "exit.json", "ledger.jsonl", "attempt", "config.yaml"):
            (shared / "theirs" / name).symlink_to(precious / "file")

    with as_other(plant):
        code, text = done("train", victim(root, "theirs", run={"dir": str(shared / "theirs")}))
        kept = (precious / "file").read_text() == "precious"
        said(
            "a run folder of another user with links to a file of yours",
            kept or "remains",
            f"code {code}, kept: {kept}, {text.strip()[-150:]!r}",
        )


ATTACKS = {
    "ports": ports,
    "gloo": gloo,
    "user": user,
    "users": attack_users.users,
    "serve": attack_server.serve,
    "group": attack_group.group,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="these attacks alone")
    arguments = parser.parse_args()
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        root = Path(name)
        root.chmod(0o755)  # another user can look, as on most machines
        done("preprocess", victim(root, "first"))
        for each in arguments.only:
            ATTACKS[each](root)
    print(f"{len(broken)} broken" if broken else "nothing is broken")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
