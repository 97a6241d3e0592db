"""Attacks of a colleague on a job of `slurm.group`, without a cluster; part of `attack_network.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attack_victim import IS_ROOT, OTHER, as_other, done, said, victim

from pipeline.common.errors import EXIT_REFUSED
from pipeline.config.load import load


def group(root: Path) -> None:
    """A colleague of the group before the job starts: the check of its script, run by bash."""
    import grp

    from slurm.submit import code_snapshot, permissions

    keys = [f"slurm.group={grp.getgrgid(OTHER if IS_ROOT else os.getgid()).gr_name}", "slurm.umask='0002'"]
    base = Path(tempfile.mkdtemp(prefix="attack-", dir=Path.home()))
    keys.append(f"slurm.private_dir={base}")
    file = victim(root, "grouped")
    done("preprocess", file)
    config = load(file, keys)
    mask = os.umask(0o022)
    permissions.apply_permissions(config)
    code = code_snapshot.take(config.run.dir, (), permissions.make_private(config, config.run.dir))
    os.umask(mask)
    _, text = done("train", file, *keys, "--slurm", "--dry-run")  # with the digest of what is there now
    script = text.partition("#!/bin/bash")[2].partition("--- end of script")[0]
    assert f"pipeline_code={code}" in script, script or text
    check = re.sub(r"(?m)^.* -m slurm\.job\.batch_entry .*$", "echo started", script, count=1)

    def start() -> tuple[int, str]:
        ran = subprocess.run(["bash", "-c", check], capture_output=True, text=True, cwd="/", check=False)
        lines = ran.stderr.strip().split("\n")
        return ran.returncode, ran.stdout.strip() or next((line for line in lines if "refused" in line), lines[-1])[
            :120
        ]

    said("group: nothing was changed", start() == (0, "started"), f"{start()}")
    if IS_ROOT:

        def change() -> list[str]:
            done_to = []
            for name, does in {
                "write": lambda: code.open("a").close(),
                "add": (code.parent / "x.zip").touch,
                "rename": lambda: code.rename(code.with_name("moved")),
                "submission": (code.parents[1] / "submissions" / "x.json").touch,
            }.items():
                with suppress(PermissionError):
                    does()
                    done_to.append(name)
            return done_to

        with as_other(change) as did:
            said("group: a colleague changes code or submissions", did == [], f"permitted: {did or 'nothing'}")

    def evil(path: Path) -> Callable[[], object]:
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        path.write_bytes((before or b"") + b"\nevil = 1\n")
        return lambda: path.write_bytes(before) if before is not None else path.unlink()

    def linked(path: Path) -> Callable[[], object]:
        kept = path.rename(base / "kept")
        path.symlink_to(kept)
        return lambda: (path.unlink(), kept.rename(path))

    def added(path: Path, name: str) -> Callable[[], object]:
        before = path.read_bytes()
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, "evil = 1")
        return lambda: path.write_bytes(before)

    def opened(path: Path) -> Callable[[], object]:
        path.chmod(0o664)
        return lambda: path.chmod(0o644)

    forced: dict[str, Callable[[], Callable[[], object]]] = {
        "bytes were added": lambda: evil(code),
        "sitecustomize.py was added": lambda: added(code, "sitecustomize.py"),
        "bytecode was added": lambda: added(code, "torch.pyc"),
        "the archive was replaced by a link": lambda: linked(code),
        "the group may write to the archive": lambda: opened(code),
    }
    for name, does in forced.items():
        back = does()
        result, says = start()
        said(f"group: {name}", result == EXIT_REFUSED and "refused" in says, f"code {result}, {says}")
        back()
        assert start() == (0, "started"), name
    submission = base / "submission.json"
    submission.write_text("{}")
    words = [sys.executable, "-m", "slurm.job.batch_entry", "1", str(submission), "0" * 64]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    said(
        "group: a submission was changed",
        ran.returncode == EXIT_REFUSED,
        f"code {ran.returncode}, {ran.stderr.strip()[-90:]}",
    )
    subprocess.run(["rm", "-r", base], check=True)
