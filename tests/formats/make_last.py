"""Makes what `test_kept_last` resumes: two runs of the last commit whose version was 0.1.0, each stopped in the middle.

`make` has the runs of an earlier one. These have what came in between: experts, a recurrence, multi-token prediction,
Muon, dropout, packs, an objective with random choices, weights of sources. `python -m tests.formats.make_last CHECKOUT`
runs the commands of a checkout of 500e8ac7^ and packs two folders of each run: `NAME` as it was when it was stopped,
and of `NAME-then`, where that version continued it to its end, the journal and the metrics.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.formats import make

PACKED = make.HERE / "v0.1-last.tar.zst"
STEPS, STOP = 6, 3
NAMES = ("experts", "packs")


def run_file(name: str) -> dict[str, Any]:
    """One of the run files."""
    run = make.run_file()
    for key in ("eval", "generate"):
        del run[key]
    run["run"]["dir"] = f"runs/{name}"
    run["train"] |= {"duration": f"{STEPS} steps", "validation": {"samples": 0}}
    run["train"]["checkpoint"] |= {"every_steps": STOP}
    if name == "experts":
        run["model"] |= {
            **{"dim": 8, "pattern": ["recurrent", "sparse"], "dropout": 0.1, "mtp": {"depth": 1}},
            "kinds": {
                "sparse": {"mlp": "experts", "experts": {"count": 3, "top_k": 2, "ffn_dim": 8, "score_bias": True}},
                "recurrent": {"mixer": "gated_delta", "delta": {"key_heads": 2, "key_dim": 4, "value_dim": 4}},
            },
        }
        del run["model"]["kv_heads"]
        run["train"] |= {"loss": {"mtp": 0.3}, "optimizer": {"type": "muon", "lr": 1e-2}}
    else:
        run["tokenizer"]["special_tokens"] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
        run["data"] |= {"loader": {"packing": "best_fit"}, "dir": "packed"}
        run["data"]["sources"][0]["loss_weight"] = 0.5
        run["model"] |= {"document_attention": True}
        run["train"] |= {"objective": {"type": "fim", "rate": 0.5}}
        run["train"]["optimizer"]["states"] = "bf16"
        run["train"]["metrics"]["windows"] = True
        run["blend"] = {"phases": [{"until": "2 steps"}, {"weights": {"sea": 1, "land": 3}}]}
    return run


def main(checkout: str) -> None:
    """Make both runs in `make.ROOT`, which must not exist, and pack them."""
    made = os.pathsep.join([str(make.HERE / "interrupt"), str(Path(checkout).resolve())])
    environment = make._environment
    make._environment = lambda rules=(): {**environment(rules), "PYTHONPATH": made}
    make.ROOT.mkdir()
    make.write_corpus(make.ROOT / "corpus")
    kept: dict[str, bytes | None] = {}
    for name in NAMES:
        (make.ROOT / f"{name}.yaml").write_text(yaml.safe_dump(run_file(name), sort_keys=False))
        make.command("preprocess", f"{name}.yaml")
        rules = [make.at("os.rename", rf"/checkpoints/step-0000000{STOP}$", 1, "SIGTERM")]
        make.command("train", f"{name}.yaml", code=75, rules=rules)
        shutil.copytree(make.ROOT / "runs" / name, make.ROOT / "runs" / f"{name}-then", symlinks=True)
        make.command("train", f"{name}.yaml", f"run.dir=runs/{name}-then")
    for path, data in make.files(make.ROOT).items():
        of_then = "-then/" in path and Path(path).name not in ("metrics.jsonl", "journal.json")
        # The older of two checkpoints is not read.
        if not (of_then or path.startswith("cache/") or f"/step-0000000{STOP}/" in path):
            kept[path] = data
    make.pack(kept, PACKED)
    print(f"{PACKED}: {PACKED.stat().st_size:,} bytes; what it was made from is in {make.ROOT}")


if __name__ == "__main__":
    main(sys.argv[1])
