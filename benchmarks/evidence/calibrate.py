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
    products = rates["products"]["per_s"]
    in_fp8 = {recipe: found["per_s"] for recipe, found in rates["fp8"].items() if "per_s" in found}
    return Shares(
        products=round(products / device.flops["bf16"], 4),
        fp8={recipe: round(each / device.flops["fp8"], 4) for recipe, each in in_fp8.items() if "fp8" in device.flops},
        attention=round(rates["attention"]["per_s"] / products, 4),
        attention_backward=rates["attention"]["backward_to_forward"],
        memory=round(rates["memory"]["per_s"] / device.memory_bandwidth, 4),
        update=round(rates["update"]["per_s"] / device.memory_bandwidth, 4),
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
