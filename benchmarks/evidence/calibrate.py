"""The measured shares that `pipeline plan` uses, from the lines of the item `rates`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.train.planning.devices import DEVICES, Device
from pipeline.train.planning.shares import FILE, Measured, Shares


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
        attention=round(rates["attention_tflops"] / products, 4),
        attention_backward=rates["attention_backward"],
        memory=round(rates["memory_gb_per_s"] * 1e9 / device.memory_bandwidth, 4),
        update=round(rates["update_gb_per_s"] * 1e9 / device.memory_bandwidth, 4),
    )


def assumed(device: Device) -> Shares:
    """The shares of a device of which nothing was measured."""
    return replace(device, measured=None).shares


def write(lines: Iterable[dict[str, Any]]) -> Path:
    """Write the file; returns its path."""
    FILE.write_text(measured(lines))
    return FILE


def measured(lines: Iterable[dict[str, Any]]) -> str:
    """The text of the file: of each device the newest line that was measured on its own card."""
    lines = list(lines)
    found = {}
    for device in DEVICES.values():
        own = [
            line
            for line in lines
            if line["item"] == "rates"
            and line["status"] == "ok"
            and not line["rehearsal"]
            and line["device"]["name"] == device.card
        ]
        if own:
            newest = max(own, key=lambda line: line["date"])
            entry = Measured(
                driver=device.card,
                date=newest["date"],
                commit=newest["commit"],
                torch=newest["versions"]["torch"],
                shares=shares(newest["result"], device),
            )
            found[device.name] = entry.to_json()
    return json.dumps(found, indent=2) + "\n"
