"""The measured shares that `pipeline plan` uses, from the lines of the item `rates`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.train.host.devices import DEVICES, Device
from pipeline.train.host.shares import FILE, MeasuredShares, Shares


def shares(rates: dict[str, Any], device: Device) -> Shares:
    """Rates as shares of the stated peaks, four digits.

    Args:
        rates: The result of the item `rates`.
        device: That it was measured on.
    """
    products, in_fp8 = rates["products_tflops"], rates["fp8_tflops"] if "fp8" in device.flops else {}
    return Shares(
        products=round(products * 1e12 / device.flops["bf16"], 4),
        fp8={recipe: round(each * 1e12 / device.flops["fp8"], 4) for recipe, each in in_fp8.items()},
        attention=round(rates["attention_tflops"] / products, 4) if products else 0.0,
        attention_backward=rates["attention_backward"],
        memory=round(rates["memory_gb_per_s"] * 1e9 / device.memory_bandwidth, 4),
        update=round(rates["update_gb_per_s"] * 1e9 / device.memory_bandwidth, 4),
    )


def sound(found: Shares) -> bool:
    """True if all shares are above 0 and none is above 1; also false for what is not a number."""
    times = found.attention_backward
    of_peaks = (found.products, *found.fp8.values(), found.products * found.attention, found.memory, found.update)
    return all(0 < share <= 1 for share in of_peaks) and 0 < times < math.inf


def assumed(device: Device) -> Shares:
    """The shares of a device of which nothing was measured."""
    return replace(device, measured=None).shares


def write(lines: Iterable[dict[str, Any]]) -> Path:
    """Write the file; returns its path."""
    Path(str(FILE)).write_text(measured(lines))
    return FILE


def measured(lines: Iterable[dict[str, Any]]) -> str:
    """The text of the file: of each device the newest line that was measured on its own card and is sound."""
    good = [line for line in lines if line["item"] == "rates" and line["status"] == "ok" and not line["rehearsal"]]
    found = {}
    for device in DEVICES.values():
        own = [
            MeasuredShares(
                driver=device.card,
                date=line["date"],
                commit=line["commit"],
                torch=line["versions"]["torch"],
                shares=shares(line["result"], device),
            )
            for line in good
            if line["device"]["name"] == device.card
        ]
        own = [entry for entry in own if sound(entry.shares)]
        if own:
            found[device.name] = asdict(max(own, key=lambda entry: entry.date))
    return json.dumps(found, indent=2) + "\n"
