"""The estimated memory of a step against what torch's own accounting says that real steps took, by case and rank.

The cases are those of the tests, on processes connected by gloo, or with `--device cuda` those of one process on a GPU,
with a larger model. JSON lines with estimate, measurement and their ratio.

Run it as `python benchmarks/train/plan_memory.py`, or for some cases `--only pp2 "full recomputation"`. With
`--resident LAYERS` one large model instead: the estimate against the kernel's high-water mark of the process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeline.config import Config
from pipeline.train.planning.memory import memory
from tests.train.distributed import ranks
from tests.train.planning.steps import CASES, case_config, measured_peak, of_case, resident_peak

_LARGE: dict[str, Any] = {
    "model__dim": 2048,
    "model__heads": 16,
    "model__ffn_dim": 5632,
    "train__sequence_length": 2048,
    "train__precision": {"compute": "bf16"},
}


def compare(name: str, config: Config, device: str, resident: bool = False) -> None:
    """Print a line for each pp rank of a case."""
    layout, spec, shape = of_case(config)
    if resident:
        found = ranks.run(1, resident_peak, config, connect=False, timeout=1800)
    else:
        found = ranks.run(layout.world_size, measured_peak, config, device, connect=device == "cpu", timeout=600)
    for each in memory(config, layout, spec, shape, "cuda" if device == "cuda" else "cpu"):
        most = min(peak for rank, peak in found if rank == each.pp_rank)  # they need the same; gloo keeps some longer
        row = {"case": name, "pp_rank": each.pp_rank, "estimated_mb": round(each.total / 1e6, 1)}
        row |= {"measured_mb": round(most / 1e6, 1), "ratio": round(each.total / most, 3), "when": each.when}
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names have one of these in them")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--resident", type=int, metavar="LAYERS")
    arguments = parser.parse_args()
    if arguments.resident is not None:
        config = case_config("one process", **{**_LARGE, "model__layers": arguments.resident, "train__batch_size": 1})
        compare(f"resident, {arguments.resident} layers", config, "cpu", resident=True)
        return
    for name in CASES:
        config = case_config(name, **(_LARGE if arguments.device == "cuda" else {}))
        one = of_case(config)[0].world_size == 1
        if any(words in name for words in arguments.only) and (one or arguments.device == "cpu"):
            compare(name, config, arguments.device)


if __name__ == "__main__":
    main()
