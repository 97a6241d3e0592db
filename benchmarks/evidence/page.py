"""`docs/gpu-results.md` from the lines of `gpu_evidence.py`: no figure that no line has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from train_gpu_table import compare_losses, markdown, table

from evidence.catalog import ITEMS
from evidence.imported import ROOT

PAGE = ROOT / "docs" / "gpu-results.md"
Line = dict[str, Any]

_HEAD = """# GPU results

Written by `benchmarks/gpu_evidence.py --page` from the lines in `benchmarks/gpu_results.jsonl`; do not edit. Every
figure here was measured on the device that is named, at the commit and on the date beside it.
"""
_NONE = """
**There is no result yet: nothing of this suite has run on a GPU.** [GPU code](gpu.md) says what was tested without one,
and what no test reaches.
"""
_HOW = """
## Measure on your GPU

On a machine with one GPU, torch and the requirements of this package (`make install`, with transformers and torchao):

```
python benchmarks/gpu_evidence.py --minutes 60 --to lines.jsonl
```

Items run in the order of the table, each in a process of its own with a time limit. A line is appended as soon as an
item ends, so the command can be cut off and called again; items with a result are skipped while the files that they
import are unchanged. `--only NAME` takes some, `--list` prints them, `--rehearse` runs all of them on a CPU with small
shapes.

For a machine without a network, `make gpu-kit` collects the wheels that an image with torch and NumPy lacks (below
40 MiB, for Python 3.12; `KIT="--python 3.11 --machine aarch64"` for others) and prints the command to run there.

Append the lines to `benchmarks/gpu_results.jsonl`, then write this page with `--page`, and what `pipeline plan` takes
for this device with `--calibrate` ([planning](planning.md)).

## Items

| item | question |
|---|---|
"""
_GROUPS = {
    "tests": "Tests that need a GPU",
    "rates": "What the device reaches",
    "exact": "Exactness",
    "speed": "Speed: layers of Llama 3 8B",
    "profile": "Profile of a step",
    "saves": "Asynchronous saves, and a kill",
    "generation": "Generation",
    "gpt2": "GPT-2 124M",
}
"""Titles, by the first part of an item's name."""
_FASTER = {"speed/fp8-tensorwise": 1.3, "speed/fp8-rowwise": 1.3}
"""Goals of tokens/s, relative to `speed/compiled`."""


def page(lines: Sequence[Line]) -> str:
    """The page.

    Args:
        lines: Of results, the oldest first. Rehearsals are left out.
    """
    items = "".join(f"| `{item.name}` | {item.question} |\n" for item in ITEMS)
    devices: dict[str, dict[str, Line]] = {}
    for line in lines:
        if not line["rehearsal"]:
            newest = devices.setdefault(line["device"]["name"], {})
            # An error does not take the place of a result.
            if "result" in line or "result" not in newest.get(line["item"], {}):
                newest[line["item"]] = line
    found = "".join(_device(name, newest) for name, newest in devices.items())
    return f"{_HEAD}{found or _NONE}{_HOW}{items}"


def _device(name: str, newest: dict[str, Line]) -> str:
    order = {item.name: place for place, item in enumerate(ITEMS)}
    lines = sorted(newest.values(), key=lambda line: order.get(line["item"], len(order)))
    facts = [*_facts(line["versions"] for line in lines), *_facts(_known(line["device"]) for line in lines)]
    text = [
        f"\n## {name}\n",
        ", ".join(facts) + ".\n",
        markdown(("item", "outcome", "date", "commit", "seconds"), map(_row, lines)),
    ]
    for group, title in _GROUPS.items():
        these = [line for line in lines if line["item"].split("/")[0] == group and "result" in line]
        if these:
            text += [f"\n### {title}\n", _group(group, these)]
    return "\n".join(text)


_FACTS = ("driver", "memory_mib", "power_limit_w", "clock_max_mhz")


def _known(device: Line) -> Line:
    return {key: value for key, value in device.items() if key in _FACTS}


def _facts(sets: Iterable[Line]) -> list[str]:
    """Names with all values that the lines have of them."""
    found: dict[str, dict[str, None]] = {}
    for each in sets:
        for key, value in each.items():
            found.setdefault(key, {})[f"{value:g}" if isinstance(value, float) else str(value)] = None
    return [f"{key} {' and '.join(values)}" for key, values in found.items()]


def _row(line: Line) -> tuple[str, ...]:
    goals = line.get("result", {}).get("goals", {})
    missed = [f"{key} {each['value']:g}, aimed at {each['goal']:g}" for key, each in goals.items() if not each["met"]]
    good = "holds" if line.get("result", {}).get("checks") else "measured"
    outcome = {"ok": good, "failed": "**FAILS**"}.get(line["status"], f"**{line['status']}**")
    if line["status"] != "ok":
        outcome += f": {_cell(line['error'])}"
    elif missed:
        outcome += f"; goal missed: {'; '.join(missed)}"
    return f"`{line['item']}`", outcome, line["date"][:10], str(line["commit"]), f"{line['seconds']:.0f}"


def _group(group: str, lines: Sequence[Line]) -> str:
    if group == "speed":
        # Rows of other models or versions are not to be compared.
        alike: dict[tuple[Any, ...], list[Line]] = {}
        for line in lines:
            result, torch = line["result"], line["versions"].get("torch")
            alike.setdefault((torch, result["layers"], result["step_tokens"]), []).append(line)
        return "\n\n".join(map(_speed, alike.values()))
    return "\n".join(f"`{line['item']}`\n\n{_values(line['result'])}\n" for line in lines)


def _speed(lines: Sequence[Line]) -> str:
    """Rows of one model, what they are relative to others, and measured against planned."""
    rows: list[Line] = []
    for line in lines:
        about = {"versions": line["versions"], "date": line["date"]}
        rows.append(compare_losses(line["result"] | about, rows))
    by_item = {line["item"]: line["result"] for line in lines}
    text = [table(rows), ""]
    rates = {name: row["tokens_per_second"] for name, row in by_item.items()}
    if base := rates.get("speed/compiled"):
        for name, wanted in _FASTER.items():
            if name in rates:
                ratio = rates[name] / base
                missed = "" if ratio >= wanted else ", missed"
                text.append(f"- `{name}`: {ratio:.2f} of `speed/compiled` in bf16; goal {wanted}{missed}.")
        for rival in ("speed/loop", "speed/trainer"):
            if rival in rates:
                text.append(f"- `speed/compiled`: {base / rates[rival]:.2f} of `{rival}`.")
    planned = [
        (
            f"`{name}`",
            f"{row['peak_gb']:.1f}",
            f"{row['planned_gb']:.1f}",
            f"{row['step_s']:.3f}",
            f"{row['planned_s']:.3f}",
            row["planned_from"],
        )
        for name, row in by_item.items()
        if row.get("planned_gb") and row.get("planned_s")
    ]
    if planned:
        text += ["", "Measured against `pipeline plan`:", ""]
        text.append(markdown(("item", "peak GB", "planned", "seconds per step", "planned", "plan"), planned))
    return "\n".join(text)


def _values(result: Line) -> str:
    """A result as a table: numbers and words by key, checks, and rows where a value is a list of them."""
    simple: list[tuple[str, str]] = []
    tables: list[str] = []
    for key, value in result.items():
        if key == "checks":
            simple += [(f"check: {name}", "holds" if holds else "**FAILS**") for name, holds in value.items()]
        elif key == "goals":
            simple += [
                (f"goal: {name}", f"{each['value']:g}, aimed at {each['goal']:g}") for name, each in value.items()
            ]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            columns = list(value[0])
            tables.append(
                f"\n{key}:\n\n" + markdown(columns, ([_cell(row.get(column)) for column in columns] for row in value))
            )
        elif value in ({}, []):
            simple.append((key, "none"))
        elif isinstance(value, dict):
            simple += [(f"{key}: {name}", _cell(each)) for name, each in value.items()]
        else:
            simple.append((key, _cell(value)))
    return "\n".join([markdown(("what", "value"), simple), *tables])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        shown = ", ".join(_cell(each) for each in value[:12])
        return shown + (f", … ({len(value)})" if len(value) > 12 else "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    text = " ".join(("–" if value is None else str(value)).split())
    return text.replace("|", "\\|")
