"""Attack a run of one user as a member of its group, who may write to the run folder, and as somebody who may not.

    sudo PYTHON benchmarks/attack/attack_members.py [--only files folders races outsider shuffle repair copies]

Needs root, and a Python that all users may execute. The owner and the attackers are user numbers without accounts. A
member puts links and pipes in the place of what the owner's commands read and write, before and while they run: of
runs, of both passes of a global shuffle, of repairs of datasets, and of copies of datasets on a node. Something is
broken if a file of the owner outside of the run folder was changed, added or removed, or if a command did not end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attack_victim import broken, said, victim

OWNER, MEMBER, OUTSIDER, GROUP = 61001, 61002, 61003, 61000
SECONDS = 180
"""For a command of the owner; each takes about 8."""
TRAIN = ("train.checkpoint.every_steps=2", "train.checkpoint.keep=2", "train.duration=6 steps")
FILES = (
    *("metrics.jsonl", "ledger.jsonl", "agreements.jsonl", "faults.jsonl", "journal.json", "saves.json", "exit.json"),
    *(".exit.json.reserved", "attempt", "lock", "lock.guard", "stop", "save", "config.yaml", "folder-id", "losses.bin"),
    *("heartbeats/0.json", "checkpoints/latest", "checkpoints/going-back", "data/status.json"),
)
FOLDERS = ("checkpoints", "heartbeats", "logs", "eval", "data", "data/sea", "data/tokenizer", "tensorboard", "profile")


PART = "parts/00000/00000000"
SHUFFLED = (
    *("plan.json", "report.json", "rejected.jsonl", "receipts/00000/00000000.json", "receipts/00000", "receipts"),
    *("receipts/00000/00000000.rejected.jsonl", "receipts/shuffle", "receipts/shuffle/train", "leases", "leases/00000"),
    *("train", "train/manifest.json", "train/parts.bin", "train/tokenizer.json", "train/parts", "train/parts/00000"),
    *(f"train/{PART}{suffix}" for suffix in (".bin", ".idx", ".prov")),
    *("train/unshuffled", "train/unshuffled/runs.json", "train/unshuffled/parts", "train/unshuffled/parts/00000"),
    *(f"train/unshuffled/{PART}{suffix}" for suffix in (".bin", ".idx", ".prov")),
)
"""Files and folders of a source of `shuffle: global`; each of the private source is there or is made, for links."""
REPAIRED = (
    *("", "plan.json", "receipts", "receipts/00000", "receipts/00000/00000000.json", "train", "train/manifest.json"),
    *("train/parts.bin", "train/tokenizer.json", "train/parts", "train/parts/00000"),
    *(f"train/{PART}{suffix}" for suffix in (".bin", ".idx", ".prov")),
)


def as_user(user: int, does: Callable[[], object], seconds: int = SECONDS) -> int:
    """The process of another user that calls a function and ends; the caller waits for it or ends it."""
    if (child := os.fork()) == 0:
        try:
            signal.alarm(seconds)
            os.setgroups([])
            group = OUTSIDER if user == OUTSIDER else GROUP
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            os.umask(0o002)
            does()
        finally:
            os._exit(0)
    return child


def data(folder: Path) -> dict[str, object]:
    """The section of a run file whose datasets lie in the run folder."""
    return {
        "sources": [{"name": "sea", "paths": [f"{folder}/corpus/*.txt"]}],
        "splits": {"heldout": 0.2},
        "preprocess": {"workers": 1, "engine": "tokenizers"},
    }


class Range:
    """A project folder of the owner, a run in it that the group may write to, and one that it may not."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project, self.private = root / "project", root / "private"
        for folder in (self.project, self.private):
            folder.mkdir()
            os.chown(folder, OWNER, GROUP)
        self.project.chmod(0o2775)
        self.run, self.mine = self.project / "team", self.private / "team"
        self.file, private = (victim(folder, "team", data=data(folder)) for folder in (self.project, self.private))
        for each in (self.project, self.private):
            for path in each.rglob("*"):
                os.chown(path, OWNER, GROUP)
        for file, mask in ((private, 0o022), (self.file, 0o002)):
            self.mask = mask
            code, text = self.owner("run", file, *TRAIN)
            assert code == 0, text
        subprocess.run(["cp", "-a", self.run, root / "copy"], check=True)
        self.before = content(self.private)

    def owner(self, *words: object) -> tuple[int | None, str]:
        """Code and output of a command of the owner; no code if it did not end."""
        with self.start(*words) as process:
            try:
                text = process.communicate(timeout=SECONDS)[0]
                return process.returncode, text
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, "did not end"

    def start(self, *words: object) -> subprocess.Popen[str]:
        """A command of the owner in the background."""
        home = self.root / "home"
        if not home.exists():
            home.mkdir()
            os.chown(home, OWNER, GROUP)
        keep = {
            name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ
        }
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", *map(str, words)],
            **{"user": OWNER, "group": GROUP, "extra_groups": [], "umask": self.mask, "cwd": self.project},
            env={**keep, "HOME": str(home), "USER": "owner", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def reset(self) -> None:
        """The run and the private folder as they were."""
        shutil.rmtree(self.run)
        subprocess.run(["cp", "-a", self.root / "copy", self.run], check=True)

    def judge(self, what: str, code: int | None, text: str) -> None:
        """The line of an attack."""
        now = content(self.private)
        changed = [name for name in sorted(self.before.keys() | now.keys()) if now.get(name) != self.before.get(name)]
        problem = "a traceback; " if "Traceback" in text else ""
        fact = f"{problem}changed outside: {changed[:4]}; code {code}: {last(text)}"
        said(what, not changed and code is not None, fact)
        self.before = now


def last(text: str) -> str:
    """The line of a command's output that says most."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "")[:230]


def content(folder: Path) -> dict[str, str]:
    """Kind and hash of everything in a folder."""
    found = {}
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()[:12] + oct(path.lstat().st_mode)
    return found


def place(path: Path, make: Callable[[Path], object]) -> None:
    """Put something in the place of a file or folder, whose old content stays beside it."""
    path.parent.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        path.rename(path.with_name(f"{path.name}.aside"))
    make(path)


def wait(child: int) -> None:
    os.waitpid(child, 0)


def files(field: Range) -> None:
    """Links and pipes in the place of files, before a training, a stop, a report."""
    target = field.private / "notes.txt"
    target.write_text("{}\n")
    os.chown(target, OWNER, GROUP)
    field.before = content(field.private)
    for name in FILES:
        for kind, make in (("link", lambda path: path.symlink_to(target)), ("pipe", os.mkfifo)):
            field.reset()
            wait(as_user(MEMBER, lambda make=make, name=name: place(field.run / name, make)))
            code, text = field.owner(
                "train", field.file, *TRAIN[:2], "train.duration=8 steps", "resume.allow=[schedule]"
            )
            field.judge(f"a {kind} in place of {name}: train", code, text)
    for name in ("config.yaml", "metrics.jsonl", "ledger.jsonl", "heartbeats/0.json", "exit.json"):
        field.reset()
        wait(as_user(MEMBER, lambda name=name: place(field.run / name, os.mkfifo)))
        code, text = field.owner("status", field.run)
        field.judge(f"a pipe in place of {name}: status", code, text)


def folders(field: Range) -> None:
    """Links in the place of folders, which lead to the same folder of the private run."""
    for name in FOLDERS:
        to = field.mine / name
        if not to.exists():
            to.mkdir()
            os.chown(to, OWNER, GROUP)
            field.before = content(field.private)
        field.reset()
        wait(as_user(MEMBER, lambda name=name, to=to: place(field.run / name, lambda path: path.symlink_to(to))))
        for words in (
            ("train", field.file, *TRAIN[:2], "train.duration=8 steps", "resume.allow=[schedule]"),
            ("preprocess", field.file),
            ("eval", field.run),
            ("checkpoint", "prune", field.run, "--keep", "1"),
        ):
            code, text = field.owner(*words)
            field.judge(f"a link in place of {name}/: {words[0]}", code, text)


def races(field: Range) -> None:
    """What is done as fast as possible while the owner works."""

    def fill(name: str, make: Callable[[Path], object]) -> Callable[[], None]:
        def does() -> None:
            while True:
                for folder in (field.run / "checkpoints").glob("*.tmp"):
                    with suppress(OSError):
                        make(folder / name)
                for folder in (field.run / "data").rglob(".*.tmp"):
                    with suppress(OSError):
                        make(folder / name)

        return does

    def swap(name: str) -> Callable[[], None]:
        def does() -> None:
            while True:
                with suppress(OSError):
                    (field.run / name).rename(field.run / "aside")
                    (field.run / name).symlink_to(field.mine / name)
                    time.sleep(0.01)
                with suppress(OSError):
                    (field.run / name).unlink()
                with suppress(OSError):
                    (field.run / "aside").rename(field.run / name)
                    time.sleep(0.01)

        return does

    def replace_temporary(target: Path) -> Callable[[], None]:
        def does() -> None:
            while True:
                for path in [*field.run.glob(".*.tmp"), *(field.run / "checkpoints").glob("**/.*.tmp")]:
                    with suppress(OSError):
                        path.unlink()
                        path.symlink_to(target)

        return does

    target = field.private / "notes.txt"
    target.write_text("{}\n")
    os.chown(target, OWNER, GROUP)
    field.before = content(field.private)
    attacks = {
        "pipes in folders that are being written": fill("pipe", os.mkfifo),
        "links in folders that are being written": fill("link", lambda path: path.symlink_to(target)),
        "links in place of temporary files": replace_temporary(target),
        **{f"{name}/ is swapped": swap(name) for name in ("checkpoints", "heartbeats", "logs", "data")},
    }
    for what, does in attacks.items():
        field.reset()
        child = as_user(MEMBER, does, 4 * SECONDS)
        for words in (
            ("train", field.file, *TRAIN[:2], "train.duration=16 steps", "resume.allow=[schedule]"),
            ("preprocess", field.file),
            ("checkpoint", "prune", field.run, "--keep", "1"),
        ):
            code, text = field.owner(*words)
            field.judge(f"{what}: {words[0]}", code, text)
        os.kill(child, signal.SIGKILL)
        wait(child)


def outsider(field: Range) -> None:
    """What somebody may write who is not in the group, or is and has only the right to read."""
    for user, mask, where in ((OUTSIDER, 0o002, field.project), (MEMBER, 0o022, field.private)):
        log = field.root / "writable"
        log.touch()
        log.chmod(0o666)

        def look(where: Path = where, log: Path = log) -> None:
            found = [str(path) for path in [where, *where.rglob("*")] if os.access(path, os.W_OK)]
            for top in ("/tmp", "/dev/shm"):
                for path in Path(top).iterdir():
                    if path.lstat().st_uid == OWNER and os.access(path, os.W_OK):
                        found.append(str(path))
            log.write_text("\n".join(found))

        wait(as_user(user, look))
        found = log.read_text().split()
        said(f"user {user} writes to files of umask {mask:04o}", not found, f"{found[:5] or 'to none'}")


def replaced(to: Path) -> list[tuple[str, Callable[[Path], object]]]:
    """What a member puts in the place of a file or folder: a link, and a pipe."""
    return [("link", lambda path: path.symlink_to(to)), ("pipe", os.mkfifo)]


def swapping(path: Path, to: Path) -> Callable[[], None]:
    """A file or folder gives way to a link, and comes back, as fast as possible."""
    aside = path.with_name(f"{path.name}.aside")

    def does() -> None:
        while True:
            with suppress(OSError):
                path.rename(aside)
                path.symlink_to(to)
            time.sleep(0.002)
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                aside.rename(path)
            time.sleep(0.002)

    return does


def exists_in_private(field: Range, path: Path, like: Path) -> None:
    """A place for links of a member to lead to: as it is in the private run, or made there, empty."""
    if not path.exists():
        path.mkdir(parents=True) if not like.is_file() else path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if like.is_file() else None
        for each in (path, *path.parents):
            if each.is_relative_to(field.private):
                os.chown(each, OWNER, GROUP)
        field.before = content(field.private)


def shuffle(field: Range) -> None:
    """Links and pipes in the place of what `shuffle: global` reads and writes, before and in its second pass."""
    settings = {"preprocess": {"workers": 1, "engine": "tokenizers", "shuffle": "global"}}
    runs = {}
    for root, mask in ((field.private, 0o022), (field.project, 0o002)):
        file = victim(root, "shuffled", data=data(root) | settings)
        (root / "corpus" / "empty.txt").touch()
        field.mask = mask
        code, text = field.owner("preprocess", file, "--units")
        assert code == 0, text
        runs[root] = root / "shuffled" / "data" / "sea"
    mine, theirs = runs[field.private], runs[field.project]
    copied = field.root / "units"
    subprocess.run(["cp", "-a", theirs.parent, copied], check=True)
    field.before = content(field.private)

    def again() -> None:
        shutil.rmtree(theirs.parent)
        subprocess.run(["cp", "-a", copied, theirs.parent], check=True)

    for name in SHUFFLED:
        exists_in_private(field, mine / name, theirs / name)
        for kind, make in replaced(mine / name):
            again()
            wait(as_user(MEMBER, lambda make=make, name=name: place(theirs / name, make)))
            code, text = field.owner("preprocess", file)
            field.judge(f"shuffle: a {kind} in place of {name}", code, text)
    for name in ("", "train", "train/unshuffled", "train/unshuffled/parts", "train/parts", "receipts", "leases"):
        again()
        child = as_user(MEMBER, swapping(theirs / name, mine / name), SECONDS)
        code, text = field.owner("preprocess", file)
        os.kill(child, signal.SIGKILL)
        wait(child)
        field.judge(f"shuffle: {name or 'the source'}/ is swapped", code, text)


def repair(field: Range) -> None:
    """Links and pipes in the place of what `data verify --repair` reads and writes of a damaged dataset."""
    mine, theirs = field.mine / "data" / "sea", field.run / "data" / "sea"

    def damaged() -> None:
        field.reset()
        with (theirs / "train" / f"{PART}.bin").open("r+b") as file:
            file.write(b"\1\2\3\4")

    for name in REPAIRED:
        for kind, make in replaced(mine / name):
            damaged()
            wait(as_user(MEMBER, lambda make=make, name=name: place(theirs / name, make)))
            code, text = field.owner("data", "verify", field.run / "data", "--repair")
            field.judge(f"repair: a {kind} in place of {name or 'the source'}", code, text)
    for name in ("", "train", "train/parts", "train/parts/00000", "receipts"):
        damaged()
        child = as_user(MEMBER, swapping(theirs / name, mine / name), SECONDS)
        for _ in range(3):
            code, text = field.owner("data", "verify", field.run / "data", "--repair")
            field.judge(f"repair: {name or 'the source'}/ is swapped", code, text)
        os.kill(child, signal.SIGKILL)
        wait(child)


def copies(field: Range) -> None:
    """Links, pipes and folders in the place of copies of datasets on a node, and of what is copied."""
    stage, private = field.project / "stage", field.private / "stage"
    for folder in (stage, private):
        folder.mkdir()
        os.chown(folder, OWNER, GROUP)
    stage.chmod(0o2775)
    name = f"pipeline-data-{OWNER}"
    words = (*TRAIN, "resume.allow=[schedule]", "stage.data=local", "train.duration=12 steps")
    code, text = field.owner("train", field.file, *words, f"stage.dir={private}")
    assert code == 0, text
    field.before = content(field.private)
    parts = field.run / "data" / "sea" / "train" / PART
    places = {
        "the folder of copies": (stage / name, private / name),
        "the folder above it": (stage, private),
        "tokens that are copied": (parts.with_suffix(".bin"), field.private / "notes.txt"),
        "an index that is copied": (parts.with_suffix(".idx"), field.private / "notes.txt"),
    }
    for what, (path, to) in places.items():
        for kind, make in [*replaced(to), ("folder", lambda path: (path.mkdir(), path.chmod(0o2777)))]:
            field.reset()
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
            os.chown(stage, OWNER, GROUP)
            stage.chmod(0o2775)
            wait(as_user(MEMBER, lambda make=make, path=path: place(path, make)))
            code, text = field.owner("train", field.file, *words, f"stage.dir={stage}")
            field.judge(f"copies: a {kind} in place of {what}", code, text)
            for left in field.project.glob("stage*"):
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    for what in ("the folder of copies", "the folder above it"):
        path, to = places[what]
        field.reset()
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        os.chown(stage, OWNER, GROUP)
        stage.chmod(0o2775)
        child = as_user(MEMBER, swapping(path, to), SECONDS)
        code, text = field.owner("train", field.file, *words, f"stage.dir={stage}")
        os.kill(child, signal.SIGKILL)
        wait(child)
        field.judge(f"copies: {what} is swapped", code, text)


ATTACKS = {
    "files": files,
    "folders": folders,
    "races": races,
    "outsider": outsider,
    "shuffle": shuffle,
    "repair": repair,
    "copies": copies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="these attacks alone")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("only root can take the place of other users")
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        root = Path(name)
        root.chmod(0o755)
        field = Range(root)
        for each in arguments.only:
            began = time.monotonic()
            ATTACKS[each](field)
            print(f"{each}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(broken)} broken" if broken else "nothing is broken")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
