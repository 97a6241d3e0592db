"""Exported models in other programs: does each load them, and does it continue prompts with the same tokens?

    python benchmarks/eval/handover.py --work DIR --vllm PYTHON --llama PYTHON --converter DIR --to lines.jsonl

A tiny model of each family is trained, exported in fp32, and continued greedily by this suite. Then each program that
is named does the same in a Python of its own, from the same ids; transformers does in this one. `--converter` is the
folder of llama.cpp that has `convert_hf_to_gguf.py`; the Python of `--llama` has the package `xllamacpp` and what the
converter needs. Trained models stay in DIR for the next time. `--table` prints the lines of `--to` as a table.

Tokens must be equal. Where they are not, `gap` is the difference of the two largest logits at the first other token, by
transformers in fp64: where it is as small as rounding, both are right.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from pipeline import api
from pipeline.common.errors import UserError
from pipeline.common.format import table
from pipeline.config.load import load
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.train.checkpoint.committed import COMMIT
from pipeline.train.huggingface.convert import to_hf

NEW = 48
PROMPTS = ("the old keeper", "a boat sails under", "night. wind")
TEXTS = ("the old keeper", "Hello, World! It's  3 o'clock\n\n\tin 2026", "caf\u00e9 \u4f60\u597d 12345 <|endoftext|>")
"""Texts that each program splits into tokens; the last one has the end of a document as characters."""
WORDS = ("the", "a", "sea", "boat", "wind", "sails", "north", "harbour", "of", "under", "and", "light", "old", "night")
_LOCAL = {"sliding_window": 16}
_MIXED = {"pattern": ["local", "full"], "kinds": {"local": _LOCAL, "full": {}}}
_GELU = {"norm": "layernorm", "mlp": "gelu", "bias": "all"}
_OLMO = {"norm_place": "output", "qk_norm": "full"}
_GEMMA = {"norm_place": "both", "norm_offset": 1.0, "embedding_scale": 8.0, "mlp": "geglu", "tie_embeddings": True}
_EXPERTS = {"count": 8, "top_k": 2, "ffn_dim": 64}
_SHARED = {**_EXPERTS, "shared_ffn_dim": 64}
_DEEP = {**_SHARED, "score": "sigmoid", "score_bias": True}
_DENSE_FIRST = {"pattern": ["dense", "moe"], "kinds": {"dense": {"mlp": "swiglu"}, "moe": {}}, "mlp": "experts"}
_LATENT = {"kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
_MLA = {"norm_eps": 1e-6, "mixer": "mla", "kv_heads": None, "mla": {**_LATENT, "q_rank": 48}}
_MAMBA = {"heads": 4, "head_dim": 32, "state_dim": 32}
_HYBRID = {"pattern": ["mamba", "attention"], "mamba2": _MAMBA}
_DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 64, "value_dim": 64}
_NEXT = {
    **{"norm_offset": 1.0, "pattern": ["delta", "full"]},
    "kinds": {
        "delta": {"mixer": "gated_delta", "delta": _DELTA},
        "full": {"qk_norm": True, "output_gate": True, "rope_share": 0.5},
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "kv_heads": 2, "ffn_dim": 256, **_GELU},
    "starcoder2": _GELU,
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, **_MIXED},
    "smollm3": {"pattern": ["rope", "none"], "kinds": {"rope": {}, "none": {"positions": "none"}}},
    "phi3": {"rope_share": 0.5},
    "granite": {"embedding_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.2, "logit_scale": 0.125},
    "gpt_neox": {**_GELU, "mlp": "gelu_exact", "residual": "parallel", "rope_share": 0.25, "kv_heads": 2},
    "cohere2": {
        **{"norm": "layernorm", "norm_bias": False, "residual": "parallel_shared", "logit_scale": 0.25},
        "tie_embeddings": True,
        **{"pattern": ["local", "full"], "kinds": {"local": _LOCAL, "full": {"positions": "none"}}},
    },
    "gemma2": {**_GEMMA, **_MIXED, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0},
    "gemma3_text": {
        **{**_GEMMA, "qk_norm": True, "pattern": ["local", "full"]},
        "kinds": {"local": _LOCAL, "full": {"rope_theta": 1e6}},
    },
    "deepseek_v2": {**_MLA, **_DENSE_FIRST, "experts": {**_SHARED, "normalize": False}},
    "deepseek_v3": {**_MLA, **_DENSE_FIRST, "experts": {**_DEEP, "groups": 2, "top_groups": 1}},
    "gpt_oss": {
        **{**_MIXED, "sinks": True, "bias": "attention", "mlp": "experts"},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 32},
        "experts": {**_EXPERTS, "activation": "clamped_swiglu", "bias": True, "router_bias": True},
    },
    "glm4_moe": {**_DENSE_FIRST, "rope_share": 0.5, "experts": _DEEP},
    "qwen2_moe": {"bias": "qkv", "mlp": "experts", "experts": {**_SHARED, "shared_gate": True, "normalize": False}},
    "qwen3_moe": {"qk_norm": True, "mlp": "experts", "experts": _EXPERTS},
    "olmoe": {"qk_norm": "full", "mlp": "experts", "experts": {**_EXPERTS, "normalize": False}, "kv_heads": 2},
    "mixtral": {"mlp": "experts", "experts": _EXPERTS},
    "mamba2": {"mixer": "mamba2", "mamba2": _MAMBA, "mlp": "none", "heads": None, "kv_heads": None, "ffn_dim": None},
    "bamba": {**_HYBRID, "kinds": {"mamba": {"mixer": "mamba2"}, "attention": {"rope_share": 0.5}}},
    "granitemoehybrid": {
        **{**_HYBRID, "attention_scale": 0.2, "residual_scale": 0.22},
        "kinds": {"mamba": {"mixer": "mamba2"}, "attention": {"positions": "none"}},
    },
    "nemotron_h": {
        **{"layers": 4, "pattern": ["mamba", "mlp", "attention", "mlp"], "mamba2": _MAMBA},
        "kinds": {
            "mamba": {"mixer": "mamba2", "mlp": "none"},
            "mlp": {"mixer": "none", "mlp": "relu2"},
            "attention": {"mlp": "none", "positions": "none"},
        },
    },
    "qwen3_next": {**_NEXT, "mlp": "experts", "experts": {**_SHARED, "shared_gate": True}},
    "qwen3_5_text": _NEXT,
    "olmo_hybrid": {
        **{**_OLMO, "pattern": ["delta", "full"]},
        "kinds": {
            "delta": {"mixer": "gated_delta", "delta": {**_DELTA, "norm_eps": 1e-5}, "norm_place": "pre"},
            "full": {},
        },
    },
    "kimi_linear": {
        **{"norm_eps": 1e-6, "kv_heads": None, **_DENSE_FIRST, "experts": _DEEP, "pattern": ["kda", "mla"]},
        "kinds": {
            "kda": {"mixer": "kda", "delta": {"key_heads": 2, "key_dim": 32, "value_dim": 32}, "mlp": "swiglu"},
            "mla": {"mixer": "mla", "mla": _LATENT, "positions": "none"},
        },
    },
}
"""By family, what its `model:` section has besides `SHAPE`; None: it leaves a key out."""
SHAPE = {"layers": 2, "dim": 64, "heads": 2, "kv_heads": 1, "ffn_dim": 128, "init": {"std": 0.2}}
"""Of all. Heads have 32 values, the fewest that vLLM computes on CPUs; `_LATENT` and `_DELTA` have sizes that it has
there. The vocabulary is a multiple of 16, which llama.cpp's converter takes for each family. Initial weights are large:
after a few steps greedy texts are varied, and few tokens are near-ties."""
STEPS = 4


def run_file(work: Path, family: str) -> Path:
    """The run file of a family; all have the same data.

    Args:
        work: Folder for everything.
        family: Of `MODELS`.
    """
    values = {
        "run": {"dir": str(work / "runs" / family)},
        "launch": {"threads": 1},
        "data": {
            "dir": str(work / "data"),
            "sources": [{"name": "sea", "paths": [str(work / "sea" / "*.txt")]}],
            "preprocess": {"workers": 1, "engine": "tokenizers"},
        },
        "tokenizer": {"train": {"vocab_size": 304}},
        "model": {key: value for key, value in {**SHAPE, **MODELS[family]}.items() if value is not None},
        "train": {
            **{"duration": f"{STEPS} steps", "sequence_length": 128, "batch_size": 4, "micro_batch_size": 4},
            "optimizer": {"lr": 1e-3},
            "precision": {"compute": "fp32"},
            "schedule": {"warmup": "1 steps"},
            "checkpoint": {"every_steps": STEPS},
            "metrics": {"tensorboard": False},
        },
    }
    file = work / f"{family}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def write_corpus(folder: Path) -> None:
    """Text files of made-up sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for number in range(200):
        sentences = (" ".join(chance.choices(WORDS, k=chance.randint(4, 12))) for _ in range(chance.randint(3, 20)))
        (folder / f"{number:03d}.txt").write_text(". ".join(sentences) + ".\n")


def trained(work: Path, family: str, console: Console) -> dict[str, Any]:
    """Train and export a family, unless it is trained already; its folder, prompts and own continuations."""
    from pipeline.train.loop import trainer

    config = load(run_file(work, family))
    run, folder = Path(config.run.dir), work / "exported" / family
    if not (run / "checkpoints" / f"step-{STEPS:08d}" / COMMIT).is_file():
        trainer.train(config, console)
    shutil.rmtree(folder, ignore_errors=True)
    to_hf(run, folder, console=console)
    exported = json.loads((folder / "config.json").read_text())["model_type"]
    tokenizer = run_tokenizer(config)
    model = api.load_model(run)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    found = [model.generate([prompt], max_tokens=NEW, temperature=0)[0] for prompt in prompts]
    return {
        "family": family,
        "exported_as": exported,
        "folder": str(folder),
        "new": NEW,
        "prompts": prompts,
        "tokens": [[token.id for token in each.tokens] for each in found],
        "texts": list(TEXTS),
        "ids": [tokenizer.encode(text) for text in TEXTS],
    }


def prepared(work: Path, families: Sequence[str]) -> Iterator[dict[str, Any]]:
    """`trained` of each family, one after the other; those that this suite refuses have an `error`."""
    from pipeline.data.preprocess import stage

    console = Console(file=io.StringIO())
    if not (work / "data").exists():
        write_corpus(work / "sea")
        stage.preprocess(load(run_file(work, families[0])))
    for family in families:
        print(f"train {family}", file=sys.stderr, flush=True)
        try:
            yield trained(work, family, console)
        except UserError as error:
            yield {"family": family, "error": str(error)}


def asked(tool: str, python: str, jobs: Sequence[dict[str, Any]], work: Path, *more: str) -> Iterator[dict[str, Any]]:
    """What a program does with each job; where its process dies, the next one begins behind that job."""
    remaining = list(jobs)
    script = Path(__file__).with_name("handover_tools.py")
    while remaining:
        file, out = work / f"{tool}-jobs.json", work / f"{tool}-out.jsonl"
        file.write_text(json.dumps(remaining))
        out.unlink(missing_ok=True)
        with (work / f"{tool}.log").open("a") as log:
            code = subprocess.call([python, str(script), tool, str(file), str(out), *more], stdout=log, stderr=log)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        yield from lines
        if len(lines) < len(remaining):
            lost = remaining[len(lines)]
            yield {"family": lost["family"], "loads": False, "why": f"the process ended with exit code {code}"}
        remaining = remaining[len(lines) + 1 :]


def result(tool: str, job: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A line of the results: what was found against what this suite has."""
    line = {"family": job["family"], "exported_as": job["exported_as"], "tool": tool}
    line |= {key: found[key] for key in ("version", "loads", "why", "needs") if found.get(key) is not None}
    if "ids" in found:
        line["texts_equal"] = found["ids"] == job["ids"]
    if "tokens" not in found:
        return line
    line["tokens_equal"] = found["tokens"] == job["tokens"]
    if not line["tokens_equal"]:
        line["first_difference"] = [
            next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
            for a, b in zip(found["tokens"], job["tokens"], strict=True)
        ]
        line["gap"] = [
            round(_gap(job, number, at), 7)
            for number, at in enumerate(line["first_difference"])
            if at < len(job["tokens"][number])
        ]
    return line


@torch.no_grad()
def _gap(job: dict[str, Any], number: int, at: int) -> float:
    from transformers import AutoModelForCausalLM

    with_experts = {"experts_implementation": "eager"}  # the others have no fp64
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float64, **with_experts)
    logits = model(torch.tensor([job["prompts"][number] + job["tokens"][number][:at]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """The lines as a table in Markdown: families by programs."""
    tools = list(dict.fromkeys(line["tool"] for line in lines))
    cells = {(line["family"], line["tool"]): _cell(line) for line in lines}
    rows = [
        [f"`{family}`", *(cells.get((family, tool), "untried") for tool in tools)]
        for family in dict.fromkeys(line["family"] for line in lines)
    ]
    versions = {line["tool"]: line["version"] for line in lines if "version" in line}
    return table(["model_type", *(f"{tool} {versions.get(tool, '')}".strip() for tool in tools)], rows)


def _cell(line: dict[str, Any]) -> str:
    if not line.get("loads"):
        return f"no: {line.get('why', 'it does not load')}"
    if "tokens_equal" not in line:
        return f"loads; {line.get('why', '')}"
    texts = "" if line.get("texts_equal", True) else "; splits texts otherwise"
    needs = f" ({line['needs']})" if "needs" in line else ""
    if line["tokens_equal"]:
        return f"equal{needs}{texts}"
    return f"tokens differ from {line['first_difference']} on, gap {line['gap']}{needs}{texts}"


def main() -> None:
    """Read the options, measure, print a line of JSON for each family and program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for models")
    parser.add_argument("--families", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--vllm", help="Python with vLLM")
    parser.add_argument("--llama", help="Python with xllamacpp and gguf")
    parser.add_argument("--converter", type=Path, help="folder with convert_hf_to_gguf.py")
    parser.add_argument("--weights", default="f32", help="type of weights that the converter writes")
    parser.add_argument("--to", type=Path, required=True, help="file of the results, one JSON object per line")
    parser.add_argument("--table", action="store_true", help="only print the results that are there as a table")
    options = parser.parse_args()
    if not options.table:
        work: Path = options.work.absolute()
        work.mkdir(parents=True, exist_ok=True)
        jobs = list(prepared(work, options.families))
        ready = [job for job in jobs if "error" not in job]
        for job in jobs:
            if "error" in job:
                print(f"{job['family']}: {job['error']}", file=sys.stderr)
        tools: dict[str, tuple[str, ...]] = {"transformers": (sys.executable,)}
        if options.llama:
            tools["llama.cpp"] = (options.llama, str(options.converter.absolute()), options.weights)
        if options.vllm:
            tools["vLLM"] = (options.vllm,)
        for tool, (python, *more) in tools.items():
            for job, found in zip(ready, asked(tool, python, ready, work, *more), strict=True):
                line = result(tool, job, found)
                print(json.dumps(line), flush=True)
                with options.to.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    print(summary([json.loads(line) for line in options.to.read_text().splitlines()]))


if __name__ == "__main__":
    main()
