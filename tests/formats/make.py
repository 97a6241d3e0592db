"""Makes what `test_kept` reads: datasets, runs and results as the commands of today write them, packed into one file.

`python -m tests.formats.make` writes `tests/formats/v0.1.tar.zst` anew, with the list of what is in it beside it. That
is for a version that writes another format on purpose; it then gets a file of its own, and the old ones stay and stay
readable. Everything is made by `python -m pipeline`, in the folder `ROOT`, which must not exist.

Paths: run files name theirs relative to themselves. What the commands make of that, below `ROOT`, is in some files that
they write. `unpack` puts its own folder in its place, but not in files whose hash is kept elsewhere (`state.json` of a
checkpoint, submissions), where paths only say where things once were. All times of files are 0, those of the corpus
from the start, as receipts have them.

Names of the machine and the user, where Python and this package lie, and what is installed are replaced by others;
times and figures stay.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import yaml
import zstandard

from pipeline.common import process_identity

HERE = Path(__file__).parent
PACKED = HERE / "v0.1.tar.zst"
PLACE = Path("/tmp/kept-formats")
"""Where what is kept was made: always the same, so that the paths in the files are."""
ROOT = Path(os.environ.get("KEPT_ROOT", PLACE))
HOST, USER = "node1", "someone"
_WORDS = "the a sea boat wind sails north harbour of under and light old night before storm keeper tower rope".split()
_MOVED = ("*.yaml", "plan.json", "rejected.jsonl")
"""Files in which `unpack` replaces `ROOT`: nobody keeps a hash of them."""
_SEALED = ("checkpoints", "submissions")
"""Folders of which somebody does."""
_LEFT_OUT = re.compile(
    r"^home/|^cache/huggingface/|/stage-memory/"
    r"|\.sh$|\.diff$|/slurm/code/|/sweeps/.*/checkpoints/.*/|^staged/.*\.(bin|idx|prov)$"
    r"|/(diverged|followed)/checkpoints/.*\.distcp$|^merged\."
)
"""What has no format of ours, or is large and there a second time."""
_PROGRAMS = {
    # As much of SLURM as sending and cancelling ask for.
    "sbatch": 'n=$(cat "$COUNT" 2>/dev/null || echo 76); n=$((n+1)); echo $n >"$COUNT"; echo "Submitted batch job $n"',
    "squeue": """for last; do :; done
case "$*" in *--me*) last=$(seq -s, 77 "$(cat "$COUNT" 2>/dev/null || echo 76)") ;; esac
[ -e "$COUNT.gone" ] || for job in $(echo "$last" | tr , ' '); do
  for task in $job ${job}_0 ${job}_1 ${job}_2 ${job}_3; do echo "$task|PENDING|Priority||N/A|N/A|"; done
done""",
    "sacct": """for last; do :; done
[ -e "$COUNT.gone" ] && for job in $(echo "$last" | tr , ' '); do
  for task in $job ${job}_0 ${job}_1 ${job}_2 ${job}_3; do echo "$task|CANCELLED by 0|0:0|00:00:00|None assigned"; done
done
exit 0""",
    "scancel": 'touch "$COUNT.gone"',
    "scontrol": "exit 0",
    "sinfo": """case "$*" in
*%P*) echo 'main*|up|infinite|1-infinite|0/4/0/4|(null)|(null)' ;;
*) echo '4|8|(null)' ;;
esac""",
    "sacctmgr": "exit 0",
    "srun": "exit 0",
}


def write_programs(folder: Path) -> None:
    """What stands in for the commands of SLURM. The jobs wait until there is a file `$COUNT.gone`."""
    folder.mkdir(parents=True)
    for name, script in _PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


def text(chance: random.Random, sentences: int) -> str:
    """Sentences of made-up words."""
    made = (" ".join(chance.choices(_WORDS, k=chance.randint(4, 12))) for _ in range(sentences))
    return ". ".join(made) + ".\n"


def write_corpus(folder: Path) -> None:
    """Three compressed files and one that is not, of JSON lines, with a few records that are bad, empty or long."""
    folder.mkdir(parents=True)
    chance = random.Random(24)

    def lines(name: str, count: int) -> bytes:
        records: list[bytes] = []
        for number in range(count):
            content = text(chance, 40 if number == 5 else chance.randint(2, 10))
            records.append(json.dumps({"id": f"{name}-{number}", "text": content, "n": number}).encode())
        records[2:2] = [b"{bad", b'{"id": "empty", "text": ""}']
        return b"\n".join(records) + b"\n"

    for number in range(3):
        (folder / f"sea-{number}.jsonl.gz").write_bytes(gzip.compress(lines(f"sea{number}", 14), mtime=0))
    (folder / "land.jsonl").write_bytes(lines("land", 30))
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text(chance, 2)[:-2]}) + "\n" for _ in range(8)))
    (folder / "wiki.txt").write_text(f" = Sea = \n\n {text(chance, 4)}\n = Land = \n\n {text(chance, 3)}")
    (folder / "kept.yaml").write_text(yaml.safe_dump(_task(folder / "lambada.jsonl")))
    for file in folder.iterdir():
        os.utime(file, (0, 0))  # receipts have it, and so has the archive


def _task(file: Path) -> dict[str, Any]:
    """A task of lm-evaluation-harness."""
    return {
        **{"task": "kept", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}},
        **{"test_split": "test", "output_type": "loglikelihood"},
        "doc_to_text": "{{text.rsplit(' ', 1)[0]}}",
        "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def run_file() -> dict[str, Any]:
    """The run file of all runs but for a few keys."""
    sources = [
        {"name": "sea", "type": "jsonl", "paths": ["corpus/sea-*.jsonl.gz"], "weight": 3, "metadata": ["n"]},
        {"name": "land", "type": "jsonl", "paths": ["corpus/land.jsonl"], "weight": 1},
    ]
    preprocess = {"workers": 1, "engine": "tokenizers", "unit_bytes": 2500, "max_error_rate": 0.3, "seed": 7}
    return {
        "run": {"dir": "runs/done"},
        "launch": {"threads": 1, "device": "cpu"},
        "data": {
            "dir": "data",
            "sources": sources,
            "splits": {"heldout": 0.25},
            "preprocess": {**preprocess, "max_document_bytes": 1500},
        },
        "tokenizer": {"train": {"vocab_size": 272}},
        "model": {
            **{"layers": 2, "dim": 16, "heads": 2, "kv_heads": 1, "ffn_dim": 32, "vocab_multiple": 16},
            "tie_embeddings": True,
        },
        "train": {
            "duration": "8 steps",
            "sequence_length": 32,
            "batch_size": 4,
            "micro_batch_size": 2,
            "compile": False,
            # Another processor rounds otherwise; bf16 would show more of that.
            "precision": {"compute": "fp32"},
            "optimizer": {"lr": 1e-2},
            "schedule": {"warmup": "2 steps"},
            "validation": {"every_steps": 4, "samples": 4},
            "checkpoint": {"every_steps": 4, "keep": 5, "async_save": False},
            "metrics": {"log_every_steps": 1, "tensorboard": False},
        },
        "eval": {
            "tasks": [
                {"type": "lambada", "path": "corpus/lambada.jsonl"},
                {"type": "wikitext", "path": "corpus/wiki.txt"},
            ]
        },
        "generate": {"prompt": "the ", "max_tokens": 8},
    }


def _environment(rules: Iterable[dict[str, Any]] = ()) -> dict[str, str]:
    python = str(Path(sys.executable).parent)
    return {
        "PATH": f"{ROOT / 'home' / 'bin'}:{python}:/usr/bin:/bin",
        "HOME": str(ROOT / "home"),
        "LANG": "C.UTF-8",
        "LOGNAME": USER,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "COUNT": str(ROOT / "home" / "jobs"),
        "XDG_CACHE_HOME": str(ROOT / "cache"),
        "PYTHONPATH": os.pathsep.join([str(HERE / "interrupt"), str(HERE.parents[1])]),
        "INTERRUPT": json.dumps(list(rules)),
    }


def command(*words: str, code: int = 0, rules: Iterable[dict[str, Any]] = ()) -> str:
    """Run one of the commands; what it printed.

    Args:
        words: after `pipeline`.
        code: with which it has to end.
        rules: at which of its files it is hit; see `interrupt/sitecustomize.py`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words],
        cwd=ROOT,
        env=_environment(rules),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=600,
        check=False,
    )
    if done.returncode != code:
        raise SystemExit(f"pipeline {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"pipeline {' '.join(words)}: {code}", flush=True)
    return done.stdout


def at(event: str, path: str, count: int, how: str, **more: str) -> dict[str, Any]:
    """A rule."""
    return {"event": event, "path": path, "count": count, "how": how, **more}


def make() -> dict[str, Any]:
    """Make everything below `ROOT`; what a reader of today has to find in it."""
    ROOT.mkdir()
    write_programs(ROOT / "home" / "bin")
    write_corpus(ROOT / "corpus")
    (ROOT / "run.yaml").write_text(yaml.safe_dump(run_file(), sort_keys=False))
    _together(_finished, _killed_units, _killed_shuffle)
    _stopped()
    _together(_continued, _diverged, _followed)
    _together(_killed_fork, _exported, _sweep, _sent, _adopted)
    _outputs()
    return {"shuffled": _finished_shuffle()}


def _together(*parts: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(part) for part in parts]:
            done.result()


def _finished() -> None:
    """A dataset."""
    command("preprocess", "run.yaml")


def _killed_units() -> None:
    """The same one, killed after some receipts; before that a worker died."""
    words = ["run.dir=runs/half", "data.dir=half"]
    rules = [at("os.rename", r"/sea/receipts/", 2, "SIGKILL", once=str(ROOT / "home" / "worker"))]
    rules += [at("os.rename", r"/land/receipts/", 3, "kill all")]
    command("preprocess", "run.yaml", *words, code=-signal.SIGKILL, rules=rules)
    done, all_units = (len(list((ROOT / name).glob("*/receipts/**/*.json"))) for name in ("half", "data"))
    print(f"half: {done} receipts of {all_units}")


SHUFFLED = ("run.dir=runs/shuffled", "data.dir=shuffled", "data.preprocess.shuffle=global")


def _killed_shuffle() -> None:
    """A shuffle over all units, killed after some buckets, with an engine that is checked first."""
    rules = [at("os.rename", r"/receipts/shuffle.*json$", 2, "kill all")]
    command(
        *("preprocess", "run.yaml", *SHUFFLED, "data.preprocess.engine=auto"),
        code=-signal.SIGKILL,
        rules=rules,
    )


def _finished_shuffle() -> dict[str, Any]:
    """The hashes of that dataset, finished in a copy."""
    shutil.copytree(ROOT / "shuffled", ROOT / "home" / "shuffled", copy_function=shutil.copy2)
    command("preprocess", "run.yaml", *SHUFFLED, "data.dir=home/shuffled")
    return {
        str(file.parent.relative_to(ROOT / "home" / "shuffled")): orjson.loads(file.read_bytes())["parts_hash"]
        for file in sorted((ROOT / "home" / "shuffled").glob("*/*/manifest.json"))
    }


def _stopped() -> None:
    """A training that is asked to end while it saves step 4; the next ones go on from a copy of it."""
    rules = [at("os.rename", r"/checkpoints/step-00000004$", 1, "SIGTERM")]
    command("train", "run.yaml", code=75, rules=rules)
    shutil.copytree(ROOT / "runs" / "done", ROOT / "runs" / "stopped", symlinks=True)


def _continued() -> None:
    """In the background on two processes, of which one dies when it begins; then everything of `pipeline run`."""
    rules = [at("open", r"/data/sea/train/.*\.idx$", 1, "error", rank="1", once=str(ROOT / "home" / "rank"))]
    command("run", "run.yaml", "--local", "launch.processes=2", rules=rules)
    ledger = ROOT / "runs" / "done" / "ledger.jsonl"
    end = time.monotonic() + 600
    while time.monotonic() < end:
        launches = [orjson.loads(line) for line in ledger.read_bytes().splitlines() if b'"launch' in line]
        stage = {each["number"]: each["stage"] for each in launches if each["event"] == "launch"}
        ends = [each for each in launches if each["event"] == "launch end"]
        if any(each["next"] == "end" or (each["next"], stage[each["number"]]) == ("done", "eval") for each in ends):
            time.sleep(1)
            break
        time.sleep(0.2)
    else:
        raise SystemExit("the jobs in the background do not end")
    command("run", "run.yaml")
    harness = {"tasks": ["kept"], "include_path": "corpus"}
    command("eval", "run.yaml", f"eval.harness={json.dumps(harness)}")


def _followed() -> None:
    """A training that goes back to step 4 because it is asked to."""
    shutil.copytree(ROOT / "runs" / "stopped", ROOT / "runs" / "followed", symlinks=True)
    command("train", "run.yaml", "run.dir=runs/followed", "resume.from=4", "train.duration=6 steps")


def _diverged() -> None:
    """A training from other weights that goes back once, from data that it has copied to its node, and ends."""
    words = ["run.dir=runs/diverged", "train.optimizer.lr=1e38", "train.schedule.warmup=0 steps"]
    words += ["train.checkpoint.every_steps=1", "train.faults.on_nonfinite=rewind", "train.faults.max_rewinds=1"]
    words += ["train.validation.samples=0", "stage.data=local", "stage.dir=staged"]
    words += ["train.init_from.path=runs/stopped/checkpoints/step-00000004"]
    command("train", "run.yaml", *words, code=77)


FORK = ("run.dir=runs/killed", "train.optimizer.lr=5e-3")


def _killed_fork() -> None:
    """A run that begins with step 4 of the other one, killed while it saves step 8."""
    command("fork", "runs/done", "run.yaml", "--step", "4", *FORK)
    rules = [at("os.rename", r"/checkpoints/step-00000008$", 1, "kill all")]
    command("train", "run.yaml", *FORK, code=-signal.SIGKILL, rules=rules)


def _exported() -> None:
    command("convert", "to-hf", "runs/done", "exports/hf")
    command("convert", "from-hf", "exports/hf", "exports/from-hf")
    command("checkpoint", "export", "runs/done", "--to", "exports/own", "--max-shard", "16KB")


SWEEP = ("train.duration=2 steps", "train.schedule.warmup=0 steps", "eval.tasks=[]", "train.optimizer.lr=0.01,0.02")


def _sweep() -> None:
    command("sweep", "run.yaml", *SWEEP)


def _sent() -> None:
    """Jobs of a scheduler, an array among them, that wait; then somebody cancels them."""
    sent = ("run.dir=runs/sent", "data.dir=sent")
    command("run", "run.yaml", "--slurm", *sent)
    command("cancel", "runs/sent")


def _adopted() -> None:
    """A dataset of two files that came from elsewhere."""
    command("data", "merge", "data/land/train", "merged")
    tokenizer = ("--tokenizer", "data/tokenizer/tokenizer.json")
    command("data", "adopt", "merged", "--to", "adopted", *tokenizer, "--link", "copy")


def _outputs() -> None:
    """What commands print with `--json`."""
    folder = ROOT / "outputs"
    folder.mkdir()
    for name, words in {
        "status": ["status", "runs/done", "runs/stopped", "runs/killed", "runs/sent", "--json"],
        "checkpoint-list": ["checkpoint", "list", "runs/done", "--json"],
        "checkpoint-show": ["checkpoint", "show", "runs/done", "--json"],
        "plan": ["plan", "run.yaml", "--json", "--device", "h100"],
        "sweep-table": ["sweep", "run.yaml", *SWEEP, "--table", "--json"],
        "data-plan": ["data", "plan", "run.yaml", "--json"],
        "data-where": ["data", "where", "runs/done", "--step", "5", "--json"],
        "data-when": ["data", "when", "runs/done", "--source", "land", "--document", "0", "--json"],
        "eval-table": ["eval", "run.yaml", "--table", "--json"],
        "generate": ["generate", "run.yaml", "--greedy", "--json", "--logprobs", "2"],
    }.items():
        (folder / f"{name}.json").write_text(command(*words))


def _neutral(path: Path, data: bytes) -> bytes:
    """A file without the names of this machine."""
    host = socket.gethostname()
    if path.name.startswith("environment-"):
        values = orjson.loads(data)
        values["distributions"] = {"numpy": "2.4.6"}
        values["environment"] = {"LANG": "C.UTF-8"}
        values["python"]["executable"] = "/usr/bin/python3"
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
    if data.startswith(b"{") and (path.name == "lock" or "leases" in path.parts):
        data = orjson.dumps({**orjson.loads(data), "boot": "0" * 32, "namespace": "pid:[1]"})
    if any(part in _SEALED for part in path.parts):
        return data
    pattern = rb"\b" + re.escape(host.encode()) + rb"\b"
    if path.parent.name == "heartbeats":  # lines of one length
        lines = (re.sub(pattern, HOST.encode(), line).rstrip().ljust(len(line)) for line in data.split(b"\n"))
        return b"\n".join(lines)
    if path.suffix in (".json", ".jsonl", ".log", ".out", "") and b"\0" not in data:
        data = re.sub(pattern, HOST.encode(), data)
        for here, there in ((HERE.parents[1], "/opt/pipeline"), (sys.base_prefix, "/usr")):
            data = data.replace(str(here).encode(), there.encode())
    return data


def files(root: Path) -> dict[str, bytes | None]:
    """What is kept, by its path: the content; None for an empty folder. Links are followed."""
    found: dict[str, bytes | None] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if _LEFT_OUT.search(f"{name}/" if path.is_dir() else name):
            continue
        if path.is_file():
            found[name] = _neutral(path.relative_to(root), path.read_bytes())
        elif not any(path.iterdir()):
            found[name] = None
    return found


def pack(contents: dict[str, bytes | None], to: Path) -> None:
    """One file, the same bytes for the same contents; beside it the list of them."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o644
            if data is None:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            entry.size = len(data or b"")
            tar.addfile(entry, io.BytesIO(data or b""))
    settings = zstandard.ZstdCompressionParameters.from_level(19, window_log=24, enable_ldm=True)
    to.write_bytes(zstandard.ZstdCompressor(compression_params=settings).compress(plain.getvalue()))
    sizes = (f"{'-' if data is None else len(data):>8}  {name}\n" for name, data in contents.items())
    to.with_suffix("").with_suffix(".txt").write_text("".join(sizes))


def unpack(packed: Path, to: Path) -> Path:
    """What was packed, in a folder, whose path stands in its files for the one that it was made in."""
    plain = zstandard.ZstdDecompressor().decompress(packed.read_bytes(), max_output_size=2**28)
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        tar.extractall(to, filter="data")
    for pattern in _MOVED:
        for file in to.rglob(pattern):
            if not any(part in _SEALED for part in file.relative_to(to).parts):
                _replace(file, str(PLACE), str(to))
    # Who had locks and leases was a process of this machine that is gone, so that nobody waits for it.
    here = {"host": socket.gethostname(), "boot": process_identity.boot(), "namespace": process_identity.namespace()}
    for file in [*to.glob("runs/*/lock"), *to.rglob("leases/**/*.json")]:
        file.write_bytes(orjson.dumps({**orjson.loads(file.read_bytes()), **here}))
        os.utime(file, (0, 0))
    for file in [*to.rglob("jobs.jsonl"), *to.rglob("ledger.jsonl")]:
        _replace(file, f'"host":"{HOST}"', f'"host":"{socket.gethostname()}"')
    return to


def _replace(file: Path, old: str, new: str) -> None:
    """Replace a text in a file that stays as old as it is."""
    mtime = file.stat().st_mtime
    file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))
    os.utime(file, (mtime, mtime))


def main() -> None:
    """Make everything and, in its usual place, pack it; `ROOT` stays, to be looked at."""
    expected = make()
    (ROOT / "expected.json").write_bytes(orjson.dumps(expected, option=orjson.OPT_INDENT_2))
    if ROOT == PLACE:
        pack(files(ROOT), PACKED)
        print(f"{PACKED}: {PACKED.stat().st_size:,} bytes; what it was made from is in {ROOT}")


if __name__ == "__main__":
    main()
