"""Profile of a step: kernels by name, waits of the host for the device, gaps in which the device idles."""

from __future__ import annotations

import gzip
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from train_gpu_steps import micro_batches as batches_of
from train_gpu_steps import ours, place_of, timed
from train_gpu_variants import Variant

from evidence.item import Result, goal
from evidence.speed import sizes_of

_ON_DEVICE = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Categories of torch's traces, in which a device is at work."""
_WAITS = "called a synchronizing"
"""What torch warns of in `set_sync_debug_mode("warn")`."""


def measure(
    device: str,
    work: Path,
    *,
    run_file: str,
    tiny: bool,
    variant: Mapping[str, Any],
    layers: int,
    tokens: int,
    micro_batches: int,
    warmup: int,
    steps: int,
    rows: int,
) -> Result:
    """Profile steps of training.

    Args:
        device: cuda or cpu.
        work: Where the trace goes.
        run_file: Relative to the repository.
        tiny: A model for a CPU instead of that of the run file.
        variant: Fields of `Variant`.
        layers: Of the model.
        tokens: Of a micro-batch.
        micro_batches: Of a step.
        warmup: Steps before anything is looked at.
        steps: That are watched for waits, and as many that are profiled.
        rows: Kernels in the table.
    """
    sizes = sizes_of(run_file, tiny, device, tokens, micro_batches)
    place = place_of(sizes.config(Variant(**variant), layers))
    numbers = range(warmup + 2 * steps + 2)
    profiled = numbers[-steps:]
    step, about = ours(place, [batches_of(place, number) for number in numbers])
    timed(step, place.setup.device, steps=1, warmup=warmup)
    waits = waits_for_device(lambda: [step(warmup + 1 + number) for number in range(steps)], device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities):  # the first one loads its libraries while the device waits
        step(profiled[0] - 1)()
    with profile(activities=activities) as found:
        # Their losses are read one step late, as in training, and at the end all of them are waited for.
        for loss in [step(number) for number in profiled]:
            loss()
    trace = work / "trace.json.gz"
    found.export_chrome_trace(str(trace))
    with gzip.open(trace) as opened:
        events = json.load(opened)["traceEvents"]
    spans = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE[device]
    ]
    busy, whole = busy_and_whole([span[:2] for span in spans])
    return {
        **about,
        "variant": Variant(**variant).name,
        "layers": layers,
        "steps": steps,
        "step_ms": round(whole / steps / 1e3, 3),
        "idle_share": round(1 - busy / whole, 5),
        "kernels": table(spans, steps)[:rows],
        "waits": waits,
        "goals": {"busy_share": goal(busy / whole, 0.99)},
        "reads": [run_file],
    }


def waits_for_device(work: Callable[[], object], device: str) -> dict[str, int]:
    """How often the host waited for the device in `work`, by torch's own warning: number by place in the source.

    On a CPU nothing waits, and the result is empty.
    """
    if device == "cpu":
        work()
        return {}
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits_by_place(caught)


def waits_by_place(caught: Iterable[warnings.WarningMessage]) -> dict[str, int]:
    """Number of waits by file and line; torch's warning that the mode itself is a prototype is none."""
    found = Counter(
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if _WAITS in str(each.message).lower()
    )
    return dict(found.most_common())


def busy_and_whole(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Time in which at least one span runs, and from the first begin to the last end; in the unit of the spans.

    Raises:
        ValueError: There is no span.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the trace has nothing that ran on the device")
    busy, (begin, end) = 0.0, ordered[0]
    for first, last in ordered[1:]:
        if first > end:
            busy += end - begin
            begin = first
        end = max(end, last)
    return busy + end - begin, end - ordered[0][0]


def table(spans: Iterable[tuple[float, float, str]], steps: int) -> list[dict[str, Any]]:
    """Kernels by name, the longest first: milliseconds and calls per step, and the share of all."""
    times: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in spans:
        times[name].append(end - begin)
    whole = sum(map(sum, times.values()))
    rows = [
        {
            "name": name[:120],
            "ms": round(sum(each) / steps / 1e3, 3),
            "calls": round(len(each) / steps, 1),
            "share": round(sum(each) / whole, 4),
        }
        for name, each in times.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])
