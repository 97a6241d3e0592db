"""New tokens per second of our generation and of transformers on the same weights, a JSON line for each size.

    python benchmarks/eval/generate_cache.py --rows 1 8 32

A Llama-like model of random weights in fp32 continues prompts of 20 to 200 tokens greedily, all at once, on one thread;
transformers has them padded on the left. The sides take turns, reading of the prompts included. `ratio` is that of the
medians of wall time, `cpu_ratio` that of CPU time, above 1 where ours is faster; `equal` says whether all texts are.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pipeline.config.model import ModelConfig
from pipeline.eval.generation.generate import generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec

NEW = 64
NAMES = {
    "embedding.": "model.embed_tokens.",
    "mixer_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "mixer.wq.": "self_attn.q_proj.",
    "mixer.wk.": "self_attn.k_proj.",
    "mixer.wv.": "self_attn.v_proj.",
    "mixer.wo.": "self_attn.o_proj.",
    "mlp.w1.": "mlp.gate_proj.",
    "mlp.w3.": "mlp.up_proj.",
    "mlp.w2.": "mlp.down_proj.",
    "head.": "lm_head.",
}

Texts = list[list[int]]
"""New tokens of each row."""


@dataclass(frozen=True)
class Shape:
    """A Llama-like model."""

    vocabulary: int = 8192
    layers: int = 6
    dim: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn_dim: int = 704


class Numbers:
    """A tokenizer whose texts are lists of numbers."""

    end_of_document = -1

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids."""
        return "".join(f"{token} " for token in ids)


def models(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Decoder, LlamaForCausalLM]:
    """Ours and theirs, random and with the same weights in memory; rotary tables are fp32 in both."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        theirs = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    sizes = {"layers": shape.layers, "dim": shape.dim, "heads": shape.heads, "kv_heads": shape.kv_heads}
    spec = decoder_spec(ModelConfig.model_validate({**sizes, "ffn_dim": shape.ffn_dim}), shape.vocabulary, 0)
    with torch.device("meta"):
        ours = Decoder(spec).eval()
    ours.load_state_dict({name: theirs.get_parameter(_theirs(name)) for name in ours.state_dict()}, assign=True)
    return ours, theirs


def _theirs(name: str) -> str:
    if name == "norm.weight":
        return "model.norm.weight"
    for here, there in NAMES.items():
        name = name.replace(here, there)
    return f"model.{name}" if name.startswith("layers.") else name


def random_prompts(rows: int, vocabulary: int) -> list[list[int]]:
    """Prompts of 20 to 200 tokens, the same for the same number of rows."""
    chance = random.Random(0)
    return [[chance.randrange(1, vocabulary) for _ in range(chance.randint(20, 200))] for _ in range(rows)]


def both_sides(
    ours: Decoder, theirs: LlamaForCausalLM, prompts: list[list[int]], new: int
) -> dict[str, Callable[[], Texts]]:
    """Greedy continuations of all prompts at once by both, to be called; ends of texts are ignored."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(each)) + each for each in prompts], device=theirs.device)
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device=theirs.device)

    def here() -> Texts:
        found = generate(ours, Numbers(), prompts, Sampling(temperature=0, max_tokens=new), slots=len(prompts))
        return [[token.id for token in each.tokens] for each in found]

    def there() -> Texts:
        found = theirs.generate(padded, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return [row.tolist() for row in found[:, longest:]]

    return {"ours": here, "transformers": there}


def timed(continued: Callable[[], Texts]) -> tuple[float, float, Texts]:
    """Wall and CPU seconds, and what came out."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = continued()
    return time.perf_counter() - wall, time.process_time() - cpu, found


def compare(sides: dict[str, Callable[[], Texts]], rounds: int) -> tuple[dict[str, Any], dict[str, Texts]]:
    """Speeds of both sides, which take turns, and their texts; the first of `rounds` + 1 warms up."""
    runs: dict[str, list[tuple[float, float, Texts]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            run = timed(side)
            if number:
                runs[name].append(run)
    wall, cpu = ({name: statistics.median(run[n] for run in runs[name]) for name in sides} for n in (0, 1))
    texts = {name: runs[name][0][2] for name in sides}
    tokens = sum(map(len, texts["ours"]))
    return {
        "rows": len(texts["ours"]),
        "tokens_per_s": {name: round(tokens / seconds, 1) for name, seconds in wall.items()},
        "ratio": round(wall["transformers"] / wall["ours"], 2),
        "cpu_ratio": round(cpu["transformers"] / cpu["ours"], 2),
        "equal": texts["ours"] == texts["transformers"],
    }, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape()
    ours, theirs = models(shape)
    for rows in args.rows:
        sides = both_sides(ours, theirs, random_prompts(rows, shape.vocabulary), NEW)
        print(json.dumps(compare(sides, args.rounds)[0]), flush=True)


if __name__ == "__main__":
    main()
