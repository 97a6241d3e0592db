"""`pipeline curate`: the whole command by pass beside datatrove, its parts, a million documents, and a huge layout.

    python benchmarks/curate/curate.py whole --work /tmp/bench --texts FOLDER [--mb 100] [--rounds 3] [--peer PYTHON]
    python benchmarks/curate/curate.py rules|duplicates|models|million|layout ...

`whole` writes the texts (or those that the machine has) as JSON Lines in documents of about 3.2 kB and runs rules,
exact and near duplicates, decontamination by a file, and the report, with 1 and 2 workers: CPU seconds by pass, and MB
of text per CPU second. `one pass` is what measuring takes in one process with its files on disk: reading JSON Lines,
hashes, rules and signatures, without and with decontamination. With `--peer`, a Python with datatrove, signature to
removal and rules run beside it. The other names are modules of their own, `curate_NAME.py`, with their own options.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from curate_million import QUICKSTART, RULES, sources, timed

from benchmarks.measure import adopt_orphans
from pipeline.config.load import load_run
from pipeline.data.curate import stage
from pipeline.data.curate.stage import MeasureRun

HERE = Path(__file__).parent
PARTS = ("rules", "duplicates", "models", "million", "layout")
PIECE = 3200


def write_texts(work: Path, folder: Path | None, size: float) -> dict[str, Any]:
    """JSON Lines of documents, and a file of items: every hundredth document's beginning."""
    texts, total = [], 0
    for text in sources(folder):
        for start in range(0, len(text), PIECE):
            texts.append(text[start : start + PIECE])
            total += len(texts[-1].encode())
        if total >= size * 1e6:
            break
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    # Two files, so that two workers have work.
    for number in range(2):
        (work / f"{number}.jsonl").write_text("".join(f"{line}\n" for line in lines[number::2]))
    items = (" ".join(text.split()[:60]) for text in texts[::100])
    (work / "items.txt").write_text("".join(f"{item}\n" for item in items if item))
    return {"documents": len(texts), "text_mb": round(total / 1e6, 2)}


def write_run(work: Path, *, items: bool = True) -> Path:
    """A run file with all but models."""
    curate: dict[str, Any] = {"rules": {name: {} for name in RULES}, "duplicates": {"exact": "text", "near": {}}}
    if items:
        curate["decontaminate"] = {"files": [str(work / "items.txt")]}
    source = {"name": "web", "type": "jsonl", "paths": [str(work / "[01].jsonl")]}
    run = {"include": str(QUICKSTART), "data": {"dir": str(work / "data"), "sources": [source], "curate": curate}}
    path = work / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


class _Measured(Exception):
    """The pass `measure` is done, and no other is wanted."""


def one_pass(run: Path, folder: Path) -> float:
    """CPU seconds of measuring all units in this process, what is compiled being loaded."""
    found: list[float] = []

    def run(self: Any, jobs: Any, _: int) -> Any:
        start = time.process_time()
        for job in jobs:
            job.run(self._shared, lambda *done: None)
        found.append(time.process_time() - start)
        raise _Measured

    MeasureRun.run = run  # type: ignore[method-assign]
    for _ in range(2):  # the first one loads
        shutil.rmtree(folder, ignore_errors=True)
        try:
            stage.curate(load_run(run, [f"data.dir={folder}"]))
        except _Measured:
            continue
    return found[-1]


def whole(options: argparse.Namespace) -> None:
    """The command by pass, and what measuring takes."""
    work = options.work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    about = write_texts(work, options.texts, options.mb)
    print(json.dumps(about), flush=True)
    run, size = write_run(work), about["text_mb"]
    for workers in (1, 2):
        runs = []
        for _ in range(options.rounds):
            shutil.rmtree(work / "data", ignore_errors=True)
            runs.append(timed(work, run, f"data.preprocess.workers={workers}"))
        middle = sorted(runs, key=lambda each: each["cpu_s"])[len(runs) // 2]
        rate = {"mb_per_cpu_s": round(size / middle["cpu_s"], 1)}
        print(json.dumps({"what": "command", "workers": workers} | rate | middle), flush=True)
    for name, items in (("one pass", False), ("one pass with decontamination", True)):
        run = write_run(work, items=items)
        seconds = statistics.median(one_pass(run, work / "one") for _ in range(options.rounds))
        print(json.dumps({"what": name, "cpu_s": round(seconds, 2), "mb_per_cpu_s": round(size / seconds, 1)}))
    if options.peer is not None:
        peer = [f"--peer={options.peer}"]
        near = [sys.executable, str(HERE / "curate_duplicates.py"), "compare", f"--work={work / 'near'}", *peer]
        subprocess.run([*near, f"--runs={options.rounds}", f"--texts={work / '0.jsonl'}"], check=True)
        rules = [sys.executable, str(HERE / "curate_rules.py"), f"--texts={work / '0.jsonl'}", *peer]
        subprocess.run([*rules, f"--rounds={options.rounds}", "--documents=1000"], check=True)
    shutil.rmtree(work)


def part(name: str) -> None:
    """Run a part with the arguments behind its name."""
    module = "duplicates" if name == "layout" else name
    sys.argv[:2] = [str(HERE / f"curate_{module}.py"), *(["layout"] if name == "layout" else [])]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in PARTS:
        return part(sys.argv[1])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("whole", *PARTS))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="a folder of texts, or of JSON Lines with `text`")
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="a Python with datatrove")
    options = parser.parse_args()
    adopt_orphans()
    whole(options)


if __name__ == "__main__":
    main()
