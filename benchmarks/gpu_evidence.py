"""Shows on one GPU what the documentation claims: exactness, speed, memory, saves; JSON lines, and the page of them.

Items run in order of worth, each in a process of its own with a time limit. Every item appends one JSON line as soon as
it ends: its result or its error, with commit, driver, clocks, power limit and versions. So the command can be cut off
anywhere, and called again: an item is skipped where the results have a line of it from the same device and version of
torch with the same shapes, and all files of this repository that it imported are unchanged.

    python benchmarks/gpu_evidence.py --minutes 9 --to lines.jsonl    on a GPU
    python benchmarks/gpu_evidence.py --list                          the items, and which have a result
    python benchmarks/gpu_evidence.py --rehearse                      all items on a CPU, with small shapes
    python benchmarks/gpu_evidence.py --page                          write docs/gpu-results.md from the results
    python benchmarks/gpu_evidence.py --calibrate                     write the measured shares for `pipeline plan`

`make gpu-kit` collects the wheels that an image with torch lacks, and prints the call. Append the lines that come back
to benchmarks/gpu_results.jsonl and commit them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence import imported, machine
from evidence.catalog import ITEMS
from evidence.child import end_with_parent
from evidence.item import Item

RESULTS = imported.ROOT / "benchmarks" / "gpu_results.jsonl"
_ERROR_CHARACTERS = 600
_REHEARSAL_TIMES = 10.0
"""A CPU with other work is given that much more than the limit of an item."""
_SAMPLE_S = 10.0
"""Between two looks at clocks and power while an item runs."""
_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for an item whose time is over."""

Line = dict[str, Any]


def read(*files: Path) -> list[Line]:
    """The lines of results; of a file that was cut off, all but the unfinished last line."""
    lines = []
    for file in files:
        for row in file.read_text().splitlines() if file.exists() else ():
            try:
                lines.append(json.loads(row))
            except json.JSONDecodeError:
                print(f"warning: {file}: a line is not complete and is left out", file=sys.stderr)
    return lines


def has_result(item: Item, lines: Sequence[Line], device: str, torch: str | None) -> bool:
    """Whether a line of the item answers for today's files on this device."""
    return any(
        line["item"] == item.name
        and line["status"] in ("ok", "failed")
        and line["device"]["name"] == device
        and line["versions"].get("torch") == torch
        and line["shapes"] == item.full
        and imported.unchanged(line["files"])
        for line in lines
    )


def run(item: Item, seconds: float, *, rehearse: bool) -> Line:
    """Run an item in a process of its own; returns `status`, `result` or `error`, `seconds`, `files`."""
    with tempfile.TemporaryDirectory(prefix="evidence-") as folder:
        answer, log, files, work = (Path(folder, name) for name in ("answer.json", "log", "files", "work"))
        files.mkdir()
        work.mkdir()
        words = [sys.executable, __file__, "--one", item.name, "--answer", str(answer), "--work", str(work)]
        begun = time.monotonic()
        with log.open("wb") as output:
            # A group and no session of its own: what ends the session of the runner has to reach the item.
            process = subprocess.Popen(
                [*words, *(["--rehearse"] if rehearse else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, imported.FOLDER: str(files), "TOKENIZERS_PARALLELISM": "false"},
                process_group=0,
            )
            try:
                during, over = _wait(process, max(1.0, seconds), watch=not rehearse)
            finally:
                _end(process)
        took = round(time.monotonic() - begun, 1)
        line: Line = {"seconds": took, "during": during, "files": imported.collect(files)}
        if answer.exists():
            return line | machine.without_paths(json.loads(answer.read_text()), folder)  # type: ignore[no-any-return]
        if over:
            return line | {"status": "cut off", "error": f"ended after {took:.0f} s"}
        last = " ".join(log.read_text(errors="replace").strip().splitlines()[-4:])
        error = machine.without_paths(f"exit code {process.returncode}: {last}", folder)
        return line | {"status": "error", "error": error[-_ERROR_CHARACTERS:]}


def _wait(process: subprocess.Popen[bytes], seconds: float, *, watch: bool) -> tuple[Line, bool]:
    """Wait for an item; returns the ranges of clocks and power meanwhile if they are watched, and whether time is over.

    After an item the GPU rests, and its clocks are no longer those of the work.
    """
    end, samples = time.monotonic() + seconds, list[Line]()
    while process.poll() is None and (left := end - time.monotonic()) > 0:
        try:
            process.wait(min(left, _SAMPLE_S))
        except subprocess.TimeoutExpired:
            if watch:
                samples.append(machine.moving())
    return machine.ranges(samples), process.poll() is None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of an item, with all processes that it started."""
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is not None and number == signal.SIGTERM:
            continue  # what it left behind gets SIGKILL below
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def run_one(item: Item, work: Path, answer: Path, *, rehearse: bool) -> None:
    """In the process of an item: measure, and leave the answer where the runner looks for it."""
    end_with_parent()
    try:
        result = item.run(work, rehearse=rehearse)
        checks = result.get("checks", {})
        found: Line = {"status": "ok" if all(checks.values()) else "failed", "result": result}
        if found["status"] == "failed":
            found["error"] = "; ".join(f"{name}: not so" for name, holds in checks.items() if not holds)
        json.dumps(found)
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        found = {"status": "error", "error": " ".join(text.split())[-_ERROR_CHARACTERS:]}
    imported.record(found.get("result", {}).pop("reads", ()))
    unfinished = answer.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found))
    unfinished.rename(answer)


def append(file: Path, line: Line) -> None:
    """Add a line durably, in one write."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - 1))
        cut_off = output.read() not in (b"", b"\n")  # a line of before; this one begins behind it
        output.write(b"\n" * cut_off + json.dumps(line).encode() + b"\n")
        output.flush()
        os.fsync(output.fileno())


def measure(items: Sequence[Item], given: argparse.Namespace) -> int:
    """Run the items that have no result; returns the exit code: 1 where one failed."""
    before = machine.cpu() if given.rehearse else machine.gpu()
    versions, commit = machine.versions(), given.commit or machine.commit()
    known = [] if given.rehearse or given.again else read(RESULTS, *([given.to] if given.to else []))
    end = time.monotonic() + given.minutes * 60
    tally: dict[str, list[str]] = {}
    for number, item in enumerate(items, 1):
        left = end - time.monotonic()
        limit = item.limit_s * (_REHEARSAL_TIMES if given.rehearse else 1)
        if has_result(item, known, before["name"], versions.get("torch")):
            line: Line = {"status": "skipped", "error": "has a result and its files are unchanged; --again repeats it"}
        elif left < item.least_s and not given.rehearse:
            line = {"status": "not begun", "error": f"{left:.0f} s were left, it takes about {item.least_s:.0f} s"}
        else:
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = run(item, min(limit, left), rehearse=given.rehearse)
            about = {
                "item": item.name,
                "date": date,
                "commit": commit,
                "rehearsal": given.rehearse,
                "shapes": item.shapes(given.rehearse),
                "device": before,
                "versions": versions,
            }
            if given.to:
                append(given.to, about | line)
        tally.setdefault(line["status"], []).append(item.name)
        said = f"{line['status']}: {line['error']}" if "error" in line else line["status"]
        took = f" ({line['seconds']:.0f} s)" if "seconds" in line else ""
        print(f"[{number}/{len(items)}] {item.name}: {said}{took}", flush=True)
    print(", ".join(f"{status} {len(names)}" for status, names in tally.items()))
    return 1 if tally.get("error") or tally.get("failed") else 0


def show_list(items: Sequence[Item]) -> None:
    """Print the items, and of which devices there are results."""
    lines = read(RESULTS)
    for item in items:
        devices = sorted({line["device"]["name"] for line in lines if line["item"] == item.name})
        seen = f"results: {', '.join(devices)}" if devices else "no result"
        print(f"{item.name:<28} about {item.least_s:>3.0f} s, at most {item.limit_s:>3.0f}   {seen}")
        print(f"{'':<28} {item.question}")


def main() -> None:
    given = _parse()
    names = {item.name: item for item in ITEMS}
    if given.one is not None:
        run_one(names[given.one], given.work, given.answer, rehearse=given.rehearse)
        return
    items = [item for item in ITEMS if not given.only or any(item.name.startswith(name) for name in given.only)]
    if not items:
        sys.exit(f"error: --only {' '.join(given.only)}: no item has a name that begins so; see --list")
    if given.list:
        show_list(items)
    elif given.page:
        from evidence.page import PAGE, page

        PAGE.write_text(page(read(RESULTS)))
        print(f"written: {PAGE.relative_to(imported.ROOT)}")
    elif given.calibrate:
        from evidence import calibrate  # here, so that no item rests on it

        print(f"written: {calibrate.write(read(RESULTS))}")
    else:
        # So that a time limit from outside ends the processes of an item, too.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            sys.exit(measure(items, given))
        except RuntimeError as error:
            sys.exit(f"error: {error}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=60, help="no item runs beyond them (60)")
    add("--to", type=Path, metavar="FILE", help="append the lines to it; without it they are not kept")
    add("--only", nargs="+", default=[], metavar="NAME", help="items whose names begin so, like exact or speed/eager")
    add("--again", action="store_true", help="run items that have a result, too")
    add("--commit", help="of the source, where it is not a git checkout")
    add("--rehearse", action="store_true", help="on a CPU, with small shapes; its lines are no results")
    add("--list", action="store_true", help="print the items and end")
    add("--page", action="store_true", help="write docs/gpu-results.md and end")
    add("--calibrate", action="store_true", help="write the measured shares of devices for `pipeline plan` and end")
    add("--one", help=argparse.SUPPRESS)
    add("--answer", type=Path, help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
